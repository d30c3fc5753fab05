"""The Triton kernel equals gathered attention on random ragged batches, and gives a row the same bits in all of them.

Runs in Triton's interpreter (`make test-triton`), which executes the kernel's programs with numpy. The interpreter
cannot multiply bfloat16, so that type is only compiled (`compile_kernels.py`).
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from actors.attention import AttentionBackend, ScoreOptions, StepSizes
from actors.attention.batch import exact_batch
from actors.attention.flat_rows import FlatRows
from actors.attention.paged import Paged, step_integers, step_tensors
from actors.attention.sdpa_gather import SdpaGather
from actors.attention.select_backend import TOLERANCE
from actors.compute.kv_cache import InputRow, LayerSize, PagedCache
from protos.draft_tree import MAX_BLOCK_TOKENS
from tests.unit.actors.attention.triton_interpreter import CPU, interpreted_paged
from tests.unit.trees import grown

HEADS = ((1, 1), (2, 2), (4, 2), (8, 2), (6, 1), (7, 1))  # query heads, key heads
MAX_CONTEXT = 1300  # several splits


@pytest.fixture(scope="module")
def paged() -> Paged:
    return interpreted_paged()


@dataclass(frozen=True)
class Case:
    """A random step."""

    rows: list[InputRow]
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    options: ScoreOptions
    seed: int

    def cache(self, dtype: torch.dtype = torch.float32) -> PagedCache:
        """Returns a cache with the rows' contexts; all other memory is NaN."""
        pages = max(page for row in self.rows for page in row.pages) + 2
        size = LayerSize(self.kv_heads, self.head_dim)
        cache = PagedCache(pages, self.page_size, {0: size}, dtype, CPU)
        pool = cache.layer(0)
        pool[: cache.padding_slot] = torch.nan
        for row in self.rows:
            context = slots_of(row, self.page_size)[: row.start]
            pool[context] = self.random(row.pages[0], row.start, 2 * self.kv_heads).to(dtype)
        return cache

    def random(self, stream: int, *sizes: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + stream)
        return torch.randn(*sizes, self.head_dim, generator=generator)

    def new(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Returns queries, and keys and values of the new tokens."""
        parts = [self.random(-1 - row.pages[0], len(row.tokens), self.heads + 2 * self.kv_heads) for row in self.rows]
        query, key_value = torch.cat(parts).to(dtype).split([self.heads, 2 * self.kv_heads], dim=1)
        return query, key_value  # views, as of a fused projection

    def attend(self, backend: AttentionBackend, dtype: torch.dtype = torch.float32) -> Tensor:
        batch = exact_batch(self.rows, self.cache(dtype), backend)
        return batch.attend(0, *self.new(dtype), self.options)

    def parts(self, out: Tensor) -> tuple[Tensor, ...]:
        """Splits a result by row."""
        return out.split([len(row.tokens) for row in self.rows])


def slots_of(row: InputRow, page_size: int) -> Tensor:
    return (torch.tensor(row.pages).unsqueeze(1) * page_size + torch.arange(page_size)).flatten()


def a_row(rng: Random, context: int) -> tuple[int, int, tuple[int, ...]]:
    """Returns start, number of tokens and parents: a decoding chain, a prompt chunk or a tree after a few tokens."""
    start = rng.choice((0, rng.randrange(40), rng.randrange(context)))
    kind = rng.randrange(8)
    if kind < 3:
        return start, rng.randrange(1, 9), ()
    if kind == 3:
        return start, rng.randrange(60, 90), ()
    parents = grown(rng, MAX_BLOCK_TOKENS if kind == 4 else rng.randrange(1, 20), 10**6).parents
    return start, len(parents) + rng.randrange(1, 4), parents


def a_case(seed: int, head_dim: int | None = None) -> Case:
    """Returns a random step. With small heads, contexts have several splits; the interpreter is slow."""
    rng = Random(seed)
    page_size = rng.choice((4, 16, 32))
    head_dim = head_dim or rng.choice((8, 16, 16, 24, 80))
    shapes = [a_row(rng, 60 if head_dim > 32 else MAX_CONTEXT) for _ in range(rng.randrange(1, 5))]
    counts = [-(-(start + tokens) // page_size) + rng.randrange(2) for start, tokens, _ in shapes]  # some have a spare
    pages = list(range(sum(counts) + 9))
    rng.shuffle(pages)
    ends = list(accumulate(counts))
    tables = [tuple(pages[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    heads, kv_heads = rng.choice(HEADS)
    return Case(
        [
            InputRow((1,) * tokens, start, 1, table, parents)
            for (start, tokens, parents), table in zip(shapes, tables, strict=True)
        ],
        heads,
        kv_heads,
        head_dim,
        page_size,
        ScoreOptions(
            rng.choice((None, 0.3)), window=rng.choice((None, 1, 7, 100, 600)), softcap=rng.choice((None, None, 2.0))
        ),
        seed,
    )


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32))
@example(seed=1)
def test_random_steps_equal_gathered_attention(paged, seed):
    """Memory outside of the rows holds NaN."""
    case = a_case(seed)
    torch.testing.assert_close(case.attend(paged), case.attend(SdpaGather()), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_types_and_head_sizes_equal_float32_within_rounding(paged, dtype, head_dim):
    case = replace(a_case(head_dim, head_dim), options=ScoreOptions())
    tolerance = TOLERANCE[dtype]
    found = case.attend(paged, dtype)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), case.attend(SdpaGather()), atol=tolerance, rtol=tolerance)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(paged, seed, dtype):
    case = a_case(seed)
    together = case.parts(case.attend(paged, dtype))
    backwards = replace(case, rows=case.rows[::-1])
    reordered = backwards.parts(backwards.attend(paged, dtype))[::-1]
    for row, found, again in zip(case.rows, together, reordered, strict=True):
        assert torch.equal(found, again)
        assert torch.equal(found, replace(case, rows=[row]).attend(paged, dtype))


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_a_chain_has_the_same_bits_however_its_tokens_are_divided_into_steps(paged, seed, dtype):
    rng = Random(seed)
    case = a_case(seed)
    start = rng.choice((0, 30, 500, 700))
    count = rng.randrange(2, 90)
    pages = tuple(range(-(-(start + count) // case.page_size)))
    whole = replace(case, rows=[InputRow((1,) * count, start, 1, pages)])
    expected = whole.attend(paged, dtype)
    query, key_value = whole.new(dtype)
    cache = whole.cache(dtype)
    done = 0
    while done < count:
        fed = min(count - done, rng.choice((1, 1, 5, 40)))
        part = slice(done, done + fed)
        batch = exact_batch([InputRow((1,) * fed, start + done, 1, pages)], cache, paged)
        assert torch.equal(batch.attend(0, query[part], key_value[part], case.options), expected[part])
        done += fed


def written(case: Case, dtype: torch.dtype = torch.float32) -> tuple[PagedCache, Tensor]:
    """Returns a cache that also holds the new keys and values, and the queries."""
    cache = case.cache(dtype)
    query, key_value = case.new(dtype)
    slots = torch.cat([slots_of(row, case.page_size)[row.start : row.end] for row in case.rows])
    cache.layer(0)[slots] = key_value
    return cache, query


def placed(case: Case, sizes: StepSizes) -> list[Tensor]:
    return [torch.tensor(part) for part in step_integers(FlatRows(case.rows, case.page_size), sizes)]


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_fixed_tensors_serve_any_step_with_poisoned_padding(paged, seed):
    """A captured step reads new contents from the same tensors. Padding holds NaN queries and invalid pages."""
    from actors.attention.paged_kernel import attend

    first = a_case(seed)
    exact = StepSizes.of(FlatRows(first.rows, first.page_size))
    sizes = StepSizes(exact.tokens + 13, exact.rows + 3, exact.pages + 30)
    parts = placed(first, sizes)
    step = step_tensors(parts, sizes)
    second = replace(first, rows=first.rows[1:] or first.rows)
    for case in (first, second):
        for part, numbers in zip(parts, placed(case, sizes), strict=True):
            part.copy_(numbers)
        for index in range(sizes.rows):
            row = case.rows[index] if index < len(case.rows) else None
            step.block_table[index, 0 if row is None else -(-row.end // case.page_size) :] = 10**12
        cache, query = written(case)
        total = len(query)
        padded = torch.cat([query, torch.full((sizes.tokens - total, *query.shape[1:]), torch.nan)])
        pool = cache.layer(0)
        found = attend(step, padded, pool, case.page_size, case.options)
        assert torch.equal(found[:total].flatten(1), case.attend(paged))
        assert found[total:].eq(0).all()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32), dtype=st.sampled_from([torch.float32, torch.float16]))
def test_one_pass_and_partial_results_have_the_same_bits(paged, seed, dtype):
    from actors.attention.paged_kernel import attend

    case = a_case(seed)
    exact = StepSizes.of(FlatRows(case.rows, case.page_size))
    sizes = StepSizes(exact.tokens + 2, exact.rows + 1, exact.pages + 512 // case.page_size)
    step = step_tensors(placed(case, sizes), sizes)
    cache, query = written(case, dtype)
    padded = torch.cat([query, query[:1].expand(sizes.tokens - len(query), -1, -1)])
    arguments = (step, padded, cache.layer(0), case.page_size, case.options)
    assert torch.equal(attend(*arguments), attend(*arguments, workspace_bytes=0))


def test_nan_of_a_row_shows_in_its_own_result_only(paged):
    """A replica ends sessions with NaN logits, so the kernel must not hide them."""
    pages = tuple(range(80))
    rows = [InputRow((1,) * 3, 600, 1, pages[:40]), InputRow((1,) * 2, 20, 1, pages[40:42])]
    case = Case(rows, 4, 2, 16, 16, ScoreOptions(), 1)
    cache = case.cache()
    cache.layer(0)[5] = torch.nan
    batch = exact_batch(rows, cache, paged)
    overflowed, other = case.parts(batch.attend(0, *case.new(), ScoreOptions()))
    assert overflowed.isnan().all()
    assert other.isfinite().all()


def test_padding_must_hold_the_step():
    """Needs no Triton."""
    rows = [InputRow((1, 2), 0, 1, (0,)), InputRow((3,), 0, 1, (1,))]
    assert StepSizes.of(FlatRows(rows, 16)) == StepSizes(3, 2, 1)
    for sizes in (StepSizes(2, 2, 1), StepSizes(3, 1, 1)):
        with pytest.raises(AssertionError, match="more"):
            step_integers(FlatRows(rows, 16), sizes)


def test_step_tensors_of_a_chain_and_a_tree():
    """Needs no Triton."""
    rows = [InputRow((1, 2), 6, 1, (5, 3)), InputRow((1, 2, 3, 4), 2, 1, (7, 8), (-1, 0, -1))]
    sizes = StepSizes(8, 3, 3)
    step = step_tensors([torch.tensor(part) for part in step_integers(FlatRows(rows, 4), sizes)], sizes)
    assert step.positions.tolist() == [6, 7, 2, 3, 4, 3, 0, 0]
    assert step.prefixes.tolist() == [7, 8, 3, 3, 3, 3, 0, 0]
    assert step.stops.tolist() == [7, 8, 3, 4, 5, 6, 0, 0]
    assert step.ancestors[:, 0].tolist() == [0, 0, 0, 0b1, 0b11, 0b100, 0, 0]
    assert step.ancestors[:, 1].eq(0).all()
    assert step.row_starts.tolist() == [0, 2, 6, 6]
    assert step.block_table.tolist() == [[5, 3, 0], [7, 8, 0], [0, 0, 0]]


def test_ancestors_fill_both_words():
    """Node 63 sets the sign bit of the first word. Needs no Triton."""
    nodes = 70
    row = InputRow((1,) * (nodes + 1), 0, 1, (0, 1, 2, 3, 4), tuple(range(-1, nodes - 1)))
    sizes = StepSizes.of(FlatRows([row], 16))
    last = step_tensors([torch.tensor(part) for part in step_integers(FlatRows([row], 16), sizes)], sizes).ancestors[-1]
    assert last.tolist() == [-1, (1 << 6) - 1]
