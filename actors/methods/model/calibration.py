"""How likely each of a draft's candidates is to be the target's token: fitted to what the target decided.

Under coupled sampling the target's token wins by its log probability and noise that the drafter knows too. The draft's
log probabilities are estimates, so the noisiest of many badly estimated tokens would win too often if all of the noise
counted for the draft: it counts for less. By how much, and how far the draft is to be believed at all, is a conditional
logit (McFadden 1974) over the candidates and, as one more, all tokens that are not among them:

    chance of a candidate  ~  exp(surety x its log probability + noise_share x its noise)
    chance of the others   ~  exp(others + others_slope x log of their probability)

Its four weights are learned online by AdaGrad (Duchi et al. 2011), for each kind of draft and of temperature. Greedy
requests have no noise, and the same fit tells what the draft's own probabilities are worth.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.drafting.open_places import OpenPlaces, Place
from protos.messages import Sampling
from protos.values import value

Floats = NDArray[np.float64]

RATE = 0.1  # of learning: logged drafts are told as well at 0.05 and 0.2
SURETY = (0.1, 8.0)  # bounds of what log probabilities count for: there would be none for a draft that is never wrong
NOISE_SHARE = (0.3, 1.0)  # bounds of what the noise counts for, relative to them
LEAST_OTHERS = 1e-4  # probability of all other tokens, at least: an estimate of nothing is worth nothing

# Of the draft that ships, over its answers to the prompts of `slipstream bench`. A sampled request's first two are
# times the temperature, as far as that is below 1: errors of logits weigh the more the lower it is.
GREEDY = (1.05, 0.0, -1.0, 0.75)
SAMPLED = (0.95, 0.8, 2.0, 0.75)


@value
class DraftKind:
    """What drafts are alike: fits are kept for each."""

    octave: int | None  # of the temperature, in halves; None: greedy
    is_further: bool  # predicted after another token, without a forward in between

    @classmethod
    def of(cls, sampling: Sampling, is_further: bool) -> "DraftKind":
        if sampling.greedy:
            return cls(None, is_further)
        return cls(round(2 * math.log2(sampling.temperature)), is_further)

    @property
    def prior(self) -> Floats:
        """Weights to begin with, (4,)."""
        if self.octave is None:
            return np.array(GREEDY)
        scale = min(1.0, 2.0 ** (self.octave / 2))
        surety, noise_share, *others = SAMPLED
        return np.array((scale * surety, scale * noise_share, *others))


@dataclass(eq=False, slots=True)
class _Fit:
    weights: Floats
    squares: Floats = field(default_factory=lambda: np.ones(4))  # of gradients so far, summed

    def learn(self, candidates: "Candidates", place: int | None) -> None:
        """The target took the candidate at this place, or another token."""
        features = candidates.features
        chances = candidates.chances(self.weights)
        taken = features[len(features) - 1 if place is None else place]
        gradient = taken - chances @ features
        self.squares += gradient**2
        weights = self.weights + RATE * gradient / np.sqrt(self.squares)
        surety = min(max(weights[0], SURETY[0]), SURETY[1])
        weights[0] = surety
        if self.weights[1]:  # without noise there is nothing to learn of it
            weights[1] = min(max(weights[1], NOISE_SHARE[0] * surety), NOISE_SHARE[1] * surety)
        self.weights = weights


@dataclass(frozen=True, eq=False, slots=True)
class Candidates:
    """Likely tokens of one position, (count,) each: what the draft and the noise say of them."""

    ids: NDArray[np.int64]
    log_probs: Floats
    noise: Floats
    log_others: float  # of the probability of all other tokens

    @property
    def features(self) -> Floats:
        """(count + 1, 4): of each candidate, and of all others together."""
        count = len(self.ids)
        found = np.zeros((count + 1, 4))
        found[:count, 0] = self.log_probs
        found[:count, 1] = self.noise
        found[count, 2] = 1.0
        found[count, 3] = self.log_others
        return found

    def chances(self, weights: Floats) -> Floats:
        """(count + 1,): of each to be the target's token; the last is of all others together."""
        scores = self.features @ weights
        powers = np.exp(scores - scores.max())
        chances: Floats = powers / powers.sum()
        return chances


class Calibration:
    """All fits of a drafter, and what was thought of places that the target has yet to decide."""

    def __init__(self) -> None:
        self._fits: dict[DraftKind, _Fit] = {}
        self._open: OpenPlaces[tuple[DraftKind, Candidates]] = OpenPlaces()

    def chances(self, kind: DraftKind, candidates: Candidates) -> Floats:
        """(count + 1,): of each to be the target's token; the last is of all others together."""
        return candidates.chances(self._fit(kind).weights)

    def note(self, session: str, place: Place, kind: DraftKind, candidates: Candidates) -> None:
        """These were considered there."""
        self._open.note(session, place, (kind, candidates))

    def decided(self, session: str, tokens: Sequence[int]) -> None:
        """The session's text is known up to here: learns from the places that it has reached."""
        for (kind, candidates), token in self._open.decided(session, tokens):
            self._learn(kind, candidates, token)

    def close(self, session: str) -> None:
        self._open.close(session)

    def _learn(self, kind: DraftKind, candidates: Candidates, token: int) -> None:
        """The target's token at that position is known."""
        places = np.flatnonzero(candidates.ids == token)
        self._fit(kind).learn(candidates, int(places[0]) if len(places) else None)

    def _fit(self, kind: DraftKind) -> _Fit:
        if kind not in self._fits:
            self._fits[kind] = _Fit(kind.prior)
        return self._fits[kind]
