"""What training asks of a kind of head: outputs for each place and step, and a checkpoint in a published layout."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from examples.train_head.shards import StatesBatch


@dataclass(frozen=True, slots=True, eq=False)
class PublishedHead:
    """A checkpoint."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


class DraftModule(nn.Module):
    """A head that is trained.

    At place p, step k predicts token p + 2 + k from the target's states up to p and the tokens up to p + 1 + k: what
    the head has to do when it drafts its token k after the token p + 1 was decided.
    """

    token_ids: Tensor  # (columns,) of the target, by column of the logits

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        """What each of the first `count` steps gives to `logits`, (rows, longest, size)."""
        raise NotImplementedError

    def logits(self, outputs: Tensor, step: int) -> Tensor:
        """(n, columns), of (n, size)."""
        raise NotImplementedError

    def published(self) -> PublishedHead:
        """As our loader and others read it."""
        raise NotImplementedError


def tokens_after(tokens: Tensor, places: int) -> Tensor:
    """The token so many places later, (rows, longest); zeros after the last."""
    return nn.functional.pad(tokens[:, places:], (0, places))
