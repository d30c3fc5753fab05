"""The paged KV cache: one pool of pages, which rows of a step reach through page tables.

Who owns which page is decided elsewhere (`cluster.pages`); this is memory and how a step addresses it. Knows
nothing of sessions or models.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cluster.pages import PageCopy

SHORT_ROW = 8  # rows of up to so many tokens (blocks, single tokens) are attended together
SHORT_CONTEXT = 256  # so are contexts up to this length; beyond, those of the same power of two


@dataclass(frozen=True, slots=True)
class FeedRow:
    """Tokens to feed at positions start, start + 1, ... of the pages; the last `logits` of them give logits."""

    tokens: tuple[int, ...]
    start: int
    logits: int
    pages: tuple[int, ...]  # that hold positions 0 to the row's end, in order

    @property
    def end(self) -> int:
        """Positions that are cached once the row is fed."""
        return self.start + len(self.tokens)


class PagedCache:
    """Keys and values of all layers, each layer's of shape (pages x page size, 2 x kv heads, head dim)."""

    def __init__(self, pages: int, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.nowhere = pages * page_size  # a place in a further page that nobody writes: what padding reads
        self._positions = (pages + 1) * page_size
        self._dtype, self.device = dtype, device
        self._layers: dict[int, Tensor] = {}

    def layer(self, index: int, kv_heads: int, head_dim: int) -> Tensor:
        """A layer's keys, then values; made on first use, when its shape is known (memory is touched when written)."""
        if index not in self._layers:
            shape = (self._positions, 2 * kv_heads, head_dim)
            self._layers[index] = torch.empty(shape, dtype=self._dtype, device=self.device)
            self._layers[index][self.nowhere :] = 0
        return self._layers[index]

    def copy(self, copies: Sequence[PageCopy]) -> None:
        """Copies whole pages, in all layers."""
        if not copies:
            return
        sources = torch.tensor([c.source for c in copies], device=self.device)
        targets = torch.tensor([c.to for c in copies], device=self.device)
        for layer in self._layers.values():
            pages = layer.view(-1, self.page_size, *layer.shape[1:])
            pages[targets] = pages[sources]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are attended together: queries and keys padded to the longest of them."""

    count: int
    queries: int
    keys: int
    query_at: Tensor | None  # (count x queries,) places in the flat batch; None: the whole batch, in order
    real: Tensor | None  # (real queries,) places in the padded queries that are none of the padding; None: all
    key_at: Tensor | slice  # (count x keys,) places in the pool
    positions: Tensor  # (count, queries)
    all_visible: bool  # every query sees every key, but for a window


class RaggedBatch:
    """Rows of mixed lengths, flat: what one forward feeds, and where it goes in the cache."""

    def __init__(self, rows: Sequence[FeedRow], cache: PagedCache) -> None:
        self.cache = cache
        device, size = cache.device, cache.page_size
        tokens = [token for row in rows for token in row.tokens]
        positions = [at for row in rows for at in range(row.start, row.end)]
        written = [row.pages[at // size] * size + at % size for row in rows for at in range(row.start, row.end)]
        self.tokens = torch.tensor(tokens, device=device)  # (total,)
        self.positions = torch.tensor(positions, device=device)  # (total,)
        self.written = torch.tensor(written, device=device)  # (total,) places in the pool
        self.logit_at = torch.tensor(_logit_places(rows), dtype=torch.int64, device=device)
        self.groups = [self._group(members, len(rows)) for members in _alike(rows)]
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}

    def mask(self, group: int, repeat: int, window: int | None) -> Tensor | None:
        """What to add to scores of the queries, each repeated in `repeat` heads, shape (count, 1, repeat x queries,
        keys); None: nothing. Made once per forward, for all layers."""
        rows = self.groups[group]
        if rows.all_visible and (window is None or rows.keys <= window):
            return None
        address = (group, repeat, window)
        if address not in self._masks:
            at = rows.positions.unsqueeze(2)
            key_at = torch.arange(rows.keys, device=at.device)
            hidden = key_at > at
            if window is not None:
                hidden |= key_at <= at - window
            scores = torch.zeros(hidden.shape, dtype=self.cache._dtype, device=at.device)
            self._masks[address] = scores.masked_fill_(hidden, -torch.inf).repeat(1, repeat, 1).unsqueeze(1)
        return self._masks[address]

    def _group(self, members: list[tuple[int, FeedRow]], rows: int) -> RowGroup:
        """`members`: a row and where its tokens begin in the flat batch."""
        device = self.cache.device
        queries = max(len(row.tokens) for _, row in members)
        keys = max(row.end for _, row in members)
        even = all(len(row.tokens) == queries for _, row in members)
        # Padding repeats a row's last query: its result is not used.
        offsets = [[min(i, len(row.tokens) - 1) for i in range(queries)] for _, row in members]
        real = [k * queries + i for k, (_, row) in enumerate(members) for i in range(len(row.tokens))]
        whole = even and len(members) == rows
        query_at = [begin + i for (begin, _), at in zip(members, offsets, strict=True) for i in at]
        positions = [[row.start + i for i in at] for (_, row), at in zip(members, offsets, strict=True)]
        return RowGroup(
            count=len(members),
            queries=queries,
            keys=keys,
            query_at=None if whole else torch.tensor(query_at, device=device),
            real=None if even else torch.tensor(real, device=device),
            key_at=_places([row for _, row in members], keys, self.cache),
            positions=torch.tensor(positions, device=device),
            all_visible=queries == 1 and all(row.end == keys for _, row in members),
        )


def _logit_places(rows: Sequence[FeedRow]) -> list[int]:
    """Places in the flat batch whose logits are wanted."""
    found: list[int] = []
    end = 0
    for row in rows:
        end += len(row.tokens)
        found += range(end - row.logits, end)
    return found


def _octave(length: int, least: int) -> int:
    """The same for all lengths up to `least`, and then for all between two powers of two."""
    return (max(length, least) - 1).bit_length()


def _alike(rows: Sequence[FeedRow]) -> list[list[tuple[int, FeedRow]]]:
    """Rows of similar lengths together, so that padding at most doubles them."""
    groups: dict[tuple[int, int], list[tuple[int, FeedRow]]] = {}
    begin = 0
    for row in rows:
        address = (_octave(len(row.tokens), SHORT_ROW), _octave(row.end, SHORT_CONTEXT))
        groups.setdefault(address, []).append((begin, row))
        begin += len(row.tokens)
    return list(groups.values())


def _places(rows: Sequence[FeedRow], keys: int, cache: PagedCache) -> Tensor | slice:
    """Where the first `keys` positions of each row lie in the pool; a slice where they lie in a row.

    Positions beyond a row's end are nowhere: masks hide scores, but not the NaN that another's memory may hold.
    """
    size, device = cache.page_size, cache.device
    pages = -(-keys // size)
    first = rows[0].pages[:pages]
    if len(rows) == 1 and first == tuple(range(first[0], first[0] + pages)):
        return slice(first[0] * size, first[0] * size + keys)
    tables = [[*row.pages[:pages], *[0] * (pages - len(row.pages))] for row in rows]
    places = torch.tensor(tables, device=device).unsqueeze(2) * size + torch.arange(size, device=device)
    ends = torch.tensor([row.end for row in rows], device=device).unsqueeze(1)
    beyond = torch.arange(keys, device=device) >= ends
    return places.view(len(rows), -1)[:, :keys].masked_fill(beyond, cache.nowhere).reshape(-1)
