"""What a model's layers require of attention and of the cache."""

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


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
    """Of one of `ranks` that share the model's heads."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    return AttentionShape(
        layers=int(config.num_hidden_layers),
        heads=heads // ranks,
        kv_heads=kv_heads // ranks,
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        page_size=page_size,
        dtype=model.dtype,
        slides=getattr(config, "sliding_window", None) is not None,
    )
