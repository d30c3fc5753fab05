"""Collective operations of tensor-parallel ranks: all-reduce and all-gather."""

import ctypes
import os
import platform
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor

THREAD_TIMEOUT_S = 30.0  # a thread that does not respond within this time has failed
SHARED_MEMORY = Path("/dev/shm")
CACHE_LINE = 64  # bytes; each counter has its own cache line
BUFFER_BYTES = 1 << 20  # size of one exchange; larger tensors are split
SYS_FUTEX = 202  # system call number on x86-64 Linux
FUTEX_WAIT = 0
FUTEX_WAKE = 1
NCCL_SIZES = (1, 1 << 14, 1 << 23)  # elements; NCCL chooses its algorithm by size
YIELDS = 200  # covers the usual wait within a step; after that, the rank sleeps and uses no CPU


class Group(Protocol):
    """One rank's view of its group. Every rank must make the same calls in the same order, with equal shapes."""

    rank: int
    size: int

    def all_reduce(self, tensor: Tensor) -> None:
        """Sums over the ranks, in place; the result is bitwise equal on all ranks."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns the tensors of all ranks, stacked: (size, *tensor.shape)."""
        ...


class SingleRank:
    """Group with a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> None:
        pass

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's columns of a matrix; the ranks' parts are consecutive and equal, but the last may be smaller."""

    group: Group
    columns: int  # total over all ranks

    @property
    def width(self) -> int:
        """Columns of the first rank."""
        return -(-self.columns // self.group.size)

    @property
    def begin(self) -> int:
        return min(self.group.rank * self.width, self.columns)

    @property
    def own_columns(self) -> int:
        return min(self.width, self.columns - self.begin)

    def gather(self, own: Tensor) -> Tensor:
        """Gathers the columns of all ranks: (..., own columns) -> (..., columns)."""
        if self.group.size == 1:
            return own
        gathered = self.group.all_gather(F.pad(own, (0, self.width - own.shape[-1])))  # (ranks, ..., width)
        return gathered.movedim(0, -2).flatten(-2)[..., : self.columns]


class ThreadGroup:
    """Group whose ranks are threads of one process, for checks without further processes."""

    def __init__(self, rank: int, shown: list[Tensor], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(shown)
        self._shown = shown
        self._barrier = barrier

    @classmethod
    def of_size(cls, size: int) -> "list[ThreadGroup]":
        """Creates all ranks of a group."""
        shown = [torch.empty(0)] * size
        barrier = threading.Barrier(size, timeout=THREAD_TIMEOUT_S)
        return [cls(rank, shown, barrier) for rank in range(size)]

    def abort(self) -> None:
        """Raises BrokenBarrierError in every waiting rank."""
        self._barrier.abort()

    def all_reduce(self, tensor: Tensor) -> None:
        tensor.copy_(self.all_gather(tensor).sum(0))

    def all_gather(self, tensor: Tensor) -> Tensor:
        self._shown[self.rank] = tensor.clone()
        self._barrier.wait()
        gathered = torch.stack(self._shown)
        self._barrier.wait()
        return gathered


class TorchGroup:
    """The default group of torch.distributed: NCCL on GPUs, gloo on CPUs. Fake tensors have no values to exchange."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce(self, tensor: Tensor) -> None:
        if not isinstance(tensor, FakeTensor):
            dist.all_reduce(tensor)

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(self.size, *tensor.shape)
        if not isinstance(tensor, FakeTensor):
            dist.all_gather_single(gathered.view(-1), tensor.reshape(-1))
        return gathered


class OrderedGroup:
    """Group that adds tensors in rank order, and communicates through another group.

    NCCL and gloo add in an order that depends on the tensor's size and on the element's position.
    """

    def __init__(self, group: Group) -> None:
        self.rank = group.rank
        self.size = group.size
        self._group = group

    def all_reduce(self, tensor: Tensor) -> None:
        total, *others = self.all_gather(tensor)
        for other in others:
            total = total + other
        tensor.copy_(total)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._group.all_gather(tensor)


def shared_bytes(ranks: int) -> int:
    """Returns the size of `HostGroup`'s shared memory, in bytes."""
    return ranks * (CACHE_LINE + 2 * BUFFER_BYTES)


class HostGroup:
    """Group of CPU ranks on one host; exchanges tensors through shared memory, far faster than gloo's sockets.

    Every rank has two buffers and a counter of entered exchanges. A rank enters exchange n only after all ranks have
    entered exchange n - 1, and thus have finished reading exchange n - 2. Therefore, two buffers are enough, and
    counters differ by at most one.
    """

    def __init__(self, rank: int, size: int, path: Path) -> None:
        assert size > 1, "one rank needs no group"
        self.rank = rank
        self.size = size
        memory = torch.from_file(str(path), shared=True, size=shared_bytes(size), dtype=torch.uint8)
        counters = memory[: size * CACHE_LINE]
        buffers = memory[size * CACHE_LINE :]
        self._buffers = buffers.view(2, size, BUFFER_BYTES)
        self._counters = counters.view(torch.int32).numpy()[:: CACHE_LINE // 4]
        self._addresses = [ctypes.c_void_p(counters.data_ptr() + rank * CACHE_LINE) for rank in range(size)]
        self._others = [other for other in range(size) if other != rank]
        self._entered = 0
        self._syscall = ctypes.CDLL(None).syscall

    def all_reduce(self, tensor: Tensor) -> None:
        for piece in self._pieces(tensor):
            first, second, *rest = self._exchange(piece)
            torch.add(first, second, out=piece)
            for part in rest:
                piece.add_(part)

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = tensor.new_empty(self.size, tensor.numel())
        begin = 0
        for piece in self._pieces(tensor.contiguous()):
            end = begin + piece.numel()
            for rank, part in enumerate(self._exchange(piece)):
                gathered[rank, begin:end] = part
            begin = end
        return gathered.view(self.size, *tensor.shape)

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return torch.split(tensor.view(-1), BUFFER_BYTES // tensor.element_size())

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        """Publishes `mine` and returns all ranks' tensors, by rank; they are valid until the next exchange."""
        before = self._entered
        self._entered = (self._entered + 1) % 4
        shown = self._buffers[self._entered % 2, :, : mine.numel() * mine.element_size()].view(mine.dtype).unbind()
        shown[self.rank].copy_(mine)
        self._counters[self.rank] = self._entered
        self._syscall(SYS_FUTEX, self._addresses[self.rank], FUTEX_WAKE, self.size, None, None, 0)
        for other in self._others:
            self._wait_while(other, before)
        return list(shown)

    def _wait_while(self, other: int, before: int) -> None:
        for _ in range(YIELDS):
            if self._counters[other] != before:
                return
            os.sched_yield()
        while self._counters[other] == before:
            self._syscall(SYS_FUTEX, self._addresses[other], FUTEX_WAIT, before, None, None, 0)


def join(device: torch.device, in_order: bool = False) -> Group:
    """Returns this rank's group, already connected on GPUs; torch.distributed must be initialized.

    With `in_order`, ranks add tensors in rank order, whatever their size.
    """
    if device.type == "cpu" and (host_group := _on_one_host()):
        return host_group
    group = OrderedGroup(TorchGroup()) if in_order else TorchGroup()
    if device.type != "cpu":
        _connect(group, device)
    return group


def _connect(group: Group, device: torch.device) -> None:
    """Makes NCCL allocate its buffers, hundreds of megabytes, before memory is planned.

    Otherwise, NCCL does so in the first collective of each size class.
    """
    for elements in NCCL_SIZES:
        tensor = torch.zeros(elements, dtype=torch.bfloat16, device=device)
        group.all_reduce(tensor)
        group.all_gather(tensor)
    torch.cuda.synchronize(device)


def _on_one_host() -> HostGroup | None:
    """Returns a `HostGroup` if every rank runs on x86-64 and sees the file created by rank 0; otherwise None."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    paths = [_shared_file(size) if rank == 0 else None]
    dist.broadcast_object_list(paths, src=0)
    path = Path(str(paths[0]))
    can = torch.tensor(platform.machine() == "x86_64" and path.is_file())
    dist.all_reduce(can, dist.ReduceOp.MIN)
    group = HostGroup(rank, size, path) if can else None
    dist.barrier()  # all ranks have mapped the file; unlinked now, it does not survive a crash
    if rank == 0:
        path.unlink()
    return group


def _shared_file(ranks: int) -> str:
    file, path = tempfile.mkstemp(prefix="slipstream-", dir=SHARED_MEMORY)
    os.posix_fallocate(file, 0, shared_bytes(ranks))  # without enough space, fails here, not with SIGBUS in a step
    os.close(file)
    return path
