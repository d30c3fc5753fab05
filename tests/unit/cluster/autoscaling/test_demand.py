"""Tests each pool's demand, computed from one or two reports."""

import pytest

from cluster.autoscaling import (
    DraftReport,
    DraftScaling,
    Need,
    TargetReport,
    TargetScaling,
    draft_need,
    fixed_ratio_need,
    reported,
    target_need,
)

TARGETS = TargetScaling(sessions_per_replica=8, max_sessions=16, first_token_s=2.0, up_delay_s=10.0, down_delay_s=300.0)
DRAFTERS = DraftScaling(sessions_per_replica=32, per_target=None, up_delay_s=10.0, down_delay_s=300.0)


def targets_needed(*reports: TargetReport, present: int = 1) -> float:
    need = target_need(reports, TARGETS, present)
    return need.replicas


def drafters_needed(target: TargetReport, *drafters: DraftReport, present: int = 1) -> float:
    need = draft_need([target], drafters, DRAFTERS, present)
    return need.replicas


def test_running_and_queued_sessions_need_targets() -> None:
    assert targets_needed(TargetReport(running=10, queued=6), TargetReport(running=8)) == 3


@pytest.mark.parametrize(("gain", "replicas"), [(1.0, 3.0), (1.5, 2.0), (0.8, 3.0), (9.0, 1.5)])
def test_a_gain_from_speculation_saves_targets_within_their_session_limit(gain: float, replicas: float) -> None:
    assert targets_needed(TargetReport(running=24, gain=gain)) == replicas


@pytest.mark.parametrize(
    ("gain", "expected"),
    [
        (1.5, "8 for each replica, times a gain of 1.50 from speculation"),
        (1.0, "8 for each replica"),  # also reported while speculation is off, whatever it gained
        (0.8, "8 for each replica"),
    ],
)
def test_the_reason_states_only_a_gain_that_saves_targets(gain: float, expected: str) -> None:
    need = target_need([TargetReport(running=24, gain=gain)], TARGETS, 1)
    assert need.why == f"24.0 sessions run and 0.0 queue, {expected}"


def test_a_full_cache_needs_targets() -> None:
    assert targets_needed(TargetReport(running=1, cache=1.0)) == 1.25


@pytest.mark.parametrize(
    ("unread", "first_token_s", "backlog_s", "replicas"),
    [(9, 6.0, 0.0, 3.0), (9, 0.0, 6.0, 3.0), (1, 60.0, 60.0, 1.0), (9, 1.5, 0.0, 1.0)],
    ids=["they wait", "they will", "one prompt is long", "soon enough"],
)
def test_a_backlog_of_prompts_needs_targets(
    unread: float, first_token_s: float, backlog_s: float, replicas: float
) -> None:
    report = TargetReport(unread=unread, first_token_s=first_token_s, backlog_s=backlog_s)
    assert targets_needed(report) == replicas


def test_targets_are_released_once_prompts_no_longer_need_them() -> None:
    """At a tenth of the allowed time, half of the targets suffice; at half of it, none may stop."""
    waits = {wait_s: [TargetReport(unread=9, first_token_s=wait_s)] * 4 for wait_s in (0.5, 1.0)}
    assert targets_needed(*waits[0.5], present=4) == 2
    assert targets_needed(*waits[1.0], present=4) == 4


def test_drafted_and_undrafted_sessions_need_drafters() -> None:
    assert drafters_needed(TargetReport(running=64, drafted=32, undrafted=16), DraftReport()) == 1.5
    assert drafters_needed(TargetReport(running=64)) == 0, "speculation is off"
    assert drafters_needed(TargetReport(running=1, undrafted=1), present=0) > 0, "there is none yet"


@pytest.mark.parametrize("trouble", [{"late": 0.3}, {"waiting": 0.3}], ids=str)
def test_late_blocks_of_busy_drafters_need_more_drafters(trouble: dict[str, float]) -> None:
    target = TargetReport(running=8, drafted=8, waiting=trouble.get("waiting", 0.0))
    assert drafters_needed(target, DraftReport(shared=0.8, late=trouble.get("late", 0.0))) == 1.6


def test_busy_drafters_without_late_blocks_need_no_more() -> None:
    target = TargetReport(running=8, drafted=8, waiting=0.1)
    assert drafters_needed(target, DraftReport(shared=0.8)) == 1


def test_late_blocks_of_idle_drafters_need_no_more() -> None:
    """A slow network or a slow pass does not get faster with another drafter."""
    assert drafters_needed(TargetReport(running=8, drafted=8), DraftReport(shared=0.1, late=0.9)) <= 1


def test_undrafted_sessions_count_like_drafted_ones() -> None:
    """Half of the sessions have drafts, and fill the drafter."""
    target = TargetReport(running=8, drafted=4, undrafted=4)
    assert drafters_needed(target, DraftReport(shared=1.0, late=0.5)) == 4
    assert drafters_needed(TargetReport(running=2, drafted=1, undrafted=1), DraftReport(shared=1.0, late=0.5)) == 2


def test_a_pool_without_reports_has_no_need() -> None:
    assert target_need([], TARGETS, 2) is None
    assert draft_need([], [DraftReport(shared=1.0)], DRAFTERS, 2) is None
    assert fixed_ratio_need(None, 2.0) is None


def test_a_coupled_pool_needs_the_size_of_the_other() -> None:
    assert fixed_ratio_need(3, 0.5) == Need(1.5, "0.5 for each of 3 target replicas", reserve=0.0)


@pytest.mark.parametrize(
    ("needed", "present", "size"),
    [(1.01, 1, 2), (1.0, 1, 1), (1.7, 2, 2), (0.85, 2, 2), (0.79, 2, 1), (0.0, 1, 0), (3.1, 7, 4), (0.1, 0, 1)],
)
def test_shrinking_needs_a_quarter_of_headroom(needed: float, present: int, size: int) -> None:
    assert Need(needed, "").size(present) == size


def test_a_replica_with_incomplete_reports_is_ignored() -> None:
    metrics = {"shared": {"a": 0.5, "b": 0.25}, "late": {"b": 0.125, "c": 1.0}, "ongoing": {"a": 1.0}}
    assert reported(DraftReport, metrics) == [DraftReport(0.25, 0.125)]
    assert reported(DraftReport, {}) == []
