"""Reads only the parts of a target that initialize a head: sizes, embedding, LM head, final norm and layers."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.drafters.heads.files import EMBEDDING, HEAD, target_tensor
from actors.models.checkpoint import local_folder
from actors.models.config_reader import read_config
from actors.models.decoder import LLAMA_KIND
from actors.models.weights import read_tensors, stored_tensors
from cluster.errors import ModelError

CHANGE_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")  # config keys that alter logits

LayerTensors = dict[str, Tensor]
"""Tensors of a decoder layer by name, without the layer's prefix."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of the target's decoder layers and vocabulary."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocabulary: int
    max_positions: int
    rope: dict[str, Any]  # in the format of `rope_parameters`


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """Reader of a target's checkpoint."""

    folder: Path
    sizes: HeadSizes
    layers: int
    is_llama_kind: bool  # whether a head can copy its layers

    def embedding(self) -> Tensor:
        """Reads the embedding, (vocabulary, hidden), in float32."""
        found: Tensor = target_tensor(self.folder, EMBEDDING)
        return found.float()

    def lm_head(self) -> Tensor:
        """Reads the LM head, (vocabulary, hidden), in float32."""
        found: Tensor = target_tensor(self.folder, HEAD)
        return found.float()

    def final_norm(self) -> Tensor | None:
        """Reads the final norm's weight, (hidden,); None unless the target is Llama-like."""
        return self._tensors("model.norm.").get("weight") if self.is_llama_kind else None

    def layer(self, index: int) -> LayerTensors | None:
        """Reads a layer in float32; None unless the target is Llama-like."""
        return self._tensors(f"model.layers.{index}.") if self.is_llama_kind else None

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        found = {
            key: stored for key, stored in stored_tensors(self.folder, partial=True).items() if key.startswith(prefix)
        }
        tensors = {key: read_tensors(stored.path, [key])[key] for key, stored in found.items()}
        return {key.removeprefix(prefix): tensor.float() for key, tensor in tensors.items()}


def target_parts(target: str) -> TargetParts:
    """Opens a folder or Hugging Face id. Raises ModelError if the config scales or caps the logits."""
    folder = local_folder(target)
    config = read_config(folder)
    text = config.get_text_config()
    for key in CHANGE_LOGITS:
        if getattr(text, key, None) not in (None, 1.0):
            raise ModelError(
                f"{target} sets {key}; heads can be trained only for targets without logit scaling or capping"
            )
    heads = int(text.num_attention_heads)
    sizes = HeadSizes(
        hidden=int(text.hidden_size),
        intermediate=int(text.intermediate_size),
        heads=heads,
        kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
        eps=float(getattr(text, "rms_norm_eps", 1e-6)),
        vocabulary=int(text.vocab_size),
        max_positions=int(text.max_position_embeddings),
        rope=_rope(text.rope_parameters),
    )
    is_llama_kind = bool(config.architectures) and set(config.architectures) <= LLAMA_KIND
    return TargetParts(folder, sizes, int(text.num_hidden_layers), is_llama_kind)


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """Returns the RoPE parameters of full attention, for models with several attention kinds."""
    return dict(parameters.get("full_attention", parameters))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draws random initial weights, (outputs, inputs), of variance 1 / inputs."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
