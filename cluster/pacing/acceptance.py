"""What drafters' blocks have brought, by node of a block, and what to expect of the next ones.

A block's nodes come in falling order of their chances, so node k of any tree is its k-th likeliest, and what it has
brought is what a k-th token is worth: of a chain, that is its position.

Three memories of one thing: a session's, some tens of blocks long; its replica's, for what little is known of a
session; and the replica's counts since the beginning, for whoever plans a fleet.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest

from cluster.pacing.smoothing import Pairs, blend
from protos.values import value

POSITIONS = 16  # nodes of a block, that are told apart: longer blocks than that are asked for by nobody
MEMORY = 0.06  # weight of the latest block: a text is as hard to guess as its last paragraph, not as its beginning
REPLICA_STRENGTH = 3.0  # blocks that PRIOR counts for: a replica's first blocks soon say more
SESSION_STRENGTH = 8.0  # blocks that others' blocks count for: with half of the blocks good, four bad ones are nothing
PRIOR = tuple(0.5**position for position in range(1, POSITIONS + 1))  # optimistic: what is never tried is never learnt
ENOUGH = 32  # times that a position was reached, before which nothing is published of it: an error below 0.09


@value
class Chances:
    """How often each node of a block was asked for, was drafted, and was accepted; decayed counts.

    They go as far as was ever asked for, which is a few nodes for most sessions; blocks may end in doubt.
    """

    asked: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()  # of as many nodes, and so below
    accepted: tuple[float, ...] = ()

    def after(self, asked: int, drafted: int, accepted: Container[int]) -> "Chances":
        """A block was verified, and these nodes accepted. What was not asked for for long is forgotten, and so is tried
        again."""
        new = (0.0,) * (min(asked, POSITIONS) - len(self.asked))
        return Chances(
            _decayed(self.asked + new, range(asked)),
            _decayed(self.drafted + new, range(drafted)),
            _decayed(self.accepted + new, accepted),
        )

    def outlook(self, others: "Chances", positions: int) -> list[tuple[float, float, float]]:
        """What to expect of the first nodes of the next block: one triple for each.

        The chance that its token is accepted, and all before it; how far luck alone may have moved that, for a few
        rejections in a row prove nothing; and the chance that it is drafted at all. `others` is what all sessions'
        blocks brought, for where little is known.
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
    """And one more for each of `nodes`."""
    return tuple([(1 - MEMORY) * count + (node in nodes) for node, count in enumerate(counts)])


@value
class ReplicaStats:
    """What all sessions of a replica have shown."""

    chances: Chances = Chances()
    delay: Pairs = Pairs()  # seconds from a verdict to its block, over the block's tokens; of blocks not there already


@dataclass(slots=True)
class SessionStats:
    """What a session's blocks have brought, how they come, and whether drafts are left off."""

    chances: Chances = Chances()
    delay_s: float = 0.0  # from a verdict to the arrival of the next block, when it was not there already; decayed
    hits: float = 0.5  # share of verdicts after which a block was there already; decayed
    missed_rounds: int = 0  # plain rounds since a block last arrived
    unawaited: int = 0  # rounds in a row for whose blocks nobody would have waited
    is_left_off: bool = False  # whether blocks were found not to pay
    is_on_trial: bool = False  # whether they are tried nevertheless, and may be once more

    def block_verified(self, asked: int, drafted: int, accepted: Sequence[int]) -> None:
        """Of so many nodes asked for, so many were drafted, and these accepted."""
        self.chances = self.chances.after(asked, drafted, accepted)
        if accepted:
            self.is_on_trial = self.is_left_off

    def nothing_drafted(self, asked: int) -> None:
        """The drafter had no block to offer: as good as one of which nothing was accepted, but no sign of decay."""
        self.chances = self.chances.after(asked, 0, ())

    def block_arrived(self, delay_s: float) -> None:
        """Or word that there is none: the drafter lives."""
        self.delay_s = blend(self.delay_s, delay_s, MEMORY)
        self.missed_rounds = 0

    def verdict_sent(self, hit: bool) -> None:
        """It asked for a block; `hit`: that was there already."""
        self.hits = blend(self.hits, hit, MEMORY)
        if hit:
            self.missed_rounds = 0

    def plain_round(self) -> None:
        """The target went on without a block."""
        self.missed_rounds += 1

    def decided(self, is_asked: bool, is_awaited: bool, is_trial: bool) -> None:
        """Whether a block is asked for now, is worth a wait, and whether that is only to see what becomes of it.

        A trial is of two blocks, for the first may meet a drafter that is not ready; of more while they are accepted.
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
    """They go as far as was ever asked for; positions from POSITIONS on are not counted."""

    reached: tuple[int, ...] = ()  # blocks asked to go as far, of which all before that position was accepted
    accepted: tuple[int, ...] = ()  # and that position too

    def after(self, asked: int, accepted: int) -> "AcceptanceCounts":
        """A block was verified. One that ended early, in doubt, counts as rejected where it ended."""
        positions = range(min(asked, POSITIONS))
        reached = tuple([int(position <= accepted) for position in positions])
        stood = tuple([int(position < accepted) for position in positions])
        return self + AcceptanceCounts(reached, stood)

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        """Of two replicas, or of further blocks."""
        return AcceptanceCounts(_sums(self.reached, other.reached), _sums(self.accepted, other.accepted))

    def by_position(self) -> tuple[float, ...]:
        """Chance of each position, given those before it, as far as enough was seen."""
        found: list[float] = []
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            if reached < ENOUGH:
                break
            found.append(accepted / reached)
        return tuple(found)


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([a + b for a, b in zip_longest(one, other, fillvalue=0)])
