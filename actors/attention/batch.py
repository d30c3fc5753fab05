"""Turns a step's rows into flat tensors on the device: tokens, positions, cache slots, attention plan and draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch
from torch import Tensor

from actors.attention import AttentionBackend, AttentionPlan, PaddedBackend, ScoreOptions, StepShape
from actors.attention.flat_rows import FlatRows, padded
from actors.attention.paged import parts_at
from actors.compute.input_row import Integers
from actors.compute.kv_cache import InputRow, PagedCache, to_device
from actors.compute.recurrent_states import Advance
from actors.sampling.draws import DRAW_LISTS, NO_DRAWS, Draws, DrawsOnDevice


class Interrupted(Exception):
    """Raised when a forward is abandoned. The cache slots of its rows are then undefined."""


def never() -> bool:
    """Default interruption check: always False."""
    return False


BATCH_LISTS = 5  # tokens, positions, slots to write, indices of the positions with logits, and their parents


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as lists of integers, which are copied to the device in one operation.

    `integers` are the tokens, their positions, the slots to write, the indices in the flat batch at which logits are
    requested, the parents of these positions (`FlatRows.parents`), then those of the draws, then those of the attention
    plan.
    """

    rows: Sequence[InputRow]
    cache: PagedCache
    plan: AttentionPlan
    integers: list[Sequence[int] | Integers]
    longest: int  # upper bound of the positions with logits per row

    @classmethod
    def exact(
        cls, rows: Sequence[InputRow], cache: PagedCache, backend: AttentionBackend, draws: Draws = NO_DRAWS
    ) -> Self:
        """Packs a step without padding."""
        plan = backend.plan(rows, cache)
        flat = FlatRows(rows, cache.page_size)
        lists = [flat.tokens, flat.positions, flat.written, flat.logit_at, flat.parents]
        return cls(rows, cache, plan, [*lists, *draws.integers, *plan.integers], flat.longest)

    @classmethod
    def padded(
        cls, rows: Sequence[InputRow], cache: PagedCache, backend: PaddedBackend, shape: StepShape, draws: Draws
    ) -> Self:
        """Packs a step of a fixed shape. Padding tokens write to `PagedCache.scrap_slot` and see no keys.

        Recurrent layers are not supported.
        """
        flat = FlatRows(rows, cache.page_size)
        plan = backend.padded_plan(flat, cache, shape)
        lists = [
            padded(flat.tokens, shape.tokens),
            padded(flat.positions, shape.tokens),
            padded(flat.written, shape.tokens, cache.scrap_slot),
            padded(flat.logit_at, shape.positions),
            padded(flat.parents, shape.positions),
        ]
        integers = [*lists, *draws.padded(shape.sampled, shape.positions), *plan.integers]
        return cls(rows, cache, plan, integers, shape.positions)


class RaggedBatch:
    """Concatenated rows of varying length on the device. `place` must be called before the forward."""

    def __init__(self, step: PackedStep, parts: Sequence[Tensor], interrupted: Callable[[], bool] = never) -> None:
        """`parts` are the step's integers as one-dimensional tensors."""
        self.cache = step.cache
        self.longest = step.longest
        self._rows = step.rows
        self._plan = step.plan
        self._interrupted = interrupted
        # tokens, positions: (total,); written: (total,) slots in the pool; logit_at: (requested,) indices in the batch;
        # parents: (requested,) indices in logit_at
        self.tokens, self.positions, self.written, self.logit_at, self.parents = parts[:BATCH_LISTS]
        self.draws = DrawsOnDevice.of(parts[BATCH_LISTS : BATCH_LISTS + DRAW_LISTS])
        self._plan_parts = parts[BATCH_LISTS + DRAW_LISTS :]

    def place(self) -> None:
        """Prepares attention from the integers on the device."""
        self._plan.place(self._plan_parts)

    def attend(
        self,
        layer: int,
        query: Tensor,  # (total, heads, head dim)
        key_value: Tensor,  # (total, 2 x kv heads, head dim): keys, then values
        options: ScoreOptions,
    ) -> Tensor:
        """Caches the new keys and values, then attends each row to its own; returns (total, heads x head dim).

        Checks for an interruption first, so once per layer, and raises Interrupted.
        """
        pool = self.open_layer(layer)
        pool.index_copy_(0, self.written, key_value)
        return self.attend_cached(query, pool, options)

    def open_layer(self, layer: int) -> Tensor:
        """Returns a layer's part of the cache, to write the batch's keys and values to it. Raises Interrupted."""
        if self._interrupted():
            raise Interrupted
        return self.cache.layer(layer)

    def attend_cached(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        """Attends as `attend` does, to a layer's part of the cache that holds the batch's keys and values."""
        return self._plan(query, pool, options).reshape(len(query), -1)

    def recur(self, layer: int, inputs: Tensor, advance: Advance) -> Tensor:
        """Computes a recurrent layer for each row, from the row's own state: (total, hidden) -> (total, hidden)."""
        states = self.cache.recurrent
        parts = torch.split(inputs, [len(row.tokens) for row in self._rows])
        return torch.cat([states.feed(layer, row, part, advance) for row, part in zip(self._rows, parts, strict=True)])


PLACE_LISTS = 3  # lists per step of a chain: positions, ends (positions + 1), and slots to write


@dataclass(frozen=True, slots=True)
class PackedChain:
    """Steps of one token per row at consecutive positions, as lists of integers.

    The rows and their pages are those of `last`, the last step. Each step adds its own places.
    """

    last: PackedStep
    places: list[list[Sequence[int]]]  # PLACE_LISTS per step

    @classmethod
    def padded(
        cls, rows: Sequence[InputRow], steps: int, cache: PagedCache, backend: PaddedBackend, shape: StepShape
    ) -> Self:
        """Packs a chain that fills the slots of `rows`; no row may start at position 0.

        A row with fewer slots than steps repeats its last position, writes to `PagedCache.scrap_slot`, and its further
        results are undefined.
        """
        lasts = [InputRow((0,), row.end - 1, 1, row.pages) for row in rows]
        size = cache.page_size
        padding = [0] * (shape.tokens - len(rows))
        places: list[list[Sequence[int]]] = []
        for step in range(steps):
            positions = [min(row.start + step, row.end - 1) for row in rows]
            slots = [
                row.pages[at // size] * size + at % size if row.start + step == at else cache.scrap_slot
                for row, at in zip(rows, positions, strict=True)
            ]
            ends = [at + 1 for at in positions]
            places.append([[*positions, *padding], [*ends, *padding], slots + [cache.scrap_slot] * len(padding)])
        return cls(PackedStep.padded(lasts, cache, backend, shape, NO_DRAWS), places)

    @property
    def integers(self) -> list[Sequence[int] | Integers]:
        return [*chain.from_iterable(self.places), *self.last.integers]

    def split(self, parts: Sequence[Tensor]) -> tuple[list[Sequence[Tensor]], Sequence[Tensor]]:
        """Returns the places of each step, and the integers of the last one, as tensors."""
        split = PLACE_LISTS * len(self.places)
        return [parts[begin : begin + PLACE_LISTS] for begin in range(0, split, PLACE_LISTS)], parts[split:]

    def batch(self, tokens: Tensor, places: Sequence[Tensor], last: Sequence[Tensor]) -> "RaggedBatch":
        """Returns the batch of a step that feeds `tokens`, (tokens,), at its places."""
        positions, ends, slots = places
        split = BATCH_LISTS + DRAW_LISTS
        plan = parts_at(last[split:], positions, ends)
        fed = [tokens, positions, slots]
        return RaggedBatch(self.last, [*fed, *last[len(fed) : split], *plan])


def exact_batch(
    rows: Sequence[InputRow],
    cache: PagedCache,
    backend: AttentionBackend,
    interrupted: Callable[[], bool] = never,
    draws: Draws = NO_DRAWS,
) -> RaggedBatch:
    """Copies rows to the device without padding, ready for a forward."""
    step = PackedStep.exact(rows, cache, backend, draws)
    batch = RaggedBatch(step, to_device(step.integers, cache.device), interrupted)
    batch.place()
    return batch
