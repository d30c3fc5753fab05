"""Finds out whether a model's own code can be captured: whether it does the same for any values of the same number.

The code runs on fake tensors, which have shapes and devices but no values, so it fails where it needs a value. It sees
fake tensors as transformers' code sees a capture: both are traces.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from actors.attention import ScoreOptions
from actors.attention.batch import RaggedBatch
from actors.compute.recurrent_states import Advance

COPIES = ("aten::_to_copy", "aten::copy_")
TRIED_TOKENS = (1, 2, 64)  # code may depend on the number of tokens


class _NotFixed(Exception):
    """Raised by code that cannot be captured."""


class _OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises _NotFixed at copies between devices, for which the host waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [part for part in (*args, result) if isinstance(part, Tensor)]
        if func.name() in COPIES and len({part.device.type for part in tensors}) > 1:
            raise _NotFixed("it copies between devices")
        return result


class _Unattended(RaggedBatch):
    """Batch whose attention returns zeros."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.tokens = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)
        self.logit_at = torch.zeros_like(self.tokens)

    def attend(self, layer: int, query: Tensor, key_value: Tensor, options: ScoreOptions) -> Tensor:
        return query.new_zeros(len(query), query.shape[1] * query.shape[2])

    def recur(self, layer: int, inputs: Tensor, advance: Advance) -> Tensor:
        raise _NotFixed("its recurrent layers run row by row")


def capture_fault(decode: Callable[[RaggedBatch], object], device: torch.device) -> str:
    """Returns why a model's code cannot be captured on a device; empty if it can."""
    try:
        for tokens in TRIED_TOKENS:
            with (
                torch.inference_mode(False),
                torch.no_grad(),
                FakeTensorMode(allow_non_fake_inputs=True),
                _OneDevice(),  # type: ignore[no-untyped-call]
            ):
                decode(_Unattended(tokens, device))
    except _NotFixed as error:
        return str(error)
    except RuntimeError as error:  # whose message may be an operation's name alone
        reason = str(error).strip().partition("\n")[0]
        return f"its code fails without values: {reason}"
    return ""
