"""Recent answers of a drafter, separated by cache salt: an answer is found only by requests of the same salt.

Salts isolate callers that must learn nothing of each other, and a client may see what was drafted for it.
"""

from collections import deque
from collections.abc import Sequence

from actors.drafters.lookup.suffix_index import Match, SuffixIndex


class RecentAnswers:
    """Holds up to `most_tokens` in total. The oldest answers are dropped first, whatever their salt."""

    def __init__(self, shortest: int, most_tokens: int) -> None:
        self.tokens = 0
        self._shortest = shortest
        self._most = most_tokens
        self._indexes: dict[str, SuffixIndex] = {}  # by salt
        self._salts: deque[str] = deque()  # of all texts, oldest first

    def add(self, salt: str, text: list[int]) -> None:
        """Adds a text, or as much of its end as fits."""
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
        """Searches the texts of this salt, like `SuffixIndex.find`."""
        index = self._indexes.get(salt) or SuffixIndex(self._shortest)
        return index.find(text, longest)

    def _forget_oldest(self) -> None:
        salt = self._salts.popleft()
        index = self._indexes[salt]
        self.tokens -= index.forget_oldest()
        if not index.tokens:
            del self._indexes[salt]
