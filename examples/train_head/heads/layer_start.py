"""Initial weights and configuration of heads that run decoder layers over the target's states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from actors.drafters.heads.rope import rope_of, rotary_of
from actors.learning.eagle_layer import EagleLayer, RootMeanSquare
from examples.train_head.heads.target_parts import HeadSizes, LayerTensors, TargetParts, normal


def states_projection(sizes: HeadSizes, states: int, generator: torch.Generator) -> nn.Linear:
    """Creates a projection from `states` concatenated target states to one state."""
    projection = nn.Linear(states * sizes.hidden, sizes.hidden, bias=False)
    # The last state is closest to the residual stream that the last layers expect.
    earlier = 0.1 * normal(generator, sizes.hidden, (states - 1) * sizes.hidden)
    projection.weight = nn.Parameter(torch.cat([earlier, torch.eye(sizes.hidden)], dim=-1))
    return projection


def start_from_last(layers: Sequence[EagleLayer], target: TargetParts, generator: torch.Generator) -> None:
    """Copies the weights of the target's last layers if the target is Llama-like."""
    for index, layer in enumerate(layers):
        start = target.layer(target.layers - len(layers) + index)
        if start is not None:
            layer.load(_with_embedding(start, generator) if hasattr(layer, "hidden_norm") else start)


def _with_embedding(layer: LayerTensors, generator: torch.Generator) -> LayerTensors:
    """Widens a layer's input projections by columns for the embedding; the copied columns apply to the state."""
    found = layer | {"hidden_norm.weight": layer["input_layernorm.weight"]}
    for name in (f"self_attn.{each}_proj.weight" for each in "qkv"):
        # The embedding's half starts small but nonzero: zero queries and keys would get zero gradients.
        found[name] = torch.cat([0.1 * normal(generator, *layer[name].shape), layer[name]], dim=-1)
    return found


def last_norm(target: TargetParts) -> RootMeanSquare:
    """Creates a norm with the target's final-norm weight, or with ones unless the target is Llama-like."""
    weight = target.final_norm()
    return RootMeanSquare(torch.ones(target.sizes.hidden) if weight is None else weight, target.sizes.eps)


def rotary_like(sizes: HeadSizes) -> nn.Module:
    """Creates a rotary module with the target's RoPE."""
    config = {"rope_parameters": sizes.rope, "max_position_embeddings": sizes.max_positions}
    return rotary_of(rope_of(config), sizes.head_dim)


def layers_config(sizes: HeadSizes, layers: Sequence[EagleLayer], columns: int) -> dict[str, Any]:
    """Returns the layer settings of a published configuration."""
    return {
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_hidden_layers": len(layers),
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "attention_bias": layers[0].self_attn.q_proj.bias is not None,
        "rms_norm_eps": sizes.eps,
        "vocab_size": sizes.vocabulary,
        "draft_vocab_size": columns,
        "max_position_embeddings": sizes.max_positions,
        "rope_theta": sizes.rope.get("rope_theta"),
        "rope_parameters": sizes.rope,
    }
