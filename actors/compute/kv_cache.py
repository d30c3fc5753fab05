"""Paged KV cache: one pool of pages, addressed through the page tables of a step's rows.

`cluster.page_allocator` assigns pages to sequences; this module holds the memory and is independent of sessions and
models. `to_device` copies all of a step's numbers of one type together: each copy costs a launch, and a copy from
pageable memory blocks the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cluster.page_allocator import PageCopy, SlotMove
from protos.draft_tree import DraftTree


def to_device(
    parts: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ...]:
    """Copies the parts to a device in one operation; returns them as one-dimensional views of one tensor.

    A copy to a GPU uses pinned memory and is asynchronous; torch keeps that memory until the copy completes.
    """
    numbers = [number for part in parts for number in part]
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return torch.split(host.to(device, non_blocking=True), [len(part) for part in parts])


@dataclass(frozen=True, slots=True)
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


class PagedCache:
    """Keys and values of all layers; each layer has shape (pages x page size, 2 x kv heads, head dim).

    Keys and values of a position are adjacent, so one copy writes both. The attention libraries accept the strides of
    views of either.
    """

    def __init__(self, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.padding_slot = pages * page_size  # first slot of an extra page of zeros, read by padding
        self._positions = (pages + 1) * page_size
        self.dtype = dtype
        self.device = device
        self._layers: dict[int, Tensor] = {}

    def layer(self, index: int, kv_heads: int, head_dim: int) -> Tensor:
        """Returns a layer's keys and values; allocates them at first use.

        The operating system commits the memory when it is first written.
        """
        if index not in self._layers:
            shape = (self._positions, 2 * kv_heads, head_dim)
            self._layers[index] = torch.empty(shape, dtype=self.dtype, device=self.device)
            self._layers[index][self.padding_slot :] = 0
        return self._layers[index]

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Copies individual slots in all layers, as one simultaneous copy. Keys keep their rotary positions."""
        if not moves:
            return
        sources, targets = to_device([[move.source for move in moves], [move.to for move in moves]], self.device)
        for layer in self._layers.values():
            layer[targets] = layer[sources]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies whole pages in all layers."""
        if not copies:
            return
        sources, targets = to_device([[copy.source for copy in copies], [copy.to for copy in copies]], self.device)
        for layer in self._layers.values():
            pages = layer.view(-1, self.page_size, *layer.shape[1:])
            pages[targets] = pages[sources]
