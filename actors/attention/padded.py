"""Attention of fixed shape by torch's basic operations: the reference for kernels of captured steps, on any device.

A captured step replays its operations with other numbers, so no operation may depend on them. Every token is attended
to all keys that its row could have, and a mask hides those that it does not see.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.attention import ScoreOptions, StepShape
from actors.attention.flat_rows import WORD, WORDS, FlatRows
from actors.attention.paged import step_integers, step_tensors
from actors.attention.sdpa_gather import SdpaGather
from actors.compute.kv_cache import PagedCache


class PaddedSdpa(SdpaGather):
    """Backend whose padded plans have fixed shapes; its other plans are those of `SdpaGather`."""

    def padded_plan(self, flat: FlatRows, cache: PagedCache, shape: StepShape) -> "PaddedSdpaPlan":
        return PaddedSdpaPlan(flat, cache.page_size, shape)


class PaddedSdpaPlan:
    """Attends every token to all slots of its row's page table."""

    def __init__(self, flat: FlatRows, page_size: int, shape: StepShape) -> None:
        self._page_size = page_size
        self._shape = shape
        self.integers = step_integers(flat, shape)

    def place(self, parts: Sequence[Tensor]) -> None:
        step = step_tensors(parts, self._shape)
        device = step.positions.device
        begins, ends = step.row_starts[:-1], step.row_starts[1:]
        last = self._shape.tokens - 1
        counts = torch.where(ends > begins, step.stops[(ends - 1).clamp(0, last)], 0)  # keys of each row
        firsts = step.stops[begins.clamp(0, last)] - 1  # slot of each row's first token
        slots = torch.arange(self._shape.pages * self._page_size, device=device)
        tokens = torch.arange(self._shape.tokens, device=device)
        self._row = torch.searchsorted(ends, tokens, right=True).clamp_max(self._shape.rows - 1)
        self._exists = slots < counts.unsqueeze(1)  # (rows, slots)
        pages = step.block_table.unsqueeze(2) * self._page_size
        self._pool_slots = (pages + torch.arange(self._page_size, device=device)).flatten(1)  # (rows, slots)
        # A token's key is at the token's position, and any other key at the position that is its slot.
        fed = begins.unsqueeze(1) + slots - firsts.unsqueeze(1)
        is_fed = slots >= firsts.unsqueeze(1)
        positions = torch.where(is_fed, step.positions[fed.clamp(0, last)], slots)
        self._distances = step.positions.unsqueeze(1) - positions[self._row]  # (tokens, slots)
        node = slots - step.prefixes.unsqueeze(1)
        words = step.ancestors.gather(1, (node // WORD).clamp(0, WORDS - 1))
        on_path = ((words >> (node % WORD)) & 1 == 1) & (node >= 0) & (node < WORD * WORDS)
        is_real = (step.stops > 0).unsqueeze(1)
        self._visible = ((node < 0) | on_path) & self._exists[self._row] & is_real

    def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
        assert options.is_plain, "fixed shapes support only plain scores"
        visible = self._visible
        if options.window is not None:
            visible = visible & (self._distances < options.window)
        # Masking scores does not hide NaN values in other rows' memory.
        cached = torch.where(self._exists[:, :, None, None], pool[self._pool_slots], 0)[self._row]
        repeat = query.shape[1] // (pool.shape[1] // 2)
        key, value = (part.transpose(1, 2).repeat_interleave(repeat, 1) for part in cached.chunk(2, dim=2))
        mask = torch.where(visible, 0.0, -torch.inf).to(query.dtype)[:, None, None]
        attended = F.scaled_dot_product_attention(query.unsqueeze(2), key, value, attn_mask=mask, scale=options.scaling)
        return torch.where(visible.any(dim=1)[:, None, None], attended.squeeze(2), 0)
