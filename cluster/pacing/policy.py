"""How far to draft and how long to wait for blocks: the policy, from the price of a second.

The one idea: at its best a replica commits `rate` tokens a second, so a second is worth `rate` tokens; time is spent on
something only if it brings more than that (Dinkelbach's method for the maximum of a ratio). Pure: it decides from what
was measured (`load`) and from what blocks have brought (`yields`). Knows nothing of sessions, streams or clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.pacing.acceptance import Arrivals, ReplicaStats, SessionStats
from cluster.pacing.load import Load
from protos.values import value

TRIAL_ROUNDS = 2  # that a trial may take until something is accepted, and asks for in each
TRIAL_TOKENS = 2
LEAST_GAIN = 0.02  # tokens a round that drafting ahead has to bring
ASK_AGAIN = 64  # rounds that were not waited for after which one may be, to see how long blocks take by now
KEPT_UP = 1.0  # times its cost that drafting has to bring; the gap keeps noise from switching it
TAKEN_UP = 1.15


@value
class DraftingDecision:
    """What a drafter is asked for after a verdict, and what is expected of it."""

    tokens: int = 0  # longest block
    worth: float = 0.0  # tokens that the block brings, less what its verification costs
    least_chance: float = 0.0  # of a token to be accepted, below which it is not worth verifying
    hold_step: bool = False  # whether a step may wait for it; if not, what is there in time is used
    skip_steps: bool = False  # whether the session had better wait for the block while others go on


@value
class Awaited:
    """A block that a step could wait for."""

    worth: float  # tokens
    in_s: float  # from when the step could begin to when the block is expected


class Pacing(Protocol):
    """Decides for the target's leader, at every step."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load
    ) -> tuple[DraftingDecision, SessionStats]:
        """How long a block to ask for next, up to `limit`, and what to remember of the decision."""
        ...

    def skip_for_s(self, decision: DraftingDecision, load: Load) -> float:
        """How long a session stays out of steps for its block."""
        ...

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """How long a step that could begin waits for further blocks; their sessions go without them then."""
        ...


class Adaptive:
    """Spends time on drafts where they bring more than it is worth."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load
    ) -> tuple[DraftingDecision, SessionStats]:
        """As far as each further token is likely enough to be accepted; nothing if the whole does not pay.

        What does not pay is tried again after a pause, by few tokens and for as long as they are accepted; of many
        sessions few try.
        """
        if not load.speculates:
            return DraftingDecision(), stats
        decision = self._paying(stats, replica, limit, load)
        if decision.tokens:
            return decision, stats.after_paying(decision.hold_step)
        if not stats.trials.is_on or (replica.too_soon and not stats.trials.rounds):
            return DraftingDecision(), stats.after_losing(stats.trials.after_pause())
        if stats.trials.rounds < TRIAL_ROUNDS:
            length = min(TRIAL_TOKENS, limit)
            worth = sum(
                [
                    p_accepted + exploration_bonus
                    for p_accepted, exploration_bonus, _ in stats.chances.outlook(replica.chances, length)
                ]
            )
            return DraftingDecision(length, worth, hold_step=True), stats.after_trial()
        return DraftingDecision(), stats.after_losing(stats.trials.after_failure())

    def skip_for_s(self, decision: DraftingDecision, load: Load) -> float:
        """As long as the session's own time is worth less than what the block brings: others go on meanwhile."""
        if not decision.skip_steps or not load.rate:
            return 0.0  # nothing is waited before a step was measured: no second has a price yet
        return decision.worth * load.sessions / load.rate

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
        return worth / load.rate if worth and load.rate else 0.0  # as in skip_for_s

    def _paying(self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load) -> DraftingDecision:
        """What pays best: a block that the next step waits for if it is not there, or only what is there in time.

        Each token brings its chance to be accepted and costs its part of the step; a wait is shared by those that wait.
        """
        arrivals = stats.arrivals
        draft_token_s = replica.delay.token_s
        second = load.rate * (TAKEN_UP if stats.trials.paused else KEPT_UP)  # what one is worth, in tokens
        waiting = second / max(1.0, load.sessions * (1 - arrivals.hits))
        least_chance = min(1.0, second * load.token_s[0])
        tokens = waited_for = 0
        worth = waited_worth = 0.0
        gain = -waiting * replica.delay.base_s
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
        if arrivals.unawaited >= ASK_AGAIN and tokens:
            return DraftingDecision(tokens, worth, least_chance, hold_step=True)
        if gain > 0:
            return self._awaited(waited_for, waited_worth, least_chance, arrivals, load)
        return (
            DraftingDecision(tokens, worth, least_chance) if arrivals.hits * worth > LEAST_GAIN else DraftingDecision()
        )

    def _awaited(
        self, tokens: int, worth: float, least_chance: float, arrivals: Arrivals, load: Load
    ) -> DraftingDecision:
        """Every round in which no block arrives at all halves what is expected, so a dead drafter costs little.

        A session that stays out of a step loses a token now; one that goes along without a block may have none after
        it either.
        """
        worth *= 0.5**arrivals.missed_rounds
        skip_steps = (1 - arrivals.hits) * worth > 1 - load.rate * load.row_s
        return DraftingDecision(tokens, worth, least_chance, True, skip_steps)


@dataclass(frozen=True, slots=True)
class LockStep:
    """The executable specification: draft for all, verify all, commit, at one fixed length.

    `patience` bounds the wait for a drafter that is gone.
    """

    patience: float = 2.0

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load
    ) -> tuple[DraftingDecision, SessionStats]:
        return DraftingDecision(
            limit, worth=float(stats.arrivals.missed_rounds == 0), hold_step=True, skip_steps=True
        ), stats

    def skip_for_s(self, decision: DraftingDecision, load: Load) -> float:
        return self.patience if decision.worth else 0.0

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        return self.patience if any(block.worth for block in awaited) else 0.0
