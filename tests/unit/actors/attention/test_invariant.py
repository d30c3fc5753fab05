"""Invariant attention gives a query the same bits alone and beside rows of other lengths."""

import pytest
import torch
from torch import Tensor

from actors.attention import ScoreOptions
from actors.attention.batch import exact_batch
from actors.attention.invariant import invariant_attention
from actors.attention.select_backend import AttentionShape
from actors.compute.kv_cache import InputRow, LayerSize, PagedCache

PAGE_SIZE = 16
TOKENS = 6
ENDS = (8, 103, 195, 230, 343, 387, 450, 515, 708, 760, 1240, 1300, 1760, 1830, 2040)  # in steps of 512, all kinds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 150])
@torch.inference_mode()
def test_queries_have_the_same_bits_beside_rows_of_other_lengths(dtype: torch.dtype, window: int | None) -> None:
    shape = AttentionShape(layers=1, heads=6, kv_heads=2, head_dim=32, page_size=PAGE_SIZE, dtype=dtype)
    backend = invariant_attention(shape)
    counts = [-(-end // PAGE_SIZE) for end in ENDS]
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(sum(counts), generator=generator)
    tables = [tuple(table.tolist()) for table in torch.split(pages, counts)]
    size = LayerSize(shape.kv_heads, shape.head_dim)
    cache = PagedCache(sum(counts), PAGE_SIZE, {0: size}, dtype, torch.device("cpu"))
    pool = cache.layer(0)
    pool[: cache.padding_slot] = torch.randn(cache.padding_slot, *pool.shape[1:], generator=generator).to(dtype)
    rows = [InputRow((0,) * TOKENS, end - TOKENS, 0, table) for end, table in zip(ENDS, tables, strict=True)]
    query = torch.randn(len(rows), TOKENS, shape.heads, shape.head_dim, generator=generator).to(dtype)
    new = torch.randn(len(rows), TOKENS, 2 * shape.kv_heads, shape.head_dim, generator=generator).to(dtype)
    options = ScoreOptions(shape.head_dim**-0.5, window=window)

    def attend(rows: list[InputRow], query: Tensor, new: Tensor) -> Tensor:
        batch = exact_batch(rows, cache, backend)
        return batch.attend(0, query.flatten(0, -3), new.flatten(0, -3), options)

    together = attend(rows, query, new).view(len(rows), TOKENS, -1)
    different = []
    for index, row in enumerate(rows):
        for at in range(TOKENS):
            token = InputRow((0,), row.start + at, 0, row.pages)
            alone = attend([token], query[index, at : at + 1], new[index, at : at + 1])[0]
            if not torch.equal(alone, together[index, at]):
                different.append(row.start + at)
    assert different == []
