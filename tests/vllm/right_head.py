"""EAGLE-3 head that is right on given texts by construction: least squares maps each state to the next one.

Its decoder layer outputs zero, so the projected states go straight to the LM head. The texts have fewer places than the
states have elements, so an exact projection exists for all places; with a missing, stale or foreign state, the head
guesses at random. It predicts only one token.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


@dataclass(frozen=True)
class Text:
    """Prompt with its answer."""

    tokens: list[int]
    prompt_len: int


RIDGE = 1e-6  # relative to the mean square of the inputs
NARROW = 64  # width of the layer that outputs zero


@torch.inference_mode()
def right_head(target: Path, texts: Sequence[Text], layers: Sequence[int], folder: Path) -> Path:
    """Writes a head in SafeAILab's layout that predicts the second token after each place of the answers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    read: list[Tensor] = []
    made: list[Tensor] = []
    for text in texts:
        streams = model.model(input_ids=torch.tensor([text.tokens]), output_hidden_states=True).hidden_states
        first = text.prompt_len - 2  # the answer follows this position and the prompt's last token
        read.append(torch.cat([streams[layer][0, first:-1] for layer in layers], dim=-1))
        made.append(streams[-1][0, first + 1 :])
    sizes = model.config
    assert sum(map(len, read)) < len(layers) * sizes.hidden_size, "too many places for one projection"
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": NARROW,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": NARROW,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rms_norm_eps": sizes.rms_norm_eps,
        "rope_theta": 10000.0,
        "eagle_aux_hidden_state_layer_ids": list(layers),
    }
    tensors = {
        "fc.weight": _least_squares(torch.cat(read), torch.cat(made)),
        "norm.weight": torch.ones(sizes.hidden_size),
        "lm_head.weight": model.lm_head.weight.contiguous(),
        **_idle_layer(sizes.hidden_size),
    }
    return _written(folder, config, tensors)


def _least_squares(read: Tensor, made: Tensor) -> Tensor:
    """Returns the smallest matrix that maps inputs, (n, inputs), to outputs, (n, outputs)."""
    wide = read.double()
    among = wide @ wide.T
    ridge = RIDGE * among.diagonal().mean() * torch.eye(len(wide), dtype=torch.float64)
    return (wide.T @ torch.linalg.solve(among + ridge, made.double())).T.float().contiguous()


def _idle_layer(hidden: int) -> dict[str, Tensor]:
    found = {f"self_attn.{name}_proj.weight": torch.zeros(NARROW, 2 * hidden) for name in "qkv"}
    found |= {f"mlp.{name}_proj.weight": torch.zeros(NARROW, hidden) for name in ("gate", "up")}
    found |= {f"{name}_proj.weight": torch.zeros(hidden, NARROW) for name in ("self_attn.o", "mlp.down")}
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    found |= {f"{name}.weight": torch.ones(hidden) for name in norms}
    return {f"midlayer.{name}": tensor for name, tensor in found.items()}


def _written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder
