"""Tests cache pages, and the packing of indices for the device into one tensor."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from actors.compute.kv_cache import LayerSize, PagedCache, to_device
from cluster.page_allocator import PageCopy, SlotMove

PAGE_SIZE = 4
CPU = torch.device("cpu")


SIZES = {0: LayerSize(1, 2), 3: LayerSize(1, 2), 4: LayerSize(2, 1), 6: LayerSize(2, 3)}  # other layers are recurrent


def filled(pages: int) -> tuple[PagedCache, list[Tensor]]:
    """Returns a cache whose numbers all differ, and its layers."""
    cache = PagedCache(pages, PAGE_SIZE, SIZES, torch.float32, CPU)
    layers = [cache.layer(index) for index in SIZES]
    begin = 0
    for layer in layers:
        layer.copy_(torch.arange(begin, begin + layer.numel()).view_as(layer))
        begin += layer.numel()
    return cache, layers


def test_each_layer_has_its_own_contiguous_memory_with_zeros_for_padding():
    cache = PagedCache(12, PAGE_SIZE, SIZES, torch.float32, CPU)
    for index, (kv_heads, head_dim) in SIZES.items():
        layer = cache.layer(index)
        assert layer.shape == (14 * PAGE_SIZE, 2 * kv_heads, head_dim)
        assert layer.is_contiguous()
        assert layer[cache.padding_slot :].eq(0).all()
    assert len(set(torch.cat([layer.flatten() for layer in filled(2)[1]]).tolist())) == 4 * PAGE_SIZE * (4 + 4 + 4 + 12)


class CountedOperations(TorchDispatchMode):
    """Counts copies to indices."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.copies += func is torch.ops.aten.index_copy_.default
        return func(*args, **(kwargs or {}))


def test_layers_of_one_size_are_copied_together():
    """On a GPU, each operation is a launch."""
    cache, _ = filled(pages=5)
    with CountedOperations() as counted:
        cache.move([SlotMove(6, 5), SlotMove(9, 6)])
    assert counted.copies == len(set(SIZES.values()))
    with CountedOperations() as counted:
        cache.copy([PageCopy(1, 4), PageCopy(3, 1)])
    assert counted.copies == len(set(SIZES.values()))


def test_whole_pages_are_copied_in_all_layers_and_nothing_else_is_touched():
    cache, layers = filled(pages=5)
    before = [layer.clone().view(-1, PAGE_SIZE, *layer.shape[1:]) for layer in layers]
    cache.copy([PageCopy(1, 4), PageCopy(1, 0), PageCopy(3, 1)])  # the last copy overwrites the source of the others
    for layer, old in zip(layers, before, strict=True):
        new = layer.view_as(old)
        for page, source in enumerate([1, 3, 2, 3, 1]):
            torch.testing.assert_close(new[page], old[source])
    cache.copy([])


def test_slots_move_together_in_all_layers():
    """A path's nodes move to consecutive slots, some of which other nodes occupied."""
    cache, layers = filled(pages=3)
    before = [layer.clone() for layer in layers]
    cache.move([SlotMove(6, 5), SlotMove(9, 6), SlotMove(2, 9)])
    for layer, old in zip(layers, before, strict=True):
        expected = old.clone()
        expected[[5, 6, 9]] = old[[6, 9, 2]]
        torch.testing.assert_close(layer, expected)
    cache.move([])


def test_parts_round_trip_including_empty_ones():
    parts = [[3, 1], [], range(5, 8), (-1,)]
    assert [part.tolist() for part in to_device(parts, CPU)] == [[3, 1], [], [5, 6, 7], [-1]]


def test_all_parts_are_one_piece_of_memory():
    first, second = to_device([[1, 2, 3], [4]], CPU)
    assert second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()


def test_numbers_are_exact_in_the_requested_type():
    (integers,) = to_device([[2**63 - 1, -(2**63)]], CPU)
    assert integers.tolist() == [2**63 - 1, -(2**63)]
    (fractions,) = to_device([[0.1, 1e-300]], CPU, torch.float64)
    assert fractions.tolist() == [0.1, 1e-300]
