"""Encodes the arguments of a forward as flat integers, for the leading rank's followers.

Draws have 64-bit integers, which follow the 32-bit integers of all other arguments.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from actors.compute.input_row import PageTable, page_numbers
from actors.compute.kv_cache import InputRow
from actors.sampling.draws import DRAW_LISTS, NO_DRAWS, Draws
from cluster.page_allocator import PageCopy, SlotMove

NO_PAGES = np.zeros(0, np.int64)
HEADER = 5  # fields: rows, copies, moves, sampled positions, whether logits are needed
ROW_FIELDS = 5  # fields: tokens, start, logits, pages, parents


def encode_forward(
    rows: Sequence[InputRow],
    copies: Sequence[PageCopy],
    moves: Sequence[SlotMove] = (),
    draws: Draws = NO_DRAWS,
) -> bytes:
    numbers = [len(rows), len(copies), len(moves), len(draws.sampled), draws.needs_logits]
    for row in rows:
        numbers += (len(row.tokens), row.start, row.logits, len(row.pages), len(row.parents))
    for row in rows:
        numbers += row.tokens
        numbers += row.parents
    for copy in copies:
        numbers += (copy.source, copy.to)
    for move in moves:
        numbers += (move.source, move.to)
    pages = np.concatenate([NO_PAGES, *[page_numbers(row.pages) for row in rows]])
    draw_bytes = [part.tobytes() for part in draws.integers]
    return b"".join([array("i", numbers).tobytes(), pages.astype(np.int32).tobytes(), *draw_bytes])


def decode_forward(data: bytes) -> tuple[list[InputRow], list[PageCopy], list[SlotMove], Draws]:
    row_count, copy_count, move_count, draw_count, needs_logits = array("i", data[: 4 * HEADER])
    draws_at = len(data) - 8 * DRAW_LISTS * draw_count
    first_row = 4 * HEADER
    fields = np.frombuffer(data, np.int32, ROW_FIELDS * row_count, first_row).reshape(-1, ROW_FIELDS)
    pages_at = draws_at - 4 * int(fields[:, 3].sum())
    pages = np.frombuffer(data, np.int32, (draws_at - pages_at) // 4, pages_at).astype(np.int64)
    numbers = array("i", data[first_row + fields.nbytes : pages_at]).tolist()
    at = page = 0
    rows: list[InputRow] = []
    for tokens, start, logits, page_count, parents in fields.tolist():
        parents_at = at + tokens
        end = parents_at + parents
        table = PageTable.of(pages[page : page + page_count])
        rows.append(InputRow(tuple(numbers[at:parents_at]), start, logits, table, tuple(numbers[parents_at:end])))
        at = end
        page += page_count
    pairs = list(zip(numbers[at::2], numbers[at + 1 :: 2], strict=True))
    assert len(pairs) == copy_count + move_count, "the message's length differs from its header"
    copies = [PageCopy(*pair) for pair in pairs[:copy_count]]
    moves = [SlotMove(*pair) for pair in pairs[copy_count:]]
    return rows, copies, moves, Draws.of(array("q", data[draws_at:]), bool(needs_logits))
