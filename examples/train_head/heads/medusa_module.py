"""Trainable Medusa-1 heads: each predicts one of the next tokens from the final state.

Medusa: Cai et al. 2024, arXiv 2401.10774. Checkpoints use FasterDecoding's layout for the whole vocabulary, and vLLM's
for a draft vocabulary.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.learning.last_state_networks import MedusaNetwork
from examples.train_head.heads.draft_module import DraftModule, PublishedHead
from examples.train_head.heads.target_parts import TargetParts
from examples.train_head.shards import StatesBatch


class MedusaModule(MedusaNetwork, DraftModule):
    """Medusa-1 heads, initialized with zero residual blocks so that each head equals the target's LM head."""

    def __init__(self, target: TargetParts, token_ids: Tensor, heads: int) -> None:
        hidden = target.sizes.hidden
        rows = target.lm_head()[token_ids]
        blocks = [nn.Linear(hidden, hidden) for _ in range(heads)]
        for block in blocks:
            nn.init.zeros_(block.weight)
            nn.init.zeros_(block.bias)
        super().__init__([[block] for block in blocks], [nn.Parameter(rows.clone()) for _ in blocks])
        self._vocabulary = target.sizes.vocabulary
        self.register_buffer("token_ids", token_ids, persistent=False)

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        yield from self.unroll(batch.tokens, batch.final.to(self.lm_heads[0].dtype), count)

    def logits(self, outputs: Tensor, step: int) -> Tensor:
        return F.linear(outputs, self.lm_heads[step])

    def published(self) -> PublishedHead:
        is_whole = len(self.token_ids) == self._vocabulary
        names = ("{0}.0.linear", "{0}.1.weight") if is_whole else ("blocks.{0}.layers.0", "lm_heads.{0}.weight")
        tensors = {}
        for index, (block,) in enumerate(self._blocks):
            tensors[names[0].format(index) + ".weight"] = block.weight.detach()
            tensors[names[0].format(index) + ".bias"] = block.bias.detach()
            tensors[names[1].format(index)] = self.lm_heads[index].detach()
        if is_whole:
            return PublishedHead({"medusa_num_heads": len(self._blocks), "medusa_num_layers": 1}, tensors)
        config = {
            "model_type": "medusa",
            "hidden_size": self.lm_heads[0].shape[1],
            "num_heads": len(self._blocks),
            "num_hidden_layers": 1,
            "vocab_size": self._vocabulary,
            "truncated_vocab_size": len(self.token_ids),
            "medusa_fc_bias": True,
        }
        return PublishedHead(config, tensors | {"token_map": torch.as_tensor(self.token_ids).cpu()})
