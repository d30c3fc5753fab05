"""What a head makes of each row of the target's states before anything else, at the target or at the drafter.

It is EAGLE-3's `fc` and DFlash's, with the norms around it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from actors.compute.linear import Projection
from actors.models.decoder import Norm


def unchanged(x: Tensor) -> Tensor:
    """The norm of what has none."""
    return x


@dataclass(frozen=True, slots=True, eq=False)
class RowProjection:
    """Norms of equal parts of a row, or none; then the product, and the norm of what it makes."""

    part_norms: tuple[Norm, ...]
    fc: Projection
    norm: Norm = unchanged

    def __call__(self, rows: Tensor) -> Tensor:
        """(n, hidden), of rows as the target has them, (n, layers x the target's hidden size)."""
        if self.part_norms:
            parts = rows.chunk(len(self.part_norms), dim=-1)
            rows = torch.cat([norm(part) for norm, part in zip(self.part_norms, parts, strict=True)], dim=-1)
        return self.norm(self.fc(rows))
