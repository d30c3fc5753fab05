"""One model, one cache, one forward over ragged rows.

Knows nothing of sessions, sampling or who asks.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.cache import ATTENTION_NAME, FeedRow, RaggedBatch, SlotCache, register_attention
from cluster.errors import ModelError

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})  # what `slot_attention` computes


class Runner(Protocol):
    """Feeds rows into slots and returns logits, shape (sum of the rows' `logits`, vocabulary)."""

    vocabulary: int
    free_slots: list[int]  # callers take and give back

    def forward(self, rows: Sequence[FeedRow]) -> Tensor: ...


def check_attention(model: PreTrainedModel) -> None:
    """Raises ModelError for a model that would run, but wrongly: soft caps, sinks, recurrent or chunked layers."""
    others = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - LAYER_TYPES
    if others or not model._supports_sdpa:
        raise ModelError(
            f"{type(model).__name__} needs attention that is not supported"
            f" ({', '.join(sorted(others)) or 'more than scaled dot products'}); expected full or sliding-window"
            " attention without soft caps or sinks"
        )


class ModelRunner:
    """A Hugging Face causal language model behind `Runner`."""

    def __init__(self, model: PreTrainedModel, slots: int, context: int) -> None:
        check_attention(model)
        register_attention()
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model.eval()
        self._device = model.device
        self.vocabulary = int(model.config.get_text_config().vocab_size)
        self.free_slots = list(range(slots))
        self._cache = SlotCache(slots, context, model.dtype, model.device)

    @torch.inference_mode()
    def forward(self, rows: Sequence[FeedRow]) -> Tensor:
        batch = RaggedBatch(rows, self._cache, self._device)
        keep = torch.tensor(batch.logit_indices, dtype=torch.int64, device=self._device)
        output = self._model(
            input_ids=batch.tokens.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=keep,
            ragged_batch=batch,
        )
        logits: Tensor = output.logits[0]
        return logits
