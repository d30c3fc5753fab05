"""Every paged attention backend equals plain attention over each separate row.

GPU libraries are replaced by reference kernels (`attention_kernels.py`).
"""

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import Alibi, AttentionBackend, ScoreOptions, pages_of
from actors.attention.batch import exact_batch
from actors.attention.flashinfer import FlashInfer
from actors.attention.sdpa_gather import SdpaGather, SdpaGatherPlan
from actors.attention.varlen import Varlen
from actors.compute.kv_cache import InputRow, LayerSize, PagedCache
from protos.draft_tree import MAX_BLOCK_TOKENS, DraftTree
from tests.unit.actors.attention.attention_kernels import FLASHINFER, exactly_bounded_varlen
from tests.unit.actors.attention.triton_interpreter import interpreted_paged
from tests.unit.trees import grown

PAGE_SIZE = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
CPU = torch.device("cpu")
SLOPES = (0.5, 0.25, 2.0, 0.01)  # by head
BACKENDS: dict[str, Callable[[], AttentionBackend]] = {
    "gathered": SdpaGather,
    "flashinfer": lambda: FlashInfer(FLASHINFER, CPU),
    "varlen": lambda: Varlen(exactly_bounded_varlen),
    "paged": interpreted_paged,
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return BACKENDS[request.param]()


def a_cache(pages: int = 12) -> PagedCache:
    """Returns a cache filled with large numbers, which reveal reads of unwritten memory."""
    cache = PagedCache(pages, PAGE_SIZE, {0: LayerSize(KV_HEADS, HEAD_DIM)}, torch.float32, CPU)
    cache.layer(0)[: cache.padding_slot] = 1e3
    return cache


def a_row(pages: tuple[int, ...], start: int, count: int) -> InputRow:
    return InputRow((1,) * count, start, 1, pages)


def a_plan(rows: list[InputRow], cache: PagedCache) -> SdpaGatherPlan:
    """Returns the gathering backend's plan on the device."""
    plan = SdpaGatherPlan(rows, cache)
    plan.place([torch.tensor(part, dtype=torch.int64) for part in plan.integers])
    return plan


def random_input(seed: int, total: int) -> tuple[Tensor, Tensor]:
    """Returns random queries, and keys followed by values."""
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(total, HEADS, HEAD_DIM, generator=generator)
    return query, torch.randn(total, 2 * KV_HEADS, HEAD_DIM, generator=generator)


def plain_attention(
    query: Tensor, key_value: Tensor, window: int | None = None, slopes: Tensor | None = None
) -> Tensor:
    """Computes a whole sequence without a cache; returns the last queries' output, (queries, heads x head dim)."""
    keys, values = key_value.repeat_interleave(HEADS // KV_HEADS, dim=1).transpose(0, 1).chunk(2)
    at = torch.arange(len(key_value))[-len(query) :].unsqueeze(1)
    key_at = torch.arange(len(key_value))
    seen = (key_at <= at) if window is None else (key_at <= at) & (key_at > at - window)
    biases = torch.zeros(HEADS) if slopes is None else slopes
    distances = (key_at - at).masked_fill(~seen, 0)
    mask = (biases.view(-1, 1, 1) * distances).masked_fill(~seen, -torch.inf)
    found = F.scaled_dot_product_attention(query.transpose(0, 1), keys, values, attn_mask=mask, scale=0.3)
    return found.transpose(0, 1).reshape(len(query), -1)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_every_backend_attends_each_row_to_its_own_text(backend, window):
    """Cases are long prompts, single tokens, shared pages and full last pages.

    The second layer may have another window, and the second step reads the first step's pages.
    """
    shared = (30, 4, 17)
    tables = [tuple(range(40, 100)), (*shared, 3, 110), (*shared, 8, 111), (119, 1, 112), (2, 7)]
    starts = (12, 13, 15, 0, 3)
    counts = (200, 5, 1, 8, 1)
    cache = a_cache(pages=120)
    pool = cache.layer(0)
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(6)))
    texts = [pages_of_row(pool, table)[:start].clone() for table, start in zip(tables, starts, strict=True)]
    for seed, fed in ((5, counts), (6, (1, 2, 1, 1, 3))):
        rows = [a_row(table, len(text), count) for table, text, count in zip(tables, texts, fed, strict=True)]
        query, new = random_input(seed, sum(fed))
        batch = exact_batch(rows, cache, backend)
        batch.attend(0, query, new, ScoreOptions(0.2, None if window else 3))
        found = batch.attend(0, query, new, ScoreOptions(0.3, window))
        texts = [torch.cat(pair) for pair in zip(texts, new.split(fed), strict=True)]
        expected = [plain_attention(part, text, window) for part, text in zip(query.split(fed), texts, strict=True)]
        torch.testing.assert_close(found, torch.cat(expected), atol=1e-4, rtol=1e-4)


def pages_of_row(pool: Tensor, table: tuple[int, ...]) -> Tensor:
    """Returns keys followed by values at each position of a row, (positions, 2 x kv heads, head dim)."""
    return pool[: len(pool) // PAGE_SIZE * PAGE_SIZE].unflatten(0, (-1, PAGE_SIZE))[list(table)].flatten(0, 1)


def a_tree_row(pages: tuple[int, ...], start: int, known: int, tree: DraftTree) -> InputRow:
    """Returns a row of decided tokens followed by a tree."""
    return InputRow((1,) * known + tree.tokens, start, 1, pages, tree.parents)


def plain_tree_attention(
    row: InputRow,
    query: Tensor,
    old: Tensor,
    new: Tensor,
    window: int | None = None,
    slopes: Tensor | None = None,
) -> list[Tensor]:
    """Computes attention token by token: decided tokens over all earlier ones, each node over its own path."""
    known = len(row.tokens) - len(row.parents)
    lines = [tuple(range(known - at)) for at in range(known - 1, -1, -1)]
    lines += [(*range(known), *[known + node for node in path]) for path in row.tree.paths]
    return [
        plain_attention(query[at : at + 1], torch.cat([old, new[list(line)]]), window, slopes)
        for at, line in enumerate(lines)
    ]


@pytest.mark.parametrize("window", [None, 1, 2, 4])
@pytest.mark.parametrize("name", ["gathered", "flashinfer", "paged"])
def test_a_tree_node_attends_to_its_path_and_the_tokens_before_the_tree(name, window):
    """The test compares with separate paths, next to other rows and across page boundaries."""
    backend = BACKENDS[name]()
    for seed in range(6):
        cache = a_cache(pages=24)
        query, old = random_input(seed, 4 + 2 + 3)
        first, other = (grown(Random(seed + more), nodes, 50) for more, nodes in ((0, 9), (100, 5)))
        rows = [a_row((7,), 0, 4), a_row((5,), 0, 2), a_row((4,), 0, 3)]
        exact_batch(rows, cache, backend).attend(0, query, old, ScoreOptions(0.3, window))
        trees = [a_tree_row((7, 2, 9, 11, 12), 4, 1, first), a_tree_row((5, 13, 14, 15), 2, 2, other)]
        further_query, new = random_input(seed + 50, 1 + len(first) + 2 + len(other) + 1)
        found = exact_batch([*trees, a_row((4,), 3, 1)], cache, backend).attend(
            0, further_query, new, ScoreOptions(0.3, window)
        )
        one = slice(0, 1 + len(first))
        two = slice(one.stop, one.stop + 2 + len(other))
        expected = plain_tree_attention(trees[0], further_query[one], old[:4], new[one], window)
        expected += plain_tree_attention(trees[1], further_query[two], old[4:6], new[two], window)
        expected.append(plain_attention(further_query[two.stop :], torch.cat([old[6:], new[two.stop :]]), window))
        torch.testing.assert_close(found, torch.cat(expected))


SPECIAL = {
    "chunks": ScoreOptions(0.3, chunk=3),
    "a bound": ScoreOptions(0.3, softcap=0.5),
    "sinks": ScoreOptions(0.3, window=4, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "all": ScoreOptions(0.3, chunk=2, softcap=0.7, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
}


def special_attention(query: Tensor, key_value: Tensor, options: ScoreOptions) -> Tensor:
    """Computes the last token's attention over a whole sequence, head by head, (1, heads x head dim)."""
    keys, values = key_value.chunk(2, dim=1)
    last = len(key_value) - 1
    found = []
    for head in range(HEADS):
        of = head // (HEADS // KV_HEADS)
        scores = keys[:, of] @ query[0, head] * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        for at in range(last):
            is_before = options.chunk is not None and at // options.chunk < last // options.chunk
            if is_before or (options.window is not None and last - at >= options.window):
                scores[at] = -torch.inf
        sink = [] if options.sinks is None else [options.sinks[head : head + 1]]
        found.append(torch.cat([scores, *sink]).softmax(0)[: last + 1] @ values[:, of])
    return torch.cat(found).unsqueeze(0)


@pytest.mark.parametrize("options", SPECIAL.values(), ids=SPECIAL)
def test_special_scores_of_chains_and_trees(options):
    for seed in range(4):
        cache = a_cache(pages=24)
        tree = grown(Random(seed), 9, 50)
        query, old = random_input(seed, 4 + 2)
        exact_batch([a_row((7,), 0, 4), a_row((5,), 0, 2)], cache, SdpaGather()).attend(0, query, old, options)
        rows = [a_tree_row((7, 2, 9, 11, 12), 4, 2, tree), a_row((5,), 2, 2)]
        query, new = random_input(seed + 50, 2 + len(tree) + 2)
        found = exact_batch(rows, cache, SdpaGather()).attend(0, query, new, options)
        lines = [(0,), (0, 1), *[(0, 1, *[2 + node for node in path]) for path in tree.paths]]
        texts = [torch.cat([old[:4], new[list(line)]]) for line in lines]
        texts += [torch.cat([old[4:], new[-2 : len(new) - 1 + at]]) for at in range(2)]
        expected = [special_attention(query[at : at + 1], text, options) for at, text in enumerate(texts)]
        torch.testing.assert_close(found, torch.cat(expected))


def test_biases_grow_with_the_position_of_a_tree_node_not_with_its_slot():
    """Rows of a tree, a block and a single token share a group."""
    slopes = torch.tensor(SLOPES)
    cache = a_cache(pages=24)
    tree = grown(Random(3), 9, 50)
    query, old = random_input(8, 4 + 2)
    exact_batch([a_row((7,), 0, 4), a_row((5,), 0, 2)], cache, SdpaGather()).attend(0, query, old, ScoreOptions(0.3))
    rows = [a_tree_row((7, 2, 9, 11), 4, 1, tree), a_row((5, 12), 2, 3), a_row((13,), 0, 1)]
    further_query, new = random_input(9, 10 + 3 + 1)
    options = ScoreOptions(0.3, alibi=Alibi(slopes, torch.float32))
    found = exact_batch(rows, cache, SdpaGather()).attend(0, further_query, new, options)
    expected = plain_tree_attention(rows[0], further_query[:10], old[:4], new[:10], None, slopes)
    expected.append(plain_attention(further_query[10:13], torch.cat([old[4:], new[10:13]]), None, slopes))
    expected.append(plain_attention(further_query[13:], new[13:], None, slopes))
    torch.testing.assert_close(found, torch.cat(expected))


def test_biases_round_to_their_type():
    """Falcon multiplies in bfloat16: 1001 rounds to 1000, and 0.7109375 x 1000 to 712."""
    slopes = torch.tensor([0.7109375], dtype=torch.bfloat16)
    assert Alibi(slopes, torch.float32, 0.5).biases(torch.tensor([[3, 1001]])).tolist() == [[[1.0625, 356.0]]]


def test_positions_of_a_tree_are_by_depth_and_a_chain_is_no_exception():
    tree = DraftTree((5, 6, 7, 8), (-1, 0, -1, 2))
    row = a_tree_row((0, 1, 2), 3, 2, tree)
    assert (row.positions, row.tree_start) == ([3, 4, 5, 6, 5, 6], 5)
    assert a_tree_row((0, 1, 2), 3, 2, DraftTree.chain((5, 6))).positions == a_row((0, 1, 2), 3, 4).positions


@pytest.mark.parametrize("name", ["gathered", "flashinfer", "paged"])
def test_as_many_nodes_as_a_block_may_have(name):
    """The mask supports every node number."""
    cache = a_cache(pages=40)
    tree = grown(Random(1), MAX_BLOCK_TOKENS, 10**6)
    assert len(tree) == MAX_BLOCK_TOKENS
    row = a_tree_row(tuple(range(40)), 0, 2, tree)
    query, new = random_input(2, len(row.tokens))
    found = exact_batch([row], cache, BACKENDS[name]()).attend(0, query, new, ScoreOptions(0.3))
    torch.testing.assert_close(found, torch.cat(plain_tree_attention(row, query, new[:0], new)))


def test_nothing_of_another_sessions_memory_reaches_a_row_not_even_nan():
    """A masked weight is 0, and 0 times NaN is NaN, so one session's overflow could fail all others."""
    cache = a_cache(pages=6)
    query, new = random_input(3, 24)
    poison = torch.full_like(new, torch.nan)
    exact_batch([a_row((0, 1, 2, 3, 4, 5), 0, 24)], cache, SdpaGather()).attend(0, query, poison, ScoreOptions(0.3))
    rows = [a_row((3, 1), 0, 7), a_row((4,), 0, 2), a_row((5,), 0, 4)]
    found = exact_batch(rows, cache, SdpaGather()).attend(0, query[:13], new[:13], ScoreOptions(0.3))
    parts = (slice(0, 7), slice(7, 9), slice(9, 13))
    torch.testing.assert_close(found, torch.cat([plain_attention(query[part], new[part]) for part in parts]))


def test_rows_are_grouped_so_that_padding_at_most_doubles_long_ones():
    cache = a_cache(pages=1024)
    pages = tuple(range(1024))
    short = [(1, 30), (5, 40), (8, 60)]
    assert len(a_plan([a_row(pages, end - count, count) for count, end in short], cache).groups) == 1
    rng = Random(1)
    long = [(rng.randrange(64, 1000), rng.randrange(1000, 4096)) for _ in range(40)]
    groups = a_plan([a_row(pages, end - count, count) for count, end in long], cache).groups
    assert 1 < sum(group.count for group in groups) == len(long)
    assert sum(group.count * group.queries for group in groups) <= 2 * sum(count for count, _ in long)
    assert sum(group.count * group.keys for group in groups) <= 2 * sum(end for _, end in long)


def test_a_mask_is_made_once_for_all_layers_and_not_at_all_where_everything_is_seen():
    cache = a_cache()
    uneven = a_plan([a_row((0, 1), 4, 2), a_row((2,), 0, 1)], cache)
    assert uneven.mask(0, 2, None) is uneven.mask(0, 2, None)
    assert uneven.mask(0, 2, 3) is not uneven.mask(0, 2, None)
    single = a_plan([a_row((0, 1), 5, 1), a_row((2, 3), 5, 1)], cache)
    assert single.mask(0, 2, None) is None
    assert single.mask(0, 2, 6) is None, "the window is not yet full"
    assert single.mask(0, 2, 5) is not None


def test_keys_and_values_of_a_pool_are_views():
    """Libraries accept strides; copying the whole pool in each layer would be far too slow."""
    pool = a_cache().layer(0)
    keys, values = pages_of(pool, PAGE_SIZE)
    assert keys.shape == values.shape == (14, PAGE_SIZE, KV_HEADS, HEAD_DIM)
    assert keys.data_ptr() == pool.data_ptr()
    assert values.stride() == keys.stride()
    torch.testing.assert_close(values.flatten(0, 1), pool[:, KV_HEADS:])
