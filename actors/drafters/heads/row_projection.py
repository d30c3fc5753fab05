"""Projection that a head applies to each row of the target's states first, at the target or at the drafter.

It is the `fc` of EAGLE-3 and DFlash, with the norms around it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.compute.linear import Projection
from actors.models.decoder import Norm


def unchanged(x: Tensor) -> Tensor:
    """Identity, for layers without a norm."""
    return x


@dataclass(frozen=True, slots=True, eq=False)
class RowProjection:
    """Optional norms of equal parts of a row, then the product, then a norm of its result."""

    part_norms: tuple[Norm, ...]
    fc: Projection
    norm: Norm = unchanged

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps the target's rows, (n, layers x target hidden size), to (n, hidden)."""
        if self.part_norms:
            parts = rows.chunk(len(self.part_norms), dim=-1)
            rows = torch.cat([norm(part) for norm, part in zip(self.part_norms, parts, strict=True)], dim=-1)
        return self.norm(self.fc(rows))
