"""The target's hidden states beside the paged KV cache, in pages of the same numbers, or of the latest forward alone.

In pages, what was computed once is found again by whoever has them: a session that begins with another's tokens, one
that was preempted, a drafter that takes over in the middle.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.to_device import to_device
from cluster.page_allocator import PageCopy, PlaceMove


class StateStore(Protocol):
    """Encoded rows by place of the KV cache."""

    def write(self, places: Tensor, rows: Tensor) -> None:
        """Rows, (n, row bytes), of all that one forward fed, to places, (n,)."""
        ...

    def read(self, places: Sequence[int]) -> bytes:
        """The rows of these places, one after the other."""
        ...

    def move(self, moves: Sequence[PlaceMove]) -> None:
        """As in the KV cache, before the forward."""
        ...

    def copy(self, copies: Sequence[PageCopy]) -> None: ...


class LatestStates:
    """A `StateStore` of the latest forward's rows, at the places where it wrote; it takes no memory beyond them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._places: Tensor = torch.empty(0, dtype=torch.long)
        self._rows = torch.empty((0, 0), dtype=torch.uint8)
        self._index: dict[int, int] = {}  # by place: which row; made when something is read

    def write(self, places: Tensor, rows: Tensor) -> None:
        self._places = places
        self._rows = rows
        self._index = {}

    def read(self, places: Sequence[int]) -> bytes:
        """To ask for what the latest forward did not write is a mistake of the caller, a KeyError."""
        if not self._index:
            self._index = {place: row for row, place in enumerate(self._places.tolist())}
        (at,) = to_device([[self._index[place] for place in places]], self._device)
        return self._rows.index_select(0, at).cpu().numpy().tobytes()

    def move(self, moves: Sequence[PlaceMove]) -> None:
        """The forward that follows writes all that is here then."""

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """As `move`."""


class StateCache:
    """One encoded row for each place, in one tensor of shape (pages x page size, row bytes)."""

    def __init__(self, pages: int, page_size: int, row_bytes: int, device: torch.device) -> None:
        self._page_size = page_size
        self._device = device
        self._rows = torch.empty((pages * page_size, row_bytes), dtype=torch.uint8, device=device)

    def write(self, places: Tensor, rows: Tensor) -> None:
        """Rows, (n, row bytes), to places, (n,)."""
        self._rows.index_copy_(0, places, rows)

    def read(self, places: Sequence[int]) -> bytes:
        """The rows of these places, one after the other."""
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
