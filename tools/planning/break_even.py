"""Where the gain of a fleet ends: the least acceptance and the longest drafting pass that pay, by simulation.

Targets that share a drafter go out of step, and how they wait for it no simple formula says.
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
MOST_RUNS = 7  # until it is known where a gain ends
PRECISION = 0.01  # of where it may end, to which it is then known


@dataclass(frozen=True, slots=True)
class Limits:
    """Where the gain of a fleet ends."""

    candidate: CandidateFleet  # in lock-step
    at_once: int  # sessions on one target, at all times
    acceptance: float | None  # of every token, from which on it gains; None: no acceptance is enough
    draft_s: float  # drafting pass that eats the gain, over however many sessions; 0 where verification alone does


def in_lock_step(best: CandidateFleet, question: PlanQuestion) -> CandidateFleet:
    """The same fleet; where none drafts, one with a drafter for each target."""
    targets, drafters = best.fleet if best.block_len else (1, 1)
    return CandidateFleet(targets, drafters, best.block_len or max(question.block_lens), Mode.LOCK_STEP)


def limits(question: PlanQuestion, candidate: CandidateFleet, at_once: float, pool: Executor) -> Limits:
    """Of a fleet in lock-step at so many sessions at once on a target; both searches go on side by side."""
    sessions = max(1, round(at_once))
    asked = replace(question, arrivals=ClosedLoop(sessions))
    plain = answer(asked, PLAIN)
    acceptance = pool.submit(least_acceptance, asked, candidate, plain)
    draft_s = pool.submit(longest_draft_s, asked, candidate, plain, sessions)
    return Limits(candidate, sessions, acceptance.result(), draft_s.result())


def least_acceptance(question: PlanQuestion, candidate: CandidateFleet, plain: PlanAnswer) -> float | None:
    """Of every token, from which on the fleet gains; None: no acceptance is enough."""

    def saved(acceptance: float) -> float:
        draft = replace(question.draft, acceptances=(acceptance,))
        return _saved(replace(question, draft=draft), candidate, plain)

    least = Point(0.0, saved(0.0))
    if least.value > 0:
        return least.at
    most = Point(1.0, saved(1.0))
    return crossing(saved, least, most) if most.value > 0 else None


def longest_draft_s(question: PlanQuestion, candidate: CandidateFleet, plain: PlanAnswer, sessions: int) -> float:
    """The drafting pass that eats the gain; 0 where verification alone does."""

    def saved(seconds: float) -> float:
        draft = DraftCost(forward=ForwardCost.linear(0.0), per_pass_s=seconds)
        return _saved(replace(question, costs=question.costs.model_copy(update={"draft": draft})), candidate, plain)

    shortest = Point(0.0, saved(0.0))
    if shortest.value <= 0:
        return shortest.at
    longest_s = (candidate.block_len + 1) * question.costs.plain_s(sessions)  # a round is no shorter than its draft
    return crossing(saved, shortest, Point(longest_s, saved(longest_s)))


def _saved(question: PlanQuestion, candidate: CandidateFleet, plain: PlanAnswer) -> float:
    """The share of plain decoding's time that the fleet saves; below 0 where it takes longer.

    Nearly linear in what is sought, as the gain is not.
    """
    return 1 - 1 / answer(question, candidate).gain(plain)


@dataclass(frozen=True, slots=True)
class Point:
    """Of a function."""

    at: float
    value: float


def crossing(function: Callable[[float], float], left: Point, right: Point) -> float:
    """Where a function is 0 between two points of unlike sign, by regula falsi in its Illinois variant."""
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
