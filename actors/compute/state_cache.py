"""Storage of the target's hidden states: pages parallel to the KV cache, or only the latest forward's rows.

With pages, states that were computed once are found again by whatever shares their KV pages: a session with the same
prefix, a preempted one, a drafter that takes over midway.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.h2d_copy import to_device
from cluster.page_allocator import PageCopy, PlaceMove


class StateStore(Protocol):
    """Encoded rows by place of the KV cache."""

    def write(self, places: Tensor, rows: Tensor) -> None:
        """Writes all rows that one forward fed, (n, row bytes), to places, (n,)."""
        ...

    def read(self, places: Sequence[int]) -> bytes:
        """Returns the rows of these places, concatenated."""
        ...

    def move(self, moves: Sequence[PlaceMove]) -> None:
        """Moves rows as the KV cache does, before the forward."""
        ...

    def copy(self, copies: Sequence[PageCopy]) -> None: ...


class LatestStates:
    """A `StateStore` of the latest forward's rows only; it takes no memory beyond them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: Tensor = torch.empty(0, dtype=torch.long)
        self._rows = torch.empty((0, 0), dtype=torch.uint8)
        self._index: dict[int, int] = {}  # row index by place; built on the first read

    def write(self, places: Tensor, rows: Tensor) -> None:
        self._places = places
        self._rows = rows
        self._index = {}

    def read(self, places: Sequence[int]) -> bytes:
        """Returns the rows of these places. Raises KeyError for a place that the latest forward did not write."""
        if not self._index:
            self._index = {place: row for row, place in enumerate(self._places.tolist())}
        (at,) = to_device([[self._index[place] for place in places]], self._device)
        return self._rows.index_select(0, at).cpu().numpy().tobytes()

    def move(self, moves: Sequence[PlaceMove]) -> None:
        """Does nothing: the next forward replaces all rows."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Does nothing, as `move`."""


class StateCache:
    """One encoded row per place, in one tensor of shape (pages x page size, row bytes)."""

    def __init__(self, pages: int, page_size: int, row_bytes: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._rows = torch.empty((pages * page_size, row_bytes), dtype=torch.uint8, device=device)

    def write(self, places: Tensor, rows: Tensor) -> None:
        """Writes rows, (n, row bytes), to places, (n,)."""
        self._rows.index_copy_(0, places, rows)

    def read(self, places: Sequence[int]) -> bytes:
        """Returns the rows of these places, concatenated."""
        (at,) = to_device([places], self._device)
        return self._rows.index_select(0, at).cpu().numpy().tobytes()

    def move(self, moves: Sequence[PlaceMove]) -> None:
        """Copies single places, all at once."""
        if not moves:
            return
        sources, targets = to_device([[move.source for move in moves], [move.to for move in moves]], self._device)
        self._rows[targets] = self._rows[sources]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies whole pages."""
        if not copies:
            return
        sources, targets = to_device([[copy.source for copy in copies], [copy.to for copy in copies]], self._device)
        pages = self._rows.view(-1, self._page_size, self._rows.shape[1])
        pages[targets] = pages[sources]
