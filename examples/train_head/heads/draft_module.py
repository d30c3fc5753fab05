"""Interface of trainable heads: outputs for each place and step, and a checkpoint in a published layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from examples.train_head.shards import StatesBatch


@dataclass(frozen=True, slots=True, eq=False)
class PublishedHead:
    """A checkpoint in a published layout."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class DraftModule(nn.Module):
    """A trainable head.

    At place p, step k predicts token p + 2 + k from the target's states up to p and the tokens up to p + 1 + k, as
    it does when it drafts token k after token p + 1 was decided.
    """

    token_ids: Tensor  # (columns,) of the target, by column of the logits

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        """Yields each step's input of `logits`, (rows, longest, size), for the first `count` steps."""
        raise NotImplementedError

    def logits(self, outputs: Tensor, step: int) -> Tensor:
        """Returns logits, (n, columns), of outputs, (n, size)."""
        raise NotImplementedError

    def published(self) -> PublishedHead:
        """Returns the checkpoint, which this project's loader and others read."""
        raise NotImplementedError
