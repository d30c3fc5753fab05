"""Probability that a token found by lookup comes next, fitted to what the target decided.

A candidate's share among earlier continuations predicts better the longer the match and the more often the token came.
So the share is multiplied by a learned ratio for each kind of evidence, and by one more ratio for the session, since
some texts copy and others do not.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from actors.drafters.lookup.occurrences import Occurrences
from cluster.drafting.candidates.outcomes import NOTHING, Choices
from cluster.drafting.candidates.tree_growth import SIBLINGS
from cluster.drafting.pending_positions import OpenPlaces, Place
from cluster.speculation.ewma import Pairs
from protos.frozen import value

MOST_SURE = 0.98  # upper bound of the candidates' total probability: any text may diverge
ALL = 0.999  # a share above this means that no other token followed
SOME = 4  # from this many occurrences on, `is_often` holds
SIZES = (2, 3, 4, 8)  # upper bounds of match lengths by kind; longer matches form the last kind
KIND_MEMORY = 1 / 512
SESSION_MEMORY = 1 / 64
PRIOR_WEIGHT = 8.0  # weight of a kind's prior, in shares
SESSION_PRIOR = 4.0  # weight of a session's prior, in expected tokens

# Ratios fitted on 160 answers of SmolLM2-135M-Instruct, greedy and sampled, by the match length in tokens:
# two or fewer, three, more.
LONE = (0.45, 0.48, 0.71)
PRIORS: Mapping[tuple[bool, bool | None], tuple[float, float, float]] = MappingProxyType(
    {  # by (is_often, is_most)
        (False, None): (0.69, 0.78, 0.91),
        (False, True): (0.53, 0.4, 0.7),
        (False, False): (0.32, 0.75, 0.69),
        (True, None): (0.91, 0.95, 0.98),
        (True, True): (0.84, 0.89, 0.93),
        (True, False): (0.53, 0.54, 0.66),
    }
)


@value
class Evidence:
    """Kind of evidence; shares of one kind have one learned ratio."""

    size: int  # index in SIZES
    is_lone: bool  # exactly one occurrence
    is_often: bool  # at least SOME occurrences
    is_most: bool | None  # whether the token followed at least half of the occurrences; None: all of them

    @classmethod
    def of(cls, found: Occurrences, share: float) -> "Evidence":
        size = next((place for place, most in enumerate(SIZES) if found.size <= most), len(SIZES))
        return cls(size, len(found) == 1, len(found) >= SOME, None if share > ALL else share >= 0.5)

    @property
    def prior(self) -> Pairs:
        worth = (LONE if self.is_lone else PRIORS[self.is_often, self.is_most])[min(self.size, 2)]
        return Pairs(weight=PRIOR_WEIGHT, x=PRIOR_WEIGHT, y=PRIOR_WEIGHT * worth)


@value
class Known:
    """Candidate tokens at one place, with their shares and the drafter's estimate."""

    tokens: tuple[int, ...]
    shares: tuple[float, ...]
    evidence: tuple[Evidence, ...]
    expected: float  # probability that one of them comes, before the session's ratio

    def __len__(self) -> int:
        return len(self.tokens)


class LookupCalibration:
    """All ratios of a drafter, and the candidates at places that the target has yet to decide."""

    def __init__(self) -> None:
        self._kinds: dict[Evidence, Pairs] = {}  # (share, whether the token came)
        self._sessions: dict[str, Pairs] = {}  # (probability that a candidate comes, whether one did)
        self._open: OpenPlaces[Known] = OpenPlaces()

    def consider(self, session: str, place: Place, found: Occurrences) -> Choices:
        """Returns the candidates at a place with their probabilities, likeliest first.

        Notes them, to learn once the target decides the place.
        """
        if not found:
            return NOTHING
        shares = dict(list(found.shares().items())[:SIBLINGS])
        evidence = tuple([Evidence.of(found, share) for share in shares.values()])
        worth = [share * self._kind(kind).ratio for share, kind in zip(shares.values(), evidence, strict=True)]
        expected = min(MOST_SURE, sum(worth))
        self._open.note(session, place, Known(tuple(shares), tuple(shares.values()), evidence, expected))
        scale = min(MOST_SURE, expected * self._session(session).ratio) / sum(worth)
        ranked = sorted(zip(shares, worth, strict=True), key=lambda choice: -choice[1])
        return Choices(tuple([token for token, _ in ranked]), tuple([scale * chance for _, chance in ranked]))

    def decided(self, session: str, tokens: Sequence[int]) -> None:
        """Learns from the places that the session's decided text has reached."""
        for known, token in self._open.decided(session, tokens):
            self._learn(session, known, token)

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; unknown ones are ignored."""
        for session in sessions:
            self._open.close(session)
            self._sessions.pop(session, None)

    def _learn(self, session: str, known: Known, came: int) -> None:
        for token, share, kind in zip(known.tokens, known.shares, known.evidence, strict=True):
            self._kinds[kind] = self._kind(kind).after(share, float(token == came), KIND_MEMORY)
        hit = float(came in known.tokens)
        self._sessions[session] = self._session(session).after(known.expected, hit, SESSION_MEMORY)

    def _kind(self, kind: Evidence) -> Pairs:
        return self._kinds.get(kind) or kind.prior

    def _session(self, session: str) -> Pairs:
        return self._sessions.get(session) or Pairs(weight=SESSION_PRIOR, x=SESSION_PRIOR, y=SESSION_PRIOR)
