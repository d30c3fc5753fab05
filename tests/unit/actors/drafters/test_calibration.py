"""Tests acceptance calibration: it fits a simulated target, and learns only from decided tokens."""

import math
from functools import cache

import numpy as np
import pytest

from actors.drafters.model.sampling import Calibration, Candidates, DraftKind
from protos.messages import Sampling

COUNT = 8
KIND = DraftKind.of(Sampling(temperature=1.0), is_consecutive_prediction=False)
ROUNDS = 4000


def some_candidates(rng: np.random.Generator) -> Candidates:
    log_probs = np.sort(np.log(rng.dirichlet(np.full(COUNT, 0.5)) * 0.9 + 1e-4))[::-1]
    return Candidates(np.arange(COUNT) + 10, log_probs, rng.gumbel(size=COUNT), math.log(0.1))


def target_token(rng: np.random.Generator, candidates: Candidates, error: float) -> int:
    """Draws the target's token with the same noise, from the draft's logits without errors."""
    wrong = rng.normal(scale=error, size=COUNT)
    return int(candidates.ids[(candidates.log_probs + wrong + candidates.noise).argmax()])


@cache
def fitted(error: float) -> Calibration:
    rng = np.random.default_rng(3)
    calibration = Calibration()
    for _ in range(ROUNDS):
        candidates = some_candidates(rng)
        calibration.note("s", (5, ()), KIND, candidates)
        calibration.committed("s", [0] * 5 + [target_token(rng, candidates, error)])
    return calibration


@pytest.mark.parametrize("error", [1.5, 4.0])
def test_chances_are_calibrated(error):
    """The limit is five standard errors over 2000 positions, or one false alarm in a million; the seed is fixed."""
    calibration = fitted(error)
    rng = np.random.default_rng(4)
    claimed = []
    right = []
    for _ in range(2000):
        candidates = some_candidates(rng)
        chances = calibration.chances(KIND, candidates)
        best = int(chances[:-1].argmax())
        claimed.append(chances[best])
        right.append(candidates.ids[best] == target_token(rng, candidates, error))
    bound = 5 * math.sqrt(sum(chance * (1 - chance) for chance in claimed)) / len(claimed)
    assert np.mean(right) == pytest.approx(np.mean(claimed), abs=bound + 0.02)


def test_poor_drafts_get_lower_confidence():
    rng = np.random.default_rng(7)
    candidates = [some_candidates(rng) for _ in range(200)]
    surest = [
        np.mean([calibration.chances(KIND, each)[:-1].max() for each in candidates])
        for calibration in (fitted(0.5), fitted(1.5), fitted(4.0))
    ]
    assert surest == sorted(surest, reverse=True)


def test_greedy_requests_have_no_noise_to_learn_of():
    greedy = DraftKind.of(Sampling(temperature=0.0), is_consecutive_prediction=False)
    calibration = Calibration()
    still = some_candidates(np.random.default_rng(1))
    candidates = Candidates(still.ids, still.log_probs, np.zeros(COUNT), still.log_others)
    for _ in range(100):
        calibration.note("s", (1, ()), greedy, candidates)
        calibration.committed("s", [0, int(candidates.ids[1])])
    other = Candidates(still.ids, still.log_probs, still.noise, still.log_others)
    assert np.array_equal(calibration.chances(greedy, candidates), calibration.chances(greedy, other))


def test_only_reached_positions_are_learned_from():
    rng = np.random.default_rng(2)
    candidates = some_candidates(rng)
    calibration = Calibration()
    before = calibration.chances(KIND, candidates).tolist()
    calibration.note("s", (2, (7,)), KIND, candidates)
    calibration.committed("s", [0, 0, 8, 10])
    assert calibration.chances(KIND, candidates).tolist() == before, "the text went another way"
    calibration.note("s", (4, (7,)), KIND, candidates)
    calibration.committed("s", [0, 0, 8, 10, 7])
    assert calibration.chances(KIND, candidates).tolist() == before, "that place is not decided yet"
    calibration.committed("s", [0, 0, 8, 10, 7, 10])
    assert calibration.chances(KIND, candidates).tolist() != before
    calibration.note("s", (6, ()), KIND, candidates)
    after = calibration.chances(KIND, candidates).tolist()
    calibration.close("s")
    calibration.committed("s", [0, 0, 8, 10, 7, 10, 10])
    assert calibration.chances(KIND, candidates).tolist() == after, "a session that is over"


def test_kinds_are_fitted_apart_and_begin_with_less_belief_at_low_temperatures():
    greedy, sampled, cooler = (DraftKind.of(Sampling(temperature=t), False).prior for t in (0.0, 1.0, 0.5))
    assert greedy[1] == 0 < sampled[1], "greedy requests have no noise"
    assert cooler.tolist() == [sampled[0] / 2, sampled[1] / 2, *sampled[2:]]
    assert DraftKind.of(Sampling(temperature=2.0), False).prior.tolist() == sampled.tolist()
    assert DraftKind.of(Sampling(temperature=1.0), True) != KIND


def test_hopeless_candidates_do_not_end_the_learning():
    """A broken model gives extremely low log probabilities."""
    candidates = Candidates(np.arange(2), np.array([-0.1, -30.0]), np.zeros(2), math.log(0.1))
    calibration = Calibration()
    for _ in range(50):
        calibration.note("s", (1, ()), KIND, candidates)
        calibration.committed("s", [0, 1])
    assert np.isfinite(calibration.chances(KIND, candidates)).all()
