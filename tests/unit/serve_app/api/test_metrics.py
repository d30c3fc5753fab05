"""Tests counters of requests, prompts and verdicts."""

from dataclasses import dataclass
from itertools import count

import pytest

from cluster.routing.ledger import CommittedTokens
from serve_app.api.metrics import Metrics
from serve_app.api.replies import FinishReason


def test_verdicts_are_counted() -> None:
    metrics = Metrics()
    metrics.committed(CommittedTokens((1, 2, 3), accepted=2, drafted=5), 0.1, first=True)
    metrics.committed(CommittedTokens((1,), accepted=0, drafted=0), 0.1, first=False)
    sample = metrics.registry.get_sample_value
    counted = {
        name: sample(f"slipstream_{name}_total")
        for name in ("completion_tokens", "draft_tokens", "accepted_tokens", "blocks", "verifies")
    }
    expected = {"completion_tokens": 4, "draft_tokens": 5, "accepted_tokens": 2, "blocks": 1, "verifies": 2}
    assert counted == expected


def test_a_request_is_running_until_it_ends() -> None:
    metrics = Metrics(clock=count().__next__)
    sample = metrics.registry.get_sample_value
    with metrics.request("chat") as record:
        assert sample("slipstream_running_requests") == 1
        record.status = 200
        record.choices = [Choice(1, "stop", 1.0)]
    assert sample("slipstream_running_requests") == 0
    assert sample("slipstream_requests_total", {"endpoint": "chat", "status": "200"}) == 1
    assert sample("slipstream_request_seconds_sum") == 1


def test_a_cancelled_request_counts_as_client_left() -> None:
    metrics = Metrics()
    with pytest.raises(KeyboardInterrupt), metrics.request("chat"):
        raise KeyboardInterrupt
    assert metrics.registry.get_sample_value("slipstream_requests_total", {"endpoint": "chat", "status": "499"})


@pytest.mark.parametrize(("status", "observed"), [(200, 1), (499, 1), (429, 0), (500, 0)])
def test_latency_excludes_refused_and_failed_requests(status: int, observed: int) -> None:
    metrics = Metrics()
    with metrics.request("chat") as record:
        record.status = status
        record.choices = [Choice(0, None, None)]
    with metrics.request("chat") as record:
        record.status = status  # without choices
    assert metrics.registry.get_sample_value("slipstream_request_seconds_count") == observed


def test_metrics_instances_are_independent() -> None:
    one = Metrics()
    other = Metrics()
    one.prompt(3)
    assert b"slipstream_prompt_tokens_total 3.0" in one.exposition()
    assert b"slipstream_prompt_tokens_total 0.0" in other.exposition()


def test_remedies_are_read_at_each_exposition() -> None:
    remedies: dict[tuple[str, str], int] = {}
    metrics = Metrics(recoveries=lambda: remedies)
    remedies["1.2.3.4:5", "given up"] = 2
    labels = {"drafter": "1.2.3.4:5", "remedy": "given up"}
    assert metrics.registry.get_sample_value("slipstream_drafter_remedies_total", labels) == 2


def test_accepted_tokens_are_counted_by_position() -> None:
    metrics = Metrics()
    for accepted in (2, 0, 1):
        metrics.committed(CommittedTokens((1, 2, 3), accepted=accepted, drafted=3), 0.1, first=False)
    at = [metrics.registry.get_sample_value("slipstream_accepted_tokens_at_total", {"position": p}) for p in "012"]
    assert at == [2, 1, None]


@dataclass
class Choice:
    tokens: int
    finish: FinishReason | None
    first_token_s: float | None
    last_token_s: float | None = None
    accepted: int = 0
    rejected: int = 0


def test_choices_are_counted_by_finish_reason_and_timed_after_their_first_token() -> None:
    metrics = Metrics(clock=iter((0.0, 9.0)).__next__)
    with metrics.request("chat") as record:
        record.choices = [Choice(5, "stop", 1.0, 5.0), Choice(1, "length", 1.0, 1.0), Choice(0, None, None)]
    sample = metrics.registry.get_sample_value
    ends = [sample("slipstream_finished_total", {"finished_reason": end}) for end in ("stop", "length", "abort")]
    assert ends == [1, 1, 1]
    assert sample("slipstream_time_per_output_token_seconds_count") == 1
    assert sample("slipstream_time_per_output_token_seconds_sum") == 1.0


def test_handovers_match_the_routers_counts():
    handovers = {("target", "planned"): 3, ("drafter", "lost"): 1}
    metrics = Metrics(handovers=lambda: handovers)
    for (pool, cause), sessions in handovers.items():
        labels = {"pool": pool, "cause": cause}
        assert metrics.registry.get_sample_value("slipstream_handovers_total", labels) == sessions
