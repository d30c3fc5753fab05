"""Which fleet serves a load best: simulates candidates under given costs and compares them.

Every candidate, plain decoding among them, runs through the simulator, with the real schedulers and pacing. Drafting
inside the target's own process is no part of Slipstream and comes from the formula, without any overhead: the strongest
form of what it is compared with.
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import groupby

from cluster.simulation.workload import ClosedLoop
from serve_app.planning.break_even import LIMITS_SOUGHT, Limits, in_lock_step, limits
from serve_app.planning.formulas import InProcess, best_in_process
from serve_app.planning.processes import AtOnce
from serve_app.planning.question import CandidateFleet, PlanQuestion, candidates
from serve_app.planning.trial import PlanAnswer, answer, choose, is_promising


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
    answers = _answers(question, pool, whole)
    best = choose(answers, question)
    at_once = sessions_at_once(question, best)
    return Advice(
        answers=answers,
        best=best,
        plain=answers[0],
        in_process=best_in_process(question),
        at_once=at_once,
        limits=limits(question, in_lock_step(best.candidate, question), at_once, pool) if best.keeps_up else None,
    )


def _answers(question: PlanQuestion, pool: Executor, whole: bool) -> tuple[PlanAnswer, ...]:
    """Plain decoding first, then fleets where no target shares a drafter: what loses there is not tried with fewer.

    Those with fewer take most of the time, for they have more targets.
    """
    answers: list[PlanAnswer] = []
    by_sharing = groupby(sorted(candidates(question), key=_sharing), key=_sharing)
    for _, fleets in by_sharing:
        tried = [fleet for fleet in fleets if whole or is_promising(fleet, answers, question)]
        runs = [pool.submit(answer, question, fleet) for fleet in tried]
        answers += [run.result() for run in runs]
    return tuple(answers)


def _sharing(candidate: CandidateFleet) -> float:
    """How many targets there are for a drafter; 1 where each has its own, or more than one."""
    return max(1.0, candidate.targets / max(1, candidate.drafters))


def run_count(question: PlanQuestion) -> int:
    """How much `advise` asks of its pool at most."""
    return sum(1 for _ in candidates(question)) + LIMITS_SOUGHT


def sessions_at_once(question: PlanQuestion, best: PlanAnswer) -> float:
    """On one target."""
    if isinstance(question.arrivals, ClosedLoop):
        return float(question.arrivals.concurrency)
    return question.arrivals.per_s * best.latency_s
