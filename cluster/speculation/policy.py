"""The pacing policy: chooses the draft length and the wait for blocks from the value of a second.

At its best a replica commits `rate` tokens per second, so a second is worth `rate` tokens. Time is spent only on what
brings more than that (Dinkelbach's method for maximising a ratio). The policy decides from measured costs (`load`) and
from the results of past blocks (`stats`). Pure, without a clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.speculation.acceptance import ReplicaStats, SessionStats
from cluster.speculation.cost_model import Load
from protos.frozen import value

TRIAL_TOKENS = 2  # draft length of a trial: cheap, and enough to see whether blocks have become good
LEAST_GAIN = 0.02  # tokens per round that drafting ahead must bring: a verdict and a block per round are not free
TAKEN_UP = 1.15  # hysteresis: value over cost at which drafting resumes; without it, noise would toggle drafting


@value
class DraftingDecision:
    """The request to a drafter after a verdict, and its expected value."""

    tokens: int = 0  # draft length
    worth: float = 0.0  # tokens that the block brings, less the cost of its verification
    least_chance: float = 0.0  # acceptance probability below which a token is not worth verifying
    hold_step: bool = False  # True: a step may wait for the block; False: it is used only if in time
    skip_for_s: float = 0.0  # how long the session should skip steps and wait while others go on
    is_trial: bool = False  # True: the block or the wait should not pay and is made to measure it


@value
class Awaited:
    """A block that a step could wait for."""

    worth: float  # tokens
    in_s: float  # from the earliest start of the step to the expected arrival of the block


class Pacing(Protocol):
    """Interface of pacing policies, which decide for the target's leader at every step."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        """Returns the request for the session's next block, at most `limit` tokens.

        `may_try` allows a request that should not pay, as a trial.
        """
        ...

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """Returns how long a step that could begin waits for further blocks; their sessions then go without them."""
        ...


class Adaptive:
    """Spends time on drafts where they bring more than the time is worth."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        """Extends the draft while each further token pays; requests none if the whole block does not pay.

        With `may_try`, a session that drafts are left off for tries a few tokens, and a session whose blocks are not
        waited for waits once, to measure how long they take.
        """
        if not load.speculates:
            return DraftingDecision()
        decision = self._paying(stats, replica, limit, load)
        if decision.hold_step or not may_try:
            return decision
        if decision.tokens:
            return DraftingDecision(decision.tokens, decision.worth, decision.least_chance, True, is_trial=True)
        if not stats.is_left_off:
            return decision  # it has only just been left off
        tokens = min(TRIAL_TOKENS, limit)
        hopes = [chance + bonus for chance, bonus, _ in stats.chances.outlook(replica.chances, tokens)]
        return DraftingDecision(tokens, sum(hopes), hold_step=True, is_trial=True)

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """Waits while the time of all sessions costs less than the value of the blocks worth waiting for.

        Those are the first blocks to arrive, as many as maximise the gain. If they do not arrive when expected, the
        wait costs at most as much as they would have brought.
        """
        best = worth = total = 0.0
        for block in sorted(awaited, key=lambda block: block.in_s):
            total += block.worth
            gain = total - load.rate * max(0.0, block.in_s)
            if gain > best:
                best = gain
                worth = total
        return worth / load.rate if load.rate else 0.0  # before the first measured step, a second has no value

    def _paying(self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load) -> DraftingDecision:
        """Returns the request that pays best: a block that the next step waits for, or one used only if it is in time.

        Each token brings its acceptance probability and costs its part of the step. The sessions that wait share a
        wait's cost.
        """
        draft_token_s = replica.delay.slope
        second = load.rate * (TAKEN_UP if stats.is_left_off else 1.0)  # value of a second in tokens
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
        """Returns a request that the step waits for. Each round without any block halves the expected worth.

        A dead drafter therefore costs little. A session that skips a step loses a token now, but one that joins without
        a block may have none after it either. It skips for as long as its own time is worth less than the block brings.
        """
        worth *= 0.5**stats.missed_rounds
        skips = load.rate > 0 and (1 - stats.hits) * worth > 1
        skip_for_s = worth * load.sessions / load.rate if skips else 0.0
        return DraftingDecision(tokens, worth, least_chance, True, skip_for_s)


@dataclass(frozen=True, slots=True)
class LockStep:
    """The executable specification: draft for all sessions, verify all, commit, with one fixed draft length.

    `patience` bounds the wait for a lost drafter, in seconds.
    """

    patience: float = 2.0

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        is_there = stats.missed_rounds == 0
        return DraftingDecision(limit, float(is_there), hold_step=True, skip_for_s=self.patience * is_there)

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        return self.patience if any(block.worth for block in awaited) else 0.0
