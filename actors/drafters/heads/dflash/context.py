"""Context of a DFlash head for one session: the target's states received, and the keys and values made of them."""

import torch
from torch import Tensor

MOST_EARLY = 64  # pieces of states that may wait for earlier ones


class DFlashContext:
    """States may arrive in any order, twice or never, from position `begin` on; they are read in order."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self.read = begin  # end of the positions whose keys and values are cached
        self._arrived = begin  # end of the gapless positions whose states have arrived
        self._unread: list[Tensor] = []  # states of the positions between `read` and `_arrived`, in pieces
        self._early: dict[int, Tensor] = {}  # pieces after a gap, by first position
        self._cached: list[Tensor] = []  # by layer: (2, capacity, kv heads, dim), keys and values

    def put(self, first: int, rows: Tensor) -> None:
        """Adds states of the positions from `first` on, (positions, width)."""
        self._early[first] = rows
        while (piece := next((at for at in self._early if at <= self._arrived), None)) is not None:
            found = self._early.pop(piece)[self._arrived - piece :]
            if len(found):
                self._unread.append(found)
                self._arrived += len(found)
        while len(self._early) > MOST_EARLY:
            del self._early[max(self._early)]

    def has(self, positions: int) -> bool:
        """Returns whether the states of the first `positions` positions have all arrived."""
        return self._arrived >= positions

    def take(self, positions: int) -> Tensor:
        """Returns the unread states among the first `positions` positions, (unread, width), and marks them read."""
        count = positions - self.read
        if not count:
            return torch.empty(0)
        whole = torch.cat(self._unread)
        self._unread = [whole[count:]] if len(whole) > count else []
        self.read = positions
        return whole[:count]

    def write(self, layer: int, first: int, key_value: Tensor) -> Tensor:
        """Writes a layer's keys and values, (rows, 2, kv heads, dim), at positions from `first` on.

        Returns the layer's whole context up to there, (2, positions, kv heads, dim).
        """
        first -= self.begin
        end = first + len(key_value)
        if layer == len(self._cached):
            self._cached.append(key_value.new_empty((2, 0, *key_value.shape[2:])))
        held = self._cached[layer]
        if held.shape[1] < end:
            grown = held.new_empty((2, max(end, 2 * held.shape[1]), *held.shape[2:]))
            grown[:, : held.shape[1]] = held
            held = self._cached[layer] = grown
        held[:, first:end] = key_value.transpose(0, 1)
        return held[:, :end]
