"""Groups of ranks inside one process: threads that meet at a barrier, and ranks that are never spoken to."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from actors.compute.collectives import ThreadGroup

T = TypeVar("T")


@dataclass
class Planned:
    """A rank whose layers are looked at and not called."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        raise AssertionError("this rank is alone")

    def all_gather(self, tensor: Tensor) -> Tensor:
        raise AssertionError("this rank is alone")

    def broadcast(self, tensor: Tensor) -> None:
        raise AssertionError("this rank is alone")


def threads(size: int) -> list[ThreadGroup]:
    return ThreadGroup.of_size(size)


def at_once(calls: list[Callable[[], T]]) -> list[T]:
    """Makes every call in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
