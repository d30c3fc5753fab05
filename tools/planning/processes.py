"""Executors for simulated runs, which are pure and independent, so that processes can share them."""

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
