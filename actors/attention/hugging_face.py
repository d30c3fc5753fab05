"""Registers `paged_attention` with transformers, for models that run in transformers' own code."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel

from actors.attention import Alibi, ScoreOptions
from actors.attention.batch import RaggedBatch
from cluster.errors import ModelError

ATTENTION_NAME = "slipstream"
TEMPERATURE = "has_temperature"  # attribute of layers whose queries depend on positions, as in Llama 4
CHANGES_SCORES = {  # unsupported arguments of transformers' attention functions, and their features
    "position_bias": "a bias by position",
    "head_mask": "a mask over heads",
    "indices": "sparse attention to selected keys",
}


@dataclass(frozen=True, slots=True)
class Visibility:
    """Stands in for transformers' mask in layers with a window or chunk."""

    window: int | None
    chunk: int | None


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
    attention_mask: Visibility | Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi: Alibi | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface with `RaggedBatch.attend`.

    Pads narrower values to the width of the cached keys. Raises ModelError for arguments that affect the result but are
    not supported by any backend.
    """
    for name, meaning in CHANGES_SCORES.items():
        if others.get(name) is not None:
            raise ModelError(f"{type(module).__name__} needs {meaning} ({name}), which is not supported")
    if value.shape[-1] > key.shape[-1]:
        raise ModelError(f"{type(module).__name__} has values wider than its keys, which is not supported")
    slot = module.batch_slot
    assert isinstance(slot, BatchSlot), "`share_batch` gives every attention layer a slot"
    if isinstance(attention_mask, Tensor):
        raise ModelError(f"{type(module).__name__} has a mask of its own, which is not supported")
    if getattr(module, TEMPERATURE, False):
        query = (query * _temperature(module, slot.batch.positions)).to(query.dtype)
    seen = attention_mask or Visibility(sliding_window, None)
    options = ScoreOptions(scaling, seen.window, seen.chunk, softcap, s_aux, alibi)
    padded = F.pad(value, (0, key.shape[-1] - value.shape[-1]))
    key_value = torch.cat([key[0], padded[0]]).transpose(0, 1)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    out = slot.batch.attend(layer, query[0].transpose(0, 1), key_value, options)
    return out.view(1, query.shape[2], query.shape[1], query.shape[3])[..., : value.shape[-1]], None


def share_batch(model: PreTrainedModel) -> BatchSlot:
    """Gives all attention layers of a model one slot and returns this slot; idempotent.

    The batch cannot be an argument of the model's forward, since some architectures do not pass arguments on to their
    layers.
    """
    slot = getattr(model, "batch_slot", None) or BatchSlot()
    for module in (model, *(module for module in model.modules() if hasattr(module, "layer_idx"))):
        module.batch_slot = slot
        if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
            module.attn_temperature_tuning = False  # it would count the tokens of the batch
            setattr(module, TEMPERATURE, True)
    return slot


def _temperature(module: Any, positions: Tensor) -> Tensor:
    """Returns Llama 4's factors of queries by position (arXiv 2501.19399), (total, 1)."""
    steps = torch.floor((positions.float() + 1.0) / module.floor_scale)
    factors: Tensor = torch.log1p(steps) * module.attn_scale + 1.0
    return factors.unsqueeze(-1)


def _visibility(*_: Any, config: PretrainedConfig, local_size: int | None = None, **__: Any) -> Visibility | None:
    """Implements transformers' mask interface; `local_size` is the size of a window or chunk."""
    if local_size is None:
        return None
    is_chunk = local_size == getattr(config, "attention_chunk_size", None)
    return Visibility(None, local_size) if is_chunk else Visibility(local_size, None)


def register_attention() -> None:
    """Registers `paged_attention` with transformers under ATTENTION_NAME; idempotent."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _visibility)
