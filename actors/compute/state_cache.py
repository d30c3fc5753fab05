"""The target's hidden states beside the paged KV cache, in pages of the same numbers.

What was computed once is found again by whoever has the pages: a session that begins with another's tokens, one that
was preempted, a drafter that takes over in the middle.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.compute.to_device import to_device
from cluster.page_allocator import PageCopy, PlaceMove


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
