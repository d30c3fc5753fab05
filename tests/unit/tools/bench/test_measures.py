"""Tests the experiment's arithmetic."""

import numpy as np
import pytest

from serve_app.endpoint_client import Tally, TimedAnswer
from tools.bench.latencies import Batch, acceptance_by_kind, arm_summary, mean_ratio, speedup


def batch(arm: str, index: int, seconds: float, *, repeat: int = 0, text: str = "same", kind: str = "chat") -> Batch:
    answer = TimedAnswer(text, tokens=10, accepted=4, rejected=2, first_token_s=seconds / 10, latency_s=seconds)
    tally = Tally(tokens=10, drafted=6, accepted=4, verifies=6, blocks=2)
    return Batch(arm, 1, index, repeat, seconds, tally, (kind,), (answer,))


def test_acceptance_of_a_tally() -> None:
    tally = Tally(tokens=10, drafted=6, accepted=3, verifies=7, blocks=2)
    assert (tally.rejected, tally.acceptance_rate, tally.acceptance_length) == (3, 0.5, 2.5)
    assert (Tally(5).acceptance_rate, Tally(5).acceptance_length) == (None, None)
    assert tally + tally - tally == tally


def test_throughput_is_total_tokens_over_total_time() -> None:
    summary = arm_summary([batch("plain", 0, 1.0), batch("plain", 1, 4.0)])
    assert summary.tokens_per_s == 4.0  # not the mean of 10 and 2.5
    assert summary.latency_s == 2.5
    assert summary.tally == Tally(20, 12, 8, 12, 4)


def test_speedup_pairs_batches_in_any_order() -> None:
    base = [batch("plain", 0, 2.0), batch("plain", 1, 30.0)]
    fast = [batch("speculative", 1, 10.0, text="other"), batch("speculative", 0, 1.0)]
    result = speedup(fast, base)
    assert result.mean == pytest.approx(6**0.5)  # geometric mean of 2 and 3
    assert (result.low, result.high) == (pytest.approx(2), pytest.approx(3))
    assert (result.equal, result.answers) == (1, 2)


def test_repetitions_of_a_prompt_are_one_observation() -> None:
    """Counted separately, 50 repeats of two prompts would narrow the interval like 100 prompts."""
    base = [batch("plain", index, 2.0, repeat=repeat) for index in range(2) for repeat in range(50)]
    fast = [batch("speculative", index, 1.0 + index, repeat=repeat) for index in range(2) for repeat in range(50)]
    result = speedup(fast, base)
    assert (result.low, result.high) == (pytest.approx(1), pytest.approx(2))


def test_intervals_have_the_stated_coverage() -> None:
    """The test draws 24 log-normal ratios 400 times.

    The percentile bootstrap at n = 24 covers about 93 %; 88 % is 4 sigma below.
    """
    draw = np.random.default_rng(1)
    covered = 0
    for _ in range(400):
        _, low, high = mean_ratio(np.exp(draw.normal(0.3, 0.2, 24)).tolist())
        covered += low <= np.exp(0.3) <= high
    assert 0.88 * 400 <= covered <= 0.98 * 400


def test_equal_ratios_have_an_empty_interval() -> None:
    assert mean_ratio([1.5] * 8) == (pytest.approx(1.5),) * 3


def test_acceptance_is_listed_by_kind() -> None:
    kinds = acceptance_by_kind([batch("speculative", 0, 1), batch("speculative", 1, 1, kind="code")] * 2)
    assert {kind: tally.drafted for kind, tally in kinds.items()} == {"chat": 12, "code": 12}
    assert kinds["code"].acceptance_rate == pytest.approx(4 / 6)
