"""Loads an EAGLE head; defines its forward over a ragged batch and its runner over a paged cache.

Cache entry i of a head is computed from state i and token i + 1 of the text, at position i. State i, computed by the
target or the head, covers all tokens up to i, and token i + 1 was sampled from it. The head then predicts token i + 2.
"""

from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.attention import AttentionBackend
from actors.attention.batch import RaggedBatch, exact_batch, never
from actors.attention.select_backend import AttentionShape, choose_attention
from actors.compute.kv_cache import InputRow, PagedCache
from actors.compute.linear import Product
from actors.drafters.heads.eagle.config import EagleConfig, EagleKind, OutputNorm
from actors.drafters.heads.eagle.weights import EagleReader, EagleWeights
from actors.drafters.heads.files import HeadFiles
from actors.drafters.heads.rope import rotary_of
from actors.models.decoder import AttentionHeads, ForwardOutput, gated_mlp, rotation_of
from cluster.page_allocator import PageCopy


class EagleDecoder:
    """Decoder for all EAGLE generations; `config` describes the differences."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, rotary: nn.Module) -> None:
        self._config = config
        self._weights = weights
        self._rotary = rotary
        self._heads = AttentionHeads(config.heads, config.kv_heads, config.head_dim)

    def project(self, raw: Tensor) -> Tensor:
        """Maps the target's states, (rows, width) as in `config.needs`, to input states, (rows, hidden)."""
        projection = self._weights.row_projection
        return raw if projection is None else projection(raw)

    @property
    def mask_state(self) -> Tensor | None:
        """State for mask tokens, (1, hidden); None if the head has no masks."""
        mask = self._weights.mask
        return None if mask is None else self.project(mask)

    def __call__(self, batch: RaggedBatch, states: Tensor) -> ForwardOutput:
        """Returns logits and the next input states at the batch's requested positions.

        `states`, (total, hidden), are projected states of the target or output states of the head.
        """
        weights = self._weights
        embedded = weights.embedding_norm(F.embedding(batch.tokens, weights.embedding))
        if self._config.hides_first:
            embedded = embedded.masked_fill((batch.positions == 0).unsqueeze(-1), 0.0)
        rotation = rotation_of(self._rotary, embedded, batch.positions)
        inputs, hidden = self._entry(embedded, states)
        for index, layer in enumerate(weights.layers):
            attended = self._heads.attend(layer, index, layer.attention_norm(inputs), rotation, batch)
            inputs = hidden = gated_mlp(layer, layer.attention_out.plus(attended, hidden))
        return self._output(hidden.index_select(0, batch.logit_at))

    def _entry(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first layer's attention input, before its norm, and the residual."""
        weights = self._weights
        if self._config.kind is not EagleKind.EAGLE3:
            assert weights.fc is not None, "only EAGLE-3 has no fc"
            fused = weights.fc(torch.cat((embedded, weights.state_norm(states)), dim=-1))
            return fused, fused
        normed = weights.state_norm(states)
        residual = normed if self._config.norm_before_residual else states
        return torch.cat((embedded, normed), dim=-1), residual

    def _output(self, hidden: Tensor) -> ForwardOutput:
        weights = self._weights
        if weights.norm is None:
            return ForwardOutput(weights.lm_head(hidden), hidden)
        normed = weights.norm(hidden)
        recycled = normed if self._config.output_norm is OutputNorm.BOTH else hidden
        return ForwardOutput(weights.lm_head(normed), recycled)


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """Loaded head and its resolved configuration."""

    config: EagleConfig
    decoder: EagleDecoder
    token_ids: Tensor  # (columns,): the target's token id for each logit column
    dtype: torch.dtype
    device: torch.device


def head_of(
    files: HeadFiles,
    config: EagleConfig,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int] | None,
    product: Product,
) -> EagleHead:
    """Builds a head from canonical tensor names, with columns only for `proposable` tokens.

    Raises ModelError if a tensor is missing, misshapen or unused.
    """
    reader = EagleReader(files, target_folder, config, dtype, device, product)
    weights = reader.weights(proposable)
    rotary = rotary_of(config.rope, config.head_dim, config.max_positions).to(device)
    return EagleHead(config, EagleDecoder(config, weights, rotary), weights.token_ids, dtype, device)


class EagleRunner:
    """An `InterruptibleRunner` for rows with `states`, (tokens, hidden).

    The `hidden` outputs of a forward are the input states for tokens sampled at these positions.
    """

    def __init__(self, head: EagleHead, pages: int, page_size: int, attention: AttentionBackend | None = None) -> None:
        self.vocabulary = head.config.vocabulary
        self._head = head
        shape = attention_shape_of(head, page_size)
        self._attention = attention or choose_attention(shape, head.device)[0]
        self._cache = PagedCache(pages, page_size, shape.sizes, head.dtype, head.device)

    def with_head(self, head: EagleHead) -> "EagleRunner":
        """Returns a runner of another head of the same shape, over the same cache."""
        runner = copy(self)
        runner._head = head
        return runner

    @torch.inference_mode()
    def project(self, raw: Tensor) -> Tensor:
        """Maps the target's states, (rows, width), to input states, (rows, hidden)."""
        return self._head.decoder.project(self.placed(raw))

    def placed(self, projected: Tensor) -> Tensor:
        """Moves states projected by the target, (rows, hidden), to the head's device and dtype."""
        return projected.to(self._head.device, self._head.dtype)

    @property
    @torch.inference_mode()
    def mask_state(self) -> Tensor | None:
        """Input state for mask tokens, (1, hidden); None if the head has no masks."""
        return self._head.decoder.mask_state

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[InputRow], copies: Sequence[PageCopy] = (), interrupted: Callable[[], bool] = never
    ) -> ForwardOutput:
        self._cache.copy(copies)
        states = torch.cat([row.states for row in rows if row.states is not None])
        batch = exact_batch(rows, self._cache, self._attention, interrupted)
        assert len(states) == len(batch.tokens), "expected one state per token"
        return self._head.decoder(batch, states)


def attention_shape_of(head: EagleHead, page_size: int) -> AttentionShape:
    """Returns the sizes of the head's attention and cache."""
    config = head.config
    return AttentionShape(
        config.layers, config.heads, config.kv_heads, config.head_dim, page_size, head.dtype, slides=False
    )
