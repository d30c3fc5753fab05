"""Which fleet serves a load best: simulates candidates under given costs and compares them.

Every candidate, plain decoding among them, runs through the simulator, with the real schedulers and pacing. Drafting
inside the target's own process is no part of Slipstream and comes from the formula, without any overhead: the strongest
form of what it is compared with.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import groupby

from tools.planning.break_even import LIMITS_SOUGHT, Limits, in_lock_step, limits
from tools.planning.formulas import InProcess, best_in_process
from tools.planning.processes import AtOnce
from tools.planning.question import PLAIN, CandidateFleet, PlanQuestion, candidates
from tools.planning.trial import PROMISING, PlanAnswer, answer, choose, is_promising, merit_among, sketch
from tools.simulation.workload import ClosedLoop


@dataclass(frozen=True, slots=True)
class Advice:
    """Every candidate, the one to take, and where its gain ends."""

    answers: tuple[PlanAnswer, ...]
    best: PlanAnswer
    plain: PlanAnswer
    in_process: InProcess
    at_once: float  # sessions on one target, under the best candidate
    limits: Limits | None  # None where the best does not keep up: there is no such number of sessions


def advise(question: PlanQuestion, pool: Executor | None = None, whole: bool = False) -> Advice:
    """Makes its runs in `pool`, by default in this process; with `whole` those too that cannot be best."""
    pool = pool or AtOnce()
    fleets = list(candidates(question))
    tried = fleets if whole else _shortlist(question, fleets, pool)
    answers = _runs(answer, question, tried, pool)
    if not any(one.keeps_up for one in answers):  # of the others one may, which short runs do not tell
        answers += _runs(answer, question, [fleet for fleet in fleets if fleet not in tried], pool)
    best = choose(answers, question)
    at_once = sessions_at_once(question, best)
    return Advice(
        answers=tuple(answers),
        best=best,
        plain=answers[0],
        in_process=best_in_process(question),
        at_once=at_once,
        limits=limits(question, in_lock_step(best.candidate, question), at_once, pool) if best.keeps_up else None,
    )


def _shortlist(question: PlanQuestion, fleets: Sequence[CandidateFleet], pool: Executor) -> list[CandidateFleet]:
    """Plain decoding, and what comes near the best in short runs, in which all fleets are asked the same.

    Fleets where no target shares a drafter come first: what loses there is not tried with fewer. Those with fewer take
    most of the time, for they have more targets.
    """
    seen: list[PlanAnswer] = []
    for _, alike in groupby(sorted(fleets, key=_sharing), key=_sharing):
        seen += _runs(sketch, question, [fleet for fleet in alike if is_promising(fleet, seen, question)], pool)
    merit = merit_among(seen, question)
    enough = PROMISING * max(map(merit, seen))
    return [one.candidate for one in seen if one.candidate == PLAIN or merit(one) >= enough]


def _runs(
    run: Callable[[PlanQuestion, CandidateFleet], PlanAnswer],
    question: PlanQuestion,
    fleets: Sequence[CandidateFleet],
    pool: Executor,
) -> list[PlanAnswer]:
    """Of each fleet, side by side."""
    under_way = [pool.submit(run, question, fleet) for fleet in fleets]
    return [one.result() for one in under_way]


def _sharing(candidate: CandidateFleet) -> float:
    """How many targets there are for a drafter; 1 where each has its own, or more than one."""
    return max(1.0, candidate.targets / max(1, candidate.drafters))


def run_count(question: PlanQuestion, whole: bool = False) -> int:
    """How much `advise` asks of its pool at most: of each fleet a short run and a whole one, or only that."""
    return (1 if whole else 2) * sum(1 for _ in candidates(question)) + LIMITS_SOUGHT


def sessions_at_once(question: PlanQuestion, best: PlanAnswer) -> float:
    """On one target."""
    if isinstance(question.arrivals, ClosedLoop):
        return float(question.arrivals.concurrency)
    return question.arrivals.per_s * best.latency_s
