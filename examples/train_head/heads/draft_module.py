"""Interface of trainable heads: outputs per place and step, and a checkpoint in a published layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from examples.train_head.shards import StatesBatch


@dataclass(frozen=True, slots=True, eq=False)
class PublishedHead:
    """Checkpoint in a published layout."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class DraftModule(nn.Module):
    """Trainable head.

    At place p, step k predicts token p + 2 + k from the target's states up to p and the tokens up to p + 1 + k. This
    matches drafting, where token k follows the decided token p + 1.
    """

    token_ids: Tensor  # (columns,): target token id of each logits column

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        """Yields each step's input of `logits`, (rows, longest, size), for the first `count` steps."""
        raise NotImplementedError

    def logits(self, outputs: Tensor, step: int) -> Tensor:
        """Returns logits, (n, columns), of outputs, (n, size)."""
        raise NotImplementedError

    def published(self) -> PublishedHead:
        """Returns the checkpoint for this project's loader and other servers."""
        raise NotImplementedError
