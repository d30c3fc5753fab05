"""Trainable EAGLE-3 head with training-time test: later steps read the head's own outputs, as in drafting.

EAGLE-3: Li et al. 2025, arXiv 2503.01840, section 3.2. Checkpoints use SafeAILab's layout.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.drafters.heads.eagle.config import KEY
from actors.learning.eagle_layer import EagleLayer
from actors.learning.eagle_network import EagleNetwork
from examples.train_head.heads.draft_module import DraftModule, PublishedHead
from examples.train_head.heads.layer_start import (
    last_norm,
    layers_config,
    rotary_like,
    start_from_last,
    states_projection,
)
from examples.train_head.heads.target_parts import TargetParts
from examples.train_head.shards import StatesBatch


class EagleModule(EagleNetwork, DraftModule):
    """EAGLE-3 head, initialized from the target's last layers, final norm, and LM-head rows of the draft vocabulary."""

    def __init__(self, target: TargetParts, reads: Sequence[int], token_ids: Tensor, layers: int, seed: int) -> None:
        sizes = target.sizes
        generator = torch.Generator().manual_seed(seed)
        projection = states_projection(sizes, len(reads), generator)
        stack = [EagleLayer(sizes, is_first=index == 0) for index in range(layers)]
        start_from_last(stack, target, generator)
        rotary = rotary_like(sizes)
        super().__init__(stack, last_norm(target), target.lm_head()[token_ids], target.embedding(), rotary)
        self.fc = projection
        self.register_buffer("token_ids", token_ids, persistent=False)
        self._sizes = sizes
        self._reads = tuple(reads)

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        yield from self.unroll(batch.tokens, self.fc(batch.states.to(self.fc.weight.dtype)), count)

    def logits(self, outputs: Tensor, step: int) -> Tensor:
        return F.linear(outputs, self.lm_head)

    def published(self) -> PublishedHead:
        tensors = {_published_name(name): parameter.detach() for name, parameter in self.named_parameters()}
        ids = self.token_ids.cpu()
        is_smaller = len(ids) < self._sizes.vocabulary
        return PublishedHead(self._config(), tensors | ({"d2t": ids - torch.arange(len(ids))} if is_smaller else {}))

    def _config(self) -> dict[str, Any]:
        return layers_config(self._sizes, self._stack, len(self.token_ids)) | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "target_hidden_size": self._sizes.hidden,
            "tie_word_embeddings": False,
            KEY: list(self._reads),
        }


def _published_name(name: str) -> str:
    if name == "lm_head":
        return "lm_head.weight"
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
