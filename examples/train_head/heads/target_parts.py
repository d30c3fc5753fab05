"""What a head borrows of the target or starts from: sizes, embedding, LM head, layers. Only these tensors are read."""

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

CHANGE_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale")  # keys of configurations

LayerTensors = dict[str, Tensor]
"""Of a decoder layer, by their names in it."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Of a decoder layer that is like the target's."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    vocabulary: int
    max_positions: int
    rope: dict[str, Any]  # as `rope_parameters` has it


@dataclass(frozen=True, slots=True, eq=False)
class TargetParts:
    """A target's checkpoint."""

    folder: Path
    sizes: HeadSizes
    layers: int
    is_llama_kind: bool  # then its layers can be started from

    def embedding(self) -> Tensor:
        """(vocabulary, hidden), in float32."""
        found: Tensor = target_tensor(self.folder, EMBEDDING)
        return found.float()

    def lm_head(self) -> Tensor:
        """(vocabulary, hidden), in float32."""
        found: Tensor = target_tensor(self.folder, HEAD)
        return found.float()

    def final_norm(self) -> Tensor | None:
        """(hidden,), if the target is of the Llama kind."""
        return self._tensors("model.norm.").get("weight") if self.is_llama_kind else None

    def layer(self, index: int) -> LayerTensors | None:
        """In float32, if the target is of the Llama kind."""
        return self._tensors(f"model.layers.{index}.") if self.is_llama_kind else None

    def _tensors(self, prefix: str) -> dict[str, Tensor]:
        found = {
            key: stored for key, stored in stored_tensors(self.folder, partial=True).items() if key.startswith(prefix)
        }
        tensors = {key: read_tensors(stored.path, [key])[key] for key, stored in found.items()}
        return {key.removeprefix(prefix): tensor.float() for key, tensor in tensors.items()}


def target_parts(target: str) -> TargetParts:
    """Of a folder or a Hugging Face id. Raises ModelError where logits are more than a product with the LM head."""
    folder = local_folder(target)
    config = read_config(folder)
    text = config.get_text_config()
    for key in CHANGE_LOGITS:
        if getattr(text, key, None) not in (None, 1.0):
            raise ModelError(f"{target} has {key}: its distribution cannot be computed from its final state alone here")
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
    """Where kinds of layers have their own, those of full attention, which a head has."""
    return dict(parameters.get("full_attention", parameters))


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Weights to start from where there are none of the target's: (outputs, inputs), of variance 1 / inputs."""
    return torch.randn(shape, generator=generator) / math.sqrt(shape[-1])
