"""One session's tokens in a step, with the cache pages of its text."""

from collections.abc import Sequence
from dataclasses import field
from functools import cached_property

import numpy as np
import numpy.typing as npt
from torch import Tensor

from protos.draft_tree import DraftTree
from protos.frozen import value

Integers = npt.NDArray[np.int64]


class PageTable(tuple[int, ...]):
    """Pages of a session's slots, in order. Its array is made once, since a long text has thousands of pages."""

    @cached_property
    def numbers(self) -> Integers:
        return np.array(self, np.int64)

    @classmethod
    def of(cls, numbers: Integers) -> "PageTable":
        """Creates a table from its array."""
        table = cls(numbers.tolist())
        table.numbers = numbers
        return table

    def replace_from(self, kept: int, further: Sequence[int]) -> "PageTable":
        """Returns the first `kept` pages, followed by the `further` ones."""
        table = PageTable(self[:kept] + tuple(further))
        table.numbers = np.concatenate([self.numbers[:kept], np.array(further, np.int64)])
        return table


def page_numbers(pages: tuple[int, ...]) -> Integers:
    """Returns a page table as an array."""
    return pages.numbers if isinstance(pages, PageTable) else np.array(pages, np.int64)


@value
class InputRow:
    """Tokens to feed at slots start, start + 1, ... of `pages`. The last `logits` tokens yield logits.

    A token's position is its slot, and it attends to all earlier tokens and itself. With `parents`, the last tokens are
    the nodes of a tree, rooted at the token before them. A node's position is its parent's plus one. A node attends to
    all tokens before the tree, to the nodes on its path and to itself.
    """

    tokens: tuple[int, ...]
    start: int
    logits: int
    pages: tuple[int, ...]  # pages of slots 0 to `end`, in order
    parents: tuple[int, ...] = ()  # as in `DraftTree`; empty for a chain
    states: Tensor | None = field(default=None, compare=False)  # (tokens, hidden): inputs of a draft head

    @property
    def end(self) -> int:
        """Number of filled slots after the row is fed."""
        return self.start + len(self.tokens)

    @property
    def slots(self) -> range:
        """Slots of the fed tokens."""
        return range(self.start, self.end)

    @property
    def positions(self) -> list[int]:
        """Positions of the fed tokens."""
        first = self.tree_start
        return [*range(self.start, first), *[first + depth for depth in self.tree.depths]]

    @property
    def seen(self) -> list[int]:
        """Returns, per token, the last slot of its fully attended prefix; a tree node also attends to its path."""
        first = self.tree_start
        return [*range(self.start, first), *[first - 1] * len(self.parents)]

    @property
    def tree_start(self) -> int:
        """Slot of the first tree node; `end` without a tree."""
        return self.end - len(self.parents)

    @property
    def tree(self) -> DraftTree:
        """The row's draft tree; empty for a chain."""
        return DraftTree(self.tokens[len(self.tokens) - len(self.parents) :], self.parents)
