"""Triton kernels of paged attention, and `attend`, which launches them. Importing this module requires Triton.

A program attends BLOCK_Q queries, which are tokens of one row times the heads that share a key head, to the keys of
some splits, as FlashDecoding does. Splits have a fixed number of keys, blocks begin at fixed slots, and partial results
are added in order; hidden keys contribute exact zeros. A row's result therefore does not depend on other rows or
padding, and a chain's not on the number of its tokens in the step. A tree's keys lie in the order of its nodes, so a
node may round differently from the same token in a chain.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from actors.attention import ScoreOptions
from actors.attention.flat_rows import WORD, WORDS
from actors.attention.paged import WORKSPACE_BYTES, StepTensors

SPLIT = 512  # keys per partial result
PROGRAMS = 4096  # maximum of a grid with several splits: enough to keep a GPU busy; more take longer to launch
LOG2_E = tl.constexpr(1.4426950408889634)
NEVER = tl.constexpr(2**31 - 1)  # beyond any slot
ROWS_AT_ONCE = tl.constexpr(256)  # row starts per comparison
NODE_WORD = tl.constexpr(WORD)
NODE_WORDS = tl.constexpr(WORDS)

# Integers whose value and alignment differ between steps. Triton would compile a kernel for each kind of value.
STEP_POINTERS = ("positions", "prefixes", "stops", "ancestors", "row_starts", "block_table")
STEP_NUMBERS = ("rows", "pages", "splits", "query_token_stride", "query_head_stride", "window")


@dataclass(frozen=True, slots=True)
class Blocks:
    """Tile sizes of a program's matrix products. They depend only on the model, so all steps round the same way."""

    tokens: int
    queries: int  # tokens x heads that share a key head, padded to a power of two
    keys: int
    dims: int  # head dim, padded to a power of two
    warps: int

    @classmethod
    def of(cls, head_dim: int, group: int, dtype: torch.dtype) -> "Blocks":
        """Returns sizes that fit in an L4's registers and shared memory; `group` heads share a key head.

        Short steps are bound by memory, so padding them to 64 queries costs little.
        """
        dims = max(16, triton.next_power_of_2(head_dim))
        queries = max(64 if dims * dtype.itemsize <= 512 else 32, triton.next_power_of_2(group))
        keys = min(64, max(16, (1 << 15) // (dims * dtype.itemsize**2)))
        return cls(queries // group, queries, keys, dims, 4 if dims <= 128 else 8)


def attend(
    step: StepTensors,
    query: Tensor,
    pool: Tensor,
    page_size: int,
    options: ScoreOptions,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Attends each token to the keys and values that it sees; returns the queries' shape.

    Queries have shape (tokens, heads, head dim), the pool (positions, 2 x kv heads, head dim): a position's keys, then
    its values. A head's elements are adjacent; other strides are free. Never waits for the device, and allocates by
    shape alone. If partial results need more than `workspace_bytes`, each program attends its queries to all splits,
    with the same operations in the same order. Raises RuntimeError if the kernel does not compile or fit.
    """
    assert replace(options, softcap=None).is_plain, "this kernel supports only windows and soft caps"
    assert query.stride(2) == pool.stride(2) == 1, "elements of a head must be adjacent"
    tokens, heads, head_dim = query.shape
    rows, pages = step.block_table.shape
    kv_heads = pool.shape[1] // 2
    group = heads // kv_heads
    blocks = Blocks.of(head_dim, group, query.dtype)
    splits = triton.cdiv(pages * page_size, SPLIT)
    # A single split has no partial results.
    in_one_pass = splits == 1 or 4 * tokens * heads * splits * head_dim > workspace_bytes
    output = torch.zeros if in_one_pass else torch.empty
    out = output((tokens, heads, head_dim), dtype=query.dtype, device=query.device)
    saved = 0 if in_one_pass else splits
    partial = torch.empty((tokens, heads, saved, head_dim), dtype=torch.float32, device=query.device)
    maxima = torch.empty((tokens, heads, saved), dtype=torch.float32, device=query.device)
    totals = torch.empty_like(maxima)
    shared: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "HAS_WINDOW": options.window is not None,
        "SPLIT": SPLIT,
        "BLOCK_D": blocks.dims,
        # Fusing a multiply and an add rounds once instead of twice, and both kernels must round the same way.
        "enable_fp_fusion": False,
    }
    try:
        # Each row has at least as many programs as blocks; see `_row_of`.
        programs = tokens // blocks.tokens + rows
        at_once = 1 if in_one_pass else min(splits, triton.cdiv(PROGRAMS, programs * kv_heads))
        attend_kernel[programs, kv_heads, at_once](
            query,
            pool,
            out,
            partial,
            maxima,
            totals,
            step.positions,
            step.prefixes,
            step.stops,
            step.ancestors,
            step.row_starts,
            step.block_table,
            rows,
            pages,
            splits,
            query.stride(0),
            query.stride(1),
            pool.stride(0),
            pool.stride(1),
            options.window or 0,
            options.scaling or head_dim**-0.5,
            options.softcap or 0.0,
            PAGE_SIZE=page_size,
            HAS_SOFTCAP=options.softcap is not None,
            IN_ONE_PASS=in_one_pass,
            BLOCK_T=blocks.tokens,
            BLOCK_Q=blocks.queries,
            BLOCK_N=blocks.keys,
            num_warps=blocks.warps,
            num_stages=2,
            **shared,
        )
        if not in_one_pass:
            add_kernel[tokens, kv_heads](
                partial,
                maxima,
                totals,
                out,
                step.positions,
                step.stops,
                splits,
                options.window or 0,
                BLOCK_G=triton.next_power_of_2(group),
                num_warps=max(1, triton.next_power_of_2(group) * blocks.dims // 2048),
                **shared,
            )
    except TritonError as error:  # of its compiler, or of a device with too little shared memory
        raise RuntimeError(f"Triton's kernel cannot run here: {error}") from error
    return out


@triton.jit
def _merge(maximum, total, result, other_maximum, other_total, other_result):
    """Adds a partial softmax: maxima of scores to base 2, totals of weights, both (queries,), and weighted values."""
    new = tl.maximum(maximum, other_maximum)
    base = tl.where(new == -float("inf"), 0.0, new)
    fade = tl.exp2(maximum - base)
    other_fade = tl.exp2(other_maximum - base)
    total = total * fade + other_total * other_fade
    result = result * fade[:, None] + other_result * other_fade[:, None]
    return new, total, result


@triton.jit
def _row_of(block, row_starts, rows, BLOCK_T: tl.constexpr):
    """Returns the row of a block: row r has the blocks from start(r) // BLOCK_T + r, in a grid of fixed size."""
    before = 0
    for first in range(0, rows, ROWS_AT_ONCE):
        row = first + tl.arange(0, ROWS_AT_ONCE)
        start = tl.load(row_starts + row, mask=row < rows, other=0)
        before += tl.sum(((row < rows) & (start // BLOCK_T + row <= block)).to(tl.int32), 0)
    return before - 1


@triton.jit
def _attend_split(
    first,  # first slot, a multiple of BLOCK_N
    last,  # end of the slots, all of which are written
    query,  # (BLOCK_Q, BLOCK_D)
    position,  # (BLOCK_Q,), also the next three
    prefix,
    low_bits,
    high_bits,
    tree,  # first slot of a tree node
    node_positions,  # pointer: plus a slot, the position of the token fed there
    table,  # pointer to the row's pages
    keys,  # pointer to a head's key at slot 0
    values,
    slot_stride,
    window,
    scale,
    softcap,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attends a block of queries to the keys of a split; returns a partial softmax."""
    maximum = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    result = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    dim = tl.arange(0, BLOCK_D)
    for start in range(first, last, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        is_written = slot < last
        page = tl.load(table + slot // PAGE_SIZE, mask=is_written, other=0).to(tl.int64)
        at = (page * PAGE_SIZE + slot % PAGE_SIZE) * slot_stride
        # Weight 0 does not hide NaN, so unwritten memory is not loaded.
        is_loaded = is_written[:, None] & (dim[None, :] < HEAD_DIM)
        key = tl.load(keys + at[:, None] + dim[None, :], mask=is_loaded, other=0.0)
        value = tl.load(values + at[:, None] + dim[None, :], mask=is_loaded, other=0.0)

        is_visible = slot[None, :] < prefix[:, None]
        if HAS_WINDOW:
            is_visible = is_visible & (position[:, None] - slot[None, :] < window)
        if start + BLOCK_N > tree:
            node = slot[None, :] - prefix[:, None]
            word = tl.where(node < NODE_WORD, low_bits[:, None], high_bits[:, None])
            bit = (word >> (node & (NODE_WORD - 1)).to(tl.int64)) & 1
            is_on_path = (node >= 0) & (node < NODE_WORDS * NODE_WORD) & (bit == 1)
            if HAS_WINDOW:
                is_node = is_written & (slot >= tree)
                key_position = tl.load(node_positions + slot, mask=is_node, other=0).to(tl.int32)
                is_on_path = is_on_path & (position[:, None] - key_position[None, :] < window)
            is_visible = is_visible | is_on_path

        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores / softcap * (2.0 * LOG2_E)) + 1.0))
        scores = tl.where(is_visible, scores * LOG2_E, -float("inf"))
        new = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(new == -float("inf"), 0.0, new)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(maximum - base)
        total = total * fade + tl.sum(weights, 1)
        result = result * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        maximum = new
    return maximum, total, result


@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_POINTERS)
def attend_kernel(
    query,
    pool,
    output,  # (tokens, heads, head dim), zeros; written in one pass
    partial,  # (tokens, heads, splits, head dim); written otherwise, as are the next two
    maxima,  # (tokens, heads, splits)
    totals,
    positions,
    prefixes,
    stops,
    ancestors,
    row_starts,
    block_table,
    rows,
    pages,
    splits,
    query_token_stride,
    query_head_stride,
    slot_stride,
    kv_head_stride,
    window,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    IN_ONE_PASS: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attends a block of one row's tokens, for one key head, to all splits or, in a grid of depth n, to every n-th."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = _row_of(block, row_starts, rows, BLOCK_T)
    row_begin = tl.load(row_starts + row).to(tl.int32)
    row_end = tl.load(row_starts + row + 1).to(tl.int32)
    first_token = row_begin + (block - row_begin // BLOCK_T - row) * BLOCK_T
    if first_token >= row_end:
        return

    member = tl.arange(0, BLOCK_Q)
    token = first_token + member // GROUP
    head = kv_head * GROUP + member % GROUP
    is_real = (member < BLOCK_T * GROUP) & (token < row_end)
    position = tl.load(positions + token, mask=is_real, other=0).to(tl.int32)
    prefix = tl.load(prefixes + token, mask=is_real, other=0).to(tl.int32)
    stop = tl.load(stops + token, mask=is_real, other=0).to(tl.int32)
    low_bits = tl.load(ancestors + NODE_WORDS * token, mask=is_real, other=0)
    high_bits = tl.load(ancestors + NODE_WORDS * token + 1, mask=is_real, other=0)
    dim = tl.arange(0, BLOCK_D)
    query_at = token[:, None] * query_token_stride + head[:, None] * query_head_stride + dim[None, :]
    is_loaded = is_real[:, None] & (dim[None, :] < HEAD_DIM)
    queries = tl.load(query + query_at, mask=is_loaded, other=0.0)

    begin = 0
    if HAS_WINDOW:
        oldest = tl.min(tl.where(is_real, position - window + 1, NEVER), 0)
        begin = tl.maximum(oldest, 0) // BLOCK_N * BLOCK_N
    last = tl.max(stop, 0)
    tree = tl.min(tl.where((low_bits | high_bits) != 0, prefix, NEVER), 0)
    first_slot = tl.load(stops + row_begin).to(tl.int32) - 1
    node_positions = positions + row_begin - first_slot
    table = block_table + row.to(tl.int64) * pages
    keys = pool + kv_head * kv_head_stride
    values = keys + KV_HEADS * kv_head_stride
    result_at = token.to(tl.int64) * (KV_HEADS * GROUP) + head  # in (tokens, heads)

    if IN_ONE_PASS:
        maximum = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        result = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
        for split in range(begin // SPLIT, tl.cdiv(last, SPLIT)):
            split_maximum, split_total, split_result = _attend_split(
                tl.maximum(begin, split * SPLIT), tl.minimum(last, (split + 1) * SPLIT),
                queries, position, prefix, low_bits, high_bits, tree, node_positions, table, keys, values,
                slot_stride, window, scale, softcap,
                HEAD_DIM, PAGE_SIZE, HAS_WINDOW, HAS_SOFTCAP, BLOCK_Q, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            maximum, total, result = _merge(maximum, total, result, split_maximum, split_total, split_result)
        out = (result / tl.where(is_real, total, 1.0)[:, None]).to(output.dtype.element_ty)
        tl.store(output + result_at[:, None] * HEAD_DIM + dim[None, :], out, mask=is_loaded)
    else:
        for split in range(tl.program_id(2), tl.cdiv(last, SPLIT), tl.num_programs(2)):
            first = tl.maximum(begin, split * SPLIT)
            end = tl.minimum(last, (split + 1) * SPLIT)
            if first < end:
                maximum, total, result = _attend_split(
                    first, end,
                    queries, position, prefix, low_bits, high_bits, tree, node_positions, table, keys, values,
                    slot_stride, window, scale, softcap,
                    HEAD_DIM, PAGE_SIZE, HAS_WINDOW, HAS_SOFTCAP, BLOCK_Q, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                split_at = result_at * splits + split
                tl.store(maxima + split_at, maximum, mask=is_real)
                tl.store(totals + split_at, total, mask=is_real)
                tl.store(partial + split_at[:, None] * HEAD_DIM + dim[None, :], result, mask=is_loaded)


@triton.jit(do_not_specialize=STEP_NUMBERS, do_not_specialize_on_alignment=STEP_POINTERS)
def add_kernel(
    partial,
    maxima,
    totals,
    output,
    positions,
    stops,
    splits,
    window,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Adds the partial results of one token's heads that share a key head, in order; writes 0 for padding tokens."""
    token = tl.program_id(0)
    stop = tl.load(stops + token).to(tl.int32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(tl.load(positions + token).to(tl.int32) - window + 1, 0)
    member = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, BLOCK_D)
    is_real = member < GROUP
    is_loaded = is_real[:, None] & (dim[None, :] < HEAD_DIM)
    result_at = token.to(tl.int64) * (KV_HEADS * GROUP) + tl.program_id(1) * GROUP + member
    maximum = tl.full((BLOCK_G,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_G,), tl.float32)
    result = tl.zeros((BLOCK_G, BLOCK_D), tl.float32)
    for split in range(begin // SPLIT, tl.cdiv(stop, SPLIT)):
        at = result_at * splits + split
        split_maximum = tl.load(maxima + at, mask=is_real, other=-float("inf"))
        split_total = tl.load(totals + at, mask=is_real, other=0.0)
        split_result = tl.load(partial + at[:, None] * HEAD_DIM + dim[None, :], mask=is_loaded, other=0.0)
        maximum, total, result = _merge(maximum, total, result, split_maximum, split_total, split_result)
    total = tl.where(is_real & (stop > 0), total, 1.0)  # a real token's NaN must show
    out = (result / total[:, None]).to(output.dtype.element_ty)
    tl.store(output + result_at[:, None] * HEAD_DIM + dim[None, :], out, mask=is_loaded)
