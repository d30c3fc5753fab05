"""Which of the target's tokens a head proposes: those that its data uses most."""

from collections.abc import Sequence

import torch
from torch import Tensor


def frequent_tokens(counts: Sequence[int], size: int | None) -> Tensor:
    """Rising ids of the `size` most frequent tokens by their counts; all of them where there is no size."""
    if size is None or size >= len(counts):
        return torch.arange(len(counts))
    return torch.tensor(counts).argsort(descending=True, stable=True)[:size].sort().values
