"""A step's rows as one tensor of integers, so that one broadcast tells every rank what to compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.compute.kv_cache import FeedRow
from cluster.page_allocator import PageCopy, PlaceMove

HEADER = 4  # length, rows, copies, moves
ROW_FIELDS = 5  # tokens, start, logits, pages, parents


def to_tensor(rows: Sequence[FeedRow], copies: Sequence[PageCopy], moves: Sequence[PlaceMove] = ()) -> Tensor:
    """Rows, copies, moves; shape (length,), the first number is the length itself."""
    numbers = [0, len(rows), len(copies), len(moves)]
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
    numbers[0] = len(numbers)
    return torch.tensor(numbers, dtype=torch.int32)


def from_tensor(tensor: Tensor) -> tuple[list[FeedRow], list[PageCopy], list[PlaceMove]]:
    """What `to_tensor` was given; numbers beyond the length are ignored."""
    numbers = tensor.tolist()
    _, row_count, copy_count, move_count = numbers[:HEADER]
    at = HEADER + ROW_FIELDS * row_count
    rows: list[FeedRow] = []
    for index in range(row_count):
        first = HEADER + ROW_FIELDS * index
        tokens, start, logits, pages, parents = numbers[first : first + ROW_FIELDS]
        pages_at = at + tokens
        parents_at = pages_at + pages
        end = parents_at + parents
        fed = tuple(numbers[at:pages_at])
        rows.append(FeedRow(fed, start, logits, tuple(numbers[pages_at:parents_at]), tuple(numbers[parents_at:end])))
        at = end
    pairs = [numbers[first : first + 2] for first in range(at, at + 2 * (copy_count + move_count), 2)]
    copies = [PageCopy(*pair) for pair in pairs[:copy_count]]
    return rows, copies, [PlaceMove(*pair) for pair in pairs[copy_count:]]
