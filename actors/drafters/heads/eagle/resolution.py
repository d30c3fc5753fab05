"""Resolves an EAGLE head's files and the target's shape into an `EagleConfig`; refuses what does not fit.

The kind of a head follows from its tensors, and from its configuration where the tensors leave it open; never from its
name.
"""

from collections.abc import Mapping
from typing import Any

from actors.drafters.heads.eagle.config import (
    EagleConfig,
    EagleKind,
    EagleOverrides,
    FeatureNorm,
    OutputNorm,
    WeightSource,
)
from actors.drafters.heads.eagle.layer_ids import check_states, states_read
from actors.drafters.heads.eagle.names import layer_count, linear_width
from actors.drafters.heads.files import HeadFiles
from actors.drafters.heads.rope import rope_of
from actors.drafters.heads.target_shape import TargetShape
from actors.drafters.model.pard import MASK_KEYS
from cluster.errors import ModelError
from protos.states import StatesNeeded

FIRST_QUERIES = "layers.0.self_attn.q_proj"
BIASES = {"bias": "fc.bias", "attention_bias": f"{FIRST_QUERIES}.bias"}  # tensors that must exist if the key is set
MAX_POSITIONS = 2048  # default if the configuration does not state it


def resolve(files: HeadFiles, target: TargetShape, overrides: EagleOverrides) -> EagleConfig:
    """Resolves a head with tensors in the names of `names`.

    Raises ModelError if it cannot draft for this target.
    """
    body = _body(files.config)
    hidden = _size(files, body, "hidden_size")
    kind = _kind(files, hidden)
    heads = _size(files, body, "num_attention_heads")
    vocabulary = _size(files, body, "vocab_size")
    _check_target(files, body, target, vocabulary)
    _check_layers(files, body)
    needs = _needs(files, kind, hidden, target, overrides)
    columns = _columns(files, vocabulary)
    return EagleConfig(
        kind=kind,
        hidden=hidden,
        intermediate=_size(files, body, "intermediate_size"),
        layers=layer_count(files),
        heads=heads,
        kv_heads=_size(files, body, "num_key_value_heads", heads),
        head_dim=_size(files, body, "head_dim", hidden // heads),
        eps=float(body.get("rms_norm_eps", 1e-6)),
        rope=rope_of(body),
        max_positions=overrides.max_positions or _size(files, body, "max_position_embeddings", MAX_POSITIONS),
        vocabulary=vocabulary,
        columns=columns,
        target_hidden=target.hidden,
        needs=needs,
        projects=kind is EagleKind.EAGLE3 and "fc.weight" in files.tensors,
        feature_norm=_feature_norm(files, body),
        norm_before_residual=_norm_before_residual(files.config, body),
        output_norm=overrides.output_norm or _output_norm(files, body, kind),
        embedding=WeightSource.HEAD if "embed_tokens.weight" in files.tensors else WeightSource.TARGET,
        lm_head=_lm_head(files, body, columns, vocabulary),
        mask_token=_mask_token(files, body, vocabulary),
    )


def _body(config: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens a configuration to one level. The decoder's section of speculators takes precedence."""
    return {**config, **(config.get("eagle_config") or {}), **(config.get("transformer_layer_config") or {})}


def _size(files: HeadFiles, body: Mapping[str, Any], key: str, default: int | None = None) -> int:
    found = body.get(key)
    if found is None and default is not None:
        return default
    if not isinstance(found, int) or found < 1:
        raise ModelError(f"{key} in the config.json of {files.folder} is {found!r}, expected a positive whole number")
    return found


def _kind(files: HeadFiles, hidden: int) -> EagleKind:
    layer_count(files)
    width = linear_width(files, FIRST_QUERIES)
    if width == 2 * hidden:
        return EagleKind.EAGLE3
    if width == hidden and "fc.weight" in files.tensors:
        return EagleKind.EAGLE
    raise ModelError(
        f"{files.folder} is no EAGLE head: {FIRST_QUERIES} has {width} inputs, expected {hidden} and a tensor fc.weight"
        f" (EAGLE-1/2) or {2 * hidden} (EAGLE-3)"
    )


def _check_target(files: HeadFiles, body: Mapping[str, Any], target: TargetShape, vocabulary: int) -> None:
    if vocabulary != target.vocabulary:
        raise ModelError(
            f"{files.folder} was made for a vocabulary of {vocabulary}, but the target has {target.vocabulary}"
        )
    said = body.get("target_hidden_size")
    if said is not None and said != target.hidden:
        raise ModelError(f"{files.folder} was made for a hidden size of {said}, but the target has {target.hidden}")


def _check_layers(files: HeadFiles, body: Mapping[str, Any]) -> None:
    found = layer_count(files)
    said = body.get("num_hidden_layers", found)
    if said != found:
        raise ModelError(f"{files.folder} has {said} decoder layers by its config.json, but tensors of {found}")
    sliding = set(body.get("layer_types") or ()) - {"full_attention"}
    if sliding:
        raise ModelError(f"{files.folder} has layers of {', '.join(sorted(sliding))}, expected full_attention alone")
    for key, name in BIASES.items():
        if body.get(key) and name not in files.tensors:
            raise ModelError(f"{files.folder} has {key}, but no tensor {name}")
    if body.get("hidden_act", "silu") != "silu":
        raise ModelError(f"{files.folder} has the activation {body['hidden_act']}, expected silu")


def _needs(
    files: HeadFiles, kind: EagleKind, hidden: int, target: TargetShape, overrides: EagleOverrides
) -> StatesNeeded:
    """Returns the final state for EAGLE-1/2 and heads without `fc`, else as many states as `fc` has inputs for."""
    if kind is EagleKind.EAGLE or "fc.weight" not in files.tensors:
        if target.hidden != hidden:
            raise ModelError(
                f"{files.folder} reads final states of {hidden} elements, but the target's hidden size is"
                f" {target.hidden}"
            )
        return StatesNeeded((target.layers,), target.hidden)
    width = linear_width(files, "fc")
    if width % target.hidden:
        raise ModelError(
            f"fc.weight in {files.folder} has {width} inputs, which is no multiple of the target's hidden size of"
            f" {target.hidden}"
        )
    count = width // target.hidden
    if overrides.states is not None:
        check_states(overrides.states, target.layers, count, "the list of states that was given")
        return StatesNeeded(overrides.states, width, hidden)
    return StatesNeeded(states_read(files.config, target.layers, count, overrides.layer_ids), width, hidden)


def _columns(files: HeadFiles, vocabulary: int) -> int:
    """Returns the size of the draft vocabulary."""
    said = files.config.get("draft_vocab_size") or vocabulary
    if not isinstance(said, int) or not 0 < said <= vocabulary:
        raise ModelError(f"draft_vocab_size of {files.folder} is {said!r}, expected 1 to {vocabulary}")
    if said < vocabulary and "d2t" not in files.tensors:
        raise ModelError(
            f"{files.folder} proposes {said} of {vocabulary} tokens, but holds no tensor d2t that says which"
        )
    return said


def _feature_norm(files: HeadFiles, body: Mapping[str, Any]) -> FeatureNorm:
    """Determines the norm from the tensors. Raises ModelError if the configuration states otherwise."""
    told = {
        FeatureNorm.ALL: ("input_norm.weight", body.get("norm_before_fc")),
        FeatureNorm.EACH: ("fc_norm.0.weight", body.get("fc_norm", body.get("use_aux_norm"))),
    }
    found = [norm for norm, (name, _) in told.items() if name in files.tensors]
    for norm, (name, said) in told.items():
        if said is not None and bool(said) != (norm in found):
            raise ModelError(
                f"{files.folder} has {'a' if norm in found else 'no'} tensor {name}, but its config.json says otherwise"
            )
    if len(found) > 1:
        raise ModelError(f"{files.folder} holds both input_norm and fc_norm, expected one of them")
    return found[0] if found else FeatureNorm.NOTHING


def _norm_before_residual(config: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """Returns the configured value; the default is True for speculators' kind eagle3, else False."""
    said = body.get("norm_before_residual")
    return config.get("speculators_model_type") == "eagle3" if said is None else bool(said)


def _output_norm(files: HeadFiles, body: Mapping[str, Any], kind: EagleKind) -> OutputNorm:
    name = "norm.weight" if kind is EagleKind.EAGLE3 else "lm_head_layernorm.weight"
    if name not in files.tensors:
        return OutputNorm.NOTHING
    return OutputNorm.BOTH if body.get("norm_output") else OutputNorm.LOGITS


def _mask_token(files: HeadFiles, body: Mapping[str, Any], vocabulary: int) -> int | None:
    """Returns the mask token of a head with a state to feed with it (`mask_hidden`); None for other heads."""
    token = next((body[key] for key in MASK_KEYS if body.get(key) is not None), None)
    if "mask_hidden" not in files.tensors:
        if token is not None:
            raise ModelError(f"{files.folder} has the mask token {token}, but no tensor mask_hidden to feed with it")
        return None
    if not isinstance(token, int) or not 0 <= token < vocabulary:
        keys = ", ".join(MASK_KEYS)
        raise ModelError(
            f"the mask token of {files.folder} is {token!r} by {keys}, expected an id from 0 to {vocabulary - 1}"
        )
    return token


def _lm_head(files: HeadFiles, body: Mapping[str, Any], columns: int, vocabulary: int) -> WeightSource:
    if "lm_head.weight" in files.tensors:
        return WeightSource.HEAD
    if columns < vocabulary:
        raise ModelError(
            f"{files.folder} proposes {columns} of {vocabulary} tokens, but holds no lm_head.weight for them"
        )
    is_tied = bool(files.config.get("tie_word_embeddings")) or bool(body.get("tie_word_embeddings"))
    return WeightSource.EMBEDDING if is_tied else WeightSource.TARGET
