"""Probability that each draft candidate is the target's token, fitted to what the target decided.

Under Gumbel coupling the target's token wins by its log probability plus noise that the drafter knows too. The draft's
log probabilities are only estimates, so with the noise at full weight the noisiest of many badly estimated tokens would
win too often; the noise gets a smaller weight. That weight, and the confidence in the draft, come from a conditional
logit (McFadden 1974) over the candidates plus one alternative for all other tokens:

    weight of a candidate  ~  exp(surety x its log probability + noise_share x its noise)
    weight of the others   ~  exp(others + others_slope x log of their probability)

Its four weights are learned online by AdaGrad (Duchi et al. 2011), for each kind of draft and of temperature. Greedy
requests have no noise; for them the same fit calibrates the draft's own probabilities.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cluster.drafting.pending_positions import OpenPlaces, Place
from protos.frozen import value
from protos.messages import Sampling

Floats = NDArray[np.float64]

RATE = 0.1  # learning rate: logged drafts are predicted as well with 0.05 and 0.2
SURETY = (0.1, 8.0)  # bounds: the weight of log probabilities would diverge for a draft that is never wrong
NOISE_SHARE = (0.3, 1.0)  # bounds of the noise's weight, relative to surety
LEAST_OTHERS = 1e-4  # lower bound of all other tokens' probability, whose logarithm is a feature

# Fitted with the bundled draft on the prompts of `slipstream bench`. For sampled requests the first two are
# multiplied by the temperature if it is below 1: errors in logits matter more at low temperatures.
GREEDY = (1.05, 0.0, -1.0, 0.75)
SAMPLED = (0.95, 0.8, 2.0, 0.75)


@value
class DraftKind:
    """Kind of draft; each kind has its own fit."""

    octave: int | None  # of the temperature, in half octaves; None: greedy
    is_further: bool  # predicted after another token without a forward in between

    @classmethod
    def of(cls, sampling: Sampling, is_further: bool) -> "DraftKind":
        if sampling.greedy:
            return cls(None, is_further)
        return cls(round(2 * math.log2(sampling.temperature)), is_further)

    @property
    def prior(self) -> Floats:
        """Initial weights, (4,)."""
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
        """Takes one gradient step; the target took the candidate at `place`, or, if None, another token."""
        features = candidates.features
        chances = candidates.chances(self.weights)
        taken = features[len(features) - 1 if place is None else place]
        gradient = taken - chances @ features
        self.squares += gradient**2
        weights = self.weights + RATE * gradient / np.sqrt(self.squares)
        surety = min(max(weights[0], SURETY[0]), SURETY[1])
        weights[0] = surety
        if self.weights[1]:  # greedy requests have no noise to learn from
            weights[1] = min(max(weights[1], NOISE_SHARE[0] * surety), NOISE_SHARE[1] * surety)
        self.weights = weights


@dataclass(frozen=True, eq=False, slots=True)
class Candidates:
    """Likely tokens at one position, (count,) each, with the draft's log probability and the noise."""

    ids: NDArray[np.int64]
    log_probs: Floats
    noise: Floats
    log_others: float  # log probability of all other tokens together

    @property
    def features(self) -> Floats:
        """Features (count + 1, 4) of each candidate, and in the last row of all others together."""
        count = len(self.ids)
        found = np.zeros((count + 1, 4))
        found[:count, 0] = self.log_probs
        found[:count, 1] = self.noise
        found[count, 2] = 1.0
        found[count, 3] = self.log_others
        return found

    def chances(self, weights: Floats) -> Floats:
        """Returns the probability that each is the target's token, (count + 1,); the last is all others'."""
        scores = self.features @ weights
        powers = np.exp(scores - scores.max())
        chances: Floats = powers / powers.sum()
        return chances


class Calibration:
    """All fits of a drafter, and the candidates at places that the target has yet to decide."""

    def __init__(self) -> None:
        self._fits: dict[DraftKind, _Fit] = {}
        self._open: OpenPlaces[tuple[DraftKind, Candidates]] = OpenPlaces()

    def chances(self, kind: DraftKind, candidates: Candidates) -> Floats:
        """Returns the probability that each is the target's token, (count + 1,); the last is all others'."""
        return candidates.chances(self._fit(kind).weights)

    def note(self, session: str, place: Place, kind: DraftKind, candidates: Candidates) -> None:
        """Records the candidates considered at a place."""
        self._open.note(session, place, (kind, candidates))

    def decided(self, session: str, tokens: Sequence[int]) -> None:
        """Learns from the places that the session's decided text has reached."""
        for (kind, candidates), token in self._open.decided(session, tokens):
            self._learn(kind, candidates, token)

    def close(self, session: str) -> None:
        self._open.close(session)

    def _learn(self, kind: DraftKind, candidates: Candidates, token: int) -> None:
        """Updates the fit with the target's token at that position."""
        places = np.flatnonzero(candidates.ids == token)
        self._fit(kind).learn(candidates, int(places[0]) if len(places) else None)

    def _fit(self, kind: DraftKind) -> _Fit:
        if kind not in self._fits:
            self._fits[kind] = _Fit(kind.prior)
        return self._fits[kind]
