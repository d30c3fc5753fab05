"""Compares latency quantiles with values computed by hand."""

import pytest

from serve_app.endpoint_client import TimedAnswer
from tools.bench.latencies import Latencies, LoadPoint, Quantiles


def answer(tokens: int, first_s: float, latency_s: float, *gaps_s: float) -> TimedAnswer:
    return TimedAnswer("", tokens, 0, 0, first_s, latency_s, gaps_s)


def test_latencies_cover_their_parts_of_an_answer() -> None:
    found = Latencies.of([answer(5, 0.25, 1.25, 0.5, 0.5)])
    assert found.ttft == Quantiles(0.25, 0.25, 0.25)
    assert found.tpot == Quantiles(0.25, 0.25, 0.25), "one second for the four tokens after the first"
    assert found.itl == Quantiles(0.5, 0.5, 0.5), "of events, whatever they brought"


def test_quantiles_are_interpolated() -> None:
    found = Quantiles.of(range(101))
    assert found == Quantiles(50.0, 90.0, 99.0)


def test_gaps_are_pooled_over_answers() -> None:
    found = Latencies.of([answer(2, 0.0, 1.0, 1.0), answer(11, 0.0, 1.0, *[0.1] * 10)])
    assert found.itl.p50 == pytest.approx(0.1), "ten of eleven gaps"
    assert found.tpot.p50 == pytest.approx(0.55), "between 1.0 and 0.1"


def test_one_token_answers_have_no_time_per_token() -> None:
    point = LoadPoint("plain", 1, 1.0, 1, 0, Latencies.of([answer(1, 0.5, 0.5)]))
    assert (point.quantile_s("tpot", "p50"), point.quantile_s("itl", "p99")) == (None, None)
    assert point.quantile_s("ttft", "p99") == 0.5
