"""Trainable MLPSpeculator: a small recurrent network over the final state and the tokens after it.

Wertheimer et al. 2024, arXiv 2404.19124. Checkpoints use the layout of foundation-model-stack/fms-extras, with separate
weights per step.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.drafters.heads.mlp_speculator import EPS
from actors.learning.eagle_network import tokens_after
from examples.train_head.heads.draft_module import DraftModule, PublishedHead
from examples.train_head.heads.target_parts import TargetParts, normal
from examples.train_head.shards import StatesBatch


class MlpSpeculatorModule(DraftModule):
    """MLPSpeculator of the target's width; each step is initialized with the target's embedding and LM head."""

    def __init__(self, target: TargetParts, steps: int, seed: int) -> None:
        super().__init__()
        width = target.sizes.hidden
        generator = torch.Generator().manual_seed(seed)
        embedding = target.embedding()
        lm_head = target.lm_head()
        embedding = embedding / embedding.std()
        self._state_share = 0.5 ** (0.5 / steps)
        self._token_share = math.sqrt((1 - self._state_share**2) * width / 2)
        # `_token_share` assumes embeddings of variance 1 / width.
        self.emb = nn.ParameterList(nn.Parameter(embedding * width**-0.5) for _ in range(steps))
        self.proj = nn.ParameterList(nn.Parameter(normal(generator, width, width)) for _ in range(steps))
        self.head = nn.ParameterList(nn.Parameter(lm_head.clone()) for _ in range(steps))
        self.norm_weight = nn.ParameterList(nn.Parameter(torch.ones(width)) for _ in range(steps))
        self.norm_bias = nn.ParameterList(nn.Parameter(torch.zeros(width)) for _ in range(steps))
        self.register_buffer("token_ids", torch.arange(len(lm_head)), persistent=False)

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        state = F.rms_norm(batch.final.float(), batch.final.shape[-1:], eps=EPS) / math.sqrt(2)
        for step in range(count):
            taken = F.embedding(tokens_after(batch.tokens, step + 1), self.emb[step])
            mixed = F.linear(state, self.proj[step]).float() * self._state_share + taken * self._token_share
            normed = F.rms_norm(mixed, mixed.shape[-1:], eps=EPS)
            state = F.gelu(normed * self.norm_weight[step] + self.norm_bias[step])
            yield state

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
