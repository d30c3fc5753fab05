"""Our attention as an attention function of transformers, for models that run through their own code."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from actors.attention.batch import RaggedBatch

ATTENTION_NAME = "slipstream"


def paged_attention(
    module: nn.Module,
    query: Tensor,  # (1, heads, total, head dim)
    key: Tensor,  # (1, kv heads, total, head dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    ragged_batch: RaggedBatch | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`RaggedBatch.attend` as transformers' attention interface asks for it."""
    assert ragged_batch is not None, "the model was called without a RaggedBatch"
    key_value = torch.cat([key[0], value[0]]).transpose(0, 1)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = ragged_batch.attend(layer, query[0].transpose(0, 1), key_value, scaling, sliding_window)
    return out.view(1, query.shape[2], query.shape[1], query.shape[3]), None


def register_attention() -> None:
    """Makes `paged_attention` known to transformers under ATTENTION_NAME; registering again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
