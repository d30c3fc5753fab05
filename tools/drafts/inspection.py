"""Inspects a draft checkpoint on disk: its layout, its requirements, and its fit to a target.

Reads only metadata: headers, configurations and id tables (`headers.py`). The result contains facts, mismatches with
their expected and found values, notes, and a suitable configuration. The method's own loader finds mismatched tensors,
by running on tensors without values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml
from torch import Tensor

from actors.compute.linear import PlainProjection
from actors.drafters.heads.dflash.config import DFlashConfig
from actors.drafters.heads.dflash.weights import DFlashReader
from actors.drafters.heads.eagle.mtp import layout_in, module_count
from actors.drafters.heads.eagle.weights import EagleReader
from actors.drafters.heads.files import EMBEDDING, HEAD, ID_TABLES, META, HeadFiles, read_headers
from actors.drafters.heads.medusa import MedusaConfig, medusa_of
from actors.drafters.heads.mlp_speculator import MlpSpeculatorConfig, mlp_speculator_of
from actors.drafters.heads.rope import TargetShape, target_shape
from actors.drafters.translation.pairing import describe, draft_pairing
from actors.models.checkpoint import vocabulary
from actors.models.config_reader import read_config
from actors.models.layer_subset import check_layers
from actors.models.weights import stored_tensors
from cluster.config import DraftPool, ModelConfig, SpeculationConfig, validated
from cluster.config_sections import MODEL_METHODS, STATE_READERS, HeadOptions, LayerSkipOptions
from cluster.errors import ConfigError, ModelError
from tools.drafts.headers import (
    CAUSAL,
    LAYER_SKIP,
    WITH_MTP,
    DraftFacts,
    DraftLayout,
    HeadConfig,
    Mismatch,
    StatesRead,
    assumed_target,
    canonical_files,
    causal_facts,
    head_facts,
    layout_of,
    resolved,
    stored_size,
)

NO_FOLDER = Path()  # placeholder for the target's folder; never read


@dataclass(frozen=True, slots=True, eq=False)
class SurveyedFiles(HeadFiles):
    """Head files that record mismatches instead of raising, so that a loader reads all tensors."""

    mismatches: list[Mismatch] = field(default_factory=list)

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        found = self.tensors.get(name)
        if found is not None and shape in (None, tuple(found.shape)):
            return found
        held = "none" if found is None else f"shape {tuple(found.shape)}"
        self.mismatches.append(Mismatch(f"tensor {name}", f"shape {shape}", held))
        return torch.zeros(shape or (), device="cpu" if name in ID_TABLES else META)

    def borrowed(self, target_folder: Path, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device=META)

    def refuse_unused(self, names: Sequence[str], family: str) -> None:
        expected = "none: this layout does not use it"
        self.mismatches.extend(Mismatch(f"tensor {name}", expected, "one") for name in names)


def _read_all(files: HeadFiles, config: HeadConfig) -> None:
    """Reads every tensor of a head with the head's own loader."""
    tokens = range(config.vocabulary)
    dtype = torch.float32
    if isinstance(config, MedusaConfig):
        medusa_of(files, config, NO_FOLDER, dtype, META, tokens, PlainProjection)
    elif isinstance(config, MlpSpeculatorConfig):
        mlp_speculator_of(files, config, dtype, META, tokens, PlainProjection)
    elif isinstance(config, DFlashConfig):
        DFlashReader(files, NO_FOLDER, config, dtype, META, PlainProjection).weights(tokens)
    else:
        EagleReader(files, NO_FOLDER, config, dtype, META, PlainProjection).weights(tokens)


DEPTH_KEY = "num_target_layers"  # key in a DFlash head's configuration


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Target's facts that drafts must match."""

    folder: Path
    shape: TargetShape
    positions: int | None


def target_facts(folder: Path) -> TargetFacts:
    """Reads a target's facts from a folder. Raises ModelError if transformers does not support its checkpoint."""
    config = read_config(folder).get_text_config()
    return TargetFacts(folder, target_shape(folder), getattr(config, "max_position_embeddings", None))


def tensor_mismatches(files: HeadFiles, draft: DraftPool) -> list[Mismatch]:
    """Finds tensors that are missing, unused, misshapen or invalid.

    The head must have canonical names and resolve for a target.
    """
    surveyed = SurveyedFiles(files.folder, files.config, files.tensors)
    try:
        _read_all(surveyed, resolved(files, draft, assumed_target(files, draft)))
    except ModelError as error:  # invalid values in an id table or a mask
        surveyed.mismatches.append(Mismatch(str(error)))
    return surveyed.mismatches


def head_mismatches(files: HeadFiles, facts: DraftFacts, target: TargetFacts, draft: DraftPool) -> list[Mismatch]:
    """Finds mismatches between a head with canonical names and a target; if all sizes fit, also runs its loader."""
    found = [*_sizes(facts, target), *_depth(files, facts, target), *_borrowed(facts, target)]
    if found:
        return found
    try:
        resolved(files, draft, target.shape)
    except ModelError as error:
        return [Mismatch(str(error))]
    return []


def causal_mismatches(target: TargetFacts, draft: DraftPool) -> list[Mismatch]:
    """Finds mismatches of a causal language model, whose drafts can be translated from another tokenizer."""
    try:
        _described_pairing(target, draft)
    except (ModelError, OSError, ValueError) as error:
        return [Mismatch(str(error))]
    return []


def _described_pairing(target: TargetFacts, draft: DraftPool) -> str:
    return describe(draft_pairing(draft, vocabulary(target.folder), with_weights=False), target.folder)


def _sizes(facts: DraftFacts, target: TargetFacts) -> Iterator[Mismatch]:
    shape = target.shape
    if facts.states is not None and facts.states.hidden != shape.hidden:
        yield Mismatch("hidden size of the target", str(facts.states.hidden), str(shape.hidden))
    is_exact = facts.layout.method in ("eagle", "dflash")
    if facts.vocabulary is not None and is_exact and facts.vocabulary != shape.vocabulary:
        yield Mismatch("vocabulary of the target", str(facts.vocabulary), str(shape.vocabulary))
    if facts.proposes is not None and not is_exact and facts.proposes > shape.vocabulary:
        yield Mismatch("vocabulary of the target", f"at least {facts.proposes}", str(shape.vocabulary))


def _depth(files: HeadFiles, facts: DraftFacts, target: TargetFacts) -> Iterator[Mismatch]:
    """Checks the target's number of layers, which determines the available states."""
    depth = target.shape.layers
    said = {**files.config, **(files.config.get("dflash_config") or {})}.get(DEPTH_KEY)
    if said is not None and said != depth:
        yield Mismatch("layers of the target", str(said), str(depth))
    read = () if facts.states is None else facts.states.layers
    last = depth if facts.layout.method == "dflash" else depth - 1  # residual streams exclude the final state
    if read and max(read) > last:
        yield Mismatch("states of the target", f"{list(read)}", f"0 to {last}")


def _borrowed(facts: DraftFacts, target: TargetFacts) -> Iterator[Mismatch]:
    """Checks that the target has the head's borrowed tensors, in the required shapes."""
    stored = stored_tensors(target.folder, partial=True)
    for owner, names, what in ((facts.embedding, EMBEDDING, "embedding"), (facts.lm_head, HEAD, "LM head")):
        if owner != "the target":
            continue
        name = next((name for name in names if name in stored), None)
        expected = (facts.vocabulary or target.shape.vocabulary, facts.shape["hidden"])
        if name is None:
            yield Mismatch(f"{what} borrowed from the target", f"one of {', '.join(names)}", "none of them")
        elif stored[name].shape != expected:
            yield Mismatch(f"{what} borrowed from the target", f"{expected}", f"{stored[name].shape} ({name})")


OPTIONAL_FILES = (
    "recurrent_head.safetensors",
    "frequent_tokens.json",
    "mask_embedding.pt",
)  # optional files beside weights
SHARE_OF_LAYERS = 4  # suggested share of layers for layer skip, as a divisor
TARGET_KEYS = ("base_model_name_or_path", "base_model")  # keys that name the target in a head's configuration
DETERMINED_KEYS = ("method", "model")  # keys of `draft` that the checkpoint determines

Options = Mapping[str, Any]
"""Configured keys of `draft` with their values."""


@dataclass(frozen=True, slots=True)
class DraftInspection:
    """Result of an inspection."""

    folder: Path
    facts: DraftFacts
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...]
    target: Path | None  # target's folder, if checked against a target
    snippet: str  # YAML configuration; empty if the checkpoint does not fit

    @property
    def fits(self) -> bool:
        """Returns whether the layout is known and the checkpoint is complete and fits the target, if given."""
        return not self.mismatches


def inspect_draft(
    folder: Path, target_folder: Path | None = None, options: Options = MappingProxyType({})
) -> DraftInspection:
    """Reads headers, id tables, configurations and tokenizers, but no weights.

    `options` override the checkpoint's own settings, as at loading. Raises ModelError if a folder contains no
    checkpoint, and ConfigError for options that the method does not accept.
    """
    files = read_headers(folder)
    target = None if target_folder is None else target_facts(target_folder)
    layout = _layout(files, target)
    if layout is WITH_MTP and target is None:
        target = target_facts(folder)  # MTP modules draft only for their own target
    facts, mismatches = _inspect_layout(files, layout, target, options)
    facts = replace(facts, made_for=_target_name(files))
    notes = tuple(_notes(files, facts, target))
    if target is not None and layout is CAUSAL and not mismatches:
        notes += (_described_pairing(target, _draft_pool(folder, "draft_model", options)),)
    owner = None if target is None else target.folder
    snippet = "" if mismatches else _snippet(folder, facts, target, options)
    return DraftInspection(folder, facts, tuple(mismatches), notes, owner, snippet)


def _layout(files: HeadFiles, target: TargetFacts | None) -> DraftLayout:
    found = layout_of(files)
    if target is None:
        return found
    if files.folder.resolve() == target.folder.resolve():
        return found if found is WITH_MTP else LAYER_SKIP
    return CAUSAL if found is WITH_MTP else found


def _inspect_layout(
    files: HeadFiles, layout: DraftLayout, target: TargetFacts | None, options: Options
) -> tuple[DraftFacts, list[Mismatch]]:
    if layout.method is None:
        facts = DraftFacts(layout, stored_size(files.tensors))
        return facts, [Mismatch("layout", "a layout that this release supports", layout.name)]
    draft = _draft_pool(files.folder, layout.method, options)
    if layout.method in STATE_READERS:
        return _head(files, layout, target, draft)
    return _without_states(files, layout, target, draft)


def _draft_pool(folder: Path, method: str, options: Options) -> DraftPool:
    """Returns the configuration section for the checkpoint."""
    if overridden := sorted(set(options).intersection(DETERMINED_KEYS)):
        raise ConfigError(
            f"draft.{overridden[0]} is read from the checkpoint in {folder}; remove --set draft.{overridden[0]}"
        )
    model = {"model": str(folder)} if method in MODEL_METHODS else {}
    return validated({"model": {"target": "TARGET"}, "draft": {"method": method, **model, **options}}).draft


def _head(
    files: HeadFiles, layout: DraftLayout, target: TargetFacts | None, draft: DraftPool
) -> tuple[DraftFacts, list[Mismatch]]:
    try:
        files = canonical_files(files, draft.method)
        facts = head_facts(files, layout, draft)
    except ModelError as error:
        return DraftFacts(layout, stored_size(files.tensors)), [Mismatch(str(error))]
    mismatches = tensor_mismatches(files, draft)
    if target is None:
        return facts, mismatches
    mismatches += head_mismatches(files, facts, target, draft)
    return (facts if mismatches else _for_target(files, facts, target.shape, draft)), mismatches


def _for_target(files: HeadFiles, facts: DraftFacts, target: TargetShape, draft: DraftPool) -> DraftFacts:
    """Fills in the facts that depend on the target's depth."""
    config = resolved(files, draft, target)
    assert facts.states is not None
    return replace(facts, states=replace(facts.states, layers=config.needs.layers))


def _without_states(
    files: HeadFiles, layout: DraftLayout, target: TargetFacts | None, draft: DraftPool
) -> tuple[DraftFacts, list[Mismatch]]:
    try:
        if draft.layer_skip != LayerSkipOptions():
            check_layers(files.folder, draft.layer_skip.ids)
        facts = causal_facts(files, layout)
    except ModelError as error:
        return DraftFacts(layout, stored_size(files.tensors)), [Mismatch(str(error))]
    if target is None or layout is LAYER_SKIP:
        return facts, []
    return facts, causal_mismatches(target, draft)


def _target_name(files: HeadFiles) -> str:
    verifier = (files.config.get("speculators_config") or {}).get("verifier") or {}
    said = verifier.get("name_or_path") or next((files.config[key] for key in TARGET_KEYS if key in files.config), "")
    return str(said)


def _notes(files: HeadFiles, facts: DraftFacts, target: TargetFacts | None) -> list[str]:
    optional_files = [name for name in OPTIONAL_FILES if (files.folder / name).is_file()]
    found = [f"additional files: {', '.join(optional_files)}"] if optional_files else []
    longest = None if target is None else target.positions
    if facts.positions is not None and longest is not None and facts.positions < longest:
        then = "drafting ends there" if facts.ends_at_positions else "acceptance may then fall"
        found.append(f"supports {facts.positions} positions of the target's {longest}: {then}")
    if facts.states is not None and not facts.states.is_final and not facts.states.layers:
        found.append("the target's depth determines the states that it reads; give --target to list them")
    if facts.layout is WITH_MTP:
        found += _notes_on_modules(files, target)
    return found


def _notes_on_modules(files: HeadFiles, target: TargetFacts | None) -> list[str]:
    assert target is not None, "modules are checked against their own target"
    try:
        layout = layout_in(files.tensors, target.shape.layers, str(files.folder))
    except ModelError:
        return []  # already reported as a mismatch
    count = module_count(files.tensors, layout)
    which = "it" if count == 1 else "the first module, once per token"
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
    usual = SpeculationConfig().draft_tokens
    if facts.longest_block is not None and facts.longest_block != usual:
        sections["speculation"] = {"draft_tokens": facts.longest_block}
    return yaml.safe_dump(sections, sort_keys=False)


def _merged(section: dict[str, Any], options: Options) -> dict[str, Any]:
    """Merges options into the section; nested sections are merged key by key."""
    of_sections = {key: section.get(key, {}) | said for key, said in options.items() if isinstance(said, dict)}
    return {**section, **options, **of_sections}


def _is_narrowed(states: StatesRead) -> bool:
    """Returns whether projection at the target makes rows smaller."""
    return states.projected is not None and states.projected < states.width


def _draft_section(folder: Path, facts: DraftFacts) -> dict[str, Any]:
    method = str(facts.layout.method)
    if method == "layer_skip":
        return {"method": method, "layer_skip": {"layers": max(1, facts.shape["layers"] // SHARE_OF_LAYERS)}}
    found: dict[str, Any] = {"method": method}
    if method in MODEL_METHODS:
        found["model"] = str(folder)
    if method in STATE_READERS:
        found[method] = HeadOptions().model_dump()
    if facts.states is not None:
        found["states"] = {"project": "target"} if _is_narrowed(facts.states) else {}
        found["states"] |= {"dtype": "bfloat16"}
    return found
