"""A language model small enough that its exact distribution is known: a Markov chain.

Stands where a real model stands, so that tests and simulations run the real loops against exact probabilities.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.compute.kv_cache import FeedRow
from actors.models.forward_output import ForwardOutput
from cluster.page_allocator import PageCopy, PlaceMove


class ToyRunner:
    """A runner over a table of logits, shape (vocabulary, vocabulary): row = last token, column = next."""

    def __init__(self, table: Tensor) -> None:
        self.vocabulary = int(table.shape[0])
        self._table = table

    def forward(
        self,
        rows: Sequence[FeedRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[PlaceMove] = (),
    ) -> ForwardOutput:
        wanted = [token for row in rows for token in row.tokens[len(row.tokens) - row.logits :]]
        return ForwardOutput(self._table[torch.tensor(wanted, dtype=torch.int64)], None)

    def read_states(self, places: Sequence[int]) -> bytes:
        raise NotImplementedError("a table has no hidden states")
