"""A paged cache with tokens in place of keys and values, so that readers see what was written."""

from collections.abc import Iterable, Sequence

from cluster.page_allocator import PageCopy, SlotMove


class TokenMemory:
    """One pool of pages; a place that was never written holds nothing, and reading it is a failure."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._held: dict[int, int] = {}  # tokens by place

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages in order, as their owner would."""
        for copy in copies:
            for offset in range(self._page_size):
                source, to = (page * self._page_size + offset for page in (copy.source, copy.to))
                self._held.pop(to, None)
                if source in self._held:
                    self._held[to] = self._held[source]

    def move(self, moves: Iterable[SlotMove]) -> None:
        """All at once; what nobody has written cannot be moved."""
        moved = [(move.to, self._held[move.source]) for move in moves]
        self._held.update(moved)

    def write(self, tokens: Sequence[int], start: int, pages: Sequence[int]) -> None:
        for position, token in enumerate(tokens, start):
            self._held[self._place(position, pages)] = token

    def read(self, end: int, pages: Sequence[int]) -> tuple[int, ...]:
        """The tokens at positions 0 to `end`."""
        places = [self._place(position, pages) for position in range(end)]
        assert all(place in self._held for place in places), "a row reads what nobody has written"
        return tuple(self._held[place] for place in places)

    def _place(self, position: int, pages: Sequence[int]) -> int:
        return pages[position // self._page_size] * self._page_size + position % self._page_size
