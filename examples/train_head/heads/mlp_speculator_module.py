"""Trainable MLPSpeculator: a small recurrent network over the final state and the tokens after it.

Wertheimer et al. 2024, arXiv 2404.19124. Checkpoints use the layout of foundation-model-stack/fms-extras, with separate
weights per step.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.learning.last_state_networks import MlpSpeculatorNetwork
from examples.train_head.heads.draft_module import DraftModule, PublishedHead
from examples.train_head.heads.target_parts import TargetParts, normal
from examples.train_head.shards import StatesBatch


class MlpSpeculatorModule(MlpSpeculatorNetwork, DraftModule):
    """MLPSpeculator of the target's width; each step is initialized with the target's embedding and LM head."""

    def __init__(self, target: TargetParts, steps: int, seed: int) -> None:
        width = target.sizes.hidden
        generator = torch.Generator().manual_seed(seed)
        embedding = target.embedding()
        lm_head = target.lm_head()
        embedding = embedding / embedding.std()
        super().__init__(
            # The shares of state and token assume embeddings of variance 1 / width.
            [nn.Parameter(embedding * width**-0.5) for _ in range(steps)],
            [nn.Parameter(normal(generator, width, width)) for _ in range(steps)],
            [(nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))) for _ in range(steps)],
            [nn.Parameter(lm_head.clone()) for _ in range(steps)],
            scales_input=True,
        )
        self.register_buffer("token_ids", torch.arange(len(lm_head)), persistent=False)

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        yield from self.unroll(batch.tokens, batch.final, count)

    def logits(self, outputs: Tensor, step: int) -> Tensor:
        return F.linear(outputs, self.head[step])

    def published(self) -> PublishedHead:
        steps = len(self.emb)
        columns, width = self.head[0].shape
        tensors = {}
        for step in range(steps):
            tensors[f"speculator.emb.{step}.weight"] = self.emb[step].detach()
            tensors[f"speculator.proj.{step}.weight"] = self.proj[step].detach()
            tensors[f"speculator.head.{step}.weight"] = self.head[step].detach()
            tensors[f"speculator.ln.{step}.weight"] = self.norm_weight[step].detach()
            tensors[f"speculator.ln.{step}.bias"] = self.norm_bias[step].detach()
        config = {
            "model_type": "mlp_speculator",
            "architectures": ["MLPSpeculatorPreTrainedModel"],
            "vocab_size": columns,
            "emb_dim": width,
            "inner_dim": width,
            "n_predict": steps,
            "top_k_tokens_per_head": [1] * steps,
            "n_candidates": 1,
            "scale_input": True,
            "tie_weights": False,
        }
        return PublishedHead(config, tensors)
