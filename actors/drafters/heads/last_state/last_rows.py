"""Storage of the target's states for heads that read only the last one."""

import torch
from torch import Tensor

MOST_ROWS = 512  # per session: states may arrive before the verdicts that they belong to


class LastRows:
    """The target's states of each session, by position, from the last decided token but one on."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._rows: dict[str, dict[int, Tensor]] = {}

    def keep(self, session: str, first: int, rows: Tensor, wanted: int) -> None:
        """Keeps rows, (rows, width), of positions from `first` on, except positions before `wanted`."""
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
        """Returns the row of a position, (width,); None if it has not arrived."""
        return self._rows.get(session, {}).get(position)

    def close(self, session: str) -> None:
        self._rows.pop(session, None)
