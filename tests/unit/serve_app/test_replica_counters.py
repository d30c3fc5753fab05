"""Counters by cause that a replica publishes."""

from collections import defaultdict
from typing import Any

import pytest

from actors.attention.select_backend import AttentionReport, Tried
from actors.drafter import Drafter
from actors.drafters.lookup.ngram import NgramDraft
from actors.engine.executor import ThreadEngine
from actors.target import TargetReplica
from cluster.audit import Audits
from cluster.config import AuditConfig
from cluster.draft_quality import kind_of
from cluster.drafting.session_table import DrafterLimits
from cluster.verification.scheduler import VerificationLimits
from serve_app.replica_counters import (
    CAUSE,
    HELP,
    LABELS,
    PERIOD_S,
    Counts,
    ReplicaCounters,
    attention_counts,
    audit_counts,
    drafter_counts,
    routed_counts,
    target_counts,
)
from tests.unit.cluster.samples import a_block, an_open

AUDITS = Audits(AuditConfig(), "float32", lambda _: None)


class Recorder:
    """A Prometheus client that adds up."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str], float] = defaultdict(float)
        self.calls = 0

    def make(self, name: str) -> "RecordedCounter":
        return RecordedCounter(self, name)


class RecordedCounter:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses anything else"
        labels = LABELS.get(self._name, CAUSE)
        assert tuple(tags) == labels
        self._recorder.totals[self._name, ",".join(tags.values())] += value
        self._recorder.calls += 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def a_target(clock: Clock) -> TargetReplica:
    executor: Any = None  # nothing is computed
    limits = VerificationLimits(vocabulary=50, max_context=100, max_sessions=4, max_step_tokens=64)
    return TargetReplica(ThreadEngine(executor), limits, "v", "m", step_timeout_s=1.0, clock=clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_counters_stand_where_the_counts_do_whenever_they_were_published(clock: Clock) -> None:
    counts: Counts = {"a": {"late": 2}, "b": {"idle": 0.5}}
    recorder = Recorder()
    counters = ReplicaCounters(lambda: counts, recorder.make, clock)
    counters.publish()
    counts = {"a": {"late": 2, "stale": 1}, "b": {"idle": 0.75}}
    clock.now += PERIOD_S
    counters.publish()
    assert recorder.totals == {("a", "late"): 2, ("a", "stale"): 1, ("b", "idle"): 0.75}
    assert recorder.calls == 4, "what has not grown is left alone"


def test_publishing_is_cheap_however_often_it_is_asked_for(clock: Clock) -> None:
    asked = 0

    def counts() -> Counts:
        nonlocal asked
        asked += 1
        return {"a": {"late": asked}}

    recorder = Recorder()
    counters = ReplicaCounters(counts, recorder.make, clock)
    made = asked
    for clock.now in (0.0, 1.0, PERIOD_S - 0.1):
        counters.publish()
    assert (asked - made, recorder.calls) == (1, 1)


def test_a_target_says_of_its_blocks_and_its_time_what_came_of_them(clock: Clock) -> None:
    target = a_target(clock)
    scheduler = target.scheduler
    scheduler.receive("router#1", an_open(tokens=(1, 2)), 0.0)
    scheduler.receive("drafter#1", a_block((1, 2, 9, 9), (1, 2, 3, 4, 5)), 0.0)
    assert scheduler.plan(now=2.0) is not None
    target.refused["Block"] += 1
    scheduler.feeds.rows["apart"] += 3
    scheduler.counts.nonfinite += 2
    counts = target_counts(target, "m")
    assert counts["slipstream_dropped_blocks"] == {"too_long": 1}
    assert counts["slipstream_received_draft_tokens"] == {"accepted": 0, "wasted": 5}
    assert counts["slipstream_target_seconds"] == {"step": 0.0, "idle": 2.0}
    assert counts["slipstream_target_events"] == {"rebased": 0, "desync": 0, "preempted": 0, "states_lost": 0}
    assert counts["slipstream_nonfinite_logits"] == {"ended": 2}
    assert counts["slipstream_state_rows"] == {"verdict": 0, "apart": 3, "again": 0}
    assert counts["slipstream_refused_messages"] == {"Block": 1}


def test_a_drafter_says_how_its_guesses_fared_and_what_its_passes_were_for(clock: Clock) -> None:
    method = NgramDraft(3, 2)
    drafter = Drafter(method, DrafterLimits(vocabulary=50, max_context=100, max_sessions=4), "v", "m", clock=clock)
    drafter.scheduler.counts.update(guess_hit=3, guess_miss=1, passes=5, passes_ahead=4, overtaken=2)
    counts = drafter_counts(drafter)
    assert counts["slipstream_guesses"] == {"hit": 3, "miss": 1}
    assert counts["slipstream_drafting_passes"] == {"asked": 5, "ahead": 4}
    assert counts["slipstream_drafter_events"] == {"overtaken": 2}
    assert drafter.scheduler.counts["guess_hit"] == 3, "the scheduler keeps its own"


def test_positions_are_counted_by_all_that_blocks_are_told_apart_by(clock: Clock) -> None:
    target = a_target(clock)
    kind = kind_of(5, is_prefix_cached=True)
    for accepted in (0, 1):
        target.scheduler.sentinel.tally.block_verified("d", kind, asked=2, accepted=accepted)
    recorder = Recorder()
    counters = ReplicaCounters(lambda: target_counts(target, "lookup"), recorder.make, clock)
    counters.publish()
    assert recorder.totals == {
        ("slipstream_draft_positions", "d,lookup,1,4,cached,accepted"): 1,
        ("slipstream_draft_positions", "d,lookup,1,4,cached,rejected"): 1,
        ("slipstream_draft_positions", "d,lookup,2,4,cached,rejected"): 1,
    }


def test_every_family_is_there_from_the_start_and_has_a_description(clock: Clock) -> None:
    """A counter is made once: causes may come later, families may not."""
    method = NgramDraft(3, 2)
    drafter = Drafter(method, DrafterLimits(vocabulary=50, max_context=100, max_sessions=4), "v", "m", clock=clock)
    target = {*target_counts(a_target(clock), "m"), *attention_counts([])}
    assert {*target, *drafter_counts(drafter), *audit_counts(AUDITS), *routed_counts({})} == HELP.keys()


def test_ranks_that_attend_the_slow_way_on_a_gpu_are_counted() -> None:
    tried = (Tried("gathered", 3.0), Tried("flex", None, "RuntimeError: no compiler"))
    slow = AttentionReport("gathered", tried)
    on_a_cpu = AttentionReport("gathered")
    assert attention_counts([slow, slow, on_a_cpu]) == {"slipstream_attention_fallbacks": {"gathered": 2}}
    assert attention_counts([on_a_cpu]) == {"slipstream_attention_fallbacks": {}}
