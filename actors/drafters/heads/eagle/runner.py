"""Runner of one EAGLE head with one cache: forwards over ragged rows that carry states with their tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.attention import AttentionBackend
from actors.attention.batch import RaggedBatch, never
from actors.attention.select_backend import choose_attention
from actors.attention.shape import AttentionShape
from actors.compute.kv_cache import FeedRow, PagedCache
from actors.drafters.heads.eagle.loading import EagleHead
from actors.models.forward_output import ForwardOutput
from cluster.page_allocator import PageCopy


class EagleRunner:
    """An `InterruptibleRunner` whose rows have `states`, (tokens, hidden).

    The `hidden` of a forward's output are the states to feed with the tokens sampled after these places.
    """

    def __init__(self, head: EagleHead, pages: int, page_size: int, attention: AttentionBackend | None = None) -> None:
        self.vocabulary = head.config.vocabulary
        self._head = head
        self._attention = attention or choose_attention(attention_shape_of(head, page_size), head.device)[0]
        self._cache = PagedCache(pages, page_size, head.dtype, head.device)

    @torch.inference_mode()
    def project(self, raw: Tensor) -> Tensor:
        """Maps the target's states, (rows, width), to the states that rows carry, (rows, hidden)."""
        return self._head.decoder.project(self.placed(raw))

    def placed(self, projected: Tensor) -> Tensor:
        """Moves states that the target has already projected, (rows, hidden), to the head's device and dtype."""
        return projected.to(self._head.device, self._head.dtype)

    @property
    @torch.inference_mode()
    def mask_state(self) -> Tensor | None:
        """State that rows carry with a mask token, (1, hidden); None if the head has none."""
        return self._head.decoder.mask_state

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[FeedRow], copies: Sequence[PageCopy] = (), interrupted: Callable[[], bool] = never
    ) -> ForwardOutput:
        self._cache.copy(copies)
        states = torch.cat([row.states for row in rows if row.states is not None])
        batch = RaggedBatch(rows, self._cache, self._attention, interrupted)
        assert len(states) == len(batch.tokens), "a token is fed to a head with the state before it"
        return self._head.decoder(batch, states)


def attention_shape_of(head: EagleHead, page_size: int) -> AttentionShape:
    """Returns the head's requirements on attention and its cache."""
    config = head.config
    return AttentionShape(
        config.layers, config.heads, config.kv_heads, config.head_dim, page_size, head.dtype, slides=False
    )
