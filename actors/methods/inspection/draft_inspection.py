"""One look at a draft checkpoint's folder: its facts, every misfit, what to know besides, and a configuration."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from actors.methods.heads.head_files import HeadFiles
from actors.methods.heads.target_shape import TargetShape
from actors.methods.inspection.draft_facts import DraftFacts, Misfit, StatesRead
from actors.methods.inspection.draft_fit import (
    TargetFacts,
    causal_misfits,
    head_misfits,
    target_facts,
    wrong_ids,
    wrong_tensors,
)
from actors.methods.inspection.draft_layout import LAYER_SKIP, DraftLayout, layout_of
from actors.methods.inspection.head_facts import canonical_files, causal_facts, head_facts, resolved
from actors.methods.inspection.header_files import read_headers, stored_size
from cluster.config import ModelConfig, SpeculationConfig
from cluster.draft_options import HEADS, HeadOptions
from cluster.errors import ModelError

BESIDE = ("recurrent_head.safetensors", "frequent_tokens.json", "mask_embedding.pt")  # that a method reads too
SHARE_OF_LAYERS = 4  # that a target drafts with, to begin with: one of so many
TARGET_KEYS = ("base_model_name_or_path", "base_model")  # of a head's configuration


@dataclass(frozen=True, slots=True)
class DraftInspection:
    """What was found."""

    folder: Path
    facts: DraftFacts
    misfits: tuple[Misfit, ...]
    notes: tuple[str, ...]
    target: Path | None  # that it was held against
    snippet: str  # YAML that drafts with it; empty where no method does

    @property
    def fits(self) -> bool:
        """Whether it is recognised, whole, and right for the target, if there is one."""
        return not self.misfits


def inspect_draft(folder: Path, target_folder: Path | None = None) -> DraftInspection:
    """Reads headers, tables of ids, configurations and tokenizers, and no weights.

    Raises ModelError where a folder holds no checkpoint at all.
    """
    files = read_headers(folder)
    target = None if target_folder is None else target_facts(target_folder)
    layout = _layout(files, target)
    facts, misfits = _head(files, layout, target) if layout.method in HEADS else _other(files, layout, target)
    facts = replace(facts, made_for=_made_for(files))
    notes = tuple(_notes(folder, facts, target))
    return DraftInspection(folder, facts, tuple(misfits), notes, target_folder, _snippet(folder, facts, target))


def _layout(files: HeadFiles, target: TargetFacts | None) -> DraftLayout:
    is_target = target is not None and files.folder.resolve() == target.folder.resolve()
    return LAYER_SKIP if is_target else layout_of(files)


def _head(files: HeadFiles, layout: DraftLayout, target: TargetFacts | None) -> tuple[DraftFacts, list[Misfit]]:
    method = str(layout.method)
    try:
        files = canonical_files(files, method)
        facts = head_facts(files, layout, method)
    except ModelError as error:
        return DraftFacts(layout, stored_size(files.tensors)), [Misfit(str(error))]
    misfits = [*wrong_tensors(files, method), *wrong_ids(files, facts)]
    if target is None:
        return facts, misfits
    misfits += head_misfits(files, facts, target)
    return (facts if misfits else _for_target(files, facts, target.shape)), misfits


def _for_target(files: HeadFiles, facts: DraftFacts, target: TargetShape) -> DraftFacts:
    """With what only the target's depth tells."""
    config = resolved(files, str(facts.layout.method), target)
    assert facts.states is not None
    return replace(facts, states=replace(facts.states, layers=config.needs.layers))


def _other(files: HeadFiles, layout: DraftLayout, target: TargetFacts | None) -> tuple[DraftFacts, list[Misfit]]:
    if layout.method is None:
        facts = DraftFacts(layout, stored_size(files.tensors))
        return facts, [Misfit("layout", "one that a method of this release drafts with", layout.name)]
    try:
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


def _notes(folder: Path, facts: DraftFacts, target: TargetFacts | None) -> list[str]:
    beside = [name for name in BESIDE if (folder / name).is_file()]
    found = [f"read beside it: {', '.join(beside)}"] if beside else []
    longest = None if target is None else target.positions
    if facts.positions is not None and longest is not None and facts.positions < longest:
        then = "nothing is drafted beyond them" if facts.ends_at_positions else "acceptance may fall beyond them"
        found.append(f"made for {facts.positions} positions, the target has {longest}: {then}")
    if facts.states is not None and not facts.states.is_final and not facts.states.layers:
        found.append("which states it reads follows from the target's depth; give --target to see them")
    return found


def _snippet(folder: Path, facts: DraftFacts, target: TargetFacts | None) -> str:
    if facts.layout.method is None:
        return ""
    model: dict[str, Any] = {"target": str(target.folder) if target is not None else facts.made_for or "TARGET"}
    longest = None if target is None else target.positions
    if longest is not None and longest < ModelConfig(target="").max_context:
        model["max_context"] = longest
    sections = {"model": model, "draft": _draft_section(folder, facts)}
    usual = SpeculationConfig().max_draft_tokens
    if facts.longest_block is not None and facts.longest_block != usual:
        sections["speculation"] = {"max_draft_tokens": facts.longest_block}
    return yaml.safe_dump(sections, sort_keys=False)


def _is_narrowed(states: StatesRead) -> bool:
    """Whether the projection at the target sends less."""
    return states.projected is not None and states.projected < states.width


def _draft_section(folder: Path, facts: DraftFacts) -> dict[str, Any]:
    method = str(facts.layout.method)
    if method == "layer_skip":
        return {"method": method, "layer_skip": {"layers": max(1, facts.shape["layers"] // SHARE_OF_LAYERS)}}
    found: dict[str, Any] = {"method": method, "model": str(folder)}
    if method in HEADS:
        found[method] = HeadOptions().model_dump()
    if facts.states is not None:
        found["states"] = {"project": "target"} if _is_narrowed(facts.states) else {}
        found["states"] |= {"dtype": "bfloat16"}
    return found
