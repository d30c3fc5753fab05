"""Loads an EAGLE head; defines its forward over a ragged batch and its runner over a paged cache.

Cache entry i of a head is computed from state i and token i + 1 of the text, at position i. State i, computed by the
target or the head, covers all tokens up to i, and token i + 1 was sampled from it. The head then predicts token i + 2.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
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
from actors.drafters.heads.projection import RowProjection
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
class StateInputs:
    """Maps the target's states to a head's input states. Holds no other weights, since it outlives exchanged heads."""

    projection: RowProjection | None  # None: the target has projected the states, or the head reads them unprojected
    dtype: torch.dtype
    device: torch.device

    @torch.inference_mode()
    def __call__(self, raw: Tensor) -> Tensor:
        """Maps rows as in `config.needs`, (rows, width), to input states, (rows, hidden)."""
        placed = raw.to(self.device, self.dtype)
        return placed if self.projection is None else self.projection(placed)


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """Loaded head and its resolved configuration."""

    config: EagleConfig
    decoder: EagleDecoder
    token_ids: Tensor  # (columns,): the target's token id for each logit column
    inputs: StateInputs
    mask_state: Tensor | None  # (1, hidden): input state for mask tokens; None if the head has no masks
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
    rotary = rotary_of(config.rope, config.head_dim).to(device)
    inputs = StateInputs(weights.row_projection, dtype, device)
    mask_state = None if weights.mask is None else inputs(weights.mask)
    decoder = EagleDecoder(config, replace(weights, row_projection=None, mask=None), rotary)
    return EagleHead(config, decoder, weights.token_ids, inputs, mask_state, dtype, device)


class EagleRunner:
    """An `InterruptibleRunner` for rows with `states`, (tokens, hidden).

    The `hidden` outputs of a forward are the input states for tokens sampled at these positions. `cache` may be reused
    from a runner of a head of the same shape.
    """

    def __init__(
        self,
        head: EagleHead,
        pages: int,
        page_size: int,
        attention: AttentionBackend | None = None,
        cache: PagedCache | None = None,
    ) -> None:
        self.vocabulary = head.config.vocabulary
        self._decode = head.decoder
        shape = attention_shape_of(head, page_size)
        self.attention = attention or choose_attention(shape, head.device)[0]
        self.cache = cache or PagedCache(pages, page_size, shape.sizes, head.dtype, head.device)

    @torch.inference_mode()
    def forward(
        self, rows: Sequence[InputRow], copies: Sequence[PageCopy] = (), interrupted: Callable[[], bool] = never
    ) -> ForwardOutput:
        self.cache.copy(copies)
        states = torch.cat([row.states for row in rows if row.states is not None])
        batch = exact_batch(rows, self.cache, self.attention, interrupted)
        assert len(states) == len(batch.tokens), "expected one state per token"
        return self._decode(batch, states)


def attention_shape_of(head: EagleHead, page_size: int) -> AttentionShape:
    """Returns the sizes of the head's attention and cache."""
    config = head.config
    return AttentionShape(
        config.layers, config.heads, config.kv_heads, config.head_dim, page_size, head.dtype, slides=False
    )
