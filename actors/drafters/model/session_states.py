"""One session's rows of the target's hidden states, by position. Rows may arrive in any order, twice, or never."""

import torch
from torch import Tensor


class SessionStates:
    """Rows of shape (hidden,) for positions from `begin` on, in one tensor that grows."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self._rows: Tensor | None = None  # (capacity, hidden)
        self._known = bytearray()  # by position from `begin` on: 1 if the row is present

    def __contains__(self, position: int) -> bool:
        at = position - self.begin
        return 0 <= at < len(self._known) and bool(self._known[at])

    def put(self, first: int, rows: Tensor) -> None:
        """Stores rows (n, hidden) for the positions from `first` on."""
        assert first >= self.begin, "none come of positions before the first"
        first -= self.begin
        end = first + len(rows)
        self._grow(end, rows)
        assert self._rows is not None, "it has grown"
        self._rows[first:end] = rows
        self._known[first:end] = b"\1" * len(rows)

    def missing_from(self, position: int) -> int:
        """Returns the first position from this one on whose row is missing."""
        found = self._known.find(0, position - self.begin)
        return max(position, self.begin + len(self._known)) if found < 0 else self.begin + found

    def rows(self, first: int, end: int) -> Tensor:
        """Returns the rows of positions `first` to `end`, (end - first, hidden). All must be present."""
        assert self._rows is not None, "a row is there"
        return self._rows[first - self.begin : end - self.begin]

    def _grow(self, end: int, like: Tensor) -> None:
        self._known.extend(bytes(max(0, end - len(self._known))))
        held = 0 if self._rows is None else len(self._rows)
        if end <= held:
            return
        grown = torch.empty((max(end, 2 * held), like.shape[-1]), dtype=like.dtype, device=like.device)
        if self._rows is not None:
            grown[:held] = self._rows
        self._rows = grown
