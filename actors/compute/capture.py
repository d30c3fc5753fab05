"""Captures functions over fixed memory, so that a GPU repeats all their operations in one launch.

`CudaCapture` records CUDA graphs; `CallCapture` calls the same function on the same memory, so that tests without a GPU
run what is captured.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

Result = TypeVar("Result")


class Capture(Protocol):
    """Records a function without arguments; returns one that repeats it on the same memory, which stays allocated."""

    def __call__(self, step: Callable[[], Result]) -> Callable[[], Result]: ...


class CallCapture:
    """Calls the function again instead of recording it."""

    def __call__(self, step: Callable[[], Result]) -> Callable[[], Result]:
        return step


class CudaCapture:
    """Records CUDA graphs that share one memory pool; a replay overwrites the results of the previous one."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # libraries have a workspace per stream
        # Destroying a graph frees the workspaces of its stream, so no graph may be freed before the others.
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def __call__(self, step: Callable[[], Result]) -> Callable[[], Result]:
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                step()  # libraries allocate their workspaces in the first call, which cannot be captured
        finally:
            # After an error, queued operations may still read memory that is about to be freed.
            current.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)
        try:
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                output = step()
        except Exception:
            # If torch cannot end a capture, it leaves its stream current, and its allocator in the capture.
            torch.cuda.set_stream(current)
            with suppress(RuntimeError):  # torch raises it if the capture has already ended
                torch._C._cuda_endAllocateToPool(current.device_index, self._pool)
            raise
        return _Replay(graph, self, step, output)


@dataclass(frozen=True, slots=True)
class _Replay(Generic[Result]):
    """Replays a graph. Holds the recorded function, whose memory the graph uses, and all graphs of the capture."""

    graph: torch.cuda.CUDAGraph
    capture: CudaCapture
    step: Callable[[], Result]
    output: Result

    def __call__(self) -> Result:
        self.graph.replay()
        return self.output
