"""Groups of ranks inside one process: threads that meet at a barrier, and ranks that are never spoken to."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

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


class ThreadGroup:
    """A rank that is a thread."""

    def __init__(self, rank: int, size: int, shown: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = size
        self._shown = shown
        self._barrier = barrier

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._shown[self.rank] = tensor.clone()
        self._barrier.wait()
        gathered = torch.stack(self._shown)
        self._barrier.wait()
        return gathered

    def broadcast(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor)[0])


def threads(size: int) -> list[ThreadGroup]:
    shown = [torch.empty(0)] * size
    barrier = threading.Barrier(size, timeout=30)
    return [ThreadGroup(rank, size, shown, barrier) for rank in range(size)]


def at_once(calls: list[Callable[[], T]]) -> list[T]:
    """Makes every call in a thread of its own."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]
