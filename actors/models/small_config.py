"""Shrinks a model's config: keeps every layer type and shortens every length on which attention depends.

A proof for the small model holds for the large one only if both take the same paths through the code. Therefore, sizes
keep their relations, such as one key head, or equal numbers of key and query heads. Windows and similar lengths become
short enough that a text of a hundred tokens exceeds them several times.
"""

from typing import Any

from transformers import PretrainedConfig

DEPTH = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "swa_num_attention_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
# Sizes of Mamba 2's heads and groups of heads; all heads together have `expand` times the hidden size.
MAMBA_HEADS: tuple[str, ...] = ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads")
MAMBA_HEAD_DIM: tuple[str, ...] = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
MAMBA_GROUPS = ("mamba_n_groups", "mamba_ngroups", "n_groups")
MAMBA_EXPANSION = ("mamba_expand", "expand")
MAMBA_INNER = ("mamba_d_ssm",)
SMALL_MAMBA_DIM = 16
MIN_LAYERS = 4  # minimum number of layers; covers alternating patterns
SMALL_HEADS = 4
SMALL_HIDDEN = 64
SMALL_VOCABULARY = 256
TEXT_TOKENS = 128  # maximum length of a check's texts
WINDOW = 8
SHORT = 16  # original length of RoPE scaling

# Upper limits by field. Missing and non-numeric fields stay unchanged.
WIDTHS = {
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "dense_intermediate_size": 96,
    "n_inner": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 32,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "kv_channels": 16,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "rotary_dim": 8,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "index_head_dim": 16,
    "index_n_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "dim_model_base": 16,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "zero_expert_num": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_start_index": 1,
}
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_target_positions")
# Lengths at which attention changes, such as the size of a window or a chunk.
THRESHOLDS = (
    "sliding_window",
    "sliding_window_size",
    "attention_window_size",
    "window_size",
    "local_attention",
    "local_attention_window_len",
    "keep_window_size",
    "attention_chunk_size",
    "floor_scale",
    "index_topk",
    "log_scaling_n_floor",
)
VOCABULARY = {
    "vocab_size": SMALL_VOCABULARY,
    "unpadded_vocab_size": SMALL_VOCABULARY,
    "vocab_size_per_layer_input": SMALL_VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NUMBERED_LAYERS = (  # lists of layer numbers
    "mlp_only_layers",
    "full_attn_idxs",
    "moe_layers",
    "hybrid_layer_ids",
    "cross_attention_layers",
    "ple_layer_ids",
)
DROPPED = (  # fields that describe weights or do not affect the computation
    "quantization_config",
    "transformers_version",
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "auto_map",
    "_attn_implementation",
    "attn_implementation",
    "attention_types",  # short form of GPT-Neo's layer list
)


def small_config(config: PretrainedConfig, *, context: int | None = None, with_widths: bool = True) -> PretrainedConfig:
    """Returns a small copy for texts of up to `context` tokens; None: up to the model's positions.

    If no such text reaches a threshold, neither does a check. Without `with_widths`, reduces only layers, vocabulary
    and positions.
    """
    return type(config)(**_small(config.to_dict(), context, with_widths))


def _small(fields: dict[str, Any], context: int | None, with_widths: bool) -> dict[str, Any]:
    small = {name: value for name, value in fields.items() if name not in DROPPED}
    _cut_layers(small)
    limits = VOCABULARY | (WIDTHS | EXPERTS if with_widths else {})
    small |= {name: _at_most(small[name], most) for name, most in limits.items() if name in small}
    positions = next((fields[name] for name in LENGTHS if _is_count(fields.get(name))), None)
    longest = context or positions
    small |= {name: TEXT_TOKENS for name in LENGTHS if _is_count(small.get(name))}
    for name in THRESHOLDS:
        if _is_count(small.get(name)):
            is_reached = longest is None or small[name] < longest
            small[name] = min(small[name], WINDOW) if is_reached else TEXT_TOKENS
    if with_widths:
        _shrink_heads(small, fields)
        _shrink_mamba(small)
    for name, value in fields.items():
        if isinstance(value, dict) and "model_type" in value:
            small[name] = _small(value, context, with_widths)
        elif isinstance(value, dict) and name.startswith("rope_"):
            _shorten_rope(name, small, fields, context)
    return small


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _at_most(value: Any, most: int) -> Any:
    if isinstance(value, list):
        return [_at_most(part, most) for part in value]
    return min(value, most) if _is_count(value) else value


def _cut_layers(fields: dict[str, Any]) -> None:
    """Keeps one layer of every type, and at least the first MIN_LAYERS layers."""
    for name in DEPTH:
        if not _is_count(fields.get(name)):
            continue
        depth = fields[name]
        numbered = {key: fields[key] for key in NUMBERED_LAYERS if isinstance(fields.get(key), list)}
        by_layer = {
            key: value
            for key, value in fields.items()
            if isinstance(value, list) and len(value) == depth and key not in numbered and key != "time_step_limit"
        }
        shared = fields.get("num_kv_shared_layers") or 0  # last layers, which use keys of earlier layers
        own = {int(layer): part for layer, part in (fields.get("per_layer_config") or {}).items()}
        kinds = [
            repr(
                (
                    [value[layer] for value in by_layer.values()],
                    [layer in value for value in numbered.values()],
                    own.get(layer),
                    layer >= depth - shared,
                )
            )
            for layer in range(depth)
        ]
        indices = {kinds.index(kind) for kind in kinds}
        others = [layer for layer in range(depth) if layer not in indices]
        layers = sorted([*indices, *others[: max(0, MIN_LAYERS - len(indices))]])
        fields |= {key: [value[layer] for layer in layers] for key, value in by_layer.items()}
        fields |= {key: [at for at, layer in enumerate(layers) if layer in value] for key, value in numbered.items()}
        if shared:
            fields["num_kv_shared_layers"] = sum(layer >= depth - shared for layer in layers)
        if own:
            fields["per_layer_config"] = {at: own[layer] for at, layer in enumerate(layers) if layer in own}
        fields[name] = len(layers)


def _shrink_heads(small: dict[str, Any], fields: dict[str, Any]) -> None:
    """Shrinks heads; preserves the ratio of key to query heads, and whether their total size equals the hidden size."""
    heads = next((fields[name] for name in HEADS if _is_count(fields.get(name))), None)
    hidden = next((fields[name] for name in HIDDEN if _is_count(fields.get(name))), None)
    if not heads or not hidden:
        return
    few = min(heads, SMALL_HEADS)
    small |= {name: min(fields[name], SMALL_HEADS) for name in HEADS if _is_count(fields.get(name))}
    if isinstance(by_layer := small.get("num_attention_heads_per_layer"), list):
        small["num_attention_heads_per_layer"] = [few if count == heads else 2 * few for count in by_layer]
    small |= {
        name: few if fields[name] == heads else min(fields[name], max(1, few // 2))
        for name in KV_HEADS
        if _is_count(fields.get(name))
    }
    small |= {
        name: SMALL_HIDDEN if fields[name] == hidden else SMALL_HIDDEN // 2
        for name in HIDDEN
        if _is_count(fields.get(name))
    }
    even = SMALL_HIDDEN // few
    head_sizes = {hidden // heads: even}
    if _is_count(fields.get("qk_rope_head_dim")) and _is_count(fields.get("qk_nope_head_dim")):  # latent attention
        rotated, other = small["qk_rope_head_dim"], small["qk_nope_head_dim"]
        head_sizes |= {
            fields["qk_nope_head_dim"]: other,
            fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]: rotated + other,
            fields["qk_rope_head_dim"]: rotated,
        }
        whole = fields["qk_nope_head_dim"] + fields["qk_rope_head_dim"]
        if _is_count(fields.get("v_head_dim")) and fields["v_head_dim"] < whole:
            head_sizes |= {fields["v_head_dim"]: other}

    def head_size(size: int) -> int:
        return int(head_sizes.get(size, 2 * even if size * heads > hidden else max(8, even // 2)))

    def kv_heads(count: int) -> int:
        return int(few if count == heads else min(count, max(1, few // 2)))

    for name in ("head_dim", "swa_head_dim", "global_head_dim", "v_head_dim", "qk_head_dim", "kv_channels"):
        if _is_count(fields.get(name)):
            small[name] = head_size(fields[name])
    for layer, own in (small.get("per_layer_config") or {}).items():
        sizes = {"head_dim": head_size, "num_key_value_heads": kv_heads}
        small["per_layer_config"][layer] = {
            name: sizes[name](value) if name in sizes else value for name, value in own.items()
        }


def _shrink_mamba(small: dict[str, Any]) -> None:
    """Shrinks Mamba 2's heads; preserves whether they form several groups."""
    heads, head_dim = MAMBA_HEADS, MAMBA_HEAD_DIM
    if small.get("model_type") == "mamba2":  # its names are those of attention elsewhere
        heads, head_dim = ("num_heads",), ("head_dim",)
    if not any(_is_count(small.get(name)) for name in heads):
        return
    expansion = next((small[name] for name in MAMBA_EXPANSION if name in small), 2)
    inner = int(expansion * SMALL_HIDDEN)
    sizes = dict.fromkeys(heads, inner // SMALL_MAMBA_DIM) | dict.fromkeys(head_dim, SMALL_MAMBA_DIM)
    sizes |= dict.fromkeys(MAMBA_INNER, inner)
    sizes |= {name: min(small[name], 2) for name in MAMBA_GROUPS if _is_count(small.get(name))}
    small |= {name: size for name, size in sizes.items() if _is_count(small.get(name))}


def _shorten_rope(name: str, small: dict[str, Any], fields: dict[str, Any], context: int | None) -> None:
    """Shortens a scaling's original length below the length of check texts, unless real texts never exceed it."""
    by_kind = {kind: part for kind, part in fields[name].items() if isinstance(part, dict)} or {"": fields[name]}
    shortened = {}
    for kind, part in by_kind.items():
        original = part.get("original_max_position_embeddings")
        short = dict(part)
        if original is not None:
            is_longrope = part.get("rope_type") == "longrope"
            passes = context is not None and context > original if is_longrope else True
            short["original_max_position_embeddings"] = SHORT if passes else TEXT_TOKENS
            if is_longrope:
                ratio = fields["max_position_embeddings"] / original
                small["max_position_embeddings"] = int(short["original_max_position_embeddings"] * ratio)
            if "original_max_position_embeddings" in small:
                small["original_max_position_embeddings"] = short["original_max_position_embeddings"]
        for factors in ("short_factor", "long_factor"):
            if factors in part:
                short[factors] = part[factors][: len(part[factors]) * _rotated(small) // _rotated(fields)]
        shortened[kind] = short
    small[name] = fields[name] | shortened if "" not in shortened else shortened[""]


def _rotated(fields: dict[str, Any]) -> int:
    """Returns the rotated size of a head, before partial rotation."""
    named = fields.get("qk_rope_head_dim") or fields.get("head_dim")
    return int(named or fields["hidden_size"] // fields["num_attention_heads"])
