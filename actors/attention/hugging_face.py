"""Registers `paged_attention` with transformers, for models that run in transformers' own code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from actors.attention.batch import RaggedBatch
from cluster.errors import ModelError

ATTENTION_NAME = "slipstream"
CHANGES_SCORES = {  # unsupported arguments of transformers' attention functions, and their features
    "s_aux": "attention sinks",
    "position_bias": "a bias by position",
    "head_mask": "a mask over heads",
    "indices": "sparse attention to selected keys",
}


class BatchSlot:
    """Holds the batch of the current forward; all attention layers of a model share one slot."""

    def __init__(self) -> None:
        self._batch: RaggedBatch | None = None

    @contextmanager
    def hold(self, batch: RaggedBatch) -> Iterator[None]:
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    @property
    def batch(self) -> RaggedBatch:
        assert self._batch is not None, "the model was called without a RaggedBatch"
        return self._batch


def paged_attention(
    module: nn.Module,
    query: Tensor,  # (1, heads, total, head dim)
    key: Tensor,  # (1, kv heads, total, head dim)
    value: Tensor,  # (1, kv heads, total, value dim): not wider than the keys
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface with `RaggedBatch.attend`.

    Pads narrower values to the width of the cached keys. Raises ModelError for arguments that affect the result but are
    not supported by any backend.
    """
    for name, meaning in CHANGES_SCORES.items():
        if others.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} needs {meaning} ({name}), which is not supported; use another model"
            )
    if value.shape[-1] > key.shape[-1]:
        raise ModelError(f"{type(module).__name__} has values wider than its keys; use another model")
    slot = module.batch_slot
    assert isinstance(slot, BatchSlot), "`share_batch` gives every attention layer a slot"
    if softcap != slot.batch.softcap:
        raise ModelError(
            f"{type(module).__name__} bounds its scores by {softcap}, but its config says {slot.batch.softcap}; use"
            " another model"
        )
    padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
    key_value = torch.cat([key[0], padded[0]]).transpose(0, 1)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = slot.batch.attend(layer, query[0].transpose(0, 1), key_value, scaling, sliding_window)
    return out.view(1, query.shape[2], query.shape[1], query.shape[3])[..., : value.shape[-1]], None


def share_batch(model: PreTrainedModel) -> BatchSlot:
    """Gives all attention layers of a model one slot and returns this slot; idempotent.

    The batch cannot be an argument of the model's forward, since some architectures do not pass arguments on to their
    layers.
    """
    slot = getattr(model, "batch_slot", None) or BatchSlot()
    for module in (model, *(module for module in model.modules() if hasattr(module, "layer_idx"))):
        module.batch_slot = slot
    return slot


def register_attention() -> None:
    """Registers `paged_attention` with transformers under ATTENTION_NAME; idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, lambda *args, **kwargs: None)
