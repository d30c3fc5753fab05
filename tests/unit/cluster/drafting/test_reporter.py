"""Tests a drafter's report of its passes."""

import pytest

from cluster.autoscaling import DraftReport
from cluster.costs import DraftCost, ForwardCost
from cluster.drafting.scheduler import DraftReporter

FOR_EACH = DraftCost(forward=ForwardCost.linear(0.0, per_row_s=0.01))
AS_LONG_FOR_MANY = DraftCost(forward=ForwardCost.linear(0.01))
UNKNOWN = DraftCost(forward=ForwardCost.linear(0.0))


@pytest.mark.parametrize(
    ("profile", "sessions", "shared"),
    [(FOR_EACH, 4, 0.375), (FOR_EACH, 1, 0.0), (AS_LONG_FOR_MANY, 4, 0.0), (UNKNOWN, 4, 0.375)],
    ids=["a row costs", "nobody to share with", "a row is free", "no profile"],
)
def test_the_report_includes_the_saving_of_further_drafters(profile: DraftCost, sessions: int, shared: float) -> None:
    """The drafter is busy half of the time."""
    reporter = DraftReporter(profile)
    reporter.report(0, 0, 100.0)
    reporter.record_pass(sessions, 3, 1.0)
    assert reporter.report(0, 0, 102.0) == DraftReport(shared, 0.0)


def test_each_report_covers_the_time_since_the_last() -> None:
    reporter = DraftReporter(FOR_EACH)
    reporter.report(10, 4, 100.0)
    reporter.record_pass(2, 1, 1.0)
    assert reporter.report(18, 6, 101.0) == DraftReport(0.5, 0.25)
    assert reporter.report(18, 6, 102.0) == DraftReport(0.0, 0.0)
