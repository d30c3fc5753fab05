"""Encodes the arguments of a forward as flat integers, for the leading rank's followers.

Draws have 64-bit integers, which follow the 32-bit integers of all other arguments.
"""

from array import array
from collections.abc import Sequence
from itertools import chain

from actors.compute.kv_cache import InputRow
from actors.sampling.draws import DRAW_LISTS, NO_DRAWS, Draws
from cluster.page_allocator import PageCopy, SlotMove

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
        numbers += row.pages
        numbers += row.parents
    for copy in copies:
        numbers += (copy.source, copy.to)
    for move in moves:
        numbers += (move.source, move.to)
    return array("i", numbers).tobytes() + array("q", chain(*draws.integers)).tobytes()


def decode_forward(data: bytes) -> tuple[list[InputRow], list[PageCopy], list[SlotMove], Draws]:
    header = array("i", data[: 4 * HEADER])
    row_count, copy_count, move_count, draw_count, needs_logits = header
    draws_at = len(data) - 8 * DRAW_LISTS * draw_count
    numbers = array("i", data[:draws_at]).tolist()
    at = HEADER + ROW_FIELDS * row_count
    rows: list[InputRow] = []
    for first in range(HEADER, at, ROW_FIELDS):
        tokens, start, logits, pages, parents = numbers[first : first + ROW_FIELDS]
        pages_at = at + tokens
        parents_at = pages_at + pages
        end = parents_at + parents
        fed = tuple(numbers[at:pages_at])
        rows.append(InputRow(fed, start, logits, tuple(numbers[pages_at:parents_at]), tuple(numbers[parents_at:end])))
        at = end
    pairs = list(zip(numbers[at::2], numbers[at + 1 :: 2], strict=True))
    assert len(pairs) == copy_count + move_count, "the message's length differs from its header"
    copies = [PageCopy(*pair) for pair in pairs[:copy_count]]
    moves = [SlotMove(*pair) for pair in pairs[copy_count:]]
    return rows, copies, moves, Draws.of(array("q", data[draws_at:]), bool(needs_logits))
