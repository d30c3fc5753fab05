"""Paged KV cache: one pool of pages, addressed through the page tables of a step's rows.

`cluster.page_allocator` assigns pages to sequences; this module holds the memory and is independent of sessions and
models. `to_device` copies all of a step's numbers of one type together: each copy costs a launch, and a copy from
pageable memory blocks the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.compute.input_row import InputRow as InputRow
from actors.compute.recurrent_states import RecurrentStates
from cluster.page_allocator import PageCopy, SlotMove


def to_device(
    parts: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ...]:
    """Copies the parts to a device in one operation; returns them as one-dimensional views of one tensor.

    A copy to a GPU uses pinned memory and is asynchronous; torch keeps that memory until the copy completes.
    """
    numbers = [number for part in parts for number in part]
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return torch.split(host.to(device, non_blocking=True), [len(part) for part in parts])


class PagedCache:
    """Keys and values of all layers; each layer has shape (pages x page size, 2 x kv heads, head dim).

    Keys and values of a position are adjacent, so one copy writes both. The attention libraries accept the strides of
    views of either. `recurrent` holds the states of recurrent layers, which belong to pages, too.
    """

    def __init__(self, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.padding_slot = pages * page_size  # first slot of an extra page of zeros, read by padding
        self.scrap_slot = self.padding_slot + page_size  # first slot of a page that padding writes and nobody reads
        self._positions = (pages + 2) * page_size
        self.dtype = dtype
        self.device = device
        self._layers: dict[int, Tensor] = {}
        self.recurrent = RecurrentStates(page_size)

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
        self.recurrent.copy(copies)
        sources, targets = to_device([[copy.source for copy in copies], [copy.to for copy in copies]], self.device)
        for layer in self._layers.values():
            pages = layer.view(-1, self.page_size, *layer.shape[1:])
            pages[targets] = pages[sources]
