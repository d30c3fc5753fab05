"""Trainable decoder layer that attends as in drafting: to the target's states, then to its own outputs."""

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, (positions, head dim)."""

HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


class LayerSizes(Protocol):
    """Sizes of a decoder layer."""

    @property
    def hidden(self) -> int: ...

    @property
    def intermediate(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def eps(self) -> float: ...


class RootMeanSquare(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Attention with the parameter names of a layer's `self_attn`, and optional q_norm and k_norm."""

    def __init__(self, sizes: LayerSizes, inputs: int) -> None:
        super().__init__()
        self._sizes = sizes
        self.q_proj = nn.Linear(inputs, sizes.heads * sizes.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, sizes.kv_heads * sizes.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, sizes.kv_heads * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)

    def forward(self, inputs: Tensor, rotation: Rotation, seen: "SeenSteps") -> Tensor:
        seen.add(*self.keys_and_values(inputs, rotation))
        attended = seen.attend(self.queries(inputs, rotation), self._sizes.head_dim**-0.5)
        return torch.as_tensor(self.o_proj(attended.transpose(1, 2).flatten(2)))

    def queries(self, inputs: Tensor, rotation: Rotation) -> Tensor:
        """Projects (rows, longest, size) to rotated queries, (rows, heads, longest, head dim)."""
        return rotated(self._heads(self.q_proj(inputs), self._sizes.heads, "q_norm"), rotation)

    def keys_and_values(self, inputs: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Projects inputs to rotated keys and to values, (rows, heads, longest, head dim), one per query head."""
        sizes = self._sizes
        key = rotated(self._heads(self.k_proj(inputs), sizes.kv_heads, "k_norm"), rotation)
        value = self._heads(self.v_proj(inputs), sizes.kv_heads)
        groups = sizes.heads // sizes.kv_heads
        return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)

    def _heads(self, x: Tensor, count: int, norm: str = "") -> Tensor:
        """Splits the last dimension into heads, (rows, heads, longest, head dim), and applies the named norm."""
        split = x.view(*x.shape[:-1], count, self._sizes.head_dim)
        if norm and hasattr(self, norm):
            split = self.get_submodule(norm)(split)
        return split.transpose(1, 2)


class SeenSteps:
    """Keys and values of all steps so far, in one layer.

    Keys of step 0 come from the target's states; every later place attends to them. Keys of a later step belong to a
    drafted token; only later steps of the same place attend to them.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def add(self, key: Tensor, value: Tensor) -> None:
        """Adds the next step's keys and values, (rows, heads, longest, head dim)."""
        self._keys.append(key)
        self._values.append(value)

    def attend(self, query: Tensor, scaling: float) -> Tensor:
        """Returns the attention output of the latest step over all steps so far, (rows, heads, longest, head dim)."""
        if len(self._keys) == 1:
            return F.scaled_dot_product_attention(query, self._keys[0], self._values[0], is_causal=True, scale=scaling)
        longest = query.shape[2]
        later = torch.ones(longest, longest, dtype=torch.bool, device=query.device).triu(1)
        true = (query @ self._keys[0].mT).masked_fill(later, float("-inf"))
        drafted = [(query * key).sum(dim=-1, keepdim=True) for key in self._keys[1:]]
        shares = torch.softmax(torch.cat([true, *drafted], dim=-1).float() * scaling, dim=-1).to(query.dtype)
        attended = shares[..., :longest] @ self._values[0]
        for step, value in enumerate(self._values[1:]):
            attended = attended + shares[..., longest + step, None] * value
        return attended


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Applies rotary embeddings, given cosines and sines, (longest, head dim)."""
    cos, sin = rotation
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class EagleLayer(nn.Module):
    """Decoder layer with checkpoint parameter names; a head's first layer reads embedding and state, concatenated."""

    def __init__(self, sizes: LayerSizes, is_first: bool) -> None:
        super().__init__()
        ones = torch.ones(sizes.hidden)
        self.self_attn = Attention(sizes, (2 if is_first else 1) * sizes.hidden)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(sizes.hidden, sizes.intermediate, bias=False),
                "up_proj": nn.Linear(sizes.hidden, sizes.intermediate, bias=False),
                "down_proj": nn.Linear(sizes.intermediate, sizes.hidden, bias=False),
            }
        )
        self.input_layernorm = RootMeanSquare(ones, sizes.eps)
        self.post_attention_layernorm = RootMeanSquare(ones, sizes.eps)
        if is_first:
            self.hidden_norm: nn.Module = RootMeanSquare(ones, sizes.eps)  # norm of the state

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces the named parameters; adds biases, query norms and key norms if `tensors` has them."""
        for norm in HEAD_NORMS:
            if f"{norm}.weight" in tensors:
                self.self_attn.add_module(
                    norm.split(".")[1], RootMeanSquare(tensors[f"{norm}.weight"], self.post_attention_layernorm.eps)
                )
        for name, tensor in tensors.items():
            module, _, kind = name.rpartition(".")
            setattr(self.get_submodule(module), kind, nn.Parameter(tensor.clone()))

    def attend(self, inputs: Tensor, residual: Tensor, rotation: Rotation, seen: SeenSteps) -> Tensor:
        """Returns the layer's output for normalized `inputs`."""
        return self.with_mlp(residual + self.self_attn(inputs, rotation, seen))

    def with_mlp(self, hidden: Tensor) -> Tensor:
        """Applies the layer's MLP."""
        normed = self.post_attention_layernorm(hidden)
        return torch.as_tensor(
            hidden + self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed))
        )
