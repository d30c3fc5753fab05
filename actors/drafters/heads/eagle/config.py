"""Resolves the configuration of an EAGLE head from its files and the target's shape.

EAGLE: Li et al. 2024, arXiv 2401.15077; EAGLE-2: arXiv 2406.16858; EAGLE-3: Li et al. 2025, arXiv 2503.01840.

1. `canonical` maps the tensor names of all known layouts to one set: SafeAILab's (`midlayer.` for EAGLE-3, `layers.0.`
   before), SpecForge's, vLLM's, ModelOpt's, and the old and new ones of speculators.
2. `resolve` derives the `EagleConfig`. The kind of head follows from its tensors; if these are ambiguous, from its
   configuration, but never from its name.
3. `states_read` interprets the layer ids of EAGLE-3. State k is the input of the target's layer k, counted from 0
   (`protos.messages`). Published ids have two meanings. In the reference implementation, vLLM and speculators, id k
   refers to state k. In the section `eagle_config` of SpecForge, SGLang and ModelOpt, id k refers to the output of
   layer k, which is state k + 1. A wrong interpretation raises no error, but at least halves the acceptance rate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from torch import Tensor

from actors.drafters.heads.files import HeadFiles
from actors.drafters.heads.rope import Rope, TargetShape, rope_of
from actors.drafters.model.forwards import MASK_KEYS
from cluster.config_sections import EagleOptions
from cluster.errors import ModelError
from protos.messages import StatesNeeded

KEY = "eagle_aux_hidden_state_layer_ids"
OUTPUTS_KEY = "target_layer_ids"
IDS_SUFFIX = "layer_ids"  # ends every publisher's key of layer ids
SECTION = "eagle_config"
SECTION_KEY = "layer_ids"  # key of the states' numbers in `eagle_config`, as in vLLM
FIRST_OF_STATES = 2  # lowest default id for states; for outputs, it is 1


class LayerIdMeaning(Enum):
    """Meaning of a published layer id k."""

    STATE = "state"  # k refers to state k
    OUTPUT = "output"  # k refers to the output of layer k, which is state k + 1


def states_read(
    config: Mapping[str, Any], target_layers: int, count: int, meaning: LayerIdMeaning | None = None
) -> tuple[int, ...]:
    """Returns the `count` states that a head reads, in ascending order.

    `meaning` overrides the meaning implied by the ids' key. Without ids, uses the reference implementation's default.
    Raises ModelError if there are not `count` ids or the target lacks a state.
    """
    named = _named(config)
    if named is None:
        states = default_states(target_layers)
        source = f"{KEY} is not in its configuration, and the default"
    else:
        ids, usual = named
        shift = 1 if (meaning or usual) is LayerIdMeaning.OUTPUT else 0
        states = tuple(sorted(k + shift for k in ids))
        source = f"layer ids {list(ids)}"
    check_states(states, target_layers, count, source)
    return states


def default_states(target_layers: int) -> tuple[int, ...]:
    """Returns the reference implementation's default states (SafeAILab/EAGLE, eagle/model/modeling_llama_kv.py)."""
    return 2, target_layers // 2, target_layers - 3


def check_states(states: Sequence[int], target_layers: int, count: int, source: str) -> None:
    """Raises ModelError unless these are `count` distinct inputs of the target's layers."""
    if len(states) != count:
        raise ModelError(
            f"the EAGLE-3 head reads {count} states side by side, but {source} lists {len(states)}: {list(states)};"
            " use a head made for this target"
        )
    if len(set(states)) < count or not all(0 <= k < target_layers for k in states):
        raise ModelError(
            f"{source} of the EAGLE-3 head selects states {list(states)}; the target has {target_layers} layers, so use"
            f" distinct indices from 0 to {target_layers - 1}"
        )


def _named(config: Mapping[str, Any]) -> tuple[tuple[int, ...], LayerIdMeaning] | None:
    """Returns the configured layer ids and the usual meaning of their key; None without ids."""
    section = config.get(SECTION) or {}
    if config.get(KEY):
        return _ids(config[KEY]), LayerIdMeaning.STATE
    if section.get(KEY):
        ids = _ids(section[KEY])
        # Some tools list states in this section too; a lowest id of 2 indicates this (SGLang PR 25454).
        return ids, LayerIdMeaning.STATE if min(ids) == FIRST_OF_STATES else LayerIdMeaning.OUTPUT
    if config.get(OUTPUTS_KEY):
        return _ids(config[OUTPUTS_KEY]), LayerIdMeaning.OUTPUT
    if section.get(SECTION_KEY):
        return _ids(section[SECTION_KEY]), LayerIdMeaning.STATE
    for key, ids in {**config, **section}.items():
        if key.endswith(IDS_SUFFIX) and ids:
            raise ModelError(
                f"the head's configuration lists layer ids {ids!r} as {key}, which has no known meaning for EAGLE-3;"
                " set draft.eagle.states to the states that the head reads"
            )
    return None


def _ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or not all(isinstance(k, int) for k in ids):
        raise ModelError(
            f"the head's layer ids are {ids!r}, expected a list of whole numbers; correct its config.json, or set"
            " draft.eagle.states"
        )
    return tuple(ids)


ALIASES = (
    (r"eagle_module\.", ""),
    (r"(?:model\.)?midlayer\.", "layers.0."),
    (r"model\.", ""),
    (r"transformer\.", "layers.0."),  # speculators up to 0.3
    (r"fusion_fc\.", "fc."),
    (r"embedding_layernorm\.", "embed_layernorm."),
    (r"pre_lm_head_layernorm\.", "lm_head_layernorm."),
    (r"hidden_layernorm\.", "layers.0.input_layernorm."),  # HASS heads converted by speculators
    (r"aux_norm_low\.", "fc_norm.0."),
    (r"aux_norm_mid\.", "fc_norm.1."),
    (r"aux_norm_high\.", "fc_norm.2."),
)


def canonical(files: HeadFiles) -> HeadFiles:
    """Renames all tensors to canonical names. Raises ModelError for quantized weights."""
    files.refuse_quantized()
    return replace(files, tensors=_without_stray_norm(files.tensors)).renamed(ALIASES)


def layer_count(files: HeadFiles) -> int:
    """Returns the number of decoder layers. Raises ModelError if there are none or their numbers have a gap."""
    numbers = {int(name.split(".")[1]) for name in files.tensors if name.startswith("layers.")}
    if not numbers or numbers != set(range(len(numbers))):
        raise ModelError(
            f"{files.folder} is no EAGLE head: it has the decoder layers {sorted(numbers)}, expected 0, ...; use the"
            " draft.method of this head, or fetch it again"
        )
    return len(numbers)


def linear_width(files: HeadFiles, name: str) -> int:
    """Returns the number of inputs of a linear layer."""
    weight: Tensor = files.tensor(f"{name}.weight")
    return int(weight.shape[-1])


def _without_stray_norm(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Drops the single, unused norm of HASS heads (speculators 0.3, convert/eagle)."""
    if "embed_layernorm.weight" in tensors:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name != "hidden_layernorm.weight"}


class EagleKind(Enum):
    """Input of a head's first layer."""

    EAGLE = "EAGLE-1/2"  # projection of concatenated embedding and final state
    EAGLE3 = "EAGLE-3"  # concatenated embedding and state
    MTP = "multi-token prediction"  # as EAGLE-1, with embedding and state normed separately


class FeatureNorm(Enum):
    """Norm of the target's states before their projection."""

    NOTHING = "nothing"
    ALL = "all states as one row"  # tensor input_norm, key norm_before_fc
    EACH = "each state by itself"  # tensor fc_norm


class OutputNorm(Enum):
    """Outputs with the norm after the last layer."""

    NOTHING = "nothing"
    LOGITS = "logits"  # recycled states are not normalized
    BOTH = "logits and recycled states"  # key norm_output: EAGLE 3.1


class WeightSource(Enum):
    """Source of the weights of the embedding or the LM head."""

    HEAD = "the head"
    EMBEDDING = "the head's embedding"
    TARGET = "the target"


@dataclass(frozen=True, slots=True)
class EagleOverrides:
    """User settings that override the head's configuration; None keeps the configured value."""

    states: tuple[int, ...] | None = None  # indices of the target's states to read
    layer_ids: LayerIdMeaning | None = None
    output_norm: OutputNorm | None = None  # SpecForge changed the meaning of norm_output in September 2026
    max_positions: int | None = None  # often configured as 2048 for heads trained on longer texts


NO_OVERRIDES = EagleOverrides()


def overrides_of(options: EagleOptions) -> EagleOverrides:
    """Reads the overrides from the method's options."""
    meaning = options.layer_ids
    norm = options.output_norm
    return EagleOverrides(
        states=options.states,
        layer_ids=None if meaning is None else LayerIdMeaning(meaning),
        output_norm=None if norm is None else OutputNorm[norm.upper()],
        max_positions=options.max_positions,
    )


GUESSED_STATES = (
    "the states are a default, not in the head's configuration; set draft.eagle.states if acceptance is low"
)


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes and conventions of a head."""

    kind: EagleKind
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # epsilon of the norms
    rope: Rope
    max_positions: int  # drafting stops at this position
    vocabulary: int  # vocabulary size of the target
    columns: int  # logit columns: size of the draft vocabulary
    target_hidden: int
    needs: StatesNeeded
    projects: bool  # EAGLE-3: `fc` projects the target's states
    feature_norm: FeatureNorm
    norm_before_residual: bool
    output_norm: OutputNorm
    embedding: WeightSource  # HEAD or TARGET
    lm_head: WeightSource
    mask_token: int | None  # P-EAGLE: mask token for several tokens per forward
    hides_first: bool = False  # the embedding at position 0 is replaced by zeros
    guesses_states: bool = False  # True if neither the head's configuration nor the user's names the states

    def describe(self) -> list[str]:
        """Describes the resolved configuration, one fact per line."""
        first = f"{self.kind.value} head: {self.layers} layer(s) of {self.hidden}, MLP {self.intermediate}"
        lines = [
            f"{first}, {self.heads} heads, {self.kv_heads} key-value heads of {self.head_dim}, eps {self.eps:g}",
            f"reads the target's states {list(self.needs.layers)} (k: after k layers), {self.needs.width} elements",
            f"positions up to {self.max_positions}, {self.rope}",
            f"proposes {self.columns} of {self.vocabulary} tokens",
            f"embedding of {self.embedding.value}, LM head of {self.lm_head.value}",
            f"norm after the last layer: {self.output_norm.value}",
        ]
        if self.kind is EagleKind.EAGLE3:
            residual = "normed" if self.norm_before_residual else "unchanged"
            lines.append(f"norm before fc: {self.feature_norm.value}; states enter the residual {residual}")
        if self.guesses_states:
            lines.append(GUESSED_STATES)
        if self.mask_token is not None:
            lines.append(f"predicts several tokens in one forward, by mask token {self.mask_token}")
        return lines


FIRST_QUERIES = "layers.0.self_attn.q_proj"
BIASES = {"bias": "fc.bias", "attention_bias": f"{FIRST_QUERIES}.bias"}  # required tensor by configuration key


def resolve(files: HeadFiles, target: TargetShape, overrides: EagleOverrides) -> EagleConfig:
    """Resolves a head's configuration from canonical tensor names.

    Raises ModelError if the head cannot draft for this target.
    """
    body = _body(files.config)
    hidden = files.size(body, "hidden_size")
    kind = _kind(files, hidden)
    heads = files.size(body, "num_attention_heads")
    vocabulary = files.size(body, "vocab_size")
    _check_target(files, body, target, vocabulary)
    _check_layers(files, body)
    needs = _needs(files, kind, hidden, target, overrides)
    projects = kind is EagleKind.EAGLE3 and "fc.weight" in files.tensors
    columns = _columns(files, vocabulary)
    rope = rope_of(body)
    return EagleConfig(
        kind=kind,
        hidden=hidden,
        intermediate=files.size(body, "intermediate_size"),
        layers=layer_count(files),
        heads=heads,
        kv_heads=files.size(body, "num_key_value_heads", heads),
        head_dim=files.size(body, "head_dim", hidden // heads),
        eps=float(body.get("rms_norm_eps", 1e-6)),
        rope=rope,
        max_positions=overrides.max_positions or rope.max_positions,
        vocabulary=vocabulary,
        columns=columns,
        target_hidden=target.hidden,
        needs=needs,
        projects=projects,
        feature_norm=_feature_norm(files, body),
        norm_before_residual=_norm_before_residual(files.config, body),
        output_norm=overrides.output_norm or _output_norm(files, body, kind),
        embedding=WeightSource.HEAD if "embed_tokens.weight" in files.tensors else WeightSource.TARGET,
        lm_head=_lm_head(files, body, columns, vocabulary),
        mask_token=_mask_token(files, body, vocabulary),
        guesses_states=projects and overrides.states is None and _named(files.config) is None,
    )


def _body(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens a configuration to one level. Values in speculators' decoder section take precedence."""
    return {**config, **(config.get("eagle_config") or {}), **(config.get("transformer_layer_config") or {})}


def _kind(files: HeadFiles, hidden: int) -> EagleKind:
    layer_count(files)
    width = linear_width(files, FIRST_QUERIES)
    if width == 2 * hidden:
        return EagleKind.EAGLE3
    if width == hidden and "fc.weight" in files.tensors:
        return EagleKind.EAGLE
    raise ModelError(
        f"{files.folder} is no EAGLE head: {FIRST_QUERIES} has {width} inputs, expected {hidden} and a tensor fc.weight"
        f" (EAGLE-1/2) or {2 * hidden} (EAGLE-3); use another head"
    )


def _check_target(files: HeadFiles, body: Mapping[str, Any], target: TargetShape, vocabulary: int) -> None:
    if vocabulary != target.vocabulary:
        raise ModelError(
            f"{files.folder} was made for a vocabulary of {vocabulary}, but the target has {target.vocabulary};"
            " use a head made for this target"
        )
    stated = body.get("target_hidden_size")
    if stated is not None and stated != target.hidden:
        raise ModelError(
            f"{files.folder} was made for a hidden size of {stated}, but the target has {target.hidden}; use a"
            " head made for this target"
        )


def _check_layers(files: HeadFiles, body: Mapping[str, Any]) -> None:
    stored = layer_count(files)
    stated = body.get("num_hidden_layers", stored)
    if stated != stored:
        raise ModelError(
            f"{files.folder} has {stated} decoder layers by its config.json, but tensors of {stored}; fetch both again"
        )
    sliding = set(body.get("layer_types") or ()) - {"full_attention"}
    if sliding:
        raise ModelError(
            f"{files.folder} has layers of {', '.join(sorted(sliding))}, but only full_attention is supported; use"
            " another head"
        )
    for key, name in BIASES.items():
        if body.get(key) and name not in files.tensors:
            raise ModelError(f"{files.folder} has {key}, but no tensor {name}; fetch the head again")
    if body.get("hidden_act", "silu") != "silu":
        raise ModelError(
            f"{files.folder} has the activation {body['hidden_act']}, but only silu is supported; use another head"
        )


def _needs(
    files: HeadFiles, kind: EagleKind, hidden: int, target: TargetShape, overrides: EagleOverrides
) -> StatesNeeded:
    """Returns the states to read: the inputs of `fc`; for EAGLE-1/2 and heads without `fc`, the final state."""
    if kind is EagleKind.EAGLE or "fc.weight" not in files.tensors:
        if target.hidden != hidden:
            raise ModelError(
                f"{files.folder} reads final states of {hidden} elements, but the target's hidden size is"
                f" {target.hidden}; use a head made for this target"
            )
        return StatesNeeded((target.layers,), target.hidden)
    width = linear_width(files, "fc")
    if width % target.hidden:
        raise ModelError(
            f"fc.weight in {files.folder} has {width} inputs, not a multiple of the target's hidden size,"
            f" {target.hidden}; use a head made for this target"
        )
    count = width // target.hidden
    if overrides.states is not None:
        check_states(overrides.states, target.layers, count, "the option for states")
        return StatesNeeded(overrides.states, width, hidden)
    return StatesNeeded(states_read(files.config, target.layers, count, overrides.layer_ids), width, hidden)


def _columns(files: HeadFiles, vocabulary: int) -> int:
    """Returns the size of the draft vocabulary."""
    columns = files.config.get("draft_vocab_size") or vocabulary
    if not isinstance(columns, int) or not 0 < columns <= vocabulary:
        raise ModelError(
            f"draft_vocab_size of {files.folder} is {columns!r}, expected 1 to {vocabulary}; correct its config.json"
        )
    if columns < vocabulary and "d2t" not in files.tensors:
        raise ModelError(
            f"{files.folder} proposes {columns} of {vocabulary} tokens, but has no tensor d2t; fetch it again"
        )
    return columns


def _feature_norm(files: HeadFiles, body: Mapping[str, Any]) -> FeatureNorm:
    """Derives the norm from the tensors. Raises ModelError if the configuration contradicts them."""
    evidence = {
        FeatureNorm.ALL: ("input_norm.weight", body.get("norm_before_fc")),
        FeatureNorm.EACH: ("fc_norm.0.weight", body.get("fc_norm", body.get("use_aux_norm"))),
    }
    norms = [norm for norm, (name, _) in evidence.items() if name in files.tensors]
    for norm, (name, stated) in evidence.items():
        if stated is not None and bool(stated) != (norm in norms):
            raise ModelError(
                f"{files.folder} has {'a' if norm in norms else 'no'} tensor {name}, but config.json disagrees; fix it"
            )
    if len(norms) > 1:
        raise ModelError(f"{files.folder} holds both input_norm and fc_norm; remove the unused one")
    return norms[0] if norms else FeatureNorm.NOTHING


def _norm_before_residual(config: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """Returns the configured value; by default, True only for speculators' kind eagle3."""
    stated = body.get("norm_before_residual")
    return config.get("speculators_model_type") == "eagle3" if stated is None else bool(stated)


def _output_norm(files: HeadFiles, body: Mapping[str, Any], kind: EagleKind) -> OutputNorm:
    """Derives the norm from the tensors. EAGLE-3 heads lack it only if their configuration says so."""
    is_eagle3 = kind is EagleKind.EAGLE3
    is_optional = not is_eagle3 or body.get("use_last_layernorm") is False
    if is_optional and ("norm.weight" if is_eagle3 else "lm_head_layernorm.weight") not in files.tensors:
        return OutputNorm.NOTHING
    return OutputNorm.BOTH if body.get("norm_output") else OutputNorm.LOGITS


def _mask_token(files: HeadFiles, body: Mapping[str, Any], vocabulary: int) -> int | None:
    """Returns the mask token if the head has a state for it (`mask_hidden`); otherwise None."""
    token = next((body[key] for key in MASK_KEYS if body.get(key) is not None), None)
    if "mask_hidden" not in files.tensors:
        if token is not None:
            raise ModelError(
                f"{files.folder} has the mask token {token}, but no tensor mask_hidden; fetch the head again"
            )
        return None
    if not isinstance(token, int) or not 0 <= token < vocabulary:
        keys = ", ".join(MASK_KEYS)
        raise ModelError(
            f"the mask token of {files.folder} is {token!r} by {keys}, expected an id from 0 to {vocabulary - 1};"
            " correct its config.json"
        )
    return token


def _lm_head(files: HeadFiles, body: Mapping[str, Any], columns: int, vocabulary: int) -> WeightSource:
    if "lm_head.weight" in files.tensors:
        return WeightSource.HEAD
    if columns < vocabulary:
        raise ModelError(
            f"{files.folder} proposes {columns} of {vocabulary} tokens, but has no lm_head.weight; fetch the head again"
        )
    is_tied = bool(files.config.get("tie_word_embeddings")) or bool(body.get("tie_word_embeddings"))
    return WeightSource.EMBEDDING if is_tied else WeightSource.TARGET
