"""Attention of fixed shape: every operation depends on the sizes of a `StepShape`, never on the rows in the step.

A captured step replays its operations with other numbers, so nothing in it may depend on them. This module defines the
numbers that describe visible keys, and attends with torch's basic operations. It is the reference for kernels that are
captured on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import ScoreOptions, StepShape
from actors.attention.sdpa_gather import SdpaGather
from actors.compute.kv_cache import InputRow, PagedCache

TREE_NODES = 63  # nodes of a tree that the bits of an int64 can name


@dataclass(frozen=True, slots=True, eq=False)
class VisibleKeys:
    """Keys of each token of a step, which belongs to one of its rows. Padding tokens see no key.

    A token sees the first `prefix` keys of its row, and those at `tail_start` + i for every bit i of `ancestors`.
    """

    row: Tensor  # (tokens,): index of the token's row
    position: Tensor  # (tokens,)
    prefix: Tensor  # (tokens,): number of keys
    ancestors: Tensor  # (tokens,): bits of an int64
    row_start: Tensor  # (rows,): slot of the row's first token, among the row's keys
    row_begin: Tensor  # (rows,): index of the row's first token in the step
    tail_start: Tensor  # (rows,): slot of the first node of the row's tree, among the row's keys
    key_count: Tensor  # (rows,): number of the row's keys; 0 for padding
    pages: Tensor  # (rows, pages): page tables, padded with any page


def visible_keys(rows: Sequence[InputRow], page_size: int, shape: StepShape) -> list[list[int]]:
    """Returns the fields of `VisibleKeys` as lists, in their order. Raises ValueError for trees of too many nodes."""
    sizes = [len(row.tokens) for row in rows]
    spare_rows = [0] * (shape.rows - len(rows))
    spare_tokens = [0] * (shape.tokens - sum(sizes))
    prefixes: list[int] = []
    ancestors: list[int] = []
    tables: list[int] = []
    for row in rows:
        if len(row.parents) > TREE_NODES:
            raise ValueError(f"a tree of {len(row.parents)} nodes is too large to capture; use at most {TREE_NODES}")
        chain = len(row.tokens) - len(row.parents)
        prefixes += [seen + 1 for seen in row.seen]
        ancestors += [0] * chain
        ancestors += [sum(1 << node for node in path) for path in row.tree.paths] if row.parents else []
        used = row.pages[: -(-row.end // page_size)]
        tables += [*used, *[0] * (shape.pages - len(used))]
    return [
        [*[at for at, size in enumerate(sizes) for _ in range(size)], *[shape.rows - 1] * len(spare_tokens)],
        [*[position for row in rows for position in row.positions], *spare_tokens],
        [*prefixes, *spare_tokens],
        [*ancestors, *spare_tokens],
        [*[row.start for row in rows], *spare_rows],
        [*accumulate(sizes[:-1], initial=0), *spare_rows][: shape.rows],
        [*[row.tree_start for row in rows], *spare_rows],
        [*[row.end for row in rows], *spare_rows],
        [*tables, *[0] * (shape.pages * len(spare_rows))],
    ]


def keys_on_device(parts: Sequence[Tensor], shape: StepShape) -> VisibleKeys:
    """Builds `VisibleKeys` from the lists of `visible_keys`, copied to a device."""
    *vectors, tables = parts
    return VisibleKeys(*(*vectors, tables.view(shape.rows, shape.pages)))


class PaddedSdpa(SdpaGather):
    """Backend whose padded plans attend with basic operations; its other plans are those of `SdpaGather`."""

    def padded_plan(self, rows: Sequence[InputRow], cache: PagedCache, shape: StepShape) -> "PaddedSdpaPlan":
        return PaddedSdpaPlan(rows, cache.page_size, shape)


class PaddedSdpaPlan:
    """Attends every token to all keys that its row could have, and masks those that it does not see."""

    def __init__(self, rows: Sequence[InputRow], page_size: int, shape: StepShape) -> None:
        self._page_size = page_size
        self._shape = shape
        self.integers = visible_keys(rows, page_size, shape)

    def place(self, parts: Sequence[Tensor]) -> None:
        self._keys = keys = keys_on_device(parts, self._shape)
        device = keys.row.device
        slots = keys.pages.unsqueeze(2) * self._page_size + torch.arange(self._page_size, device=device)
        at = torch.arange(self._shape.pages * self._page_size, device=device)
        self._exists = at < keys.key_count.unsqueeze(1)  # (rows, keys)
        self._slots = slots.flatten(1)
        # A key of this step is at the position of its token, any other one at its own slot.
        fresh = keys.row_begin.unsqueeze(1) + at - keys.row_start.unsqueeze(1)
        is_fresh = self._exists & (at >= keys.row_start.unsqueeze(1))
        self._key_positions = torch.where(is_fresh, keys.position[fresh.clamp(0, self._shape.tokens - 1)], at)
        node = at - keys.tail_start[keys.row].unsqueeze(1)  # (tokens, keys)
        is_ancestor = (keys.ancestors.unsqueeze(1) >> node.clamp(0, TREE_NODES)) & 1
        on_path = (is_ancestor == 1) & (node >= 0) & (node < TREE_NODES)
        self._visible = (at < keys.prefix.unsqueeze(1)) | on_path

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        assert options.is_plain, "fixed shapes support only plain scores"
        keys = self._keys
        visible = self._visible
        if options.window is not None:
            visible = visible & (self._key_positions[keys.row] > keys.position.unsqueeze(1) - options.window)
        heads = query.shape[1]
        # A mask does not hide NaN in memory of other rows.
        cached = torch.where(self._exists[:, :, None, None], pool[self._slots], 0)[keys.row]
        key, value = cached.chunk(2, dim=2)  # each (tokens, keys, kv heads, head dim)
        key, value = (part.transpose(1, 2).repeat_interleave(heads // part.shape[2], 1) for part in (key, value))
        mask = torch.where(visible, 0.0, -torch.inf).to(query.dtype)[:, None, None]
        attended = F.scaled_dot_product_attention(query.unsqueeze(2), key, value, attn_mask=mask, scale=options.scaling)
        return torch.where(visible.any(dim=1)[:, None, None], attended.squeeze(2), 0)
