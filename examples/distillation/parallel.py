"""Several tokens in one forward: mask tokens after the last one known, each of which names one token further.

(PARD: An et al. 2025, arXiv 2504.18583.) A mask token sees what the tokens before it say and the masks between, but not
the tokens that stand there. In training many places of a sequence are continued so at once: all their masks come
after the sequence, each group sees only what is before its place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Masks:
    """Groups of mask tokens, `width` of them after each of some places, for sequences of `length` tokens."""

    after: Tensor  # [sequences, places]: index of the last token that a group sees
    width: int
    length: int

    def tokens(self, tokens: Tensor, mask_token: int) -> Tensor:
        """[sequences, length + places * width]."""
        masks = torch.full((len(tokens), self.after.shape[1] * self.width), mask_token)
        return torch.cat((tokens, masks), dim=1)

    def positions(self) -> Tensor:
        """Of all these tokens: a mask's is that of the token it stands for."""
        real = torch.arange(self.length).expand(len(self.after), -1)
        return torch.cat((real, self.stand_for().flatten(1)), dim=1)

    def stand_for(self) -> Tensor:
        """[sequences, places, width]: the index at which each mask's own token would be."""
        return self.after[:, :, None] + torch.arange(1, self.width + 1)

    def columns(self) -> Tensor:
        """[sequences, places, width]: where each mask stands among all these tokens."""
        places = self.after.shape[1]
        return (
            (self.length + torch.arange(places * self.width))
            .view(1, places, self.width)
            .expand(len(self.after), -1, -1)
        )

    def bias(self) -> Tensor:
        """[sequences, 1, tokens, tokens]: 0 where a token may look, -inf where not."""
        sequences, places = self.after.shape
        total = self.length + places * self.width
        last_seen = self.after.repeat_interleave(self.width, dim=1)  # [sequences, masks]
        real = torch.arange(self.length)
        group = torch.arange(places).repeat_interleave(self.width)
        own = (group[:, None] == group[None, :]).tril()
        sees = torch.zeros((sequences, total, total), dtype=torch.bool)
        sees[:, : self.length, : self.length] = real[:, None] >= real[None, :]
        sees[:, self.length :, : self.length] = last_seen[:, :, None] >= real
        sees[:, self.length :, self.length :] = own
        return torch.zeros(sees.shape, dtype=torch.bfloat16).masked_fill_(~sees, -torch.inf)[:, None]
