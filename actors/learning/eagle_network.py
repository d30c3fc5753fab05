"""Trainable layers of an EAGLE-3 head, which continue from their own outputs as they do when drafting.

(EAGLE-3: Li et al. 2025, arXiv 2503.01840; training-time test is in its section 3.2.)
"""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.learning.eagle_layer import EagleLayer, RootMeanSquare, SeenSteps
from actors.learning.head_trainee import HeadNetwork


def tokens_after(tokens: Tensor, places: int) -> Tensor:
    """Returns the token `places` later at each place, (rows, longest); zeros after the last."""
    return F.pad(tokens[:, places:], (0, places))


class EagleNetwork(HeadNetwork):
    """Decoder layers, norm and LM head. The embedding is not trained."""

    def __init__(
        self,
        layers: Sequence[EagleLayer],
        norm: RootMeanSquare | None,
        lm_head: Tensor,  # (columns, hidden)
        embedding: Tensor,  # (vocabulary, hidden)
        rotary: nn.Module,
        *,
        norm_before_residual: bool = False,
        norms_recycled: bool = False,  # whether states are fed back after the norm
    ) -> None:
        super().__init__()
        self._stack = layers
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.lm_head = nn.Parameter(lm_head.clone())
        self.register_buffer("embedding", embedding, persistent=False)
        self._rotary = rotary
        self._norm_before_residual = norm_before_residual
        self._norms_recycled = norms_recycled

    def unroll(self, tokens: Tensor, states: Tensor, count: int) -> Iterator[Tensor]:
        """Yields the LM head's inputs of `count` steps, (rows, longest, hidden).

        At place p, step k predicts token p + 2 + k from `states`, (rows, longest, hidden), up to p, which are the
        target's after the head's projection, and from `tokens`, (rows, longest), up to p + 1 + k.
        """
        seen = [SeenSteps() for _ in self._stack]
        for step in range(count):
            hidden = self._forward(tokens_after(tokens, step + 1), states, step, seen)
            output = hidden if self.norm is None else self.norm(hidden)
            states = output if self._norms_recycled else hidden
            yield output

    def lm_head_of(self, step: int) -> Tensor:
        """Returns the LM head's weight, (columns, hidden), the same for every step."""
        return self.lm_head

    def _forward(self, tokens: Tensor, states: Tensor, step: int, seen: list[SeenSteps]) -> Tensor:
        """Runs the layers over a token and the state before it, at positions `step` later than the places."""
        first = self._stack[0]
        embedded = F.embedding(tokens, self.get_buffer("embedding")).to(states.dtype)
        positions = torch.arange(tokens.shape[1], device=tokens.device) + step
        cos, sin = self._rotary(states.float(), position_ids=positions.unsqueeze(0))
        rotation = (cos[0], sin[0])
        normed = first.hidden_norm(states)
        inputs = torch.cat((first.input_layernorm(embedded), normed), dim=-1)
        hidden = first.attend(inputs, normed if self._norm_before_residual else states, rotation, seen[0])
        for layer, mine in zip(self._stack[1:], seen[1:], strict=True):
            hidden = layer.attend(layer.input_layernorm(hidden), hidden, rotation, mine)
        return hidden
