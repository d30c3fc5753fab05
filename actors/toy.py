"""A language model small enough to know its exact distribution: the next token depends on the last one alone.

Stands where a real model stands, so that tests and simulations run the real loops against exact probabilities.
Knows nothing of who uses it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.cache import FeedRow


class ToyRunner:
    """A `Runner` over a table of logits, shape (vocabulary, vocabulary): row = last token, column = next."""

    def __init__(self, table: Tensor, slots: int) -> None:
        self.vocabulary = int(table.shape[0])
        self.free_slots = list(range(slots))
        self._table = table
        self._fed: list[int] = [0] * slots  # how many tokens each slot has been given

    def forward(self, rows: Sequence[FeedRow]) -> Tensor:
        wanted: list[int] = []
        for row in rows:
            assert row.start <= self._fed[row.slot], "a row starts beyond what its slot holds"
            self._fed[row.slot] = row.start + len(row.tokens)
            wanted += row.tokens[len(row.tokens) - row.logits :]
        return self._table[torch.tensor(wanted, dtype=torch.int64)]
