"""Loads an EAGLE head, and runs it: the forward over a ragged batch, and a runner over a paged cache.

Entry i of a head's cache is computed from token i + 1 of the text and state i, at position i. So a step reads the state
that the target, or the head itself, computed from all tokens up to i, and the token sampled from it. It predicts the
token after that.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.attention import AttentionBackend
from actors.attention.batch import RaggedBatch, never
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
    """Decoder for all EAGLE generations; `config` states how they differ."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, rotary: nn.Module) -> None:
        self._config = config
        self._weights = weights
        self._rotary = rotary
        self._heads = AttentionHeads(config.heads, config.kv_heads, config.head_dim)

    def project(self, raw: Tensor) -> Tensor:
        """Maps the target's states as in `config.needs`, (rows, width), to a step's input states, (rows, hidden)."""
        projection = self._weights.row_projection
        return raw if projection is None else projection(raw)

    @property
    def mask_state(self) -> Tensor | None:
        """State fed with a mask token, (1, hidden); None if the head has none."""
        mask = self._weights.mask
        return None if mask is None else self.project(mask)

    def __call__(self, batch: RaggedBatch, states: Tensor) -> ForwardOutput:
        """Returns logits, and the states to feed next, at the positions that the batch requests.

        `states`, (total, hidden), are the target's projected states or states from earlier steps of the head.
        """
        weights = self._weights
        embedded = weights.embedding_norm(F.embedding(batch.tokens, weights.embedding))
        if self._config.hides_first:
            embedded = embedded.masked_fill((batch.positions == 0).unsqueeze(-1), 0.0)
        rotation = rotation_of(self._rotary, embedded, batch.positions)
        first, *others = weights.layers
        inputs, residual = self._entry(embedded, states)
        hidden = gated_mlp(first, self._heads.attend(first, 0, first.attention_norm(inputs), residual, rotation, batch))
        for index, layer in enumerate(others, start=1):
            inputs = layer.attention_norm(hidden)
            hidden = gated_mlp(layer, self._heads.attend(layer, index, inputs, hidden, rotation, batch))
        return self._output(hidden.index_select(0, batch.logit_at))

    def _entry(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first layer's attention input, before its norm, and the residual."""
        weights = self._weights
        if self._config.kind is not EagleKind.EAGLE3:
            assert weights.fc is not None, "a head of the first kind has a projection"
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
    """A loaded head and its resolved configuration."""

    config: EagleConfig
    decoder: EagleDecoder
    token_ids: Tensor  # (columns,): the target's token id for each logit column
    dtype: torch.dtype
    device: torch.device

    def page_bytes(self, page_size: int) -> int:
        """Returns the bytes of one page of keys and values in all layers."""
        config = self.config
        return 2 * config.layers * config.kv_heads * config.head_dim * page_size * self.dtype.itemsize


def head_of(
    files: HeadFiles,
    config: EagleConfig,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int] | None,
    product: Product,
) -> EagleHead:
    """Builds a head from tensors in canonical names, leaving out tokens that are not `proposable`.

    Raises ModelError if a tensor is missing, has another shape, or is not used.
    """
    reader = EagleReader(files, target_folder, config, dtype, device, product)
    weights = reader.weights(proposable)
    rotary = rotary_of(config.rope, config.head_dim, config.max_positions).to(device)
    return EagleHead(config, EagleDecoder(config, weights, rotary), weights.token_ids, dtype, device)


class EagleRunner:
    """An `InterruptibleRunner` whose rows have `states`, (tokens, hidden).

    A forward's `hidden` output holds the states to feed with the tokens sampled at these positions.
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
        """Moves states already projected by the target, (rows, hidden), to the head's device and dtype."""
        return projected.to(self._head.device, self._head.dtype)

    @property
    @torch.inference_mode()
    def mask_state(self) -> Tensor | None:
        """State that rows carry with a mask token, (1, hidden); None if the head has none."""
        return self._head.decoder.mask_state

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[InputRow], copies: Sequence[PageCopy] = (), interrupted: Callable[[], bool] = never
    ) -> ForwardOutput:
        self._cache.copy(copies)
        states = torch.cat([row.states for row in rows if row.states is not None])
        batch = RaggedBatch(rows, self._cache, self._attention, interrupted)
        assert len(states) == len(batch.tokens), "each token is fed with the state before it"
        return self._head.decoder(batch, states)


def attention_shape_of(head: EagleHead, page_size: int) -> AttentionShape:
    """Returns the sizes that the head's attention and cache require."""
    config = head.config
    return AttentionShape(
        config.layers, config.heads, config.kv_heads, config.head_dim, page_size, head.dtype, slides=False
    )
