"""A step's rows as one tensor of integers, so that one broadcast tells every rank what to compute.

Knows nothing of what the rows mean.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.compute.kv_cache import FeedRow
from cluster.page_allocator import PageCopy

ROW_FIELDS = 5  # tokens, start, logits, pages, alternatives


def to_tensor(rows: Sequence[FeedRow], copies: Sequence[PageCopy]) -> Tensor:
    """Rows, copies; shape (length,), the first number is the length itself."""
    numbers = [0, len(rows), len(copies)]
    for row in rows:
        numbers += (len(row.tokens), row.start, row.logits, len(row.pages), row.alternatives)
    for row in rows:
        numbers += row.tokens
        numbers += row.pages
    for copy in copies:
        numbers += (copy.source, copy.to)
    numbers[0] = len(numbers)
    return torch.tensor(numbers, dtype=torch.int32)


def from_tensor(tensor: Tensor) -> tuple[list[FeedRow], list[PageCopy]]:
    """What `to_tensor` was given; numbers beyond the length are ignored."""
    numbers = tensor.tolist()
    _, row_count, copy_count = numbers[:3]
    at = 3 + ROW_FIELDS * row_count
    rows: list[FeedRow] = []
    for index in range(row_count):
        first = 3 + ROW_FIELDS * index
        tokens, start, logits, pages, alternatives = numbers[first : first + ROW_FIELDS]
        middle = at + tokens
        end = at + tokens + pages
        rows.append(FeedRow(tuple(numbers[at:middle]), start, logits, tuple(numbers[middle:end]), alternatives))
        at = end
    copies = [PageCopy(*numbers[at + 2 * i : at + 2 * i + 2]) for i in range(copy_count)]
    return rows, copies
