"""Limits of a fleet's gain, found by simulation: the least acceptance and the longest drafting pass that pay off.

Targets that share a drafter drift out of step, and no simple formula gives how they wait for it.
"""

import math
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from cluster.costs import DraftCost, ForwardCost
from tools.planning.question import PLAIN, CandidateFleet, PlanQuestion
from tools.planning.trial import PlanAnswer, answer
from tools.simulation.setting import Mode
from tools.simulation.workload import ClosedLoop

LIMITS_SOUGHT = 2
MOST_RUNS = 7  # most simulations to find where a gain ends
PRECISION = 0.01  # of the result, relative to the search interval


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a fleet's gain."""

    candidate: CandidateFleet  # in lock step
    at_once: int  # concurrent sessions on one target
    acceptance: float | None  # least acceptance of every token with a gain; None: none suffices
    draft_s: float  # drafting pass that cancels the gain, for any number of sessions; 0 if verification alone does


def in_lock_step(best: CandidateFleet, question: PlanQuestion) -> CandidateFleet:
    """Returns the same fleet in lock step; if it has no drafters, one with a drafter for each target."""
    targets, drafters = best.fleet if best.block_len else (1, 1)
    return CandidateFleet(targets, drafters, best.block_len or max(question.block_lens), Mode.LOCK_STEP)


def limits(question: PlanQuestion, candidate: CandidateFleet, at_once: float, pool: Executor) -> Limits:
    """Finds the limits of a fleet in lock step at `at_once` sessions per target, with both searches in parallel."""
    sessions = max(1, round(at_once))
    asked = replace(question, arrivals=ClosedLoop(sessions))
    plain = answer(asked, PLAIN)
    acceptance = pool.submit(least_acceptance, asked, candidate, plain)
    draft_s = pool.submit(longest_draft_s, asked, candidate, plain, sessions)
    return Limits(candidate, sessions, acceptance.result(), draft_s.result())


def least_acceptance(question: PlanQuestion, candidate: CandidateFleet, plain: PlanAnswer) -> float | None:
    """Returns the acceptance of every token above which the fleet gains; None if no acceptance suffices."""

    def saved(acceptance: float) -> float:
        draft = replace(question.draft, acceptances=(acceptance,))
        return _saved(replace(question, draft=draft), candidate, plain)

    least = Point(0.0, saved(0.0))
    if least.value > 0:
        return least.at
    most = Point(1.0, saved(1.0))
    return crossing(saved, least, most) if most.value > 0 else None


def longest_draft_s(question: PlanQuestion, candidate: CandidateFleet, plain: PlanAnswer, sessions: int) -> float:
    """Returns the drafting pass, in seconds, that cancels the gain; 0 if verification alone does."""

    def saved(seconds: float) -> float:
        draft = DraftCost(forward=ForwardCost.linear(0.0), per_pass_s=seconds)
        return _saved(replace(question, costs=question.costs.model_copy(update={"draft": draft})), candidate, plain)

    shortest = Point(0.0, saved(0.0))
    if shortest.value <= 0:
        return shortest.at
    longest_s = (candidate.block_len + 1) * question.costs.plain_s(sessions)  # no round is shorter than its draft
    return crossing(saved, shortest, Point(longest_s, saved(longest_s)))


def _saved(question: PlanQuestion, candidate: CandidateFleet, plain: PlanAnswer) -> float:
    """Returns the share of non-speculative decoding's time that the fleet saves; negative if it takes longer.

    It is nearly linear in the searched quantity, unlike the gain.
    """
    return 1 - 1 / answer(question, candidate).gain(plain)


@dataclass(frozen=True, slots=True)
class Point:
    """Point of a function."""

    at: float
    value: float


def crossing(function: Callable[[float], float], left: Point, right: Point) -> float:
    """Finds the zero of a function between two points of opposite sign, by the Illinois variant of regula falsi."""
    precision = PRECISION * (right.at - left.at)
    found = math.nan
    for _ in range(MOST_RUNS):
        before = found
        found = (left.at * right.value - right.at * left.value) / (right.value - left.value)
        if abs(found - before) < precision:
            break
        middle = Point(found, function(found))
        if (middle.value > 0) == (left.value > 0):
            right = Point(right.at, right.value / 2) if before == left.at else right
            left = middle
        else:
            left = Point(left.at, left.value / 2) if before == right.at else left
            right = middle
    return found
