"""Reads facts about a draft checkpoint from its headers, without weights: layout, sizes and intended target.

Tensors have names, shapes and dtypes but no memory, so the functions that resolve a loaded head also accept them. The
content of a checkpoint determines its layout, not its name. Without a given target, a head is resolved for its intended
target. The facts can be displayed, serialized, and compared with a target.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import Tensor

from actors.drafters.heads.dflash.config import DFlashConfig, resolve_dflash
from actors.drafters.heads.dflash.weights import ALIASES as DFLASH_ALIASES
from actors.drafters.heads.eagle.config import ALIASES as EAGLE_ALIASES
from actors.drafters.heads.eagle.config import SECTION, EagleConfig, canonical, overrides_of, resolve
from actors.drafters.heads.eagle.mtp import layout_in, module_files, resolve_mtp
from actors.drafters.heads.files import EMBEDDING, HeadFiles
from actors.drafters.heads.medusa import MedusaConfig, resolve_medusa, without_base_model
from actors.drafters.heads.medusa import borrowed_tensors_of as borrowed_by_medusa
from actors.drafters.heads.mlp_speculator import ALIASES as MLP_ALIASES
from actors.drafters.heads.mlp_speculator import MlpSpeculatorConfig, resolve_mlp_speculator
from actors.drafters.heads.rope import DEFAULT_BASE, TargetShape, rope_of, target_shape
from actors.drafters.model.forwards import MASK_KEYS
from cluster.config import DraftPool
from protos.messages import StateDtype, StatesFormat, StatesNeeded


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Total size of a checkpoint's tensors."""

    parameters: int  # number of floating-point elements
    bytes: int


def stored_size(tensors: Mapping[str, Tensor]) -> StoredSize:
    """Returns the total size; id tables and masks add bytes but no parameters."""
    numbers = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return StoredSize(
        parameters=sum(tensor.numel() for tensor in numbers),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """Checkpoint layout, and the drafting method that reads it."""

    name: str
    method: str | None  # value of draft.method; None if no method reads the layout


SPECULATORS_KEY = "speculators_model_type"
CAUSAL = DraftLayout("causal language model", "draft_model")
PARD = DraftLayout("causal language model with mask tokens (PARD)", "draft_model")
LAYER_SKIP = DraftLayout("the target itself, with layers that can draft", "layer_skip")
UNKNOWN = DraftLayout("unknown", None)
MLP_SPECULATOR = DraftLayout("MLPSpeculator", "mlp_speculator")
WITH_MTP = DraftLayout("target with multi-token prediction", "mtp")
MTP = r"(?:model\.)?(?:mtp\.|mtp_layers\.|(?:layers\.\d+\.)?eh_proj\.)"  # prefix of tensor names in an MTP module

MEDUSA: Mapping[str, DraftLayout] = MappingProxyType(
    {
        r"\d+\.\d+\.linear\.weight": DraftLayout("Medusa heads, FasterDecoding's layout", "medusa"),
        r"medusa_head\.\d+\.\d+\.": DraftLayout("Medusa heads merged with their target (Medusa-2)", "medusa"),
        r"(?:medusa_heads\.)?blocks\.\d+\.layers\.\d+\.": DraftLayout("Medusa heads, vLLM's layout", "medusa"),
    }
)
"""Layouts by a regular expression for the start of tensor names."""

WITHOUT_METHOD: Mapping[str, DraftLayout] = MappingProxyType(
    {
        r"(?:hydra_head\.)?hydra_mlp\.": DraftLayout("Hydra heads", None),
        r"(?:markov_head\.)?markov_w1\.": DraftLayout("DSpark head", None),
        r"candidate_selector\.": DraftLayout("DFlash2 head", None),
        r"prefix_gru\.": DraftLayout("Domino head", None),
        r"lilicorr\.": DraftLayout("LiLiCorr head", None),
        r"xpress_head\.": DraftLayout("XPress head", None),
        r"parallel_draft_heads\.": DraftLayout("EAGLE with Medusa heads, ModelOpt's", None),
        MTP: DraftLayout("multi-token prediction without its target", None),
    }
)


def layout_of(files: HeadFiles) -> DraftLayout:
    """Recognizes a folder's layout from its tensors and configuration."""
    names = tuple(files.tensors)
    has_embedding = any(name in files.tensors for name in EMBEDDING)
    if has_embedding and _any_matches(names, MTP):
        return WITH_MTP
    if found := _by_name(names, MEDUSA) or _by_name(names, WITHOUT_METHOD):
        return found
    if _any_matches(names, r"(?:speculator\.)?emb\.\d+\.weight"):
        return MLP_SPECULATOR
    if _is_dflash(files):
        return DraftLayout(f"DFlash head, {_dflash_publisher(files.config)} layout", "dflash")
    if found := _eagle(files):
        return found
    if not has_embedding:
        return UNKNOWN
    return PARD if any(files.config.get(key) is not None for key in MASK_KEYS) else CAUSAL


def _is_dflash(files: HeadFiles) -> bool:
    tensors = files.renamed(DFLASH_ALIASES).tensors
    return "hidden_norm.weight" in tensors and "fc.weight" in tensors


def _eagle(files: HeadFiles) -> DraftLayout | None:
    """Recognizes EAGLE heads by the first layer's input, which is two concatenated rows or their projection."""
    tensors = files.renamed(EAGLE_ALIASES).tensors
    queries = tensors.get("layers.0.self_attn.q_proj.weight")
    if queries is None:
        return None
    body = {**files.config, **(files.config.get("transformer_layer_config") or {})}
    if queries.shape[-1] == 2 * int(body.get("hidden_size") or 0):
        kind = "P-EAGLE" if "mask_hidden" in tensors else "EAGLE-3"
        return DraftLayout(f"{kind} head, {_eagle3_publisher(files.tensors, files.config)} layout", "eagle")
    if "fc.weight" not in tensors:
        return None
    return DraftLayout(f"EAGLE-1/2 head, {_eagle_publisher(files.tensors)} layout", "eagle")


def _dflash_publisher(config: Mapping[str, Any]) -> str:
    return "speculators'" if SPECULATORS_KEY in config else "z-lab's"


def _eagle3_publisher(names: Iterable[str], config: Mapping[str, Any]) -> str:
    if SPECULATORS_KEY in config:
        return "speculators'"
    if SECTION in config:
        return "ModelOpt's or SpecForge's"
    if "LlamaForCausalLMEagle3" in (config.get("architectures") or ()):
        return "SpecForge's"
    return "SafeAILab's" if _any_matches(names, r"(?:model\.)?midlayer\.") else "vLLM's"


def _eagle_publisher(names: Iterable[str]) -> str:
    if _any_matches(names, r"fusion_fc\.|transformer\."):
        return "speculators'"
    return "HASS's" if _any_matches(names, r"(?:model\.)?embed_layernorm\.") else "SafeAILab's"


def _by_name(names: Iterable[str], layouts: Mapping[str, DraftLayout]) -> DraftLayout | None:
    return next((layout for pattern, layout in layouts.items() if _any_matches(names, pattern)), None)


def _any_matches(names: Iterable[str], pattern: str) -> bool:
    return any(re.match(pattern, name) for name in names)


@dataclass(frozen=True, slots=True)
class StatesRead:
    """Hidden states of the target that a head reads per token."""

    layers: tuple[int, ...]  # numbered as in `StatesNeeded`; empty if dependent on the target's depth
    is_final: bool  # True: state after the final norm; False: residual streams before any norm
    hidden: int  # hidden size of the target
    width: int  # elements of a row before projection
    projected: int | None  # elements of a row after the head's own projection, if any

    @property
    def row_bytes(self) -> dict[str, dict[str, int]]:
        """Returns the bytes per token on the wire, by projecting side, then by data type."""
        widths = {"drafter": self.width} | ({} if self.projected is None else {"target": self.projected})
        return {
            where: {dtype.name.lower(): StatesFormat(width, dtype).row_bytes for dtype in StateDtype}
            for where, width in widths.items()
        }


@dataclass(frozen=True, slots=True)
class DraftFacts:
    """Facts about one checkpoint; None or empty if its layout does not determine them."""

    layout: DraftLayout
    size: StoredSize
    shape: Mapping[str, int] = field(default_factory=dict)  # sizes by name
    vocabulary: int | None = None  # vocabulary size of the head's target
    proposes: int | None = None  # number of distinct tokens that the head can propose
    states: StatesRead | None = None
    embedding: str = ""  # source of the embedding
    lm_head: str = ""
    positions: int | None = None  # maximum number of positions
    rope: str = ""
    longest_block: int | None = None  # maximum draft tokens after a prefix; None: no limit
    conventions: tuple[str, ...] = ()  # lines of the loader's description that repeat no other field
    ends_at_positions: bool = False  # whether drafting ends at `positions`
    made_for: str = ""  # target's name, if stated


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Reason why a checkpoint cannot draft for a target, or for any target."""

    what: str
    expected: str = ""
    found: str = ""

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}" if self.expected else self.what


HeadConfig = EagleConfig | DFlashConfig | MedusaConfig | MlpSpeculatorConfig
DEPTHS = (1 << 10, 1 << 11)  # two assumed target depths, to find facts that depend on the depth
FACT_PREFIXES = ("reads the target's state", "proposes ", "positions up to ", "embedding of ")
COUNT = 3  # hidden states that an EAGLE-3 head reads by default


def canonical_files(files: HeadFiles, method: str) -> HeadFiles:
    """Renames tensors for the method's loader. Raises the loader's ModelError."""
    return _CANONICAL[method](files)


def resolved(files: HeadFiles, draft: DraftPool, target: TargetShape) -> HeadConfig:
    """Resolves a head with canonical names for a target, with its method's options.

    Raises ModelError if the head does not fit.
    """
    return _RESOLVE[draft.method](files, target, draft)


def assumed_target(files: HeadFiles, draft: DraftPool, depth: int = DEPTHS[0]) -> TargetShape:
    """Returns the intended target of a head with canonical names, at an assumed `depth`, which few heads state."""
    body = {**files.config, **(files.config.get("transformer_layer_config") or {})}
    method = draft.method
    if method == "medusa":
        return _target_of_heads(files, depth)
    if method == "mlp_speculator":
        (vocabulary, _) = files.tensor("emb.0.weight").shape
        return TargetShape(int(files.tensor("proj.0.weight").shape[-1]), int(vocabulary), depth)
    own = int(body.get("hidden_size") or 0)
    if method != "eagle":
        return TargetShape(own, int(body.get("vocab_size") or 0), depth)
    states = len(draft.eagle.states or ()) or COUNT
    hidden = _hidden_read(files, int(body.get("target_hidden_size") or own), states)
    return TargetShape(hidden, int(body.get("vocab_size") or 0), depth)


def head_facts(files: HeadFiles, layout: DraftLayout, draft: DraftPool) -> DraftFacts:
    """Collects facts about a head with canonical names. Raises ModelError if it is inconsistent."""
    config = resolved(files, draft, assumed_target(files, draft))
    deeper = resolved(files, draft, assumed_target(files, draft, DEPTHS[1]))
    needs = config.needs if config.needs == deeper.needs else replace(config.needs, layers=())
    found = DraftFacts(layout, stored_size(files.tensors), conventions=conventions_of(config))
    return _described(found, files, config, draft, needs)


def conventions_of(config: HeadConfig) -> tuple[str, ...]:
    """Returns the loader's description of the head, without lines that repeat other facts."""
    return tuple(line for line in config.describe() if not line.startswith(FACT_PREFIXES))


def _described(
    facts: DraftFacts, files: HeadFiles, config: HeadConfig, draft: DraftPool, needs: StatesNeeded
) -> DraftFacts:
    target = assumed_target(files, draft)
    states = _states_read(config, needs, target)
    facts = replace(facts, vocabulary=config.vocabulary, proposes=config.columns, states=states)
    if isinstance(config, EagleConfig):
        return replace(
            facts,
            shape=_decoder_shape(config) | {"layers": config.layers},
            embedding=config.embedding.value,
            lm_head=config.lm_head.value,
            positions=config.max_positions,
            ends_at_positions=True,
            rope=str(config.rope),
        )
    if isinstance(config, DFlashConfig):
        return replace(
            facts,
            shape=_decoder_shape(config) | {"layers": len(config.layers), "block_size": config.block_size},
            embedding=_owner(files, "embed_tokens.weight"),
            lm_head=_owner(files, "lm_head.weight"),
            positions=config.rope.max_positions,
            rope=str(config.rope),
            longest_block=config.block_size - 1,
        )
    if isinstance(config, MedusaConfig):
        is_open = bool(borrowed_by_medusa(files)) and "vocab_size" not in files.config
        return replace(
            facts,
            vocabulary=None if is_open else config.vocabulary,
            proposes=None if is_open else config.columns,
            shape={"hidden": config.hidden, "heads": config.heads, "blocks": config.blocks},
            embedding="none",
            lm_head="the target" if borrowed_by_medusa(files) else "the head",
            longest_block=config.heads,
        )
    return replace(
        facts,
        shape={"hidden": config.hidden, "inner": config.inner, "steps": config.steps},
        embedding="the head",
        lm_head="the head",
        longest_block=config.steps,
    )


def causal_facts(files: HeadFiles, layout: DraftLayout) -> DraftFacts:
    """Collects facts about a causal language model. Raises ModelError for unknown rotary positions."""
    text: Mapping[str, Any] = files.config.get("text_config") or files.config
    names = {
        "hidden": "hidden_size",
        "intermediate": "intermediate_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
    }
    vocabulary = int(text["vocab_size"]) if "vocab_size" in text else None
    return DraftFacts(
        layout=layout,
        size=stored_size(files.tensors),
        shape={short: int(text[key]) for short, key in names.items() if isinstance(text.get(key), int)},
        vocabulary=vocabulary,
        proposes=vocabulary,
        embedding="its own",
        lm_head="its own" if "lm_head.weight" in files.tensors else "its own embedding",
        positions=text.get("max_position_embeddings"),
        rope=_rope(text),
    )


def _rope(text: Mapping[str, Any]) -> str:
    section = text.get("rope_scaling") or text.get("rope_parameters") or {}  # as transformers prefers them
    if any(isinstance(value, dict) for value in section.values()):
        return "RoPE by layer type"
    base = section.get("rope_theta") or text.get("rope_theta") or DEFAULT_BASE
    return str(rope_of({**text, "rope_theta": base, "rope_parameters": section, "rope_scaling": None}))


def _states_read(config: HeadConfig, needs: StatesNeeded, target: TargetShape) -> StatesRead:
    return StatesRead(
        layers=needs.layers,
        is_final=config.needs.layers == (target.layers,),
        hidden=target.hidden,
        width=needs.width,
        projected=needs.projected_width,
    )


def _hidden_read(files: HeadFiles, said: int, states: int) -> int:
    """Returns the hidden size of an EAGLE head's target; the input of `fc` concatenates all states."""
    fc = files.tensors.get("fc.weight")
    if fc is None or not said or fc.shape[-1] % said == 0:
        return said
    return int(fc.shape[-1]) // states


def _target_of_heads(files: HeadFiles, depth: int) -> TargetShape:
    """Returns the target's shape, derived from Medusa heads, which end in an LM head."""
    shapes = [tensor.shape for name, tensor in files.tensors.items() if name.endswith(".weight")]
    rows = [int(shape[0]) for shape in shapes]
    return TargetShape(int(shapes[0][-1]), int(files.config.get("vocab_size") or max(rows)), depth)


def _decoder_shape(config: EagleConfig | DFlashConfig) -> dict[str, int]:
    return {
        "hidden": config.hidden,
        "intermediate": config.intermediate,
        "heads": config.heads,
        "kv_heads": config.kv_heads,
        "head_dim": config.head_dim,
    }


def _owner(files: HeadFiles, name: str) -> str:
    return "the head" if name in files.tensors else "the target"


def _first_module(files: HeadFiles) -> HeadFiles:
    """Returns the first MTP module in a target's folder."""
    layout = layout_in(files.tensors, target_shape(files.folder).layers, str(files.folder))
    return module_files(files.folder, layout, files.tensors)


_CANONICAL: Mapping[str, Callable[[HeadFiles], HeadFiles]] = MappingProxyType(
    {
        "eagle": canonical,
        "dflash": lambda files: files.renamed(DFLASH_ALIASES),
        "medusa": without_base_model,
        "mlp_speculator": lambda files: files.renamed(MLP_ALIASES),
        "mtp": _first_module,
    }
)
_RESOLVE: Mapping[str, Callable[[HeadFiles, TargetShape, DraftPool], HeadConfig]] = MappingProxyType(
    {
        "eagle": lambda files, target, draft: resolve(files, target, overrides_of(draft.eagle)),
        "dflash": lambda files, target, _: resolve_dflash(files, target),
        "medusa": lambda files, target, _: resolve_medusa(files, target),
        "mlp_speculator": lambda files, target, _: resolve_mlp_speculator(files, target),
        "mtp": lambda files, target, _: resolve_mtp(files, target),
    }
)
