"""Captures of steps without a GPU, each with a property of CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Overwriting:
    """Captures steps as a CUDA graph does: every repeat writes its results to the memory of the first one."""

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        first: list[Any] = []

        def repeat() -> Any:
            output = step()
            if not first:
                first.append(output)
            for kept, part in zip(first[0], output, strict=True):
                if kept is not None:
                    kept.copy_(part)
            return first[0]

        return repeat


class CountedCapture:
    """Captures steps by calling them; counts captures and repeats. Raises RuntimeError after `limit` captures."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.captures = 0
        self.repeats = 0

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        if self.captures == self.limit:
            raise RuntimeError("out of memory")
        self.captures += 1

        def repeat() -> Any:
            self.repeats += 1
            return step()

        return repeat


READS_VALUES = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::repeat_interleave.Tensor",
    "aten::bincount",
    "aten::equal",
}


class Static(TorchDispatchMode):
    """Raises AssertionError at operations that read values on the host, or whose shapes depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.name() not in READS_VALUES, f"{func.name()} cannot be captured"
        if func.name() in ("aten::index.Tensor", "aten::index_put_", "aten::index_put"):
            assert all(index is None or index.dtype is not torch.bool for index in args[1]), "a mask has no fixed shape"
        with self:  # in inference mode, operations arrive that consist of others, such as `item`
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


class StaticCapture:
    """Captures steps by calling them in `Static`."""

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def repeat() -> Any:
            with Static():
                return step()

        return repeat


def call_directly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles nothing."""
    return function
