"""Pages as memory, and the attention over them, below any model."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import attend
from actors.cache import SHORT_CONTEXT, FeedRow, PagedCache, RaggedBatch
from cluster.pages import PageCopy

PAGE_SIZE, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 8


def a_cache(pages: int = 12) -> PagedCache:
    return PagedCache(pages, PAGE_SIZE, torch.float32, torch.device("cpu"))


def a_row(pages: tuple[int, ...], start: int, count: int) -> FeedRow:
    return FeedRow((1,) * count, start, 1, pages)


def random_input(seed: int, total: int) -> tuple[Tensor, Tensor]:
    """Queries, and keys before values."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(total, HEADS, HEAD_DIM, generator=generator)
    return query, torch.randn(total, 2 * KV_HEADS, HEAD_DIM, generator=generator)


def plain_attention(query: Tensor, key_value: Tensor, window: int | None = None) -> Tensor:
    """Of one whole sequence, the last queries of it; (queries, heads x head dim)."""
    keys, values = key_value.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1).chunk(2)
    at, key_at = torch.arange(len(key_value))[-len(query) :].unsqueeze(1), torch.arange(len(key_value))
    seen = (key_at <= at) if window is None else (key_at <= at) & (key_at > at - window)
    found = F.scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=seen, scale=0.3)
    return found.transpose(0, 1).reshape(len(query), -1)


@pytest.mark.parametrize("window", [None, 3])
def test_rows_of_unequal_lengths_attend_each_to_its_own(window):
    cache = a_cache()
    query, new = random_input(1, 6 + 3)
    rows = [a_row((7, 2), 0, 6), a_row((5,), 0, 3)]
    found = attend(RaggedBatch(rows, cache), 0, query, new, 0.3, window)
    expected = [plain_attention(query[part], new[part], window) for part in (slice(0, 6), slice(6, 9))]
    torch.testing.assert_close(found, torch.cat(expected))
    further_query, further = random_input(2, 1 + 4)
    rows = [a_row((7, 2), 6, 1), a_row((5, 9), 3, 4)]
    found = attend(RaggedBatch(rows, cache), 0, further_query, further, 0.3, window)
    first, second = torch.cat([new[:6], further[:1]]), torch.cat([new[6:], further[1:]])
    expected = [plain_attention(further_query[:1], first, window), plain_attention(further_query[1:], second, window)]
    torch.testing.assert_close(found, torch.cat(expected))


def test_nothing_of_another_sessions_memory_reaches_a_row_not_even_nan():
    """A mask gives a weight of nought, and nought times NaN is NaN: one session's overflow would end all others."""
    cache = a_cache(pages=6)
    query, new = random_input(3, 24)
    poison = torch.full_like(new, torch.nan)
    attend(RaggedBatch([a_row((0, 1, 2, 3, 4, 5), 0, 24)], cache), 0, query, poison, 0.3, None)
    rows = [a_row((3, 1), 0, 7), a_row((4,), 0, 2), a_row((5,), 0, 4)]
    found = attend(RaggedBatch(rows, cache), 0, query[:13], new[:13], 0.3, None)
    parts = (slice(0, 7), slice(7, 9), slice(9, 13))
    torch.testing.assert_close(found, torch.cat([plain_attention(query[part], new[part]) for part in parts]))


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
    cache.copy([PageCopy(1, 4), PageCopy(1, 0), PageCopy(3, 1)])  # the last writes what the others were copied from
    for layer, old in zip(layers, before, strict=True):
        new = layer.view_as(old)
        for page, source in enumerate([1, 3, 2, 3, 1]):
            torch.testing.assert_close(new[page], old[source])
    cache.copy([])


def test_rows_are_grouped_so_that_padding_at_most_doubles_what_is_long():
    lengths = [(1, 30), (5, 200), (8, 255), (1, 2 * SHORT_CONTEXT + 1), (1, 3 * SHORT_CONTEXT), (40, 60), (60, 60)]
    cache = a_cache(pages=256)
    rows = [a_row(tuple(range(200)), end - count, count) for count, end in lengths]
    groups = RaggedBatch(rows, cache).groups
    assert [group.count for group in groups] == [3, 2, 2]
    assert [(group.queries, group.keys) for group in groups] == [(8, 255), (1, 768), (60, 60)]


def test_a_mask_is_made_once_for_all_layers_and_not_at_all_where_everything_is_seen():
    cache = a_cache()
    uneven = RaggedBatch([a_row((0, 1), 4, 2), a_row((2,), 0, 1)], cache)
    assert uneven.mask(0, 2, None) is uneven.mask(0, 2, None)
    assert uneven.mask(0, 2, 3) is not uneven.mask(0, 2, None)
    single = RaggedBatch([a_row((0, 1), 5, 1), a_row((2, 3), 5, 1)], cache)
    assert single.mask(0, 2, None) is None
    assert single.mask(0, 2, 6) is None, "the window is not yet full"
    assert single.mask(0, 2, 5) is not None
