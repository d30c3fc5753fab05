"""The target's states that heads which read only the last of them keep."""

import torch
from torch import Tensor

MOST_ROWS = 512  # of a session, which may come before the verdicts that they belong to


class LastRows:
    """Of each session the target's states from its last decided token but one on, by position."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._rows: dict[str, dict[int, Tensor]] = {}

    def keep(self, session: str, first: int, rows: Tensor, wanted: int) -> None:
        """Rows of the positions from `first` on, (rows, width), as far as they are `wanted` ones or later."""
        kept = self._rows.setdefault(session, {})
        for position in range(max(first, wanted), first + len(rows)):
            kept[position] = rows[position - first].to(self._device, self._dtype, copy=True)
        for position in sorted(kept)[MOST_ROWS:]:
            del kept[position]

    def forget_before(self, session: str, wanted: int) -> None:
        kept = self._rows.get(session, {})
        for position in [position for position in kept if position < wanted]:
            del kept[position]

    def at(self, session: str, position: int) -> Tensor | None:
        """(width,), if it has come."""
        return self._rows.get(session, {}).get(position)

    def close(self, session: str) -> None:
        self._rows.pop(session, None)
