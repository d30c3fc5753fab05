"""Tests cache pages, and the packing of indices for the device into one tensor."""

import torch

from actors.compute.kv_cache import PagedCache, to_device
from cluster.page_allocator import PageCopy, SlotMove

PAGE_SIZE = 4
CPU = torch.device("cpu")


def a_cache(pages: int = 12) -> PagedCache:
    return PagedCache(pages, PAGE_SIZE, torch.float32, CPU)


def test_layers_of_other_shapes_live_beside_each_other():
    cache = a_cache()
    for layer, (kv_heads, head_dim) in enumerate([(2, 8), (1, 16)]):
        assert cache.layer(layer, kv_heads, head_dim).shape[1:] == (2 * kv_heads, head_dim)
        assert cache.layer(layer, kv_heads, head_dim) is cache.layer(layer, kv_heads, head_dim)


def test_whole_pages_are_copied_in_all_layers_and_nothing_else_is_touched():
    cache = a_cache(pages=5)
    layers = [cache.layer(index, 1, 2) for index in range(2)]
    for index, layer in enumerate(layers):
        layer.copy_(torch.arange(layer.numel()).view_as(layer) + 1000 * index)
    before = [layer.clone().view(-1, PAGE_SIZE, *layer.shape[1:]) for layer in layers]
    cache.copy([PageCopy(1, 4), PageCopy(1, 0), PageCopy(3, 1)])  # the last copy overwrites the source of the others
    for layer, old in zip(layers, before, strict=True):
        new = layer.view_as(old)
        for page, source in enumerate([1, 3, 2, 3, 1]):
            torch.testing.assert_close(new[page], old[source])
    cache.copy([])


def test_slots_move_together_in_all_layers():
    """A path's nodes move to consecutive slots, some of which other nodes occupied."""
    cache = a_cache(pages=3)
    layers = [cache.layer(index, 1, 2) for index in range(2)]
    for index, layer in enumerate(layers):
        layer.copy_(torch.arange(layer.numel()).view_as(layer) + 1000 * index)
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
