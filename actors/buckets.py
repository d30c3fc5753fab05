"""Steps of few shapes: small ones are padded to the next bucket of (rows, tokens).

This is the place for CUDA graphs, which replay a forward for exactly the shape that it was captured at. None is
captured yet, for none could be run; FlashInfer's plan will need buffers of its own for each bucket. What a capture
needs besides is in `RaggedBatch`: a step's integers are one tensor. Nothing pads steps until then.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from actors.cache import FeedRow

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
TOKENS_EACH = (1, 2, 3, 4, 5, 6, 8)  # on average of a row: single tokens, and blocks with the token before them


@dataclass(frozen=True, slots=True)
class Bucket:
    """A shape of steps."""

    rows: int
    tokens: int  # of all rows together


def bucket_for(rows: Sequence[FeedRow]) -> Bucket | None:
    """The smallest bucket that a step fits into; None for large steps, where launching costs little beside the work."""
    total = sum(len(row.tokens) for row in rows)
    for count in ROWS[bisect_left(ROWS, len(rows)) :]:
        padding = count - len(rows)  # rows, of a token at least
        for each in TOKENS_EACH:
            left = count * each - total
            if left == padding == 0 or (padding > 0 and left >= padding):
                return Bucket(count, count * each)
    return None


def padded(rows: Sequence[FeedRow], bucket: Bucket, spare_page: int, page_size: int) -> list[FeedRow]:
    """The rows, and behind them rows of noughts without logits on a page that holds nothing, which fill the bucket."""
    count = bucket.rows - len(rows)
    if count == 0:
        return list(rows)
    left = bucket.tokens - sum(len(row.tokens) for row in rows)
    sizes = [left // count + (index < left % count) for index in range(count)]
    return [*rows, *(FeedRow((0,) * size, 0, 0, (spare_page,) * -(-size // page_size)) for size in sizes)]
