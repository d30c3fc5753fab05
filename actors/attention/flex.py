"""Attention by torch's FlexAttention, with a block mask of each row's pages.

On a GPU, it compiles to one kernel that reads pages in place. On a CPU, it runs uncompiled and computes scores over the
whole pool, which is only fast enough for tests.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from actors.attention import ScoreOptions, pages_of
from actors.compute.kv_cache import InputRow, PagedCache
from protos.draft_tree import MAX_BLOCK_TOKENS

QUERY_BLOCK = 128  # queries per list of pages
MIN_BLOCK_KEYS = 16  # minimum number of keys per kernel block
MAX_KERNELS = 64  # limit on compiled kernels (chains, trees, windows, ...); beyond it, torch computes all scores
WORD = 32  # nodes per bit set
WORDS = -(-MAX_BLOCK_TOKENS // WORD)


class Flex:
    """Backend over a `kernel` with the signature of torch's flex_attention."""

    name = "flex"
    takes_trees = True

    def __init__(self, kernel: Callable[..., Tensor]) -> None:
        self._kernel = kernel

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> "FlexPlan":
        return FlexPlan(rows, cache, self._kernel)


class FlexPlan:
    """Treats the pool as one long sequence of keys; creates one block mask per window."""

    def __init__(self, rows: Sequence[InputRow], cache: PagedCache, kernel: Callable[..., Tensor]) -> None:
        self._kernel = kernel
        self._page_size = cache.page_size
        self._pages = cache.scrap_slot // cache.page_size + 1  # pages of the pool, including those for padding
        self._rows = len(rows)
        used = [row.pages[: -(-row.end // cache.page_size)] for row in rows]
        row_of = [index for index, row in enumerate(rows) for _ in row.tokens]
        blocks = [
            sorted({page for row in set(row_of[begin : begin + QUERY_BLOCK]) for page in used[row]})
            for begin in range(0, len(row_of), QUERY_BLOCK)
        ]
        self.integers = [
            row_of,
            [at for row in rows for at in row.positions],
            [row * self._pages + page for row, pages in enumerate(used) for page in pages],
            [at for pages in used for at in range(len(pages))],
            [len(pages) for pages in blocks],
            [index * self._pages + at for index, pages in enumerate(blocks) for at in range(len(pages))],
            [page for pages in blocks for page in pages],
            [page * cache.page_size + at for page, at in _slots_beyond_ends(rows, cache.page_size)],
        ]
        self._has_trees = any(row.parents for row in rows)
        if self._has_trees:
            self.integers += _tree_integers(rows)
        self._masks: dict[int | None, BlockMask] = {}

    def place(self, parts: Sequence[Tensor]) -> None:
        self._row_of, self._positions, held, logical, counts, listed_at, listed, self._behind = parts[:8]
        self._tree_parts = parts[8:]
        # (rows x pages of the pool,): index of the page in the row's table; -1: not in it
        self._page_of_row = torch.full((self._rows * self._pages,), -1, device=held.device)
        self._page_of_row[held] = logical
        self._counts = counts.to(torch.int32).view(1, 1, -1)
        # Kernels expect one entry per page of the pool; they ignore entries beyond a block's count.
        blocks = torch.zeros(len(counts) * self._pages, dtype=torch.int32, device=held.device)
        blocks[listed_at] = listed.to(torch.int32)
        self._blocks = blocks.view(1, 1, -1, self._pages)

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        # The kernel multiplies masked values by zero, and unwritten memory may contain NaN.
        pool.index_fill_(0, self._behind, 0)
        assert options.is_plain, "this kernel supports only plain scores"
        window = options.window
        if window not in self._masks:
            self._masks[window] = self._block_mask(window, len(query), len(pool))
        keys, values = (part.flatten(0, 1).transpose(0, 1).unsqueeze(0) for part in pages_of(pool, self._page_size))
        attended = self._kernel(
            _padded_heads(query).transpose(0, 1).unsqueeze(0),
            keys,
            values,
            block_mask=self._masks[window],
            scale=options.scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
            kernel_options={"BLOCK_M": 64, "BLOCK_N": min(64, self._page_size)},
        )
        return attended[0].transpose(0, 1)

    def _block_mask(self, window: int | None, queries: int, keys: int) -> BlockMask:
        row_of = self._row_of
        positions = self._positions
        page_of_row = self._page_of_row
        pages = self._pages
        page_size = self._page_size

        def seen(batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            page = page_of_row[row_of[query] * pages + slot // page_size]
            behind = positions[query] - (page * page_size + slot % page_size)
            visible = (page >= 0) & (behind >= 0)
            return visible if window is None else visible & (behind < window)

        return BlockMask.from_kv_blocks(
            self._counts,
            self._blocks,
            BLOCK_SIZE=(QUERY_BLOCK, self._page_size),
            mask_mod=self._tree_visibility(window) if self._has_trees else seen,
            seq_lengths=(queries, keys),
            compute_q_blocks=False,  # used only by the backward pass
        )

    def _tree_visibility(self, window: int | None) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
        """Returns the mask function for trees: a node sees the text before the tree and the nodes on its path."""
        row_of = self._row_of
        positions = self._positions
        page_of_row = self._page_of_row
        pages = self._pages
        page_size = self._page_size
        seen_to, paths, starts, begins, tree_starts = self._tree_parts
        last = len(positions) - 1

        def seen(batch: Tensor, head: Tensor, query: Tensor, slot: Tensor) -> Tensor:
            row = row_of[query]
            page = page_of_row[row * pages + slot // page_size]
            at = page * page_size + slot % page_size
            node = at - tree_starts[row]
            word = paths[query * WORDS + (node // WORD).clamp(0, WORDS - 1)]
            on_path = (node >= 0) & (node < MAX_BLOCK_TOKENS) & ((word >> (node % WORD)) & 1 == 1)
            visible = (page >= 0) & ((at <= seen_to[query]) | on_path)
            if window is None:
                return visible
            fed = (begins[row] + at - starts[row]).clamp(0, last)  # index of a tree node's key in the batch
            key_position = torch.where(node >= 0, positions[fed], at)
            return visible & (positions[query] - key_position < window)

        return seen


def _padded_heads(query: Tensor) -> Tensor:
    """Returns a contiguous copy, since torch compiles one kernel per memory layout."""
    return query.flatten().view(query.shape)


def _tree_integers(rows: Sequence[InputRow]) -> list[list[int]]:
    """Returns, per query, the last slot of its fully visible prefix, and WORDS bit sets of the nodes on its path.

    Also returns, per row, its first slot, the start of its tokens in the batch, and the slot of its first node.
    """
    paths: list[int] = []
    for row in rows:
        paths += [0] * (WORDS * (len(row.tokens) - len(row.parents)))
        for path in row.tree.paths:
            bits = sum([1 << node for node in path])
            paths += [(bits >> (WORD * word)) & ((1 << WORD) - 1) for word in range(WORDS)]
    return [
        [at for row in rows for at in row.seen],
        paths,
        [row.start for row in rows],
        list(accumulate([len(row.tokens) for row in rows[:-1]], initial=0)),
        [row.tree_start for row in rows],
    ]


def _slots_beyond_ends(rows: Sequence[InputRow], page_size: int) -> Iterator[tuple[int, int]]:
    """Yields (page, offset) of each unwritten position in the rows' last pages.

    A partly written page belongs to exactly one row.
    """
    for row in rows:
        filled = (row.end - 1) % page_size + 1
        yield from ((row.pages[(row.end - 1) // page_size], at) for at in range(filled, page_size))


def flex_for(page_size: int) -> Flex:
    """Creates the compiled backend. Raises RuntimeError if no kernel supports the page size."""
    if page_size < MIN_BLOCK_KEYS or page_size & (page_size - 1):
        raise RuntimeError(f"no kernel for page_size {page_size}; use a power of two, at least {MIN_BLOCK_KEYS}")
    return Flex(compiled())


def compiled(backend: str | Callable[..., Any] | None = None) -> Callable[..., Tensor]:
    """Returns FlexAttention compiled for any number of rows, tokens and pages."""
    options: dict[str, Any] = {"dynamic": True, "recompile_limit": MAX_KERNELS}
    if backend is not None:
        options["backend"] = backend
    kernel: Callable[..., Tensor] = torch.compile(flex_attention, **options)
    return kernel
