"""Where the end of a text occurred before, in itself and in texts that have ended, and what followed it there.

(After SuffixDecoding: Oliaro et al. 2024, arXiv 2411.04975.) Places are found by a hash of the few tokens before them,
and compared backwards from there. Pure.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cluster.drafting.candidates.outcomes import Choices

MANY = 4  # occurrences: more say no more about whether anything new will follow
LOOKED_AT = 64  # occurrences, the latest ones
MOST_SEEN = 256  # occasions that a rate is taken over; beyond, earlier ones count half

Place = tuple[list[int], int]
"""A text, and the index in it of a token that is there."""


@dataclass(frozen=True, slots=True)
class Match:
    """The places that follow the longest occurrence of a text's end, the latest first."""

    length: int  # tokens that are alike
    places: tuple[Place, ...]

    @property
    def following(self) -> dict[int, tuple[Place, ...]]:
        """Places by the token there: the most frequent token first, of equals the one that came latest."""
        found: dict[int, list[Place]] = {}
        for text, at in self.places:
            found.setdefault(text[at], []).append((text, at))
        return {token: tuple(places) for token, places in sorted(found.items(), key=lambda each: -len(each[1]))}

    def after(self, token: int) -> "Match":
        """Once the text has gone on with this token."""
        places = [(text, at + 1) for text, at in self.following.get(token, ()) if at + 1 < len(text)]
        return Match(self.length + 1, tuple(places))

    @property
    def kind(self) -> tuple[int, int]:
        """Octaves of how much is alike and of how often that was found: what is about as reliable."""
        return self.length.bit_length(), min(len(self.places), MANY).bit_length()


class SuffixIndex:
    """Texts that are looked up in together."""

    def __init__(self, shortest: int) -> None:
        self._shortest = shortest
        self._texts: deque[list[int]] = deque()
        self._places: defaultdict[int, list[Place]] = defaultdict(list)  # by hash of the tokens just before
        self.tokens = 0

    def add(self, text: list[int]) -> None:
        self._texts.append(text)
        self.grow(0)

    def grow(self, known: int) -> None:
        """The latest text, which is all that was added, has tokens after those known."""
        text = self._texts[-1]
        self.tokens += len(text) - known
        for at in range(max(known, self._shortest), len(text)):
            self._places[self._key(text, at)].append((text, at))

    def forget_oldest(self) -> int:
        """The oldest text's places are the first ones everywhere; returns its length."""
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
        """What followed the most tokens of the text's end, up to `longest`; as many places as were looked at."""
        if len(text) < self._shortest:
            return NOTHING
        end = list(text[-longest:])
        found: list[Place] = []
        alike = self._shortest  # at least: hashes may be equal for other tokens
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
    """The one with more tokens alike, or both together where they are equal."""
    if first.length == second.length:
        return Match(first.length, first.places + second.places)
    return max(first, second, key=lambda match: match.length)


def _alike(end: list[int], other: list[int], at: int, known: int) -> int:
    """Tokens of `end` that stand before `at` in another text, where that is known of the last ones."""
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
    """How often what followed a match was none of what had followed it before, by the kind of match.

    (As in PPM compressors: Cleary and Witten 1984; by kinds of contexts: Bloom 1998.)
    """

    def __init__(self) -> None:
        self._rates: defaultdict[tuple[int, int], _Rate] = defaultdict(_Rate)

    def learn(self, match: Match, token: int) -> None:
        """It was this token that followed."""
        rate = self._rates[match.kind]
        if rate.seen >= MOST_SEEN:
            rate.seen /= 2
            rate.missed /= 2
        rate.seen += 1
        rate.missed += token not in match.following

    def choices(self, match: Match) -> Choices:
        """What may follow, each with its share of the chance that it is something that did before."""
        rate = self._rates[match.kind]
        each = (1 - rate.missed / rate.seen) / len(match.places)
        following = match.following
        return Choices(tuple(following), tuple([each * len(places) for places in following.values()]))
