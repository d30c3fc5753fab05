"""Search for the fleet that serves a load best: simulates candidates under given costs and compares them.

Every candidate, non-speculative decoding included, runs through the simulator with the real schedulers and pacing.
Drafting inside the target's own process is not part of Slipstream; a formula without overhead gives the strongest form
of that alternative.

Executors for simulated runs, which are pure and independent, so that processes can share them.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import ParamSpec, TypeVar

from tools.planning.estimates import PLAIN, CandidateFleet, InProcess, PlanQuestion, best_in_process, candidates
from tools.planning.trial import (
    LIMITS_SOUGHT,
    PROMISING,
    Limits,
    PlanAnswer,
    answer,
    choose,
    in_lock_step,
    is_promising,
    limits,
    merit_among,
    sketch,
)
from tools.simulation.oracle import ClosedLoop

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class AtOnce(Executor):
    """Runs in this process, before `submit` returns."""

    def submit(
        self, run: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        done: Future[Result] = Future()
        done.set_result(run(*args, **kwargs))
        return done


class Watched(Executor):
    """Wraps another executor; `advance` is called after each run."""

    def __init__(self, pool: Executor, advance: Callable[[], None]) -> None:
        self._pool = pool
        self._advance = advance

    def submit(
        self, run: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        future = self._pool.submit(run, *args, **kwargs)
        future.add_done_callback(lambda _: self._advance())
        return future


@contextmanager
def processes() -> Iterator[Executor]:
    """Opens a pool with one process per CPU; pending runs are cancelled when the caller leaves."""
    pool = ProcessPoolExecutor(
        len(os.sched_getaffinity(0)),
        mp_context=multiprocessing.get_context("spawn"),  # forking a process with threads may hang
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # the caller stops them
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass(frozen=True, slots=True)
class Advice:
    """All candidates, the recommended one, and where its gain ends."""

    answers: tuple[PlanAnswer, ...]
    best: PlanAnswer
    plain: PlanAnswer
    in_process: InProcess
    at_once: float  # concurrent sessions on one target under the best candidate
    limits: Limits | None  # None if the best does not keep up: `at_once` is undefined then


def advise(question: PlanQuestion, pool: Executor | None = None, whole: bool = False) -> Advice:
    """Simulates in `pool`, by default in this process; `whole` includes candidates that cannot be best."""
    pool = pool or AtOnce()
    fleets = list(candidates(question))
    tried = fleets if whole else _shortlist(question, fleets, pool)
    answers = _runs(answer, question, tried, pool)
    if not any(one.keeps_up for one in answers):  # a remaining one may, which short runs cannot show
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
    """Returns non-speculative decoding and the fleets that come near the best in short runs.

    Fleets whose targets share no drafter run first: what loses there is not tried with fewer drafters. Fleets with
    fewer drafters take most of the time, because they have more targets.
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
    """Runs all fleets in parallel."""
    under_way = [pool.submit(run, question, fleet) for fleet in fleets]
    return [one.result() for one in under_way]


def _sharing(candidate: CandidateFleet) -> float:
    """Returns the targets per drafter; 1 if each has its own, or more than one."""
    return max(1.0, candidate.targets / max(1, candidate.drafters))


def run_count(question: PlanQuestion, whole: bool = False) -> int:
    """Returns the most runs that `advise` submits: a short and a full one per fleet, or only a full one."""
    return (1 if whole else 2) * sum(1 for _ in candidates(question)) + LIMITS_SOUGHT


def sessions_at_once(question: PlanQuestion, best: PlanAnswer) -> float:
    """Returns the concurrent sessions on one target."""
    if isinstance(question.arrivals, ClosedLoop):
        return float(question.arrivals.concurrency)
    return question.arrivals.per_s * best.latency_s
