"""Selects the draft vocabulary: the target's most frequent tokens in the data."""

from collections.abc import Sequence

import torch
from torch import Tensor


def frequent_tokens(counts: Sequence[int], size: int | None) -> Tensor:
    """Returns the ids of the `size` most frequent tokens in ascending order; all tokens if `size` is None."""
    if size is None or size >= len(counts):
        return torch.arange(len(counts))
    return torch.tensor(counts).argsort(descending=True, stable=True)[:size].sort().values
