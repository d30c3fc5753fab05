"""Writes draft heads with random weights for a target, in published checkpoint layouts.

They have the inputs, message sizes and compute time of trained heads; only their acceptance rate differs.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig

DRAFT_VOCABULARY = 8192
HEADS = 3  # Medusa heads, or MLPSpeculator steps

Head = tuple[dict[str, Any], dict[str, Tensor]]
"""Configuration and tensors."""


class Weights:
    """Draws random tensors of a target's sizes, deterministically for each seed."""

    def __init__(self, target: Path, seed: int = 0) -> None:
        text = AutoConfig.from_pretrained(target).get_text_config()
        self.hidden = int(text.hidden_size)
        self.intermediate = int(text.intermediate_size)
        self.heads = int(text.num_attention_heads)
        self.kv_heads = int(text.num_key_value_heads)
        self.head_dim = int(getattr(text, "head_dim", None) or self.hidden // self.heads)
        self.vocabulary = int(text.vocab_size)
        self.layers = int(text.num_hidden_layers)
        self._generator = torch.Generator().manual_seed(seed)

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * shape[-1] ** -0.5

    def config(self, **more: Any) -> dict[str, Any]:
        """Returns the configuration of a one-layer decoder."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000.0,
            **more,
        }

    def layer(self, name: str, inputs: int) -> dict[str, Tensor]:
        """Returns the tensors of a decoder layer whose attention reads rows of the given width."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        return {
            f"{name}.self_attn.q_proj.weight": self.drawn(queries, inputs),
            f"{name}.self_attn.k_proj.weight": self.drawn(keys, inputs),
            f"{name}.self_attn.v_proj.weight": self.drawn(keys, inputs),
            f"{name}.self_attn.o_proj.weight": self.drawn(self.hidden, queries),
            f"{name}.mlp.gate_proj.weight": self.drawn(self.intermediate, self.hidden),
            f"{name}.mlp.up_proj.weight": self.drawn(self.intermediate, self.hidden),
            f"{name}.mlp.down_proj.weight": self.drawn(self.hidden, self.intermediate),
            f"{name}.post_attention_layernorm.weight": torch.ones(self.hidden),
        }

    def draft_vocabulary(self) -> dict[str, Tensor]:
        """Returns an LM head and `d2t` for the first tokens of the target's vocabulary."""
        columns = min(DRAFT_VOCABULARY, self.vocabulary)
        return {"lm_head.weight": self.drawn(columns, self.hidden), "d2t": torch.zeros(columns, dtype=torch.int64)}


def eagle3(weights: Weights) -> Head:
    """Creates an EAGLE-3 head over three of the target's layers, in SafeAILab's layout."""
    hidden = weights.hidden
    tensors = {
        "fc.weight": weights.drawn(hidden, 3 * hidden),
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "midlayer.input_layernorm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        **weights.layer("midlayer", 2 * hidden),
        **weights.draft_vocabulary(),
    }
    return weights.config(draft_vocab_size=len(tensors["d2t"])), tensors


def eagle1(weights: Weights) -> Head:
    """Creates an EAGLE-1 head over the final state, with the target's embedding and LM head, in SafeAILab's layout."""
    fc = weights.drawn(weights.hidden, 2 * weights.hidden)
    return weights.config(bias=False), {"fc.weight": fc, **weights.layer("layers.0", weights.hidden)}


def medusa(weights: Weights) -> Head:
    """Creates Medusa heads of one residual block over the final state, in FasterDecoding's layout."""
    tensors: dict[str, Tensor] = {}
    for head in range(HEADS):
        tensors[f"{head}.0.linear.weight"] = weights.drawn(weights.hidden, weights.hidden)
        tensors[f"{head}.0.linear.bias"] = torch.zeros(weights.hidden)
        tensors[f"{head}.1.weight"] = weights.drawn(weights.vocabulary, weights.hidden)
    return {"medusa_num_heads": HEADS, "medusa_num_layers": 1}, tensors


def mlp_speculator(weights: Weights) -> Head:
    """Creates an MLPSpeculator over the final state; all steps share weights except the first projection."""
    width = weights.hidden
    tensors = {
        "emb.0.weight": weights.drawn(weights.vocabulary, width),
        "head.0.weight": weights.drawn(weights.vocabulary, width),
        "ln.0.weight": torch.ones(width),
        "ln.0.bias": torch.zeros(width),
        "proj.0.weight": weights.drawn(width, weights.hidden),
        "proj.1.weight": weights.drawn(width, width),
    }
    return {"n_predict": HEADS, "tie_weights": True, "vocab_size": weights.vocabulary}, tensors


def dflash(weights: Weights) -> Head:
    """Creates a DFlash head with blocks of eight over five of the target's layers, in z-lab's layout.

    It shares the target's embedding and LM head.
    """
    hidden = weights.hidden
    outputs = [round(1 + index * (weights.layers - 4) / 4) for index in range(5)]
    tensors = {
        "fc.weight": weights.drawn(hidden, 5 * hidden),
        "hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "layers.0.input_layernorm.weight": torch.ones(hidden),
        "layers.0.self_attn.q_norm.weight": torch.ones(weights.head_dim),
        "layers.0.self_attn.k_norm.weight": torch.ones(weights.head_dim),
        **weights.layer("layers.0", hidden),
    }
    options = {"mask_token_id": 0, "target_layer_ids": outputs}
    return weights.config(block_size=8, dflash_config=options), tensors


PROCESSOR_FACTORIES: Mapping[str, Callable[[Weights], Head]] = MappingProxyType(
    {"eagle3": eagle3, "eagle1": eagle1, "medusa": medusa, "mlp_speculator": mlp_speculator, "dflash": dflash}
)


def random_head(name: str, target: Path, folder: Path) -> Path:
    """Writes the head into `folder` unless the folder exists; returns the folder."""
    if not folder.is_dir():
        folder.mkdir(parents=True)
        config, tensors = PROCESSOR_FACTORIES[name](Weights(target))
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(tensors, folder / "model.safetensors")
    return folder
