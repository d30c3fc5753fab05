"""Drafts whole blocks with a DFlash head, in one forward from the target's states at all earlier positions.

A block is the last committed token, followed by masks, each at its own position. Every layer computes the keys and
values of the context from the same projected states of the target. The block's queries attend to the context and to the
block itself. Position j >= 1 of the block predicts the token at this position.

`DFlashContext` holds a session's states, keys and values. `DFlashDecoder` is the forward over several sessions, and
`DFlashPredictor` drafts with it. `create` and `load_dflash` load a published head with its target.
"""

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.compute.linear import PlainProjection, Product, projection
from actors.drafters.heads.dflash.config import DFlashConfig, DFlashLayerKind, resolve_dflash
from actors.drafters.heads.dflash.weights import ALIASES, DFlashLayer, DFlashReader, DFlashWeights
from actors.drafters.heads.files import META, HeadFiles, folder_to_borrow_from, head_folder, read_head, read_headers
from actors.drafters.heads.head_drafter import HeadDrafter, PredictedDraft, fill_positions
from actors.drafters.heads.projection import DecodedStates, RowProjection, decoded
from actors.drafters.heads.rope import rotary_of, target_shape
from actors.drafters.heads.weight_reader import borrowed_tensors
from actors.drafters.model.sampling import Calibration, DraftingLimits, DraftSampler
from actors.drafters.products import choose_products
from actors.drafters.registry import DraftSetup
from actors.engine.process import device_of
from actors.models.decoder import Rotation, rotation_of
from actors.sampling.logits_processors import PROCESSOR_FACTORIES
from cluster.config import DraftPool
from protos.messages import StatesNeeded

MAX_EARLY_PIECES = 64  # limit on pieces stored while earlier states are missing


class DFlashContext:
    """A session's context from position `begin` on. States may arrive in any order, twice or never; they are read in
    order.
    """

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.read = begin  # end of the cached positions
        self._arrived = begin  # end of the positions with states, without a gap
        self._unread: list[Tensor] = []  # states at positions `read` to `_arrived`, in pieces
        self._early: dict[int, Tensor] = {}  # pieces beyond a gap, by first position
        self._cached: list[Tensor] = []  # keys and values by layer: (2, capacity, kv heads, dim)

    def put(self, first: int, rows: Tensor) -> None:
        """Adds states, (positions, width), at positions `first` and up."""
        self._early[first] = rows
        while (piece := next((at for at in self._early if at <= self._arrived), None)) is not None:
            rows_due = self._early.pop(piece)[self._arrived - piece :]
            if len(rows_due):
                self._unread.append(rows_due)
                self._arrived += len(rows_due)
        while len(self._early) > MAX_EARLY_PIECES:
            del self._early[max(self._early)]

    def has(self, positions: int) -> bool:
        """Returns whether all states of the first `positions` positions have arrived."""
        return self._arrived >= positions

    def take(self, positions: int) -> Tensor:
        """Returns the unread states of the first `positions` positions, (unread, width), and marks them as read."""
        count = positions - self.read
        if not count:
            return torch.empty(0)
        whole = torch.cat(self._unread)
        self._unread = [whole[count:]] if len(whole) > count else []
        self.read = positions
        return whole[:count]

    def write(self, layer: int, first: int, key_value: Tensor) -> Tensor:
        """Writes a layer's keys and values, (rows, 2, kv heads, dim), at positions `first` and up.

        Returns the layer's context up to the last written position, (2, positions, kv heads, dim).
        """
        first -= self.begin
        end = first + len(key_value)
        if layer == len(self._cached):
            self._cached.append(key_value.new_empty((2, 0, *key_value.shape[2:])))
        cached = self._cached[layer]
        if cached.shape[1] < end:
            grown = cached.new_empty((2, max(end, 2 * cached.shape[1]), *cached.shape[2:]))
            grown[:, : cached.shape[1]] = cached
            cached = self._cached[layer] = grown
        cached[:, first:end] = key_value.transpose(0, 1)
        return cached[:, :end]


class _Step(NamedTuple):
    """Inputs of a forward in addition to the blocks."""

    contexts: Sequence[DFlashContext]
    starts: Sequence[int]  # first position of each block
    states: Tensor  # (rows, hidden): unread states of all contexts, concatenated
    counts: list[int]  # rows of `states` per context
    rotation: Rotation  # rotary factors of the states, then of the blocks


class DFlashDecoder:
    """DFlash decoder with the layers in `config`."""

    def __init__(self, config: DFlashConfig, weights: DFlashWeights, rotary: nn.Module) -> None:
        self.config = config
        self.token_ids = weights.token_ids  # (columns,): the target's token id for each logit column
        self.like = weights.mask_embedding  # determines dtype and device of received rows
        self._weights = weights
        self._rotary = rotary

    def project(self, rows: Tensor) -> Tensor:
        """Projects the target's states, (rows, width), to the head's context, (rows, hidden)."""
        return self._weights.row_projection(rows)

    def hidden(self, contexts: Sequence[DFlashContext], anchors: Sequence[int], starts: Sequence[int]) -> Tensor:
        """Returns the inputs of `logits`, (sessions, block, hidden).

        A session's block begins with its anchor at position `start`. All earlier states must have arrived.
        """
        hidden = self._embedded(anchors)
        step = self._step(contexts, starts)
        for index, layer in enumerate(self._weights.layers):
            hidden = layer.attention_out.plus(self._attended(index, layer.attention_norm(hidden), step), hidden)
            gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
            hidden = layer.down.plus(F.silu(gate) * up, hidden)
        return self._weights.norm(hidden).view(len(contexts), self.config.block_size, -1)

    def logits(self, hidden: Tensor) -> Tensor:
        """Maps hidden states, (..., hidden), to logits, (..., columns)."""
        logits = self._weights.lm_head(hidden) * self.config.logit_scale
        cap = self.config.logit_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _embedded(self, anchors: Sequence[int]) -> Tensor:
        """Returns the concatenated embeddings of all blocks, (rows, hidden)."""
        weights = self._weights
        blocks = weights.mask_embedding.repeat(len(anchors), self.config.block_size, 1)
        blocks[:, 0] = F.embedding(torch.tensor(anchors, device=blocks.device), weights.embedding)
        return blocks.flatten(0, 1) * self.config.embedding_scale

    def _step(self, contexts: Sequence[DFlashContext], starts: Sequence[int]) -> _Step:
        """Builds a step's inputs; marks the contexts' states as read."""
        size = self.config.block_size
        before = [torch.arange(context.read, start) for context, start in zip(contexts, starts, strict=True)]
        within = [torch.arange(start, start + size) for start in starts]
        positions = torch.cat([*before, *within]).to(self.like.device)
        unread = [context.take(start) for context, start in zip(contexts, starts, strict=True)]
        states = torch.cat([self.like.new_empty((0, self.config.hidden)), *[rows for rows in unread if len(rows)]])
        rotation = rotation_of(self._rotary, self.like, positions)
        return _Step(contexts, starts, states, [len(each) for each in before], rotation)

    def _attended(self, index: int, inputs: Tensor, step: _Step) -> Tensor:
        """Returns a layer's attention output for all blocks, (rows, heads x dim)."""
        layer = self._weights.layers[index]
        size = self.config.block_size
        query = torch.split(self._query(layer, inputs, step.rotation), size)
        key_value = self._key_value(layer, torch.cat([step.states, inputs]), step.rotation)
        context_kv = torch.split(key_value[: len(step.states)], step.counts)
        block_kv = torch.split(key_value[len(step.states) :], size)
        pieces = zip(step.contexts, step.starts, context_kv, query, block_kv, strict=True)
        kind = self.config.layers[index]
        return torch.cat([_attend(context, start, index, kind, *piece) for context, start, *piece in pieces])

    def _query(self, layer: DFlashLayer, inputs: Tensor, rotation: Rotation) -> Tensor:
        """Returns queries, (rows, heads, dim), rotated by the last rows of `rotation`."""
        query = layer.query_norm(layer.query(inputs).view(len(inputs), self.config.heads, self.config.head_dim))
        return _rotate(query, Rotation(rotation.cos[-len(query) :], rotation.sin[-len(query) :]))

    def _key_value(self, layer: DFlashLayer, inputs: Tensor, rotation: Rotation) -> Tensor:
        """Returns keys and values, (rows, 2, kv heads, dim)."""
        shape = (len(inputs), 2, self.config.kv_heads, self.config.head_dim)
        key, value = layer.key_value(inputs).view(shape).unbind(1)
        return torch.stack((_rotate(layer.key_norm(key), rotation), value), dim=1)


def _rotate(x: Tensor, rotation: Rotation) -> Tensor:
    return x * rotation.cos + x.roll(x.shape[-1] // 2, -1) * rotation.sin


def _attend(
    context: DFlashContext,
    start: int,
    index: int,
    kind: DFlashLayerKind,
    context_kv: Tensor,
    query: Tensor,
    block_kv: Tensor,
) -> Tensor:
    """Returns the attention output of one session's block, (block, heads x dim).

    Also writes the block's keys and values to the context; later states overwrite them.
    """
    key_value = context.write(index, start - len(context_kv), torch.cat([context_kv, block_kv]))
    first = context.begin  # start of the anchor's window
    if kind.window is not None:
        first = max(first, start - kind.window + 1)
    key, value = key_value[:, first - context.begin :].transpose(1, 2)
    mask = _mask(kind, start, len(query), first, query.device) if kind.is_causal or kind.window else None
    attended = F.scaled_dot_product_attention(
        query.transpose(0, 1).unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), mask, enable_gqa=True
    )
    return attended[0].transpose(0, 1).flatten(1)


def _mask(kind: DFlashLayerKind, start: int, size: int, first: int, device: torch.device) -> Tensor:
    """Returns the mask of positions, from `first` on, visible to each position of the block, (block, positions)."""
    positions = torch.arange(first, start + size, device=device)
    ahead = positions - positions[start - first :].unsqueeze(1)
    seen = ahead <= 0 if kind.is_causal else torch.ones_like(ahead, dtype=torch.bool)
    return seen if kind.window is None else seen & (ahead.abs() < kind.window)


class DFlashPredictor:
    """A `StatePredictor` whose lookahead blocks reuse later positions of the block under verification.

    With `is_projected`, the target has already projected the received states.
    """

    def __init__(self, decoder: DFlashDecoder, sampler: DraftSampler, is_projected: bool = False) -> None:
        self._decoder = decoder
        self._is_projected = is_projected
        self._sampler = sampler
        self._contexts: dict[str, DFlashContext] = {}
        self._blocks: dict[str, tuple[int, Tensor]] = {}  # by session: hash of its text, (positions, hidden)

    @property
    def width(self) -> int:
        return self._decoder.config.block_size - 1

    @property
    def needs(self) -> StatesNeeded:
        return self._decoder.config.needs

    def reach(self, depth: int) -> int:
        """Returns the number of remaining positions in the block after `depth` tokens.

        The context contains only the target's states, so after the last position, the head waits for new states.
        """
        return max(0, self.width - depth)

    # ------------------------------------------------------------ states

    def open(self, session: str) -> None:
        self._contexts[session] = DFlashContext()
        self._blocks.pop(session, None)

    def begin(self, session: str, first: int) -> None:
        self._contexts[session] = DFlashContext(first)

    def states(self, session: str, first: int, rows: Tensor, length: int) -> None:
        """Adds rows, (rows, width) as in `needs`, or projected rows, (rows, hidden)."""
        needs = self.needs
        width = needs.projected_width if self._is_projected else needs.width
        assert rows.shape[-1] == width, "unexpected row width"
        like = self._decoder.like
        rows = rows.to(like.device, like.dtype)
        self._contexts[session].put(first, rows.clone() if self._is_projected else self._decoder.project(rows))

    def committed(self, session: str, length: int) -> None:
        """Does nothing, since the next block reads the context."""

    def close(self, session: str) -> None:
        self._contexts.pop(session, None)
        self._blocks.pop(session, None)

    def is_ready(self, session: str, length: int) -> bool:
        return self._contexts[session].has(length - 1)

    # ------------------------------------------------------------ blocks

    def fill(self, drafts: Sequence[PredictedDraft], interrupted: Callable[[], bool]) -> None:
        fill_positions(drafts, self.width, self._predict_logits, self._sampler, interrupted)

    def _predict_logits(self, drafts: Sequence[PredictedDraft], counts: Sequence[int]) -> Sequence[Tensor]:
        self._draft_blocks([draft for draft in drafts if self._known(draft) is None])
        hidden = [
            logits[:count]
            for draft, count in zip(drafts, counts, strict=True)
            if (logits := self._known(draft)) is not None
        ]
        return torch.split(self._decoder.logits(torch.cat(hidden)), list(counts))

    def _draft_blocks(self, drafts: Sequence[PredictedDraft]) -> None:
        """Computes whole blocks, even if fewer tokens are requested, because masks attend to one another."""
        if not drafts:
            return
        sessions = [draft.request.session for draft in drafts]
        contexts = [self._contexts[session] for session in sessions]
        anchors = [draft.text.tokens[-1] for draft in drafts]
        starts = [draft.request.base_len - 1 for draft in drafts]
        for draft, hidden in zip(drafts, self._decoder.hidden(contexts, anchors, starts), strict=True):
            self._blocks[draft.request.session] = (draft.base_hash, hidden[1:])

    def _known(self, draft: PredictedDraft) -> Tensor | None:
        """Returns the session's latest block, (positions, hidden), if it follows the same text; otherwise None."""
        base_hash, hidden = self._blocks.get(draft.request.session, (None, None))
        return hidden if base_hash == draft.base_hash else None


log = logging.getLogger(__name__)


def states_needed(draft: DraftPool, target: Path) -> StatesNeeded:
    """Returns the hidden states that the head in `draft.model` reads."""
    files = _files(draft)
    return resolve_dflash(files, target_shape(target)).needs


def check_head(draft: DraftPool, target: Path, tokens: Collection[int]) -> None:
    """Runs the head's loader on headers alone. Raises ModelError if the head does not match the target."""
    files = read_headers(head_folder(draft)).renamed(ALIASES)
    config = resolve_dflash(files, target_shape(target))
    DFlashReader(files, target, config, torch.float32, META, PlainProjection).weights(tokens)


def load_projection(draft: DraftPool, target: Path, dtype: str, device: torch.device) -> RowProjection:
    """Loads only the head's projection of the target's states.

    It uses the target's dtype, even if the drafter quantizes the head.
    """
    files = _files(draft)
    config = resolve_dflash(files, target_shape(target))
    return DFlashReader(files, target, config, getattr(torch, dtype), device, projection).row_projection()


def _files(draft: DraftPool) -> HeadFiles:
    return read_head(head_folder(draft)).renamed(ALIASES)


def create(draft: DraftPool, setup: DraftSetup) -> DecodedStates:
    """Creates the method. Raises ModelError if the head in `draft.model` does not match the target."""
    device = device_of(draft.resources)
    products = choose_products(draft.dflash.quantization, setup.dtype, device)
    target = folder_to_borrow_from(setup.target, borrowed_tensors(_files(draft).tensors))
    decoder = load_dflash(
        head_folder(draft), target, products.dtype, device, setup.target_tokens.keys(), products.product
    )
    log.info("\n".join(decoder.config.describe()))
    limits = DraftingLimits(draft.dflash.draft_probs_top_k)
    processor_factories = (*PROCESSOR_FACTORIES, *setup.processor_factories)
    sampler = DraftSampler(decoder.token_ids, decoder.config.vocabulary, limits, Calibration(), processor_factories)
    is_projected = draft.states.projects_at_target(decoder.config.needs)
    return decoded(HeadDrafter(DFlashPredictor(decoder, sampler, is_projected), sampler), setup)


def load_dflash(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int],
    product: Product = projection,
) -> DFlashDecoder:
    """Loads a published head; borrows a missing embedding or LM head from the target."""
    files = read_head(folder).renamed(ALIASES)
    config = resolve_dflash(files, target_shape(target_folder))
    weights = DFlashReader(files, target_folder, config, dtype, device, product).weights(proposable)
    rotary = rotary_of(config.rope, config.head_dim).to(device)
    return DFlashDecoder(config, weights, rotary)
