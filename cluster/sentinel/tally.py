"""What verified blocks have brought, told apart by drafter, context length, cached prefix, and position in the block.

An average over all of them hides what is broken: a draft that loses its way at long contexts, or after a prefix that
came from the cache.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.pacing.acceptance import AcceptanceCounts
from protos.values import value

MOST_DRAFTERS = 64  # that are remembered, the latest ones


@value
class BlockKind:
    """What blocks are told apart by, beside their drafter."""

    context: int  # tokens before the block, rounded down to a power of two
    is_prefix_cached: bool  # whether the session began on pages that were there already


def kind_of(length: int, is_prefix_cached: bool) -> BlockKind:
    """Of a block after so many tokens."""
    return BlockKind(1 << (length.bit_length() - 1), is_prefix_cached)


class AcceptanceTally:
    """Counts by drafter and kind. They only grow, until a drafter is forgotten for many that came after it."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, dict[BlockKind, AcceptanceCounts]] = OrderedDict()  # heard of last at the end

    def block_verified(self, drafter: str, kind: BlockKind, asked: int, accepted: int) -> None:
        """A block of up to `asked` tokens."""
        kinds = self._counts.setdefault(drafter, {})
        self._counts.move_to_end(drafter)
        kinds[kind] = kinds.get(kind, AcceptanceCounts()).after(asked, accepted)
        if len(self._counts) > MOST_DRAFTERS:
            self._counts.popitem(last=False)

    def rows(self) -> list[dict[str, Any]]:
        """For whoever shows or adds them up."""
        return [
            {"drafter": drafter, **asdict(kind), **asdict(counts)}
            for drafter, kinds in self._counts.items()
            for kind, counts in kinds.items()
        ]

    @property
    def counts(self) -> Mapping[str, Mapping[BlockKind, AcceptanceCounts]]:
        """By drafter, then by kind."""
        return self._counts
