"""Finds out whether a model's own code can be captured: whether its operations depend only on the number of tokens.

The code runs on fake tensors, which have shapes and devices but no values, so reading a value fails.
transformers' code takes the same branches for fake tensors as during a capture (`transformers.utils.is_tracing`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actors.attention import ScoreOptions
from actors.attention.batch import RaggedBatch
from actors.compute.recurrent_states import Advance

COPIES = ("aten::_to_copy", "aten::copy_")
FROM_HOST = ("aten::lift_fresh", "aten::lift")  # of `torch.tensor`
WRITES = ("aten::index_put", "aten::index_put_")


class _CannotCapture(Exception):
    """Raised at an operation that cannot be captured."""


class _Captured(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises _CannotCapture at operations for which the host waits, although they need no fake tensor's value."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in WRITES and any(index is not None and index.dtype is torch.bool for index in args[1]):
            raise _CannotCapture("it writes to masked elements")
        if name in FROM_HOST and args[0].device.type != "cpu":
            raise _CannotCapture("it copies between devices")
        result = func(*args, **(kwargs or {}))
        tensors = [part for part in (*args, result) if isinstance(part, Tensor)]
        if name in COPIES and len({part.device.type for part in tensors}) > 1:
            raise _CannotCapture("it copies between devices")
        return result


class _BatchWithoutCache(RaggedBatch):
    """Batch whose attention returns zeros."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.logit_at = torch.zeros_like(self.tokens)

    def attend(self, layer: int, query: Tensor, key_value: Tensor, options: ScoreOptions) -> Tensor:
        return query.new_zeros(len(query), query.shape[1] * query.shape[2])

    def recur(self, layer: int, inputs: Tensor, advance: Advance) -> Tensor:
        raise _CannotCapture("its recurrent layers run row by row")


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Restores all attributes and buffers of a model, some of which code may replace with fake tensors."""
    saved = [(module, dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes, buffers in saved:
            vars(module).clear()
            vars(module).update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)


def capture_fault(model: nn.Module, decode: Callable[[RaggedBatch], object], numbers: Sequence[int]) -> str:
    """Returns why steps with these numbers of tokens cannot be captured on the model's device; empty if they can.

    `decode` runs the model's code, and may fail in any way without values.
    """
    device = next(model.parameters()).device
    try:
        for tokens in numbers:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                _unchanged(model),
                FakeTensorMode(allow_non_fake_inputs=True),
                _Captured(),  # type: ignore[no-untyped-call]
            ):
                decode(_BatchWithoutCache(tokens, device))
    except _CannotCapture as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever fails here, the model can run without captures
        reason = str(error).strip().partition("\n")[0]
        return f"its code fails without values: {type(error).__name__}: {reason}"
    return ""
