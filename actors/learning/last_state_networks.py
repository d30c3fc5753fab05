"""Trainable heads that predict several tokens from one state of the target: Medusa heads and MLPSpeculator.

`actors.drafters.heads.medusa` and `actors.drafters.heads.mlp_speculator` run them while serving, and give the sources.
"""

import math
from collections.abc import Iterator, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from actors.drafters.heads.mlp_speculator import EPS
from actors.learning.eagle_network import tokens_after
from actors.learning.head_trainee import HeadNetwork


class MedusaNetwork(HeadNetwork):
    """Medusa heads. Heads may share blocks and LM heads."""

    def __init__(self, blocks: Sequence[Sequence[nn.Linear]], lm_heads: Sequence[nn.Parameter]) -> None:
        """Takes each head's residual blocks, and LM heads, (columns, hidden)."""
        super().__init__()
        self._blocks = blocks
        self.blocks = nn.ModuleList(nn.ModuleList(own) for own in blocks)
        self.lm_heads = nn.ParameterList(lm_heads)

    def unroll(self, tokens: Tensor, states: Tensor, count: int) -> Iterator[Tensor]:
        for blocks in self._blocks[:count]:
            hidden = states
            for block in blocks:
                hidden = hidden + F.silu(block(hidden))
            yield hidden

    def lm_head_of(self, step: int) -> Tensor:
        weight: Tensor = self.lm_heads[step]
        return weight


class MlpSpeculatorNetwork(HeadNetwork):
    """MLPSpeculator. Steps may share weights."""

    def __init__(
        self,
        embeddings: Sequence[nn.Parameter],  # (vocabulary, inner) per step
        projections: Sequence[nn.Parameter],  # (inner, width of the state before)
        norms: Sequence[tuple[nn.Parameter, nn.Parameter]],  # weight and bias, (inner,)
        lm_heads: Sequence[nn.Parameter],  # (columns, inner)
        *,
        scales_input: bool,
    ) -> None:
        super().__init__()
        self.emb = nn.ParameterList(embeddings)
        self.proj = nn.ParameterList(projections)
        self.norm_weight = nn.ParameterList(weight for weight, _ in norms)
        self.norm_bias = nn.ParameterList(bias for _, bias in norms)
        self.head = nn.ParameterList(lm_heads)
        self._scales_input = scales_input
        steps, inner = len(projections), projections[0].shape[0]
        self._state_share = 0.5 ** (0.5 / steps)
        self._token_share = math.sqrt((1 - self._state_share**2) * inner / 2)

    def unroll(self, tokens: Tensor, states: Tensor, count: int) -> Iterator[Tensor]:
        state = states
        if self._scales_input:
            state = F.rms_norm(state.float(), state.shape[-1:], eps=EPS) / math.sqrt(2)
        for step in range(min(count, len(self.proj))):
            embedded = F.embedding(tokens_after(tokens, step + 1), self.emb[step])
            mixed = F.linear(state, self.proj[step]).float() * self._state_share + embedded * self._token_share
            normed = F.rms_norm(mixed, mixed.shape[-1:], eps=EPS)
            state = F.gelu(normed * self.norm_weight[step] + self.norm_bias[step])
            yield state

    def lm_head_of(self, step: int) -> Tensor:
        weight: Tensor = self.head[step]
        return weight
