"""The operations between a layer's matrix products as three functions, each of which torch's compiler fuses.

On a GPU, every operation is a launch, and reads and writes all of its tensors; a layer has ten between its products and
attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Returns a compiled function, as `torch.compile` does."""


def compile_invariant(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function in inductor's batch-invariant mode, which does not choose reductions by timing them."""
    return torch.compile(function, options={"batch_invariant": True})


class HeadNorms(NamedTuple):
    """Weights of the norms on queries and keys, each (head dim,)."""

    query: Tensor
    key: Tensor
    eps: float


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Returns x + residual and its root mean square norm, each (tokens, hidden)."""
    total = x + residual
    return total, F.rms_norm(total, weight.shape, weight, eps)


def rotate_and_cache(
    qkv: Tensor,  # (tokens, (heads + 2 x kv heads) x head dim)
    cos: Tensor,  # (tokens, 1, head dim)
    sin: Tensor,  # likewise, with the sign of rotate_half
    norms: HeadNorms | None,
    pool: Tensor,  # (slots, 2 x kv heads, head dim)
    slots: Tensor,  # (tokens,)
) -> Tensor:
    """Writes rotated keys, and values, to the slots of a layer's pool; returns the rotated queries, (tokens, heads,
    head dim).
    """
    both, dim = pool.shape[1:]
    keys = both // 2
    heads = qkv.view(len(qkv), -1, dim)
    query, key, value = heads[:, :-both], heads[:, -both:-keys], heads[:, -keys:]
    if norms is not None:
        query = F.rms_norm(query, (dim,), norms.query, norms.eps)
        key = F.rms_norm(key, (dim,), norms.key, norms.eps)
    query, key = (part * cos + part.roll(dim // 2, -1) * sin for part in (query, key))
    pool.index_copy_(0, slots, torch.cat((key, value), dim=1))
    return query


def gate(gate_up: Tensor) -> Tensor:
    """Returns SiLU(gate) x up: (tokens, 2 x intermediate), the gate first, -> (tokens, intermediate)."""
    gates, up = gate_up.chunk(2, dim=-1)
    return F.silu(gates) * up


@dataclass(frozen=True, slots=True)
class FusedFunctions:
    """The three functions, compiled."""

    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_cache: Callable[[Tensor, Tensor, Tensor, HeadNorms | None, Tensor, Tensor], Tensor]
    gate: Callable[[Tensor], Tensor]

    @classmethod
    def of(cls, compile_function: Compile) -> "FusedFunctions":
        return cls(*(compile_function(function) for function in (add_norm, rotate_and_cache, gate)))
