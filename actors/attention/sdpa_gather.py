"""Attention over gathered keys and values by torch's scaled dot product attention; works on every device.

Rows of similar length form a group, and a layer attends group by group. It copies their pages even if these are
adjacent: on a CPU, the kernel reads a fresh copy up to twice as fast.

torch's kernel rounds by the number of queries and keys in a call, and by the keys' places in it. With a `Padding`, a
query has the same result in every group: its position determines the number of keys, except among sizes that round
alike, and a tree is attended path by path, so that a node sees its keys in the order of the text.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import ScoreOptions
from actors.compute.input_row import Integers, page_numbers
from actors.compute.kv_cache import InputRow, PagedCache

SHORT_ROW = 8  # rows of up to this number of tokens (blocks, single tokens) share a group
SHORT_CONTEXT = 256  # contexts up to this length share a group; longer contexts have one group per power of two
CPU_POSITIONS = 2048  # maximum keys per group on a CPU, so that the gathered copy fits in its cache
KEY_BLOCK = 512  # keys per block of torch's kernel, which adds the blocks' results in order
QUERIES = 4  # in bfloat16, the kernel takes up to six times longer for one query; a remainder rounds differently


@dataclass(frozen=True, slots=True)
class Padding:
    """Numbers of keys per call for which torch's kernel rounds each query the same way."""

    last_keys: tuple[int, ...]  # numbers of keys in the last block, ascending, up to KEY_BLOCK
    alike: frozenset[int]  # those of them that round a query like KEY_BLOCK keys

    def keys(self, end: int) -> int:
        """Returns the smallest number of keys that is at least `end`."""
        before = (end - 1) // KEY_BLOCK * KEY_BLOCK
        return before + self.last_keys[bisect_left(self.last_keys, end - before)]

    def only_keys(self, end: int) -> int | None:
        """Returns the number of keys in every call of a query that sees `end` keys; None if others round alike."""
        keys = self.keys(end)
        return None if (keys - 1) % KEY_BLOCK + 1 in self.alike else keys


class SdpaGather:
    """Backend that gathers each group's keys and values, then attends."""

    name = "gathered"
    takes_trees = True

    def __init__(self, padding: Padding | None = None) -> None:
        self._padding = padding

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> "SdpaGatherPlan":
        return SdpaGatherPlan(rows, cache, self._padding)


@dataclass(frozen=True, slots=True)
class _Member:
    """Queries of one row over one list of keys: all of them, or those on one path of its tree."""

    row: InputRow
    query_at: Sequence[int]  # indices in the flat batch
    positions: Sequence[int]
    seen: Sequence[int]  # last key of each query's fully visible prefix
    end: int  # number of keys
    path: tuple[int, ...] | None = None  # nodes that are the last keys; None: all nodes, in the order of their slots


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows attended together; queries and keys are padded to the longest row."""

    count: int
    queries: int
    keys: int
    query_at: Tensor  # (count x queries,): indices in the flat batch
    real: Tensor | slice  # (real queries,): indices of the queries that are not padding
    key_at: Tensor  # (count x keys,): slots in the pool
    positions: Tensor  # (count, queries)
    seen: Tensor  # (count, queries): last key of the fully visible prefix; later keys are visible only on the path
    on_path: Tensor  # (node pairs,): indices in (count, queries, keys)
    behind: Tensor  # (node pairs,): distance in positions from query to key
    all_visible: bool  # whether every query sees every key, disregarding windows


class SdpaGatherPlan:
    """Attends a step's rows group by group."""

    def __init__(self, rows: Sequence[InputRow], cache: PagedCache, padding: Padding | None = None) -> None:
        self._cache = cache
        is_padded = padding is not None or (cache.device.type == "cpu" and cache.dtype is torch.bfloat16)
        self._query_multiple = QUERIES if is_padded else 1  # each head that shares a key adds its own queries
        self._total = sum(len(row.tokens) for row in rows)
        members = list(_members(rows, padding))
        self._drafts = [_GroupDraft(part, cache, padding) for part in _groups(members, cache.device, padding)]
        self.integers = [part for draft in self._drafts for part in draft.integers]
        self.groups: list[RowGroup] = []
        self._orders: dict[tuple[int, int, int], _HeadOrder] = {}
        self._masks: dict[tuple[int, int, int | None, int | None], Tensor] = {}
        self._key_positions: dict[int, Tensor] = {}

    def place(self, parts: Sequence[Tensor]) -> None:
        begin = 0
        for draft in self._drafts:
            end = begin + len(draft.integers)
            self.groups.append(draft.group(parts[begin:end]))
            begin = end

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        heads, head_dim = query.shape[1:]
        order = self._order(heads, pool.shape[1] // 2, self._query_multiple if options.is_plain else 1)
        grouped = query.reshape(-1, head_dim).index_select(0, order.taken)
        if len(self.groups) == 1:
            attended = self._attend_group(0, grouped, order, pool, options)
        else:
            parts = enumerate(torch.split(grouped, order.sizes))
            attended = torch.cat([self._attend_group(index, part, order, pool, options) for index, part in parts])
        return attended.index_select(0, order.returned).view(query.shape)

    def _order(self, heads: int, kv_heads: int, multiple: int) -> "_HeadOrder":
        """Returns the order of a layer's query heads; layers of one size share it per step."""
        address = heads, kv_heads, multiple
        if address not in self._orders:
            self._orders[address] = _HeadOrder(self.groups, self._total, heads, kv_heads, multiple)
        return self._orders[address]

    def _attend_group(
        self, index: int, query: Tensor, order: "_HeadOrder", pool: Tensor, options: ScoreOptions
    ) -> Tensor:
        """Attends one group: (count x kv heads x queries, head dim) -> (count x queries x kv heads, head dim)."""
        shape = order.shapes[index]
        keys, values = _gather(self.groups[index], pool)
        mask = self.mask(index, order.repeat, options.window, options.chunk)
        if mask is not None and mask.shape[2] != shape[2]:
            mask = mask[:, :, : shape[2]]  # options that are not plain need no padding
        biases = None if options.alibi is None else options.alibi.biases(self.key_positions(index))
        attended = _weigh(query.view(*shape, -1), keys, values, mask, options, biases)
        return attended.transpose(1, 2).reshape(-1, query.shape[1])

    def mask(self, group: int, repeat: int, window: int | None, chunk: int | None = None) -> Tensor | None:
        """Returns the additive mask, (count, 1, repeat x queries, keys), with each query repeated for `repeat` heads.

        Returns None if nothing is masked. All layers share one mask per step. Queries that are padding see all keys.
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
            mask = scores.masked_fill_(hidden, -torch.inf).repeat(1, repeat, 1).unsqueeze(1)
            self._masks[address] = F.pad(mask, (0, 0, 0, -mask.shape[2] % self._query_multiple))
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


class _HeadOrder:
    """Order of a step's query heads by group.

    Query heads that share a key head become further queries of it, so keys and values are never repeated.
    """

    def __init__(self, groups: Sequence[RowGroup], total: int, heads: int, kv_heads: int, multiple: int) -> None:
        """`total`: number of queries in the batch; `multiple`: divides the number of queries per key head."""
        self.repeat = repeat = heads // kv_heads
        device = groups[0].query_at.device
        head_at = torch.arange(heads, device=device).view(kv_heads, repeat, 1)
        taken = []
        returned = torch.empty(total, heads, dtype=torch.int64, device=device)
        begin = 0
        for group in groups:
            queries = repeat * group.queries
            padding = -queries % multiple
            at = group.query_at.view(-1, 1, 1, group.queries) * heads + head_at
            taken.append(F.pad(at.reshape(group.count, kv_heads, queries), (0, padding)))
            end = begin + taken[-1].numel()
            results = torch.arange(begin, end, device=device).view(group.count, queries + padding, kv_heads)
            apart = results[:, :queries].reshape(group.count, repeat, group.queries, kv_heads)
            by_query = apart.permute(0, 2, 3, 1).reshape(-1, heads)
            returned[group.query_at[group.real]] = by_query[group.real]
            begin = end
        self.shapes = [tuple(part.shape) for part in taken]  # (count, kv heads, queries) of each group
        self.sizes = [part.numel() for part in taken]
        self.taken = torch.cat([part.flatten() for part in taken])  # indices in (total x heads,)
        self.returned = returned.flatten()  # indices in the groups' results, each (count x queries x kv heads,)


class _GroupDraft:
    """Host-side description of a group whose integers are not yet on the device.

    `integers` are query_at, real, positions, seen, on_path, behind and key_at.
    """

    def __init__(self, members: list[_Member], cache: PagedCache, padding: Padding | None) -> None:
        self.count = len(members)
        self.queries = max(len(member.query_at) for member in members)
        end = max(member.end for member in members)
        self.keys = end if padding is None else padding.keys(end)
        self.even = all(len(member.query_at) == self.queries for member in members)
        # Padding repeats a row's last query; the result of padding is discarded.
        offsets = [[min(i, len(member.query_at) - 1) for i in range(self.queries)] for member in members]
        query_at = [member.query_at[i] for member, at in zip(members, offsets, strict=True) for i in at]
        self.all_visible = self.queries == 1 and all(member.end == self.keys for member in members)
        real = [k * self.queries + i for k, member in enumerate(members) for i in range(len(member.query_at))]
        self.integers: list[list[int] | Integers] = [
            query_at,
            [] if self.even else real,
            [member.positions[i] for member, at in zip(members, offsets, strict=True) for i in at],
            [member.seen[i] for member, at in zip(members, offsets, strict=True) for i in at],
            *self._paths(members),
            self._slots(members, cache),
        ]

    def _paths(self, members: Sequence[_Member]) -> tuple[list[int], list[int]]:
        """Returns `on_path` and `behind` for all tree nodes."""
        on_path: list[int] = []
        behind: list[int] = []
        for index, member in enumerate(members):
            row = member.row
            if not row.parents or member.path is not None:
                continue
            first = len(row.tokens) - len(row.parents)  # index of the first node's query in the row
            for node, path in enumerate(row.tree.paths):
                query = index * self.queries + first + node
                on_path += [query * self.keys + row.tree_start + passed for passed in path]
                behind += range(len(path) - 1, -1, -1)
        return on_path, behind

    def _slots(self, members: Sequence[_Member], cache: PagedCache) -> Integers:
        """Returns the pool slots of each member's keys, (count x keys,).

        Keys beyond a member's end read the padding page, because a mask does not hide NaN in another row's memory.
        """
        size = cache.page_size
        in_page = np.arange(size)
        slots = np.full((self.count, self.keys), cache.padding_slot, np.int64)
        for own, member in zip(slots, members, strict=True):
            pages = page_numbers(member.row.pages)
            in_order = pages[: -(-member.end // size), np.newaxis] * size + in_page
            own[: member.end] = in_order.ravel()[: member.end]
            if member.path:
                first = member.row.tree_start
                nodes = np.array(member.path, np.int64) + first
                own[first : member.end] = pages[nodes // size] * size + nodes % size
        return slots.ravel()

    def group(self, parts: Sequence[Tensor]) -> RowGroup:
        query_at, real, positions, seen, on_path, behind, key_at = parts
        return RowGroup(
            count=self.count,
            queries=self.queries,
            keys=self.keys,
            query_at=query_at,
            real=slice(None) if self.even else real,
            key_at=key_at,
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


def _gather(rows: RowGroup, pool: Tensor) -> tuple[Tensor, ...]:
    """Returns copies of the group's keys and values, each (count, kv heads, keys, head dim)."""
    gathered = pool.index_select(0, rows.key_at).view(rows.count, rows.keys, 2, pool.shape[1] // 2, pool.shape[2])
    return gathered.permute(2, 0, 3, 1, 4).unbind(0)


def _octave(length: int, least: int) -> int:
    """Maps a length to a bucket: one bucket up to `least`, then one bucket per power of two."""
    return (max(length, least) - 1).bit_length()


def _members(rows: Sequence[InputRow], padding: Padding | None) -> Iterator[_Member]:
    """Yields each row; with a padding, parts of rows and of their trees' paths that have calls of their own."""
    begin = 0
    for row in rows:
        end = begin + len(row.tokens)
        if padding is None or not row.parents:
            whole = [_Member(row, range(begin, end), row.positions, row.seen, row.end)]
        else:
            whole = list(_path_members(row, begin))
        for member in whole:
            yield from [member] if padding is None else _parts(member, padding)
        begin = end


def _path_members(row: InputRow, begin: int) -> Iterator[_Member]:
    """Yields a tree's root-to-leaf paths, each with the queries that no earlier path has."""
    first = begin + len(row.tokens) - len(row.parents)  # index of the first node's query in the flat batch
    query_at = list(range(begin, first))
    positions = list(range(row.start, row.tree_start))
    attended: set[int] = set()
    for leaf in sorted(set(range(len(row.parents))) - set(row.parents)):
        path = row.tree.paths[leaf]
        new = [depth for depth, node in enumerate(path) if node not in attended]
        attended.update(path)
        query_at += [first + path[depth] for depth in new]
        positions += [row.tree_start + depth for depth in new]
        yield _Member(row, query_at, positions, positions, row.tree_start + len(path), path)
        query_at, positions = [], []


def _parts(member: _Member, padding: Padding) -> Iterator[_Member]:
    """Yields runs of queries that may share a call."""
    for _, run in groupby(range(len(member.seen)), lambda index: padding.only_keys(member.seen[index] + 1)):
        indices = list(run)
        part = slice(indices[0], indices[-1] + 1)
        seen = member.seen[part]
        end = seen[-1] + 1
        path = None if member.path is None else member.path[: max(0, end - member.row.tree_start)]
        yield _Member(member.row, member.query_at[part], member.positions[part], seen, end, path)


def _alike(members: Sequence[_Member], padding: Padding | None) -> list[list[_Member]]:
    """Groups rows of similar length, so that padding at most doubles a row."""
    groups: dict[tuple[int, int, int | None], list[_Member]] = {}
    for member in members:
        only_keys = None if padding is None else padding.only_keys(member.end)
        address = (_octave(len(member.query_at), SHORT_ROW), _octave(member.end, SHORT_CONTEXT), only_keys)
        groups.setdefault(address, []).append(member)
    return list(groups.values())


def _groups(members: Sequence[_Member], device: torch.device, padding: Padding | None) -> list[list[_Member]]:
    """Groups rows of similar length; on a CPU, also limits the number of keys per group."""
    if device.type != "cpu":
        return _alike(members, padding)
    groups = []
    for group in _alike(members, padding):
        count = max(1, CPU_POSITIONS // max(member.end for member in group))
        groups += [group[first : first + count] for first in range(0, len(group), count)]
    return groups
