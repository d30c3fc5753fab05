"""Inspection of a draft checkpoint's folder: its facts, all misfits, notes, and a suitable configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from actors.drafters.heads.files import HeadFiles
from actors.drafters.heads.mtp.names import layout_in, module_count
from actors.drafters.heads.target_shape import TargetShape
from actors.models.layer_subset import check_layers
from cluster.config import DraftPool, ModelConfig, SpeculationConfig, validated
from cluster.draft_options import STATE_READERS, TAKING_MODELS, HeadOptions, LayerSkipOptions
from cluster.errors import ConfigError, ModelError
from tools.drafts.inspection.facts import DraftFacts, Misfit, StatesRead
from tools.drafts.inspection.fit import (
    TargetFacts,
    causal_misfits,
    head_misfits,
    target_facts,
    wrong_ids,
    wrong_tensors,
)
from tools.drafts.inspection.head_facts import canonical_files, causal_facts, head_facts, resolved
from tools.drafts.inspection.header_files import read_headers, stored_size
from tools.drafts.inspection.layout import CAUSAL, LAYER_SKIP, WITH_MTP, DraftLayout, layout_of

BESIDE = ("recurrent_head.safetensors", "frequent_tokens.json", "mask_embedding.pt")  # optional files
SHARE_OF_LAYERS = 4  # suggested layer skip: one in this many layers drafts
TARGET_KEYS = ("base_model_name_or_path", "base_model")  # keys in a head's configuration
FOUND = ("method", "model")  # keys of `draft` that follow from the checkpoint

Options = Mapping[str, Any]
"""Configured keys of `draft` with their values."""


@dataclass(frozen=True, slots=True)
class DraftInspection:
    """Result of an inspection."""

    folder: Path
    facts: DraftFacts
    misfits: tuple[Misfit, ...]
    notes: tuple[str, ...]
    target: Path | None  # target that it was checked against
    snippet: str  # YAML configuration that uses it; empty if it does not fit

    @property
    def fits(self) -> bool:
        """True if the layout is known, the checkpoint is complete, and it fits the target, if one was given."""
        return not self.misfits


def inspect_draft(
    folder: Path, target_folder: Path | None = None, options: Options = MappingProxyType({})
) -> DraftInspection:
    """Reads headers, tables of ids, configurations and tokenizers, but no weights.

    `options` override what the checkpoint states, as they do when it is loaded. Raises ModelError if a folder holds no
    checkpoint at all, and ConfigError for options that its method does not accept.
    """
    files = read_headers(folder)
    target = None if target_folder is None else target_facts(target_folder)
    layout = _layout(files, target)
    if layout is WITH_MTP and target is None:
        target = target_facts(folder)  # an MTP module drafts only for its own target
    facts, misfits = _looked_at(files, layout, target, options)
    facts = replace(facts, made_for=_made_for(files))
    notes = tuple(_notes(files, facts, target))
    whose = None if target is None else target.folder
    snippet = "" if misfits else _snippet(folder, facts, target, options)
    return DraftInspection(folder, facts, tuple(misfits), notes, whose, snippet)


def _layout(files: HeadFiles, target: TargetFacts | None) -> DraftLayout:
    found = layout_of(files)
    if target is None:
        return found
    if files.folder.resolve() == target.folder.resolve():
        return found if found is WITH_MTP else LAYER_SKIP
    return CAUSAL if found is WITH_MTP else found


def _looked_at(
    files: HeadFiles, layout: DraftLayout, target: TargetFacts | None, options: Options
) -> tuple[DraftFacts, list[Misfit]]:
    if layout.method is None:
        facts = DraftFacts(layout, stored_size(files.tensors))
        return facts, [Misfit("layout", "one that a method of this release drafts with", layout.name)]
    draft = _draft_pool(files.folder, layout.method, options)
    if layout.method in STATE_READERS:
        return _head(files, layout, target, draft)
    return _without_states(files, layout, target, draft)


def _draft_pool(folder: Path, method: str, options: Options) -> DraftPool:
    """Builds the configuration that would use the checkpoint."""
    told = sorted(set(options).intersection(FOUND))
    if told:
        raise ConfigError(f"draft.{told[0]} cannot be set: it follows from the checkpoint in {folder}")
    model = {"model": str(folder)} if method in TAKING_MODELS else {}
    return validated({"model": {"target": "TARGET"}, "draft": {"method": method, **model, **options}}).draft


def _head(
    files: HeadFiles, layout: DraftLayout, target: TargetFacts | None, draft: DraftPool
) -> tuple[DraftFacts, list[Misfit]]:
    try:
        files = canonical_files(files, draft.method)
        facts = head_facts(files, layout, draft)
    except ModelError as error:
        return DraftFacts(layout, stored_size(files.tensors)), [Misfit(str(error))]
    misfits = [*wrong_tensors(files, draft), *wrong_ids(files, facts)]
    if target is None:
        return facts, misfits
    misfits += head_misfits(files, facts, target, draft)
    return (facts if misfits else _for_target(files, facts, target.shape, draft)), misfits


def _for_target(files: HeadFiles, facts: DraftFacts, target: TargetShape, draft: DraftPool) -> DraftFacts:
    """Adds the facts that depend on the target's depth."""
    config = resolved(files, draft, target)
    assert facts.states is not None
    return replace(facts, states=replace(facts.states, layers=config.needs.layers))


def _without_states(
    files: HeadFiles, layout: DraftLayout, target: TargetFacts | None, draft: DraftPool
) -> tuple[DraftFacts, list[Misfit]]:
    try:
        if draft.layer_skip != LayerSkipOptions():
            check_layers(files.folder, draft.layer_skip.ids)
        facts = causal_facts(files, layout)
    except ModelError as error:
        return DraftFacts(layout, stored_size(files.tensors)), [Misfit(str(error))]
    if target is None or layout is LAYER_SKIP:
        return facts, []
    return facts, causal_misfits(files.folder, facts, target)


def _made_for(files: HeadFiles) -> str:
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
    said = verifier.get("name_or_path") or next((files.config[key] for key in TARGET_KEYS if key in files.config), "")
    return str(said)


def _notes(files: HeadFiles, facts: DraftFacts, target: TargetFacts | None) -> list[str]:
    beside = [name for name in BESIDE if (files.folder / name).is_file()]
    found = [f"read beside it: {', '.join(beside)}"] if beside else []
    longest = None if target is None else target.positions
    if facts.positions is not None and longest is not None and facts.positions < longest:
        then = "nothing is drafted beyond them" if facts.ends_at_positions else "acceptance may fall beyond them"
        found.append(f"made for {facts.positions} positions, the target has {longest}: {then}")
    if facts.states is not None and not facts.states.is_final and not facts.states.layers:
        found.append("which states it reads follows from the target's depth; give --target to see them")
    if facts.layout is WITH_MTP:
        found += _notes_on_modules(files, target)
    return found


def _notes_on_modules(files: HeadFiles, target: TargetFacts | None) -> list[str]:
    assert target is not None, "a module is held against its own target"
    try:
        layout = layout_in(files.tensors, target.shape.layers, str(files.folder))
    except ModelError:
        return []  # already reported as the misfit
    count = module_count(files.tensors, layout)
    which = "it" if count == 1 else "the first alone, asked again for each further token"
    return [
        f"{count} module{'s' * (count > 1)} in {layout.name} layout; draft.method: mtp drafts with {which}",
        "the target's own first layers can draft too, with draft.method: layer_skip",
    ]


def _snippet(folder: Path, facts: DraftFacts, target: TargetFacts | None, options: Options) -> str:
    model: dict[str, Any] = {"target": str(target.folder) if target is not None else facts.made_for or "TARGET"}
    longest = None if target is None else target.positions
    if longest is not None and longest < ModelConfig(target="").max_context:
        model["max_context"] = longest
    sections = {"model": model, "draft": _merged(_draft_section(folder, facts), options)}
    usual = SpeculationConfig().max_draft_tokens
    if facts.longest_block is not None and facts.longest_block != usual:
        sections["speculation"] = {"max_draft_tokens": facts.longest_block}
    return yaml.safe_dump(sections, sort_keys=False)


def _merged(section: dict[str, Any], options: Options) -> dict[str, Any]:
    """Merges options into the section; options that are sections are merged key by key."""
    of_sections = {key: section.get(key, {}) | said for key, said in options.items() if isinstance(said, dict)}
    return {**section, **options, **of_sections}


def _is_narrowed(states: StatesRead) -> bool:
    """Returns whether projecting at the target makes rows smaller."""
    return states.projected is not None and states.projected < states.width


def _draft_section(folder: Path, facts: DraftFacts) -> dict[str, Any]:
    method = str(facts.layout.method)
    if method == "layer_skip":
        return {"method": method, "layer_skip": {"layers": max(1, facts.shape["layers"] // SHARE_OF_LAYERS)}}
    found: dict[str, Any] = {"method": method}
    if method in TAKING_MODELS:
        found["model"] = str(folder)
    if method in STATE_READERS:
        found[method] = HeadOptions().model_dump()
    if facts.states is not None:
        found["states"] = {"project": "target"} if _is_narrowed(facts.states) else {}
        found["states"] |= {"dtype": "bfloat16"}
    return found
