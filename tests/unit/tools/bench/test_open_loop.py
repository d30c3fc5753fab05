"""Tests requests at random arrival times, and the results of a run."""

import itertools
import json
from statistics import mean, pstdev

import httpx
import pytest

from serve_app.endpoint_client import ChatEndpoint, EndpointError, TimedAnswer
from tools.bench.experiment import PLAIN, SPECULATIVE, Prompt
from tools.bench.open_loop import Sweep, arrivals, load_point, run_sweep

USAGE = {
    "completion_tokens": 4,
    "completion_tokens_details": {"accepted_prediction_tokens": 1, "rejected_prediction_tokens": 2},
}
EVENT = f"data: {json.dumps({'choices': [{'delta': {'content': 'text'}}], 'usage': USAGE})}\n\n"


def test_arrival_times_form_a_poisson_process() -> None:
    """Exponential gaps have a standard deviation equal to their mean, within 3 % for 4000 gaps in 19 of 20 cases."""
    moments = arrivals(rate=4.0, count=4001, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(moments)]
    assert moments[0] == 0
    assert mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert pstdev(gaps) == pytest.approx(0.25, rel=0.07)


def test_arrival_times_depend_only_on_the_seed() -> None:
    assert arrivals(2.0, 5, 3) == arrivals(2.0, 5, 3) != arrivals(2.0, 5, 4)


async def test_every_arm_gets_the_same_requests_at_every_rate() -> None:
    asked: list[tuple[str, bool]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        asked.append((body["messages"][-1]["content"], "draft_tokens" in body["speculation"]))
        return httpx.Response(200, text=EVENT)

    http = httpx.AsyncClient(base_url="http://scripted", transport=httpx.MockTransport(answer))
    sweep = Sweep((Prompt(kind="a", prompt="one"), Prompt(kind="a", prompt="two")), (1e6, 2e6), requests=3)
    runs: list[None] = []
    points = await run_sweep(ChatEndpoint(http), "m", sweep, lambda: runs.append(None))
    assert [(point.arm, point.load) for point in points] == [
        (SPECULATIVE, 1e6),
        (PLAIN, 1e6),
        (PLAIN, 2e6),
        (SPECULATIVE, 2e6),
    ]
    assert len(runs) == sweep.runs
    measured = asked[2:]  # after one warm-up request per arm
    for is_plain in (False, True):
        assert sorted(prompt for prompt, plain in measured if plain is is_plain) == ["one"] * 4 + ["two"] * 2


def test_failures_are_counted_separately() -> None:
    outcomes = [TimedAnswer("", 10, 0, 0, 0.1, 1.0), EndpointError("429"), TimedAnswer("", 20, 0, 0, 0.3, 1.0)]
    point = load_point(PLAIN, 2.0, outcomes, seconds=2.0)
    assert (point.answers, point.failed, point.tokens_per_s) == (2, 1, 15.0)
    assert point.quantile_s("ttft", "p50") == pytest.approx(0.2)


def test_a_run_without_answers_reports_the_reason() -> None:
    with pytest.raises(EndpointError, match="429: full"):
        load_point(PLAIN, 2.0, [EndpointError("429: full")], 1.0)
