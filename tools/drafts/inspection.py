"""Inspection of a draft checkpoint on disk: what it is, what it needs, and whether it fits a target.

Only metadata is read: headers, configurations and tables of ids (`headers.py`). The result has the facts, every
mismatch with its expected and found value, notes, and a suitable configuration. The loader's requirements on tensors
are data here (`ExpectedTensors`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from actors.drafters.heads.dflash.config import DFlashConfig
from actors.drafters.heads.eagle.config import EagleConfig, EagleKind, FeatureNorm, OutputNorm, WeightSource
from actors.drafters.heads.eagle.mtp import layout_in, module_count
from actors.drafters.heads.files import EMBEDDING, HEAD, HeadFiles
from actors.drafters.heads.medusa import MedusaConfig
from actors.drafters.heads.mlp_speculator import MlpSpeculatorConfig
from actors.drafters.heads.projection import draft_columns
from actors.drafters.heads.rope import TargetShape, target_shape
from actors.drafters.heads.weight_reader import DERIVED, NOT_COMPUTED_WITH
from actors.models.checkpoint import check_draft, vocabulary
from actors.models.config_reader import read_config
from actors.models.layer_subset import check_layers
from actors.models.weights import stored_tensors
from cluster.config import DraftPool, ModelConfig, SpeculationConfig, validated
from cluster.config_sections import STATE_READERS, TAKING_MODELS, HeadOptions, LayerSkipOptions
from cluster.errors import ConfigError, ModelError
from tools.drafts.headers import (
    CAUSAL,
    LAYER_SKIP,
    WITH_MTP,
    DraftFacts,
    DraftLayout,
    Mismatch,
    StatesRead,
    canonical_files,
    causal_facts,
    head_facts,
    layout_of,
    presumed_target,
    read_headers,
    resolved,
    stored_size,
)

Shape = tuple[int, ...]
MASK_STATE = "mask_hidden"  # P-EAGLE: one row, saved with any number of dimensions of size 1


@dataclass(slots=True)
class ExpectedTensors:
    """Shapes by tensor name. A bias is allowed with each linear weight."""

    needed: dict[str, Shape] = field(default_factory=dict)
    allowed: dict[str, Shape] = field(default_factory=dict)
    is_closed: bool = True  # True if any further tensor is a misfit

    def linear(self, name: str, outputs: int, inputs: int) -> None:
        self.needed[f"{name}.weight"] = (outputs, inputs)
        self.allowed[f"{name}.bias"] = (outputs,)

    def norm(self, name: str, size: int, *, is_needed: bool = True) -> None:
        (self.needed if is_needed else self.allowed)[f"{name}.weight"] = (size,)

    def either(self, is_needed: bool, name: str, shape: Shape) -> None:
        """Expects a tensor if it is needed; otherwise it is borrowed from elsewhere."""
        if is_needed:
            self.needed[name] = shape


def expected_tensors(
    files: HeadFiles, config: EagleConfig | DFlashConfig | MedusaConfig | MlpSpeculatorConfig
) -> ExpectedTensors:
    """Returns the expected tensors of a head in canonical names that was resolved to `config`."""
    if isinstance(config, EagleConfig):
        return _of_eagle(config, files)
    if isinstance(config, DFlashConfig):
        return _of_dflash(config, files)
    return _of_medusa(config, files) if isinstance(config, MedusaConfig) else _of_mlp_speculator(config)


def _of_eagle(config: EagleConfig, files: HeadFiles) -> ExpectedTensors:
    found = ExpectedTensors()
    is_eagle3 = config.kind is EagleKind.EAGLE3
    hidden = config.hidden
    if config.projects or not is_eagle3:
        found.linear("fc", hidden, config.needs.width if is_eagle3 else 2 * hidden)
    _feature_norms(found, config)
    if config.kind is EagleKind.MTP:
        found.norm("state_layernorm", hidden, is_needed=False)
    for index in range(config.layers):
        is_wide = is_eagle3 and index == 0
        found.norm(f"layers.{index}.input_layernorm", hidden, is_needed=is_wide or index > 0)
        _decoder_layer(found, config, index, (2 if is_wide else 1) * hidden)
        if f"layers.{index}.self_attn.q_norm.weight" in files.tensors:
            _head_norms(found, config, index)
    if is_eagle3:
        found.norm("layers.0.hidden_norm", hidden, is_needed=False)
    else:
        found.norm("embed_layernorm", hidden, is_needed=False)
    last = "norm" if is_eagle3 else "lm_head_layernorm"
    found.norm(last, hidden, is_needed=config.output_norm is not OutputNorm.NOTHING)
    found.either(config.embedding is WeightSource.HEAD, "embed_tokens.weight", (config.vocabulary, hidden))
    found.either(config.lm_head is WeightSource.HEAD, "lm_head.weight", (config.columns, hidden))
    found.either(config.columns < config.vocabulary, "d2t", (config.columns,))
    found.either(config.mask_token is not None, MASK_STATE, (config.needs.width,))
    found.allowed["d2t"] = (config.columns,)
    return found


def _feature_norms(found: ExpectedTensors, config: EagleConfig) -> None:
    if config.feature_norm is FeatureNorm.ALL:
        found.norm("input_norm", config.needs.width)
    elif config.feature_norm is FeatureNorm.EACH:
        for part in range(config.needs.width // config.target_hidden):
            found.norm(f"fc_norm.{part}", config.target_hidden)


def _of_dflash(config: DFlashConfig, files: HeadFiles) -> ExpectedTensors:
    found = ExpectedTensors()
    hidden = config.hidden
    found.linear("fc", hidden, config.needs.width)
    found.norm("hidden_norm", hidden)
    found.norm("norm", hidden)
    for index in range(len(config.layers)):
        found.norm(f"layers.{index}.input_layernorm", hidden)
        _decoder_layer(found, config, index, hidden)
        _head_norms(found, config, index)
    found.either("embed_tokens.weight" in files.tensors, "embed_tokens.weight", (config.vocabulary, hidden))
    found.either("lm_head.weight" in files.tensors, "lm_head.weight", (config.columns, hidden))
    found.allowed["d2t"] = (config.columns,)
    return found


def _decoder_layer(found: ExpectedTensors, config: EagleConfig | DFlashConfig, index: int, inputs: int) -> None:
    layer = f"layers.{index}"
    queries = config.heads * config.head_dim
    keys = config.kv_heads * config.head_dim
    for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
        found.linear(f"{layer}.self_attn.{name}_proj", outputs, inputs)
    found.linear(f"{layer}.self_attn.o_proj", config.hidden, queries)
    found.norm(f"{layer}.post_attention_layernorm", config.hidden)
    found.linear(f"{layer}.mlp.gate_proj", config.intermediate, config.hidden)
    found.linear(f"{layer}.mlp.up_proj", config.intermediate, config.hidden)
    found.linear(f"{layer}.mlp.down_proj", config.hidden, config.intermediate)


def _head_norms(found: ExpectedTensors, config: EagleConfig | DFlashConfig, index: int) -> None:
    """Expects both norms; heads have both or neither."""
    for name in ("q_norm", "k_norm"):
        found.norm(f"layers.{index}.self_attn.{name}", config.head_dim)


def _of_medusa(config: MedusaConfig, files: HeadFiles) -> ExpectedTensors:
    """Allows for FasterDecoding's layout, where the blocks of a head may be one module, saved once."""
    found = ExpectedTensors(is_closed=False)
    is_vllm = any(name.startswith("blocks.") for name in files.tensors)
    for head in range(config.heads):
        for block in range(config.blocks):
            name = f"blocks.{head}.layers.{block}" if is_vllm else f"{head}.{block}.linear"
            if is_vllm or block == 0 or f"{name}.weight" in files.tensors:
                found.linear(name, config.hidden, config.hidden)
        last = f"lm_heads.{head}" if is_vllm else f"{head}.{config.blocks}"
        found.either(not files.config.get("original_lm_head"), f"{last}.weight", (config.columns, config.hidden))
    found.allowed["token_map"] = (config.columns,)
    return found


def _of_mlp_speculator(config: MlpSpeculatorConfig) -> ExpectedTensors:
    found = ExpectedTensors(is_closed=False)
    own = range(1 if config.is_tied else config.steps)
    for step in own:
        found.needed[f"emb.{step}.weight"] = (config.columns, config.inner)
        found.needed[f"head.{step}.weight"] = (config.columns, config.inner)
        found.needed[f"ln.{step}.weight"] = (config.inner,)
        found.needed[f"ln.{step}.bias"] = (config.inner,)
    for step in range(min(2, config.steps) if config.is_tied else config.steps):
        found.needed[f"proj.{step}.weight"] = (config.inner, config.hidden if step == 0 else config.inner)
    return found


DEPTH_KEY = "num_target_layers"  # key in a DFlash configuration


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts about a target that drafts must fit."""

    folder: Path
    shape: TargetShape
    positions: int | None


def target_facts(folder: Path) -> TargetFacts:
    """Reads the checkpoint in a folder. Raises ModelError if there is none that transformers knows."""
    config = read_config(folder).get_text_config()
    return TargetFacts(folder, target_shape(folder), getattr(config, "max_position_embeddings", None))


def wrong_tensors(files: HeadFiles, draft: DraftPool) -> list[Mismatch]:
    """Finds tensors that are missing, unused, or of another shape.

    The head must have canonical names and must resolve.
    """
    config = resolved(files, draft, presumed_target(files, draft))
    expected = expected_tensors(files, config)
    return [*_missing(files, expected), *_of_another_shape(files, expected), *_surplus(files, expected)]


def wrong_ids(files: HeadFiles, facts: DraftFacts) -> list[Mismatch]:
    """Finds a table of draft ids that maps outside the vocabulary, or twice to one token."""
    offsets = files.tensors.get("d2t")
    table = files.tensors.get("token_map")
    if (offsets is None and table is None) or not facts.vocabulary:
        return []
    ids = table if offsets is None else offsets.long() + offsets.new_ones(len(offsets)).long().cumsum(0) - 1
    assert ids is not None
    try:
        draft_columns(files.folder, ids.long(), facts.vocabulary, range(facts.vocabulary))
    except ModelError as error:
        return [Mismatch(str(error))]
    return []


def head_mismatches(files: HeadFiles, facts: DraftFacts, target: TargetFacts, draft: DraftPool) -> list[Mismatch]:
    """Finds misfits between a head in canonical names and a target; if its sizes fit, its loader decides."""
    found = [*_sizes(facts, target), *_depth(files, facts, target), *_borrowed(facts, target)]
    if found:
        return found
    try:
        resolved(files, draft, target.shape)
    except ModelError as error:
        return [Mismatch(str(error))]
    return []


def causal_mismatches(folder: Path, facts: DraftFacts, target: TargetFacts) -> list[Mismatch]:
    """Finds misfits of a causal language model, whose tokens must mean the same as the target's."""
    try:
        check_draft(vocabulary(target.folder), folder)
    except (ModelError, OSError, ValueError) as error:
        return [Mismatch(str(error))]
    return []


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
    """Checks the number of layers, which determines which states exist."""
    depth = target.shape.layers
    said = {**files.config, **(files.config.get("dflash_config") or {})}.get(DEPTH_KEY)
    if said is not None and said != depth:
        yield Mismatch("layers of the target", str(said), str(depth))
    read = () if facts.states is None else facts.states.layers
    last = depth if facts.layout.method == "dflash" else depth - 1  # streams exclude the final state, which is normed
    if read and max(read) > last:
        yield Mismatch("states of the target", f"{list(read)}", f"0 to {last}")


def _borrowed(facts: DraftFacts, target: TargetFacts) -> Iterator[Mismatch]:
    """Checks that the tensors that the head borrows exist in the target and have the head's shape."""
    stored = stored_tensors(target.folder, partial=True)
    for whose, names, what in ((facts.embedding, EMBEDDING, "embedding"), (facts.lm_head, HEAD, "LM head")):
        if whose != "the target":
            continue
        name = next((name for name in names if name in stored), None)
        expected = (facts.vocabulary or target.shape.vocabulary, facts.shape["hidden"])
        if name is None:
            yield Mismatch(f"{what} that is borrowed of the target", f"one of {', '.join(names)}", "none of them")
        elif stored[name].shape != expected:
            yield Mismatch(f"{what} that is borrowed of the target", f"{expected}", f"{stored[name].shape} ({name})")


def _missing(files: HeadFiles, expected: ExpectedTensors) -> Iterator[Mismatch]:
    for name, shape in expected.needed.items():
        if name not in files.tensors:
            yield Mismatch(f"tensor {name}", f"shape {shape}", "none")


def _of_another_shape(files: HeadFiles, expected: ExpectedTensors) -> Iterator[Mismatch]:
    for name, shape in {**expected.allowed, **expected.needed}.items():
        if name not in files.tensors:
            continue
        found = tuple(files.tensors[name].shape)
        if (found if name != MASK_STATE else (files.tensors[name].numel(),)) != shape:
            yield Mismatch(f"tensor {name}", f"shape {shape}", f"shape {found}")


def _surplus(files: HeadFiles, expected: ExpectedTensors) -> Iterator[Mismatch]:
    """Finds tensors that the forward would not use: they belong to another kind of head."""
    known = {**expected.allowed, **expected.needed}
    for name in files.tensors if expected.is_closed else ():
        if name not in known and not name.startswith(NOT_COMPUTED_WITH) and not name.endswith(DERIVED):
            yield Mismatch(f"tensor {name}", "none: no head of this layout computes with it", "one")


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
    mismatches: tuple[Mismatch, ...]
    notes: tuple[str, ...]
    target: Path | None  # target that it was checked against
    snippet: str  # YAML configuration that uses it; empty if it does not fit

    @property
    def fits(self) -> bool:
        """True if the layout is known, the checkpoint is complete, and it fits the target, if one was given."""
        return not self.mismatches


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
    facts, mismatches = _looked_at(files, layout, target, options)
    facts = replace(facts, made_for=_made_for(files))
    notes = tuple(_notes(files, facts, target))
    whose = None if target is None else target.folder
    snippet = "" if mismatches else _snippet(folder, facts, target, options)
    return DraftInspection(folder, facts, tuple(mismatches), notes, whose, snippet)


def _layout(files: HeadFiles, target: TargetFacts | None) -> DraftLayout:
    found = layout_of(files)
    if target is None:
        return found
    if files.folder.resolve() == target.folder.resolve():
        return found if found is WITH_MTP else LAYER_SKIP
    return CAUSAL if found is WITH_MTP else found


def _looked_at(
    files: HeadFiles, layout: DraftLayout, target: TargetFacts | None, options: Options
) -> tuple[DraftFacts, list[Mismatch]]:
    if layout.method is None:
        facts = DraftFacts(layout, stored_size(files.tensors))
        return facts, [Mismatch("layout", "one that a method of this release drafts with", layout.name)]
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
) -> tuple[DraftFacts, list[Mismatch]]:
    try:
        files = canonical_files(files, draft.method)
        facts = head_facts(files, layout, draft)
    except ModelError as error:
        return DraftFacts(layout, stored_size(files.tensors)), [Mismatch(str(error))]
    mismatches = [*wrong_tensors(files, draft), *wrong_ids(files, facts)]
    if target is None:
        return facts, mismatches
    mismatches += head_mismatches(files, facts, target, draft)
    return (facts if mismatches else _for_target(files, facts, target.shape, draft)), mismatches


def _for_target(files: HeadFiles, facts: DraftFacts, target: TargetShape, draft: DraftPool) -> DraftFacts:
    """Adds the facts that depend on the target's depth."""
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
    return facts, causal_mismatches(files.folder, facts, target)


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
    usual = SpeculationConfig().draft_tokens
    if facts.longest_block is not None and facts.longest_block != usual:
        sections["speculation"] = {"draft_tokens": facts.longest_block}
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
