"""Counts of verified blocks by drafter, context length, cached prefix, and position in the block.

An average over all of them hides specific faults: a draft that fails at long contexts, or after a prefix from the
cache.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from cluster.speculation.acceptance import AcceptanceCounts
from protos.frozen import value

MOST_DRAFTERS = 64  # most recent drafters that are kept


@value
class BlockKind:
    """Features that blocks are counted by, besides their drafter."""

    context: int  # tokens before the block, rounded down to a power of two
    is_prefix_cached: bool  # whether the session began on cached pages


def kind_of(length: int, is_prefix_cached: bool) -> BlockKind:
    """Returns the kind of a block after `length` tokens."""
    return BlockKind(1 << (length.bit_length() - 1), is_prefix_cached)


class AcceptanceTally:
    """Counts by drafter and kind. They only grow, until a drafter is dropped for more recent ones."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, dict[BlockKind, AcceptanceCounts]] = OrderedDict()  # most recent last

    def block_verified(self, drafter: str, kind: BlockKind, asked: int, accepted: int) -> None:
        """Records a block of up to `asked` tokens with `accepted` accepted ones."""
        kinds = self._counts.setdefault(drafter, {})
        self._counts.move_to_end(drafter)
        kinds[kind] = kinds.get(kind, AcceptanceCounts()).after(asked, accepted)
        if len(self._counts) > MOST_DRAFTERS:
            self._counts.popitem(last=False)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per drafter and kind, for display and for sums over replicas."""
        return [
            {"drafter": drafter, **asdict(kind), **asdict(counts)}
            for drafter, kinds in self._counts.items()
            for kind, counts in kinds.items()
        ]

    @property
    def counts(self) -> Mapping[str, Mapping[BlockKind, AcceptanceCounts]]:
        """Counts by drafter, then by kind."""
        return self._counts
