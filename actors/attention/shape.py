"""What a model's layers require of attention and of the cache."""

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

GATHERED = "colwise_gather_output"  # in transformers' tensor-parallel plans: ranks exchange what they projected
REPEATS_KEYS = frozenset({"jetmoe"})  # architectures that repeat keys for every query head before attention


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Sizes on one rank."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    slides: bool = True  # whether any layer sees no further back than a window

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers, keys and values."""
        return 2 * self.layers * self.kv_heads * self.page_size * self.head_dim * self.dtype.itemsize


def attention_shape(model: PreTrainedModel, page_size: int, ranks: int = 1) -> AttentionShape:
    """Returns what one of `ranks` writes and attends, by the model's config.

    `actors.models.reference_check` proves for every class that its layers write just this.
    """
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    split = ranks if _splits_heads(model) else 1
    return AttentionShape(
        layers=int(config.num_hidden_layers),
        heads=heads // split,
        kv_heads=_kv_heads(config, heads) // split,
        head_dim=_head_dim(config, heads),
        page_size=page_size,
        dtype=model.dtype,
        slides=getattr(config, "sliding_window", None) is not None,
    )


def _splits_heads(model: PreTrainedModel) -> bool:
    """Whether each rank attends with its own heads; with a fused projection, or a norm over all heads, it has all."""
    plan = model.tp_plan or {}
    return not any(style == GATHERED for name, style in plan.items() if "attn" in name or "attention" in name)


def _has_latent_attention(config: PretrainedConfig) -> bool:
    """Whether keys and values are projected up from one latent vector, for every query head anew."""
    return getattr(config, "kv_lora_rank", None) is not None


def _kv_heads(config: PretrainedConfig, heads: int) -> int:
    """Heads of keys that reach attention, which is where they are cached."""
    if _has_latent_attention(config) or config.model_type in REPEATS_KEYS:
        return heads
    if config.model_type == "gpt_bigcode":
        return 1 if config.multi_query else heads
    return int(getattr(config, "num_key_value_heads", None) or heads)


def _head_dim(config: PretrainedConfig, heads: int) -> int:
    if _has_latent_attention(config):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    named = getattr(config, "head_dim", None) or getattr(config, "kv_channels", None)
    return int(named or config.hidden_size // heads)
