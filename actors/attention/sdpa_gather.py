"""Attention over gathered keys and values by torch's scaled dot product attention; works on every device.

Rows of similar length form a group, and a layer attends group by group. The keys and values of a group of one row with
adjacent pages are not copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import ScoreOptions
from actors.compute.kv_cache import InputRow, PagedCache

SHORT_ROW = 8  # rows of up to this number of tokens (blocks, single tokens) share a group
SHORT_CONTEXT = 256  # contexts up to this length share a group; longer contexts have one group per power of two
CPU_POSITIONS = 2048  # maximum keys per group on a CPU, so that the gathered copy fits in its cache


class SdpaGather:
    """Backend that gathers each group's keys and values, then attends."""

    name = "gathered"
    takes_trees = True

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> "SdpaGatherPlan":
        return SdpaGatherPlan(rows, cache)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows attended together; queries and keys are padded to the longest row."""

    count: int
    queries: int
    keys: int
    query_at: Tensor | None  # (count x queries,): indices in the flat batch; None: the whole batch, in order
    real: Tensor | None  # (real queries,): indices of the queries that are not padding; None: all
    key_at: Tensor | slice  # (count x keys,): slots in the pool
    positions: Tensor  # (count, queries)
    seen: Tensor  # (count, queries): last key of the fully visible prefix; later keys are visible only on the path
    on_path: Tensor  # (node pairs,): indices in (count, queries, keys)
    behind: Tensor  # (node pairs,): distance in positions from query to key
    all_visible: bool  # whether every query sees every key, disregarding windows


class SdpaGatherPlan:
    """Attends a step's rows group by group."""

    def __init__(self, rows: Sequence[InputRow], cache: PagedCache) -> None:
        self._cache = cache
        self._drafts = [_GroupDraft(members, len(rows), cache.page_size) for members in _groups(rows, cache.device)]
        self.integers = [part for draft in self._drafts for part in draft.integers]
        self.groups: list[RowGroup] = []
        self._masks: dict[tuple[int, int, int | None, int | None], Tensor] = {}
        self._key_positions: dict[int, Tensor] = {}
        self._is_one_group = len(self._drafts) == 1 and self._drafts[0].whole

    def place(self, parts: Sequence[Tensor]) -> None:
        begin = 0
        for draft in self._drafts:
            end = begin + len(draft.integers)
            self.groups.append(draft.group(parts[begin:end], self._cache))
            begin = end

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        if self._is_one_group:
            return self._attend_group(0, query, pool, options)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for index, group in enumerate(self.groups):
            assert group.query_at is not None, "query_at is None only for a single group"
            attended = self._attend_group(index, query[group.query_at], pool, options)
            if group.real is None:
                out.index_copy_(0, group.query_at, attended)
            else:
                out.index_copy_(0, group.query_at[group.real], attended[group.real])
        return out

    def _attend_group(self, index: int, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        """Attends one group. `query` and the result have shape (count x queries, heads, head dim).

        Query heads that share a key head become further queries of it, so keys and values are never repeated.
        """
        rows = self.groups[index]
        heads, head_dim = query.shape[1:]
        kv_heads = pool.shape[1] // 2
        repeat = heads // kv_heads
        keys, values = _gather(rows, pool).unbind(2)  # each (count, keys, kv heads, head dim)
        grouped = query.view(rows.count, rows.queries, kv_heads, repeat, head_dim).permute(0, 2, 3, 1, 4)
        biases = None if options.alibi is None else options.alibi.biases(self.key_positions(index))
        attended = _weigh(
            grouped.reshape(rows.count, kv_heads, repeat * rows.queries, head_dim),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            self.mask(index, repeat, options.window, options.chunk),
            options,
            biases,
        )
        apart = attended.view(rows.count, kv_heads, repeat, rows.queries, head_dim).permute(0, 3, 1, 2, 4)
        return apart.reshape(-1, heads, head_dim)

    def mask(self, group: int, repeat: int, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Returns the additive mask, (count, 1, repeat x queries, keys), with each query repeated for `repeat` heads.

        Returns None if nothing is masked. All layers share one mask per step.
        """
        rows = self.groups[group]
        if rows.all_visible and all(limit is None or rows.keys <= limit for limit in (window, chunk)):
            return None
        address = (group, repeat, window, chunk)
        if address not in self._masks:
            at = rows.positions.unsqueeze(2)
            key_at = torch.arange(rows.keys, device=at.device)
            hidden = key_at > rows.seen.unsqueeze(2)
            if window is not None:
                hidden |= key_at <= at - window
            if chunk is not None:
                hidden |= key_at < at - at % chunk
            if len(rows.on_path):
                beyond = rows.behind >= (rows.keys if window is None else window)
                if chunk is not None:
                    beyond |= rows.behind > at.flatten()[rows.on_path // rows.keys] % chunk
                hidden.view(-1).index_copy_(0, rows.on_path, beyond)
            scores = torch.zeros(hidden.shape, dtype=self._cache.dtype, device=at.device)
            self._masks[address] = scores.masked_fill_(hidden, -torch.inf).repeat(1, repeat, 1).unsqueeze(1)
        return self._masks[address]

    def key_positions(self, group: int) -> Tensor:
        """Returns the positions of a group's keys, (count, keys): tree nodes at their depth, other keys at their slot.

        All layers share them per step.
        """
        if group not in self._key_positions:
            rows = self.groups[group]
            at = torch.arange(rows.keys, device=rows.positions.device).repeat(rows.count, 1)
            query = rows.on_path // rows.keys
            at[query // rows.queries, rows.on_path % rows.keys] = rows.positions.flatten()[query] - rows.behind
            self._key_positions[group] = at
        return self._key_positions[group]


class _GroupDraft:
    """Host-side description of a group whose integers are not yet on the device.

    `integers` are query_at, real, positions, seen, on_path, behind, tables and ends.
    """

    def __init__(self, members: list[tuple[int, InputRow]], rows: int, page_size: int) -> None:
        """`members`: (start of the row's tokens in the flat batch, row) pairs; `rows`: number of rows in the batch."""
        self.count = len(members)
        self.queries = max(len(row.tokens) for _, row in members)
        self.keys = max(row.end for _, row in members)
        self.even = all(len(row.tokens) == self.queries for _, row in members)
        self.whole = self.even and len(members) == rows
        self.all_visible = self.queries == 1 and all(row.end == self.keys for _, row in members)
        # Padding repeats a row's last query; the result of padding is discarded.
        offsets = [[min(i, len(row.tokens) - 1) for i in range(self.queries)] for _, row in members]
        pages = -(-self.keys // page_size)
        first = members[0][1].pages[:pages]
        together = self.count == 1 and first == tuple(range(first[0], first[0] + pages))
        self.slice = slice(first[0] * page_size, first[0] * page_size + self.keys) if together else None
        query_at = [begin + i for (begin, _), at in zip(members, offsets, strict=True) for i in at]
        real = [k * self.queries + i for k, (_, row) in enumerate(members) for i in range(len(row.tokens))]
        self.integers: list[list[int]] = [
            [] if self.whole else query_at,
            [] if self.even else real,
            [held[i] for (_, row), at in zip(members, offsets, strict=True) for held in (row.positions,) for i in at],
            [held[i] for (_, row), at in zip(members, offsets, strict=True) for held in (row.seen,) for i in at],
            *self._paths([row for _, row in members]),
            [] if together else [page for _, row in members for page in _padded(row.pages, pages)],
            [] if together else [row.end for _, row in members],
        ]

    def _paths(self, rows: Sequence[InputRow]) -> tuple[list[int], list[int]]:
        """Returns `on_path` and `behind` for all tree nodes."""
        on_path: list[int] = []
        behind: list[int] = []
        for index, row in enumerate(rows):
            if not row.parents:
                continue
            first = len(row.tokens) - len(row.parents)  # index of the first node's query in the row
            for node, path in enumerate(row.tree.paths):
                query = index * self.queries + first + node
                on_path += [query * self.keys + row.tree_start + passed for passed in path]
                behind += range(len(path) - 1, -1, -1)
        return on_path, behind

    def group(self, parts: Sequence[Tensor], cache: PagedCache) -> RowGroup:
        query_at, real, positions, seen, on_path, behind, tables, ends = parts
        return RowGroup(
            count=self.count,
            queries=self.queries,
            keys=self.keys,
            query_at=None if self.whole else query_at,
            real=None if self.even else real,
            key_at=self.slice or _slots(tables.view(self.count, -1), ends, self.keys, cache),
            positions=positions.view(self.count, self.queries),
            seen=seen.view(self.count, self.queries),
            on_path=on_path,
            behind=behind,
            all_visible=self.all_visible,
        )


def _weigh(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: ScoreOptions, biases: Tensor | None
) -> Tensor:
    """Returns the values weighted by the softmax of the scores. torch's own kernels support only plain scores.

    `query` has shape (rows, kv heads, query heads per kv head x queries, head dim), `biases` (rows, heads, keys).
    """
    if options.is_plain:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=options.scaling)
    scores = query @ keys.transpose(-1, -2) * (options.scaling or query.shape[-1] ** -0.5)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if biases is not None:
        by_head = scores.float().view(len(biases), biases.shape[1], -1, biases.shape[2])
        scores = (by_head + biases.unsqueeze(2)).view(scores.shape)
    if mask is not None:
        scores = scores + mask
    if options.sinks is None:
        return scores.softmax(-1, dtype=torch.float32).to(query.dtype) @ values
    kv_heads, queries = query.shape[1:3]
    repeat = len(options.sinks) // kv_heads
    sinks = options.sinks.to(scores.dtype).view(kv_heads, repeat, 1).expand(-1, -1, queries // repeat)
    scores = torch.cat([scores, sinks.reshape(1, kv_heads, queries, 1).expand(len(query), -1, -1, -1)], -1)
    return scores.softmax(-1, dtype=torch.float32)[..., :-1].to(query.dtype) @ values


def _gather(rows: RowGroup, pool: Tensor) -> Tensor:
    """Returns the group's keys and values, (count, keys, 2, kv heads, head dim); a view if its pages are adjacent."""
    gathered = pool[rows.key_at] if isinstance(rows.key_at, slice) else pool.index_select(0, rows.key_at)
    return gathered.view(rows.count, rows.keys, 2, pool.shape[1] // 2, pool.shape[2])


def _octave(length: int, least: int) -> int:
    """Maps a length to a bucket: one bucket up to `least`, then one bucket per power of two."""
    return (max(length, least) - 1).bit_length()


def _alike(rows: Sequence[InputRow]) -> list[list[tuple[int, InputRow]]]:
    """Groups rows of similar length, so that padding at most doubles a row."""
    groups: dict[tuple[int, int], list[tuple[int, InputRow]]] = {}
    begin = 0
    for row in rows:
        address = (_octave(len(row.tokens), SHORT_ROW), _octave(row.end, SHORT_CONTEXT))
        groups.setdefault(address, []).append((begin, row))
        begin += len(row.tokens)
    return list(groups.values())


def _groups(rows: Sequence[InputRow], device: torch.device) -> list[list[tuple[int, InputRow]]]:
    """Groups rows of similar length; on a CPU, also limits the number of keys per group."""
    if device.type != "cpu":
        return _alike(rows)
    groups = []
    for members in _alike(rows):
        count = max(1, CPU_POSITIONS // max(row.end for _, row in members))
        groups += [members[first : first + count] for first in range(0, len(members), count)]
    return groups


def _padded(pages: tuple[int, ...], count: int) -> list[int]:
    return [*pages[:count], *[0] * (count - len(pages))]


def _slots(tables: Tensor, ends: Tensor, keys: int, cache: PagedCache) -> Tensor:
    """Returns the pool slots of each row's first `keys` positions, (rows x keys,).

    Positions beyond a row's end read the padding page, because a mask does not hide NaN in another row's memory.
    """
    size = cache.page_size
    slots = tables.unsqueeze(2) * size + torch.arange(size, device=tables.device)
    beyond = torch.arange(keys, device=tables.device) >= ends.unsqueeze(1)
    return slots.view(len(tables), -1)[:, :keys].masked_fill(beyond, cache.padding_slot).reshape(-1)
