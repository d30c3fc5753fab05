"""Matrix products with fixed weights, packed once for the processor where that is faster.

Decoding feeds a handful of rows through very large weights; on a CPU oneDNN reads them up to twice as fast from a
layout of its own than from a plain matrix. Knows nothing of models beyond `nn.Linear`.
"""

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FASTEST_ROWS = 4  # oneDNN takes up to a quarter longer for one to three rows than for four


class Projection(Protocol):
    """y = x W^T + b, x of shape (..., inputs)."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """y + other, of y's shape."""
        ...


class PlainProjection:
    """Over the weights as they are."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias) + other


class PackedProjection:
    """Over weights in oneDNN's layout, by the operators that torch's own compiler emits for frozen models."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias
        self._linear = torch.ops.mkldnn._linear_pointwise.default
        self._linear_binary = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        if rows < FASTEST_ROWS:
            x = F.pad(x, (0, 0, 0, FASTEST_ROWS - rows))
        y: Tensor = self._linear(x, self._weight, self._bias, "none", [], "")
        return y.narrow(-2, 0, rows)

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        if x.shape[-2] < FASTEST_ROWS:
            return self(x) + other
        y: Tensor = self._linear_binary(x, other, self._weight, self._bias, "add")
        return y


class SharedProjection:
    """A rank's part of a product; `combine` makes the whole of it and what the other ranks have."""

    def __init__(self, part: Projection, combine: Callable[[Tensor], Tensor]) -> None:
        self._part, self._combine = part, combine

    def __call__(self, x: Tensor) -> Tensor:
        return self._combine(self._part(x))

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self(x) + other


def can_pack(weight: Tensor) -> bool:
    """Whether this build of torch and this processor have the packed product for such weights."""
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype is torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype is torch.float32


def fastest_rows(weight: Tensor) -> int:
    """Fewer rows than this are no faster through such weights."""
    return FASTEST_ROWS if can_pack(weight) else 1


def projection(weight: Tensor, bias: Tensor | None = None) -> Projection:
    """The fastest product for weights of shape (outputs, inputs)."""
    weight = weight.detach()
    bias = bias.detach() if bias is not None else None
    return PackedProjection(weight, bias) if can_pack(weight) else PlainProjection(weight, bias)


class PackedLinear(nn.Module):
    """Stands where an `nn.Linear` stood."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._projection = projection(linear.weight, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self._projection(x)


def pack_linears(model: nn.Module) -> None:
    """Replaces every `nn.Linear` inside a model whose weights can be packed; a tied embedding keeps its own copy."""
    found = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    for name, module in found:
        if can_pack(module.weight):
            model.set_submodule(name, PackedLinear(module))
