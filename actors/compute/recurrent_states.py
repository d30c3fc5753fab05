"""States of recurrent layers (linear attention, convolutions), stored by page beside the KV cache.

A recurrent layer reduces a text to a state of fixed size, which cannot be rolled back. Verification needs the state
after every token that may be the last accepted one. Therefore, a page holds a state and the layer's inputs at the
following positions in the page: the next row replays the inputs of accepted tokens from there, together with its own
tokens. A replay costs one pass through the layer over a few tokens. Snapshots after every token would store a state, of
several MB per layer in current models, for every drafted token.

Since states belong to pages, sessions share, fork, copy and free them with the pages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.compute.input_row import InputRow
from cluster.page_allocator import PageCopy

State = tuple[Tensor | None, ...]
"""State of one layer after a text. Tensors are never modified."""

Advance = Callable[[Tensor, State | None], tuple[Tensor, State]]
"""Computes a layer from (inputs, state before them): returns outputs and the state after them.

Inputs and outputs have shape (tokens, hidden); the state before a text is None.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A layer's state after the first `at` tokens, and its inputs at the following positions."""

    at: int
    state: State | None
    inputs: Tensor  # (tokens, hidden)

    def reaches(self, position: int) -> bool:
        """Returns whether a row may start at this position."""
        return self.at <= position <= self.at + len(self.inputs)


class RecurrentStates:
    """Snapshots of all recurrent layers, by page and layer."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._pages: dict[int, dict[int, tuple[Snapshot, ...]]] = {}  # latest snapshot first

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies the snapshots of whole pages."""
        for copy in copies:
            self._pages[copy.to] = dict(self._pages.get(copy.source, {}))

    def feed(self, layer: int, row: InputRow, inputs: Tensor, advance: Advance) -> Tensor:
        """Computes a layer for a row's tokens: (tokens, hidden) -> (tokens, hidden); stores snapshots in its pages.

        Later rows may start at any of the positions with logits, or at the row's end.
        """
        assert not row.parents, "recurrent layers do not support trees"
        base = self._before(layer, row, inputs)
        todo = torch.cat([base.inputs, inputs])  # at positions base.at, base.at + 1, ...
        restart = row.end - max(row.logits, 1) + 1  # usually, the next row starts here or later
        first = row.start // self._page_size
        bounds = range((first + 1) * self._page_size, row.end, self._page_size)
        states = {base.at: base.state}
        outputs = []
        at = base.at
        for cut in sorted({restart, *bounds, row.end}):
            output, states[cut] = advance(todo[at - base.at : cut - base.at], states[at])
            outputs.append(output)
            at = cut
        for index, end in enumerate((*bounds, row.end), first):
            begin = index * self._page_size
            latest = min(max(restart, begin), end)
            snapshots = [Snapshot(latest, states[latest], todo[latest - base.at : end - base.at].clone())]
            if index == first and base.at >= begin:  # serves a row that starts before `restart`
                snapshots.append(Snapshot(base.at, base.state, todo[: end - base.at].clone()))
            self._pages.setdefault(row.pages[index], {})[layer] = tuple(snapshots)
        return torch.cat(outputs)[row.start - base.at :]

    def _before(self, layer: int, row: InputRow, inputs: Tensor) -> Snapshot:
        """Returns the latest snapshot from which a row may start, with the inputs up to the row's start."""
        if row.start == 0:
            return Snapshot(0, None, inputs[:0])
        page = self._pages.get(row.pages[(row.start - 1) // self._page_size], {})
        for snapshot in page.get(layer, ()):
            if snapshot.reaches(row.start):
                if row.start % self._page_size == 0:
                    page[layer] = (snapshot,)  # the page is complete, and no row starts before its end again
                return Snapshot(snapshot.at, snapshot.state, snapshot.inputs[: row.start - snapshot.at])
        raise AssertionError(f"layer {layer} has no state at position {row.start}")
