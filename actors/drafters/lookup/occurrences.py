"""Lookup in a text's own history: earlier occurrences of its suffixes, and the tokens that followed them.

One search finds the occurrences of all suffixes. Longer paths are read off these, and the text is searched again only
where none of them continues (after REST: He et al. 2023, arXiv 2311.08252). Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Places = NDArray[np.int64]

MOST = 32  # occurrences considered: those of the longest suffixes, the latest of these first
OF_LENGTH = 4.0  # weight factor for each further matching token
OF_AGE = 0.9  # weight factor for each later occurrence considered


class GrowingText:
    """A text's tokens as a growing array, since converting 100,000 tokens every round would be slow."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._room = np.array(tokens, dtype=np.int32)
        self._length = len(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        end = self._length + len(tokens)
        if end > len(self._room):
            room = np.empty(2 * end, dtype=np.int32)
            room[: self._length] = self.tokens
            self._room = room
        self._room[self._length : end] = tokens
        self._length = end

    @property
    def tokens(self) -> Ids:
        """Tokens so far, (length,): a view, which later `extend` calls do not change."""
        return self._room[: self._length]

    def followed_by(self, tokens: Sequence[int]) -> Ids:
        """Returns the text followed by `tokens`, (length + tokens,)."""
        return np.concatenate((self.tokens, np.array(tokens, dtype=np.int32))) if tokens else self.tokens


@dataclass(frozen=True, eq=False, slots=True)
class Occurrences:
    """Earlier places where the text read as it does at its end."""

    tokens: Ids  # of the text
    ends: Places  # (count,): indices of the tokens that followed, in ascending order
    sizes: Places  # (count,): match length in tokens, as far as it was compared

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def size(self) -> int:
        """Length of the longest match, in tokens."""
        return int(self.sizes.max())

    def shares(self) -> Mapping[int, float]:
        """Returns each following token's share, largest first, weighted by frequency, recency and match length."""
        ages = np.arange(len(self))[::-1]
        weights = OF_LENGTH ** (self.sizes - self.size) * OF_AGE**ages
        found: dict[int, float] = {}
        for token, weight in zip(self.tokens[self.ends].tolist(), (weights / weights.sum()).tolist(), strict=True):
            found[token] = found.get(token, 0.0) + weight
        return dict(sorted(found.items(), key=lambda share: -share[1]))

    def after(self, token: int) -> "Occurrences":
        """Returns the occurrences that this token followed and that have text after it."""
        kept = (self.tokens[self.ends] == token) & (self.ends + 1 < len(self.tokens))
        return Occurrences(self.tokens, self.ends[kept] + 1, self.sizes[kept] + 1)


def occurrences(tokens: Ids, longest: int, shortest: int) -> Occurrences:
    """Finds earlier occurrences of the text's suffixes of `shortest` to `longest` tokens.

    Each place is returned once, with its longest match.
    """
    end = len(tokens)
    if end <= shortest:
        nowhere = np.empty(0, dtype=np.int64)
        return Occurrences(tokens, nowhere, nowhere)
    is_same = np.ones(end - shortest, dtype=np.bool_)  # by index of the token after the match, from `shortest` on
    for back in range(1, shortest + 1):
        is_same &= tokens[shortest - back : end - back] == tokens[end - back]
    ends = np.flatnonzero(is_same) + shortest
    sizes = np.full(len(ends), shortest)
    for size in range(shortest + 1, longest + 1):
        reaches = (sizes == size - 1) & (ends >= size)
        sizes[reaches] += tokens[ends[reaches] - size] == tokens[end - size] if end >= size else 0
    best = np.sort(np.lexsort((ends, sizes))[-MOST:])
    return Occurrences(tokens, ends[best], sizes[best])


class Continuations:
    """Candidates after each path of further tokens; cached while a block is being made."""

    def __init__(self, text: GrowingText, outcome: Sequence[int], longest: int, shortest: int) -> None:
        self._text = text
        self._outcome = tuple(outcome)
        self._longest = longest
        self._shortest = shortest
        self._known: dict[tuple[int, ...], Occurrences] = {}

    def at(self, path: tuple[int, ...]) -> Occurrences:
        """Returns the occurrences after this path; empty if the text has none."""
        if path not in self._known:
            gone_on = self.at(path[:-1]).after(path[-1]) if path else None
            self._known[path] = gone_on or self._search(path)
        return self._known[path]

    def _search(self, path: tuple[int, ...]) -> Occurrences:
        return occurrences(self._text.followed_by((*self._outcome, *path)), self._longest, self._shortest)
