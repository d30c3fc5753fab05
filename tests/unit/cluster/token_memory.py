"""Simulated paged cache that stores tokens instead of keys and values."""

from collections.abc import Iterable, Sequence

from cluster.page_allocator import PageCopy, SlotMove


class TokenMemory:
    """Pool of pages; reading an unwritten slot fails."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._held: dict[int, int] = {}  # tokens by slot

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages in order, like a real cache."""
        for copy in copies:
            for offset in range(self._page_size):
                source, to = (page * self._page_size + offset for page in (copy.source, copy.to))
                self._held.pop(to, None)
                if source in self._held:
                    self._held[to] = self._held[source]

    def move(self, moves: Iterable[SlotMove]) -> None:
        """Moves all slots simultaneously; fails for an unwritten slot."""
        moved = [(move.to, self._held[move.source]) for move in moves]
        self._held.update(moved)

    def write(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            self._held[self._place(position, pages)] = token

    def read(self, end: int, pages: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens at positions 0 to `end`."""
        return self.at([self._place(position, pages) for position in range(end)])

    def at(self, slots: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens in these slots."""
        assert self._held.keys() >= {*slots}, "a slot is read that was never written"
        return tuple(self._held[slot] for slot in slots)

    def _place(self, position: int, pages: Sequence[int]) -> int:
        return pages[position // self._page_size] * self._page_size + position % self._page_size
