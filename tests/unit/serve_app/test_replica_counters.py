"""Tests a replica's published counters by cause."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from actors.attention.select_backend import AttentionReport, TriedBackend
from actors.drafter import Drafter
from actors.drafters.lookup.ngram import NgramDraft
from actors.engine.executor import ThreadEngine
from actors.target import TargetReplica
from cluster.audit import Audits
from cluster.config import AuditConfig
from cluster.draft_quality import kind_of
from cluster.drafting.session_table import DrafterLimits
from cluster.verification.scheduler import VerificationLimits
from protos.messages import Identity
from serve_app.publishing.ray_mirror import RayMirror
from serve_app.replica_counters import (
    CAUSE_LABEL,
    HELP,
    LABELS,
    Counts,
    attention_counts,
    audit_counts,
    counted_families,
    drafter_counts,
    example_counts,
    kept_states_counts,
    routed_counts,
    target_counts,
    version_counts,
)
from tests.unit.cluster.samples import a_block, an_open

DROPPED = "slipstream_dropped_blocks"
SECONDS = "slipstream_target_seconds"
AUDITS = Audits(AuditConfig(), "float32", lambda _: None)


class Recorder:
    """Sums the increments of Ray's counters."""

    def __init__(self) -> None:
        self.totals: dict[tuple[str, str], float] = defaultdict(float)
        self.calls = 0

    def make(self, name: str, _: str, labels: tuple[str, ...]) -> "RecordedCounter":
        assert labels == LABELS.get(name, CAUSE_LABEL)
        return RecordedCounter(self, name)

    def mirror(self, counts: Callable[[], Counts], clock: Callable[[], float]) -> RayMirror:
        return RayMirror(lambda: counted_families(counts()), self.make, clock=clock)


class RecordedCounter:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name

    def inc(self, value: float, tags: dict[str, str]) -> None:
        assert value > 0, "Ray refuses anything else"
        labels = LABELS.get(self._name, CAUSE_LABEL)
        assert tuple(tags) == labels
        self._recorder.totals[self._name, ",".join(tags.values())] += value
        self._recorder.calls += 1


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


MODELS = {"": Identity("v", "m")}


def a_target(clock: Clock) -> TargetReplica:
    executor: Any = None  # never computes
    limits = VerificationLimits(vocabulary=50, max_context=100, max_sessions=4, max_step_tokens=64)
    return TargetReplica(ThreadEngine(executor), limits, "v", "m", step_timeout_s=1.0, clock=clock)


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_counters_receive_increments(clock: Clock) -> None:
    counts: Counts = {DROPPED: {"late": 2}, SECONDS: {"idle": 0.5}}
    recorder = Recorder()
    counters = recorder.mirror(lambda: counts, clock)
    counters.publish()
    counts = {DROPPED: {"late": 2, "stale": 1}, SECONDS: {"idle": 0.75}}
    clock.now += 60
    counters.publish()
    assert recorder.totals == {(DROPPED, "late"): 2, (DROPPED, "stale"): 1, (SECONDS, "idle"): 0.75}
    assert recorder.calls == 4, "what has not grown is left alone"


def test_target_counts(clock: Clock) -> None:
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


def test_drafter_counts(clock: Clock) -> None:
    method = NgramDraft(3, 2)
    drafter = Drafter(method, DrafterLimits(vocabulary=50, max_context=100, max_sessions=4), MODELS, clock=clock)
    drafter.scheduler.counts.update(guess_hit=3, guess_miss=1, passes=5, passes_ahead=4, overtaken=2)
    counts = drafter_counts(drafter)
    assert counts["slipstream_guesses"] == {"hit": 3, "miss": 1}
    assert counts["slipstream_drafting_passes"] == {"asked": 5, "ahead": 4}
    assert counts["slipstream_drafter_events"] == {"overtaken": 2}
    assert drafter.scheduler.counts["guess_hit"] == 3, "the scheduler keeps its own"


def test_positions_are_counted_by_kind_of_block(clock: Clock) -> None:
    target = a_target(clock)
    kind = kind_of(5, is_prefix_cached=True)
    for accepted in (0, 1):
        target.scheduler.draft_quality.acceptance.block_verified("d", kind, requested=2, accepted=accepted)
    recorder = Recorder()
    counters = recorder.mirror(lambda: target_counts(target, "lookup"), clock)
    counters.publish()
    assert recorder.totals == {
        ("slipstream_draft_positions", "d,lookup,1,4,cached,accepted"): 1,
        ("slipstream_draft_positions", "d,lookup,1,4,cached,rejected"): 1,
        ("slipstream_draft_positions", "d,lookup,2,4,cached,rejected"): 1,
    }


def test_every_family_has_a_description(clock: Clock) -> None:
    method = NgramDraft(3, 2)
    drafter = Drafter(method, DrafterLimits(vocabulary=50, max_context=100, max_sessions=4), MODELS, clock=clock)
    target = {*target_counts(a_target(clock), "m"), *attention_counts([])}
    of_drafter = {**drafter_counts(drafter), **version_counts({}), **kept_states_counts({})}
    assert {*target, *of_drafter, *audit_counts(AUDITS), *routed_counts({}), *example_counts({})} == HELP.keys()


def test_attention_fallbacks_on_gpus_are_counted() -> None:
    tried = (TriedBackend("gathered", 3.0), TriedBackend("paged", None, "RuntimeError: no compiler"))
    slow = AttentionReport("gathered", tried)
    on_a_cpu = AttentionReport("gathered")
    assert attention_counts([slow, slow, on_a_cpu]) == {"slipstream_attention_fallbacks": {"gathered": 2}}
    assert attention_counts([on_a_cpu]) == {"slipstream_attention_fallbacks": {}}
