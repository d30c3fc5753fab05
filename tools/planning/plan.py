"""Finds the best fleet for a load by simulating candidates in parallel.

Simulations are pure and independent, so they run in a process pool.
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

from tools.planning.estimates import (
    NON_SPECULATIVE,
    CandidateFleet,
    InProcessResult,
    PlanInput,
    best_in_process,
    candidates,
)
from tools.planning.trial import (
    LIMIT_SEARCHES,
    PROMISING_SHARE,
    CandidateResult,
    Limits,
    choose_best,
    is_promising,
    limits,
    lock_step_candidate,
    merit_function,
    simulate,
    simulate_briefly,
)
from tools.simulation.oracle import ClosedLoop

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class InlineExecutor(Executor):
    """Executor that runs each call synchronously in this process."""

    def submit(
        self, run: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        done: Future[Result] = Future()
        done.set_result(run(*args, **kwargs))
        return done


class ProgressExecutor(Executor):
    """Wraps another executor; calls `advance` after each run."""

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
    """Opens a pool with one process per CPU; ends its runs if the block fails. SIGTERM raises KeyboardInterrupt.

    Without a handler for SIGTERM, the processes would keep running, and Python would report leaked semaphores.
    """
    others = multiprocessing.active_children()
    earlier_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ProcessPoolExecutor(
        len(os.sched_getaffinity(0)),
        mp_context=multiprocessing.get_context("spawn"),  # forking a multithreaded process may hang
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # Ctrl-C reaches the caller, which ends the processes
    )
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, earlier_handler)


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommended candidate, the limits of its gain, and all results."""

    results: tuple[CandidateResult, ...]
    best: CandidateResult
    plain: CandidateResult
    in_process: InProcessResult
    at_once: float  # concurrent sessions per target under the best candidate
    limits: Limits | None  # None if the best candidate does not keep up: `at_once` is then undefined


def recommend(inputs: PlanInput, pool: Executor | None = None, whole: bool = False) -> Recommendation:
    """Simulates candidates in `pool`, by default in this process. `whole` includes candidates that cannot be best."""
    pool = pool or InlineExecutor()
    fleets = list(candidates(inputs))
    candidates_to_run = fleets if whole else _shortlist(inputs, fleets, pool)
    results = _run_all(simulate, inputs, candidates_to_run, pool)
    if not any(one.keeps_up for one in results):  # an omitted fleet may keep up, which short runs cannot show
        results += _run_all(simulate, inputs, [fleet for fleet in fleets if fleet not in candidates_to_run], pool)
    best = choose_best(results, inputs)
    at_once = sessions_at_once(inputs, best)
    return Recommendation(
        results=tuple(results),
        best=best,
        plain=results[0],
        in_process=best_in_process(inputs),
        at_once=at_once,
        limits=limits(inputs, lock_step_candidate(best.candidate, inputs), at_once, pool) if best.keeps_up else None,
    )


def _shortlist(inputs: PlanInput, fleets: Sequence[CandidateFleet], pool: Executor) -> list[CandidateFleet]:
    """Returns non-speculative decoding and the fleets that come close to the best in short runs.

    Fleets with at least one drafter per target run first. Candidates that lose are not tried with fewer drafters per
    target, which takes longer because those fleets have more targets.
    """
    seen: list[CandidateResult] = []
    for _, alike in groupby(sorted(fleets, key=_sharing), key=_sharing):
        seen += _run_all(
            simulate_briefly, inputs, [fleet for fleet in alike if is_promising(fleet, seen, inputs)], pool
        )
    merit = merit_function(seen, inputs)
    enough = PROMISING_SHARE * max(map(merit, seen))
    return [one.candidate for one in seen if one.candidate == NON_SPECULATIVE or merit(one) >= enough]


def _run_all(
    run: Callable[[PlanInput, CandidateFleet], CandidateResult],
    inputs: PlanInput,
    fleets: Sequence[CandidateFleet],
    pool: Executor,
) -> list[CandidateResult]:
    """Runs all fleets in parallel."""
    futures = [pool.submit(run, inputs, fleet) for fleet in fleets]
    return [one.result() for one in futures]


def _sharing(candidate: CandidateFleet) -> float:
    """Returns the number of targets per drafter, at least 1."""
    return max(1.0, candidate.targets / max(1, candidate.drafters))


def run_count(inputs: PlanInput, whole: bool = False) -> int:
    """Returns the maximum number of runs in `recommend`: a short and a full run per fleet, or only a full run."""
    return (1 if whole else 2) * fleet_count(inputs) + LIMIT_SEARCHES


def fleet_count(inputs: PlanInput) -> int:
    """Returns the number of candidates, including non-speculative decoding."""
    return sum(1 for _ in candidates(inputs))


def sessions_at_once(inputs: PlanInput, best: CandidateResult) -> float:
    """Returns the concurrent sessions on one target under the best candidate."""
    if isinstance(inputs.arrivals, ClosedLoop):
        return float(inputs.arrivals.concurrency)
    return inputs.arrivals.per_s * best.latency_s
