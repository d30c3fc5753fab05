"""Groups of ranks inside one process: threads with a barrier, and ranks that never communicate."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import BrokenBarrierError
from typing import TypeVar

from torch import Tensor

from actors.compute.collectives import ThreadGroup

T = TypeVar("T")


@dataclass
class Planned:
    """Rank whose layers are inspected but never called."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        raise AssertionError("this rank is alone")

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError("this rank is alone")


def threads(size: int) -> list[ThreadGroup]:
    return ThreadGroup.of_size(size)


def at_once(calls: list[Callable[[], T]]) -> list[T]:
    """Runs each call in its own thread. A rank's own error is raised before the broken barriers that it causes."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
    for error in (future.exception() for future in futures):
        if error is not None and not isinstance(error, BrokenBarrierError):
            raise error
    return [future.result() for future in futures]
