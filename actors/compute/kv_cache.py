"""Paged KV cache: one pool of pages, addressed through the page tables of a step's rows.

`cluster.page_allocator` assigns pages to sequences; this module holds the memory and is independent of sessions and
models. `to_device` copies all of a step's numbers of one type together: each copy costs a launch, and a copy from
pageable memory blocks the host.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from actors.compute.input_row import InputRow as InputRow
from actors.compute.input_row import Integers
from actors.compute.recurrent_states import RecurrentStates
from cluster.page_allocator import PageCopy, SlotMove


def to_device(
    parts: Sequence[Sequence[float] | Integers], device: torch.device, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ...]:
    """Copies the parts to a device in one operation; returns them as one-dimensional views of one tensor.

    A copy to a GPU uses pinned memory and is asynchronous; torch keeps that memory until the copy completes.
    """
    sizes = [len(part) for part in parts]
    host = torch.empty(sum(sizes), dtype=dtype, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    at = 0
    for part, size in zip(parts, sizes, strict=True):
        numbers[at : at + size] = part
        at += size
    return torch.split(host.to(device, non_blocking=True), sizes)


class LayerSize(NamedTuple):
    """Size of a layer's cached keys on one rank."""

    kv_heads: int
    head_dim: int


class PagedCache:
    """Keys and values of all layers; each layer has shape (pages x page size, 2 x kv heads, head dim).

    Keys and values of a position are adjacent, so one copy writes both. The attention libraries accept the strides of
    views of either. Layers of one size share a tensor, usually the only one, so that one operation moves a slot in all
    of them. `recurrent` holds the states of recurrent layers, which belong to pages, too.
    """

    def __init__(
        self, pages: int, page_size: int, layers: Mapping[int, LayerSize], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocates `layers`, by index. The operating system commits their memory when it is first written."""
        self.page_size = page_size
        self.padding_slot = pages * page_size  # first slot of an extra page of zeros, read by padding
        self.scrap_slot = self.padding_slot + page_size  # first slot of a page that padding writes and nobody reads
        self.dtype = dtype
        self.device = device
        counts = Counter(layers.values())
        slots = (pages + 2) * page_size
        self._pools = {
            size: torch.empty((count, slots, 2 * size.kv_heads, size.head_dim), dtype=dtype, device=device)
            for size, count in counts.items()
        }
        for pool in self._pools.values():
            pool[:, self.padding_slot :] = 0
        free = {size: iter(range(count)) for size, count in counts.items()}
        self._layers = {index: self._pools[size][next(free[size])] for index, size in layers.items()}
        self.recurrent = RecurrentStates(page_size)

    def layer(self, index: int) -> Tensor:
        """Returns a layer's keys and values."""
        return self._layers[index]

    def move(self, moves: Sequence[SlotMove]) -> None:
        """Copies individual slots in all layers, as one simultaneous copy. Keys keep their rotary positions."""
        if not moves:
            return
        sources, targets = to_device([[move.source for move in moves], [move.to for move in moves]], self.device)
        for pool in self._pools.values():
            pool.index_copy_(1, targets, pool.index_select(1, sources))

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies whole pages in all layers."""
        if not copies:
            return
        self.recurrent.copy(copies)
        sources, targets = to_device([[copy.source for copy in copies], [copy.to for copy in copies]], self.device)
        for pool in self._pools.values():
            pages = pool.view(len(pool), -1, self.page_size, *pool.shape[2:])
            pages.index_copy_(1, targets, pages.index_select(1, sources))
