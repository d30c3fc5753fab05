"""Index of where a text's end occurred before, in itself and in finished texts, and what followed it there.

After SuffixDecoding (Oliaro et al. 2024, arXiv 2411.04975). Places are found by a hash of the few tokens before them,
and compared backwards from there. Pure.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.drafting.candidates.outcomes import Choices

MANY = 4  # occurrences: more make it no likelier that a known token follows
LOOKED_AT = 64  # latest occurrences that are compared
MOST_SEEN = 256  # observations behind a rate; at this count, earlier ones are halved

Place = tuple[list[int], int]
"""A text, and the index of a token in it."""


@dataclass(frozen=True, slots=True)
class Match:
    """Places that follow the longest occurrence of a text's end, latest first."""

    length: int  # matching tokens
    places: tuple[Place, ...]

    @property
    def following(self) -> dict[int, tuple[Place, ...]]:
        """Places grouped by the token there, most frequent token first; ties go to the latest."""
        found: dict[int, list[Place]] = {}
        for text, at in self.places:
            found.setdefault(text[at], []).append((text, at))
        return {token: tuple(places) for token, places in sorted(found.items(), key=lambda each: -len(each[1]))}

    def after(self, token: int) -> "Match":
        """Returns the match after the text continued with this token."""
        places = [(text, at + 1) for text, at in self.following.get(token, ()) if at + 1 < len(text)]
        return Match(self.length + 1, tuple(places))

    @property
    def kind(self) -> tuple[int, int]:
        """Octaves of the match length and of the number of places: matches of one kind are about as reliable."""
        return self.length.bit_length(), min(len(self.places), MANY).bit_length()


class SuffixIndex:
    """Texts that are searched together."""

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._texts: deque[list[int]] = deque()
        self._places: defaultdict[int, list[Place]] = defaultdict(list)  # by hash of the tokens just before
        self.tokens = 0

    def add(self, text: list[int]) -> None:
        self._texts.append(text)
        self.grow(0)

    def grow(self, known: int) -> None:
        """Indexes the tokens after the first `known` ones of the latest text; only that text may grow."""
        text = self._texts[-1]
        self.tokens += len(text) - known
        for at in range(max(known, self._shortest), len(text)):
            self._places[self._key(text, at)].append((text, at))

    def forget_oldest(self) -> int:
        """Drops the oldest text and returns its length. Its places are the first ones in every list."""
        text = self._texts.popleft()
        self.tokens -= len(text)
        for at in range(self._shortest, len(text)):
            key = self._key(text, at)
            places = self._places[key]
            del places[0]
            if not places:
                del self._places[key]
        return len(text)

    def find(self, text: Sequence[int], longest: int) -> Match:
        """Finds the longest match of the text's end, up to `longest` tokens, among the latest LOOKED_AT places."""
        if len(text) < self._shortest:
            return NOTHING
        end = list(text[-longest:])
        found: list[Place] = []
        alike = self._shortest  # at least: different tokens may have equal hashes
        for place in reversed(self._places.get(self._key(text, len(text)), [])[-LOOKED_AT:]):
            other, at = place
            if other[at - alike : at] != end[-alike:]:
                continue
            size = _alike(end, other, at, alike)
            if size > alike:
                found = []
                alike = size
            found.append(place)
        return Match(alike, tuple(found)) if found else NOTHING

    def _key(self, text: Sequence[int], end: int) -> int:
        return hash(tuple(text[end - self._shortest : end]))


NOTHING = Match(0, ())


def longer(first: Match, second: Match) -> Match:
    """Returns the longer match, or both combined if they are equally long."""
    if first.length == second.length:
        return Match(first.length, first.places + second.places)
    return max(first, second, key=lambda match: match.length)


def _alike(end: list[int], other: list[int], at: int, known: int) -> int:
    """Counts how many last tokens of `end` precede index `at` of another text; the last `known` are known to match."""
    size = known
    most = min(len(end), at)
    while size < most and end[-1 - size] == other[at - 1 - size]:
        size += 1
    return size


@dataclass(slots=True)
class _Rate:
    seen: float = 2.0
    missed: float = 1.0


class EscapeRates:
    """Rates at which a match is followed by a token that had not followed it before, by kind of match.

    As in PPM compressors (Cleary and Witten 1984), with contexts grouped by kind (Bloom 1998).
    """

    def __init__(self) -> None:
        self._rates: defaultdict[tuple[int, int], _Rate] = defaultdict(_Rate)

    def learn(self, match: Match, token: int) -> None:
        """Records that `token` followed."""
        rate = self._rates[match.kind]
        if rate.seen >= MOST_SEEN:
            rate.seen /= 2
            rate.missed /= 2
        rate.seen += 1
        rate.missed += token not in match.following

    def choices(self, match: Match) -> Choices:
        """Returns candidates with their share of the probability that a known token follows."""
        rate = self._rates[match.kind]
        each = (1 - rate.missed / rate.seen) / len(match.places)
        following = match.following
        return Choices(tuple(following), tuple([each * len(places) for places in following.values()]))
