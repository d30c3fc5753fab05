"""Forward of an EAGLE head over a ragged batch: from tokens and preceding states to logits and states.

Place i of a head's cache holds token i + 1 of the text and state i, at position i. So a step reads the state that the
target, or the head itself, computed from all tokens up to i, and the token sampled after them. It predicts the token
after that.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.attention.batch import RaggedBatch
from actors.drafters.heads.eagle.config import EagleConfig, EagleKind, OutputNorm
from actors.drafters.heads.eagle.weights import EagleWeights
from actors.models.decoder import AttentionHeads, gated_mlp, rotation_of
from actors.models.forward_output import ForwardOutput


class EagleDecoder:
    """Decoder for all generations; `config` states how they differ."""

    def __init__(self, config: EagleConfig, weights: EagleWeights, rotary: nn.Module) -> None:
        self._config = config
        self._weights = weights
        self._rotary = rotary
        self._heads = AttentionHeads(config.heads, config.kv_heads, config.head_dim)

    def project(self, raw: Tensor) -> Tensor:
        """Maps the target's states as in `config.needs`, (rows, width), to inputs of a step, (rows, hidden)."""
        projection = self._weights.row_projection
        return raw if projection is None else projection(raw)

    @property
    def mask_state(self) -> Tensor | None:
        """State fed with a mask token, (1, hidden); None if the head has none."""
        mask = self._weights.mask
        return None if mask is None else self.project(mask)

    def __call__(self, batch: RaggedBatch, states: Tensor) -> ForwardOutput:
        """Returns logits, and the states to feed next, at the batch's wanted places.

        `states`, (total, hidden), are projected states of the target or earlier states of the head.
        """
        weights = self._weights
        embedded = weights.embedding_norm(F.embedding(batch.tokens, weights.embedding))
        if self._config.hides_first:
            embedded = embedded.masked_fill((batch.positions == 0).unsqueeze(-1), 0.0)
        rotation = rotation_of(self._rotary, embedded, batch.positions)
        first, *others = weights.layers
        inputs, residual = self._entry(embedded, states)
        hidden = gated_mlp(first, self._heads.attend(first, 0, first.attention_norm(inputs), residual, rotation, batch))
        for index, layer in enumerate(others, start=1):
            inputs = layer.attention_norm(hidden)
            hidden = gated_mlp(layer, self._heads.attend(layer, index, inputs, hidden, rotation, batch))
        return self._output(hidden.index_select(0, batch.logit_at))

    def _entry(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the first layer's attention input, before its norm, and the residual."""
        weights = self._weights
        if self._config.kind is not EagleKind.EAGLE3:
            assert weights.fc is not None, "a head of the first kind has a projection"
            fused = weights.fc(torch.cat((embedded, weights.state_norm(states)), dim=-1))
            return fused, fused
        normed = weights.state_norm(states)
        residual = normed if self._config.norm_before_residual else states
        return torch.cat((embedded, normed), dim=-1), residual

    def _output(self, hidden: Tensor) -> ForwardOutput:
        weights = self._weights
        if weights.norm is None:
            return ForwardOutput(weights.lm_head(hidden), hidden)
        normed = weights.norm(hidden)
        recycled = normed if self._config.output_norm is OutputNorm.BOTH else hidden
        return ForwardOutput(weights.lm_head(normed), recycled)
