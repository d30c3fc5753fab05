"""Acceptance statistics of drafters' blocks, by node, and the outlook for the next blocks.

A block's nodes come in falling order of probability, so node k of any tree is its k-th likeliest, and its acceptance
rate is the value of a k-th token. In a chain, k is the position.

The same statistics are kept three times: per session, over some tens of blocks; per replica, for sessions that little
is known of; and as the replica's counts since startup, for planning a fleet.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from cluster.speculation.ewma import Pairs, blend
from protos.frozen import value

POSITIONS = 16  # nodes of a block that are counted separately: no request is longer
MEMORY = 0.06  # weight of the latest block: a text is as predictable as its last paragraph, not as its beginning
REPLICA_STRENGTH = 3.0  # weight of PRIOR in blocks: a replica's first blocks soon outweigh it
SESSION_STRENGTH = 8.0  # weight of other sessions in blocks: with half of all blocks good, four bad ones prove nothing
PRIOR = tuple(0.5**position for position in range(1, POSITIONS + 1))  # optimistic, so that blocks are tried
ENOUGH = 32  # times that a position must be reached before its rate is published: an error below 0.09


@value
class Chances:
    """Decayed counts of how often each node of a block was requested, drafted and accepted.

    The counts extend to the longest block requested, a few nodes for most sessions. A block may end early when the
    drafter is in doubt.
    """

    asked: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()  # for the same nodes, as is the next
    accepted: tuple[float, ...] = ()

    def after(self, asked: int, drafted: int, accepted: Container[int]) -> "Chances":
        """Returns the counts after a verified block with these nodes accepted.

        Nodes that have not been requested for long are forgotten, and so are tried again.
        """
        new = (0.0,) * (min(asked, POSITIONS) - len(self.asked))
        return Chances(
            _decayed(self.asked + new, range(asked)),
            _decayed(self.drafted + new, range(drafted)),
            _decayed(self.accepted + new, accepted),
        )

    def outlook(self, others: "Chances", positions: int) -> list[tuple[float, float, float]]:
        """Returns what to expect of the first nodes of the next block, one triple for each node.

        The triple holds the cumulative acceptance probability, its standard error (an exploration bonus, since a few
        rejections in a row prove nothing), and the probability that the node is drafted at all. `others` holds the
        counts over all sessions, which stand in where little is known.
        """
        counts = others.asked, others.drafted, others.accepted, self.asked, self.drafted, self.accepted
        seen = islice(zip_longest(PRIOR, *counts, fillvalue=0.0), min(positions, POSITIONS))
        found = []
        for prior, o_asked, o_drafted, o_accepted, asked, drafted, accepted in seen:
            usual = REPLICA_STRENGTH + o_asked
            blocks = SESSION_STRENGTH + asked
            p_accepted = (SESSION_STRENGTH * ((REPLICA_STRENGTH * prior + o_accepted) / usual) + accepted) / blocks
            p_drafted = (SESSION_STRENGTH * ((REPLICA_STRENGTH + o_drafted) / usual) + drafted) / blocks
            found.append((p_accepted, math.sqrt(p_accepted * (1 - p_accepted) / blocks), p_drafted))
        return found


def _decayed(counts: tuple[float, ...], nodes: Container[int]) -> tuple[float, ...]:
    """Returns decayed counts, with 1 added for each of `nodes`."""
    return tuple([(1 - MEMORY) * count + (node in nodes) for node, count in enumerate(counts)])


@value
class ReplicaStats:
    """Statistics over all sessions of a replica."""

    chances: Chances = Chances()
    delay: Pairs = Pairs()  # seconds from a verdict to its block over the block's tokens, without hits


@dataclass(slots=True)
class SessionStats:
    """Results of a session's blocks, their delays, and whether drafts are left off."""

    chances: Chances = Chances()
    delay_s: float = 0.0  # from a verdict to the arrival of the next block, without hits; decayed
    hits: float = 0.5  # share of verdicts for which a block was there already; decayed
    missed_rounds: int = 0  # rounds without a block since one last arrived
    unawaited: int = 0  # rounds in a row with blocks that were not worth a wait
    is_left_off: bool = False  # True: blocks were found not to pay
    is_on_trial: bool = False  # True: they are tried nevertheless, and may be tried once more

    def block_verified(self, asked: int, drafted: int, accepted: Sequence[int]) -> None:
        """Records the accepted nodes of a block of `drafted` nodes, of `asked` requested."""
        self.chances = self.chances.after(asked, drafted, accepted)
        if accepted:
            self.is_on_trial = self.is_left_off

    def nothing_drafted(self, asked: int) -> None:
        """Records that the drafter had no block to offer: counted as requested, with no node drafted."""
        self.chances = self.chances.after(asked, 0, ())

    def block_arrived(self, delay_s: float) -> None:
        """Records a block, or the drafter's answer that it has none; either shows that the drafter is alive."""
        self.delay_s = blend(self.delay_s, delay_s, MEMORY)
        self.missed_rounds = 0

    def verdict_sent(self, hit: bool) -> None:
        """Records a verdict that asked for a block; `hit`: the block was there already."""
        self.hits = blend(self.hits, hit, MEMORY)
        if hit:
            self.missed_rounds = 0

    def plain_round(self) -> None:
        """Records that the target went on without a block."""
        self.missed_rounds += 1

    def decided(self, is_asked: bool, is_awaited: bool, is_trial: bool) -> None:
        """Records whether a block is requested now, whether it is worth a wait, and whether the request is a trial.

        A trial has two blocks, because the first may meet a drafter that is not ready. It continues while blocks are
        accepted.
        """
        if is_asked:
            self.unawaited = 0 if is_awaited else self.unawaited + 1
        if not is_trial:
            self.is_left_off = not is_asked
            self.is_on_trial = False
        elif self.is_left_off:
            self.is_on_trial = not self.is_on_trial


@value
class AcceptanceCounts:
    """Counts of blocks by position since startup, as far as was ever requested and below POSITIONS."""

    reached: tuple[int, ...] = ()  # blocks requested to this position or further, with all positions before it accepted
    accepted: tuple[int, ...] = ()  # those with this position accepted too

    def after(self, asked: int, accepted: int) -> "AcceptanceCounts":
        """Returns the counts after a verified block.

        One that ended early, in doubt, counts as rejected where it ended.
        """
        positions = range(min(asked, POSITIONS))
        reached = tuple([int(position <= accepted) for position in positions])
        stood = tuple([int(position < accepted) for position in positions])
        return self + AcceptanceCounts(reached, stood)

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        """Returns the sums of two replicas' counts, or of earlier and later blocks."""
        return AcceptanceCounts(_sums(self.reached, other.reached), _sums(self.accepted, other.accepted))

    def by_position(self) -> tuple[float, ...]:
        """Returns the acceptance probability of each position given those before it, up to the first with too few
        blocks."""
        found: list[float] = []
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            if reached < ENOUGH:
                break
            found.append(accepted / reached)
        return tuple(found)


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([a + b for a, b in zip_longest(one, other, fillvalue=0)])
