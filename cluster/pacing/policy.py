"""How far to draft and how long to wait for blocks: the policy, from the price of a second.

The one idea: at its best a replica commits `rate` tokens a second, so a second is worth `rate` tokens; time is spent on
something only if it brings more than that (Dinkelbach's method for the maximum of a ratio). Pure: it decides from what
was measured (`load`) and from what blocks have brought (`stats`). Knows nothing of clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.pacing.acceptance import ReplicaStats, SessionStats
from cluster.pacing.step_cost import Load
from protos.values import value

TRIAL_TOKENS = 2  # that a trial asks for: enough to see whether blocks have become good, and cheap
LEAST_GAIN = 0.02  # tokens a round that drafting ahead has to bring: a verdict and a block a round are not free
TAKEN_UP = 1.15  # times its cost that drafting has to bring once it is left off; or noise would switch it to and fro


@value
class DraftingDecision:
    """What a drafter is asked for after a verdict, and what is expected of it."""

    tokens: int = 0  # longest block
    worth: float = 0.0  # tokens that the block brings, less what its verification costs
    least_chance: float = 0.0  # of a token to be accepted, below which it is not worth verifying
    hold_step: bool = False  # whether a step may wait for it; if not, what is there in time is used
    skip_for_s: float = 0.0  # how long the session had better wait for the block while others go on
    is_trial: bool = False  # whether it should not pay, or not the wait for it, and is made to learn whether it does


@value
class Awaited:
    """A block that a step could wait for."""

    worth: float  # tokens
    in_s: float  # from when the step could begin to when the block is expected


class Pacing(Protocol):
    """Decides for the target's leader, at every step."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        """How long a block to ask for next, up to `limit`; `may_try`: even where that should not pay."""
        ...

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """How long a step that could begin waits for further blocks; their sessions go without them then."""
        ...


class Adaptive:
    """Spends time on drafts where they bring more than it is worth."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        """As far as each further token is likely enough to be accepted; nothing if the whole does not pay.

        What does not pay is tried now and then, by few tokens; so is a wait for blocks, to see how long they take.
        """
        if not load.speculates:
            return DraftingDecision()
        decision = self._paying(stats, replica, limit, load)
        if decision.hold_step or not may_try:
            return decision
        if decision.tokens:
            return DraftingDecision(decision.tokens, decision.worth, decision.least_chance, True, is_trial=True)
        if not stats.is_left_off:
            return decision  # it has only just been given up
        tokens = min(TRIAL_TOKENS, limit)
        hopes = [chance + bonus for chance, bonus, _ in stats.chances.outlook(replica.chances, tokens)]
        return DraftingDecision(tokens, sum(hopes), hold_step=True, is_trial=True)

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """As long as the time of all is worth less than what the blocks bring that are worth waiting for.

        Those are the first to come, as many as bring most. One that does not come when it should costs as much again.
        """
        best = worth = total = 0.0
        for block in sorted(awaited, key=lambda block: block.in_s):
            total += block.worth
            gain = total - load.rate * max(0.0, block.in_s)
            if gain > best:
                best = gain
                worth = total
        return worth / load.rate if load.rate else 0.0  # no second has a price before a step was measured

    def _paying(self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load) -> DraftingDecision:
        """What pays best: a block that the next step waits for if it is not there, or only what is there in time.

        Each token brings its chance to be accepted and costs its part of the step; a wait is shared by those that wait.
        """
        draft_token_s = replica.delay.slope
        second = load.rate * (TAKEN_UP if stats.is_left_off else 1.0)  # what one is worth, in tokens
        waiting = second / max(1.0, load.sessions * (1 - stats.hits))
        least_chance = min(1.0, second * load.token_s[0])
        tokens = waited_for = 0
        worth = waited_worth = 0.0
        gain = -waiting * replica.delay.base
        for (p_accepted, exploration_bonus, p_drafted), token_s in zip(
            stats.chances.outlook(replica.chances, limit), load.token_s, strict=False
        ):
            brings = p_accepted + exploration_bonus - second * p_drafted * token_s
            if brings <= 0:
                break
            wait = waiting * p_drafted * draft_token_s
            if waited_for == tokens and brings > wait:
                waited_for = waited_for + 1
                waited_worth = waited_worth + brings
                gain = gain + brings - wait
            tokens = tokens + 1
            worth = worth + brings
        if gain > 0:
            return self._awaited(waited_for, waited_worth, least_chance, stats, load)
        return DraftingDecision(tokens, worth, least_chance) if stats.hits * worth > LEAST_GAIN else DraftingDecision()

    def _awaited(
        self, tokens: int, worth: float, least_chance: float, stats: SessionStats, load: Load
    ) -> DraftingDecision:
        """Every round in which no block arrives at all halves what is expected, so a dead drafter costs little.

        A session that stays out of a step loses a token now; one that goes along without a block may have none after
        it either. It stays out for as long as its own time is worth less than what the block brings.
        """
        worth *= 0.5**stats.missed_rounds
        skips = load.rate > 0 and (1 - stats.hits) * worth > 1
        skip_for_s = worth * load.sessions / load.rate if skips else 0.0
        return DraftingDecision(tokens, worth, least_chance, True, skip_for_s)


@dataclass(frozen=True, slots=True)
class LockStep:
    """The executable specification: draft for all, verify all, commit, at one fixed length.

    `patience` bounds the wait for a drafter that is gone.
    """

    patience: float = 2.0

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        is_there = stats.missed_rounds == 0
        return DraftingDecision(limit, float(is_there), hold_step=True, skip_for_s=self.patience * is_there)

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        return self.patience if any(block.worth for block in awaited) else 0.0
