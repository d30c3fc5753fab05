"""Recent answers of a drafter, kept apart by their requests' cache salts: what one salt's have is found by it alone.

A salt keeps callers apart who are to learn nothing of each other, and a client may be shown what was drafted for it.
"""

from collections import deque
from collections.abc import Sequence

from actors.methods.lookup.suffix_index import Match, SuffixIndex


class RecentAnswers:
    """Of `most_tokens` together; the oldest are forgotten first, whatever their salt."""

    def __init__(self, shortest: int, most_tokens: int) -> None:
        self.tokens = 0
        self._shortest = shortest
        self._most = most_tokens
        self._indexes: dict[str, SuffixIndex] = {}  # by salt
        self._salts: deque[str] = deque()  # of all texts, oldest first

    def add(self, salt: str, text: list[int]) -> None:
        """A text, or as much of its end as may be kept."""
        text = text[max(0, len(text) - self._most) :]
        if not text:
            return
        index = self._indexes.setdefault(salt, SuffixIndex(self._shortest))
        index.add(text)
        self._salts.append(salt)
        self.tokens += len(text)
        while self.tokens > self._most:
            self._forget_oldest()

    def find(self, salt: str, text: Sequence[int], longest: int) -> Match:
        """As `SuffixIndex.find`, among the texts of this salt."""
        index = self._indexes.get(salt) or SuffixIndex(self._shortest)
        return index.find(text, longest)

    def _forget_oldest(self) -> None:
        salt = self._salts.popleft()
        index = self._indexes[salt]
        self.tokens -= index.forget_oldest()
        if not index.tokens:
            del self._indexes[salt]
