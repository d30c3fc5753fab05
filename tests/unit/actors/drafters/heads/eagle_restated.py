"""EAGLE heads with all variations of published heads, and a plain torch implementation of their forward pass."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from actors.drafters.heads.files import EMBEDDING, HEAD, target_tensor
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET

TARGET_HIDDEN = 32
VOCABULARY = 96
WIDE = 40
EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Structure and configuration of a head."""

    eagle3: bool = True
    hidden: int = TARGET_HIDDEN
    layers: int = 1
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    aux: int = 3  # number of concatenated target states; 0: only the final state, without a projection
    columns: int = VOCABULARY
    fc_bias: bool = False
    attention_bias: bool = False
    head_norms: bool = False  # q_norm and k_norm
    feature_norm: str = ""  # input_norm, fc_norm or its legacy names
    state_norm: bool = True
    last_norm: bool = True
    hass: bool = False  # norms after the embedding, before the layer and before the head
    norm_before_residual: bool = False
    norm_output: bool = False
    own_embedding: bool = True
    own_head: bool = True
    tied: bool = False
    base: float = 10000.0
    factor: float = 1.0  # divisor of positions
    mask_shape: tuple[int, ...] = ()  # shape of mask_hidden, if present
    prefix: str = "layers.0."  # name prefix of the first layer
    config: dict[str, Any] = field(default_factory=dict)


class RestatedEagle:
    """Variant with random weights in a folder, and its reference computation."""

    def __init__(self, variant: Variant, seed: int = 11) -> None:
        self.variant = variant
        self._drawn = torch.Generator().manual_seed(seed)
        self.tensors = self._make()
        self.token_ids = torch.arange(variant.columns)
        if variant.columns < VOCABULARY:
            self.token_ids = torch.randperm(VOCABULARY, generator=self._drawn)[: variant.columns].sort().values
            self.tensors["d2t"] = self.token_ids - torch.arange(variant.columns)

    # ------------------------------------------------------------ folder

    def save(self, folder: Path) -> Path:
        v = self.variant
        config = {
            "hidden_size": v.hidden,
            "intermediate_size": WIDE,
            "num_attention_heads": v.heads,
            "num_key_value_heads": v.kv_heads,
            "num_hidden_layers": v.layers,
            "head_dim": v.head_dim,
            "rms_norm_eps": EPS,
            "rope_theta": v.base,
            "vocab_size": VOCABULARY,
            "draft_vocab_size": v.columns,
            "max_position_embeddings": 512,
            "tie_word_embeddings": v.tied,
            "norm_before_residual": v.norm_before_residual,
            "norm_output": v.norm_output,
        } | v.config
        (folder / "config.json").write_text(json.dumps(config))
        named = {self._stored(name): tensor.contiguous() for name, tensor in self.tensors.items()}
        save_file(named, folder / "model.safetensors")
        return folder

    def _stored(self, name: str) -> str:
        legacy = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}
        if self.variant.feature_norm == "legacy" and name.startswith("fc_norm."):
            return f"{legacy[name[:9]]}.weight"
        return self.variant.prefix + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._drawn) * shape[-1] ** -0.5

    def _weights_of_norm(self, size: int) -> Tensor:
        return torch.rand(size, generator=self._drawn) + 0.5

    def _make(self) -> dict[str, Tensor]:
        v = self.variant
        found: dict[str, Tensor] = {}
        if not v.eagle3:
            found["fc.weight"] = self._random(v.hidden, 2 * v.hidden)
        elif v.aux:
            found["fc.weight"] = self._random(v.hidden, v.aux * TARGET_HIDDEN)
        if v.fc_bias:
            found["fc.bias"] = self._random(v.hidden)
        if v.feature_norm == "input_norm":
            found["input_norm.weight"] = self._weights_of_norm(v.aux * TARGET_HIDDEN)
        elif v.feature_norm:
            found |= {f"fc_norm.{i}.weight": self._weights_of_norm(TARGET_HIDDEN) for i in range(v.aux)}
        if v.mask_shape:
            found["mask_hidden"] = self._random(*v.mask_shape)
        if v.own_embedding:
            found["embed_tokens.weight"] = 3 * self._random(VOCABULARY, v.hidden)
        if v.own_head:
            found["lm_head.weight"] = 3 * self._random(v.columns, v.hidden)
        if v.eagle3 and v.last_norm:
            found["norm.weight"] = self._weights_of_norm(v.hidden)
        if v.hass:
            names = ("embed_layernorm", "hidden_layernorm", "lm_head_layernorm")
            found |= {f"{name}.weight": self._weights_of_norm(v.hidden) for name in names}
        for index in range(v.layers):
            found |= {f"layers.{index}.{name}": tensor for name, tensor in self._layer(index).items()}
        return found

    def _layer(self, index: int) -> dict[str, Tensor]:
        v = self.variant
        is_wide = v.eagle3 and index == 0
        inputs = 2 * v.hidden if is_wide else v.hidden
        sizes = {"q": v.heads * v.head_dim, "k": v.kv_heads * v.head_dim, "v": v.kv_heads * v.head_dim}
        found = {f"self_attn.{name}_proj.weight": self._random(size, inputs) for name, size in sizes.items()}
        if v.attention_bias:
            found |= {f"self_attn.{name}_proj.bias": self._random(size) for name, size in sizes.items()}
        if v.head_norms:
            found |= {f"self_attn.{name}_norm.weight": self._weights_of_norm(v.head_dim) for name in "qk"}
        found["self_attn.o_proj.weight"] = self._random(v.hidden, sizes["q"])
        found["post_attention_layernorm.weight"] = self._weights_of_norm(v.hidden)
        if v.eagle3 or index:
            found["input_layernorm.weight"] = self._weights_of_norm(v.hidden)
        if is_wide and v.state_norm:
            found["hidden_norm.weight"] = self._weights_of_norm(v.hidden)
        found["mlp.gate_proj.weight"] = self._random(WIDE, v.hidden)
        found["mlp.up_proj.weight"] = self._random(WIDE, v.hidden)
        found["mlp.down_proj.weight"] = self._random(v.hidden, WIDE)
        return found

    # ------------------------------------------------------------ forward pass over a whole sequence

    def project(self, raw: Tensor) -> Tensor:
        """Projects the target's states, (rows, hidden)."""
        v = self.variant
        if not v.eagle3 or not v.aux:
            return raw
        if v.feature_norm == "input_norm":
            raw = self._normed(raw, "input_norm")
        elif v.feature_norm:
            parts = raw.split(TARGET_HIDDEN, dim=-1)
            raw = torch.cat([self._normed(part, f"fc_norm.{i}") for i, part in enumerate(parts)], dim=-1)
        return self._linear(raw, "fc")

    def __call__(self, tokens: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits and the next input states at each place."""
        v = self.variant
        embedding = self.tensors["embed_tokens.weight"] if v.own_embedding else target_tensor(TARGET, EMBEDDING)
        embedded = embedding[tokens]
        if v.eagle3:
            normed = self._normed(states, "layers.0.hidden_norm") if v.state_norm else states
            inputs = torch.cat([self._normed(embedded, "layers.0.input_layernorm"), normed], dim=-1)
            x = self._layer_forward(0, inputs, normed if v.norm_before_residual else states)
        else:
            embedded = self._normed(embedded, "embed_layernorm") if v.hass else embedded
            fused = self._linear(torch.cat([embedded, states], dim=-1), "fc")
            x = self._layer_forward(0, self._normed(fused, "hidden_layernorm") if v.hass else fused, fused)
        for index in range(1, v.layers):
            x = self._layer_forward(index, self._normed(x, f"layers.{index}.input_layernorm"), x)
        last = "lm_head_layernorm" if v.hass else "norm" if v.eagle3 and v.last_norm else ""
        normed = self._normed(x, last) if last else x
        if v.own_head:
            head = self.tensors["lm_head.weight"]
        else:
            head = embedding if v.tied else target_tensor(TARGET, HEAD)
        return normed @ head.T, normed if v.norm_output else x

    def _layer_forward(self, index: int, inputs: Tensor, residual: Tensor) -> Tensor:
        v = self.variant
        layer = f"layers.{index}"
        q, k, value = [self._heads(self._linear(inputs, f"{layer}.self_attn.{name}_proj")) for name in "qkv"]
        if v.head_norms:
            q = self._normed(q, f"{layer}.self_attn.q_norm")
            k = self._normed(k, f"{layer}.self_attn.k_norm")
        shared = v.heads // v.kv_heads
        k = self._rotated(k).repeat_interleave(shared, dim=0)
        value = value.repeat_interleave(shared, dim=0)
        scores = self._rotated(q) @ k.transpose(-1, -2) / v.head_dim**0.5
        scores = scores + torch.full_like(scores, -torch.inf).triu(1)
        attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
        x = residual + self._linear(attended, f"{layer}.self_attn.o_proj")
        normed = self._normed(x, f"{layer}.post_attention_layernorm")
        gated = F.silu(self._linear(normed, f"{layer}.mlp.gate_proj")) * self._linear(normed, f"{layer}.mlp.up_proj")
        return x + self._linear(gated, f"{layer}.mlp.down_proj")

    def _heads(self, x: Tensor) -> Tensor:
        """Splits into heads, (heads, tokens, head dim)."""
        return x.unflatten(-1, (-1, self.variant.head_dim)).transpose(0, 1)

    def _rotated(self, x: Tensor) -> Tensor:
        v = self.variant
        half = v.head_dim // 2
        frequencies = v.base ** (-torch.arange(half) / half) / v.factor
        angles = torch.arange(x.shape[-2]).unsqueeze(1) * frequencies
        first, second = x.chunk(2, dim=-1)
        cos = angles.cos()
        sin = angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * self.tensors[f"{name}.weight"]

    def _linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias
