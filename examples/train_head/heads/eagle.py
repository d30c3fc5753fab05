"""Trainable EAGLE-3 head: it continues from its own outputs, as it does when drafting.

(EAGLE-3: Li et al. 2025, arXiv 2503.01840; training-time test is in its section 3.2.) Checkpoints have SafeAILab's
layout.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.drafters.heads.eagle.config import KEY
from actors.drafters.heads.rope import rope_of, rotary_of
from examples.train_head.heads.draft_module import DraftModule, PublishedHead, tokens_after
from examples.train_head.heads.eagle_layer import EagleLayer, SeenSteps
from examples.train_head.heads.layer_start import last_norm, layers_config, start_from_last, states_projection
from examples.train_head.heads.target_parts import TargetParts
from examples.train_head.shards import StatesBatch


class EagleModule(DraftModule):
    """Starts from the target's last layers, its final norm, and the rows of its LM head for the draft vocabulary."""

    def __init__(self, target: TargetParts, reads: Sequence[int], token_ids: Tensor, layers: int, seed: int) -> None:
        super().__init__()
        sizes = target.sizes
        generator = torch.Generator().manual_seed(seed)
        self._sizes = sizes
        self._reads = tuple(reads)
        self.fc = states_projection(sizes, len(reads), generator)
        self._stack = [EagleLayer(sizes, is_first=index == 0) for index in range(layers)]
        self.layers = nn.ModuleList(self._stack)
        start_from_last(self._stack, target, generator)
        self.norm = last_norm(target)
        self.lm_head = nn.Parameter(target.lm_head()[token_ids].clone())
        self.register_buffer("embedding", target.embedding(), persistent=False)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self._rotary = rotary_of(rope_of({"rope_parameters": sizes.rope}), sizes.head_dim, sizes.max_positions)

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        state = self.fc(batch.states.to(self.fc.weight.dtype))
        seen = [SeenSteps() for _ in self._stack]
        for step in range(count):
            state = self._forward(tokens_after(batch.tokens, step + 1), state, step, seen)
            yield self.norm(state)

    def logits(self, outputs: Tensor, step: int) -> Tensor:
        return F.linear(outputs, self.lm_head)

    def _forward(self, tokens: Tensor, state: Tensor, step: int, seen: list[SeenSteps]) -> Tensor:
        """Runs the layers over a token and the state before it, at positions `step` later than the places."""
        first = self._stack[0]
        embedded = F.embedding(tokens, self.get_buffer("embedding")).to(state.dtype)
        positions = torch.arange(tokens.shape[1], device=tokens.device) + step
        cos, sin = self._rotary(state.float(), position_ids=positions.unsqueeze(0))
        rotation = (cos[0], sin[0])
        inputs = torch.cat((first.input_layernorm(embedded), first.hidden_norm(state)), dim=-1)
        hidden = first.attend(inputs, state, rotation, seen[0])
        for layer, mine in zip(self._stack[1:], seen[1:], strict=True):
            hidden = layer.attend(layer.input_layernorm(hidden), hidden, rotation, mine)
        return hidden

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
