"""Where simulated runs are made: each is pure and alone, so that they share out over processes."""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class AtOnce(Executor):
    """In this process, before `submit` returns."""

    def submit(
        self, run: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        done: Future[Result] = Future()
        done.set_result(run(*args, **kwargs))
        return done


class Watched(Executor):
    """Another one's runs; `advance` is called after each."""

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
    """One for each processor; what is still due when the caller gives up is not begun."""
    pool = ProcessPoolExecutor(
        len(os.sched_getaffinity(0)),
        mp_context=multiprocessing.get_context("spawn"),  # forks of a process with threads may hang
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),  # the caller ends them
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
