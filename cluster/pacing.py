"""How far to draft, how long to wait for blocks, and what is learnt from how they fared.

Pure arithmetic over measurements. The one idea: at its best a replica commits `rate` tokens a second, so a second is
worth `rate` tokens; time is spent on something only if it brings more than that (Dinkelbach's method for the maximum
of a ratio). Knows nothing of sessions, streams or clocks.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise, zip_longest
from typing import Protocol

from cluster.step_cost import StepCost

FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # rounds without drafts before they are tried again; doubles while they do not pay
TRIAL_ROUNDS, TRIAL_TOKENS = 2, 2  # that a trial may take until something is accepted, and asks for in each
TRIED_ONE_IN = 100  # of all sessions' rounds, for all share what trials cost
MEMORY = 0.06  # weight of the latest block in a session's chances
KEPT = 1 - MEMORY  # that of all before it
LEAST_GAIN = 0.02  # tokens a round that drafting ahead has to bring
GOING_ON = 0.2  # by so much more often is a block there after a step without drafts than after one with drafts
ASK_AGAIN = 64  # rounds that were not waited for after which one may be, to see how long blocks take by now
FLEET_STRENGTH = 3.0  # blocks that a guess counts for, before anything is known
SESSION_STRENGTH = 8.0  # blocks that what others' blocks brought counts for, before a session's own
KEPT_UP, TAKEN_UP = 1.0, 1.15  # times its cost that drafting has to bring; the gap keeps noise from switching it
ALARM = 1e-4  # chance of so many rejections in a row at which a drafter is taken for out of step
PROOF = 8  # blocks that must have been good before, or there is no history to fall short of
POSITIONS = 16  # of a block, that are told apart
PRIOR = tuple(0.5**position for position in range(1, POSITIONS + 1))


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True, slots=True)
class Chances:
    """How often each position of a block was asked for, was drafted, and was accepted; decayed counts.

    They go as far as was ever asked for, which is a few positions for most sessions; blocks may end in doubt.
    """

    asked: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()  # of as many positions, and so below
    accepted: tuple[float, ...] = ()

    def after(self, asked: int, drafted: int, accepted: int) -> "Chances":
        """A block was verified. What was not asked for for long is forgotten, and so is tried again."""
        new = (0.0,) * (min(asked, POSITIONS) - len(self.asked))
        return Chances(
            _counted(self.asked + new, asked),
            _counted(self.drafted + new, drafted),
            _counted(self.accepted + new, accepted),
        )

    def outlook(self, others: "Chances", positions: int) -> list[tuple[float, float, float]]:
        """What to expect of the first positions of the next block: one triple for each.

        The chance that its token is accepted, and all before it; how far luck alone may have moved that, for a few
        rejections in a row prove nothing; and the chance that it is drafted at all. `others` is what all sessions'
        blocks brought, for where little is known.
        """
        counts = others.asked, others.drafted, others.accepted, self.asked, self.drafted, self.accepted
        seen = islice(zip_longest(PRIOR, *counts, fillvalue=0.0), min(positions, POSITIONS))
        found = []
        for prior, o_asked, o_drafted, o_accepted, asked, drafted, accepted in seen:
            usual, blocks = FLEET_STRENGTH + o_asked, SESSION_STRENGTH + asked
            survival = (SESSION_STRENGTH * ((FLEET_STRENGTH * prior + o_accepted) / usual) + accepted) / blocks
            reach = (SESSION_STRENGTH * ((FLEET_STRENGTH + o_drafted) / usual) + drafted) / blocks
            found.append((survival, math.sqrt(survival * (1 - survival) / blocks), reach))
        return found


def _counted(counts: tuple[float, ...], positions: int) -> tuple[float, ...]:
    """Decayed, and one more for each of the first `positions`."""
    return tuple([KEPT * count + (index < positions) for index, count in enumerate(counts)])


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How a session's blocks come."""

    delay_s: float = 0.0  # from a verdict to the arrival of the next block, when it was not there already; decayed
    hits: float = 0.5  # share of verdicts after which a block was there already; decayed
    vain_rounds: int = 0  # plain rounds since a block last arrived
    unawaited: int = 0  # rounds in a row for whose blocks nobody would have waited

    def asked_for(self, waits: bool) -> "Arrivals":
        """One was asked for; `waits`: and is worth waiting for."""
        if waits and self.unawaited == 0:
            return self
        return Arrivals(self.delay_s, self.hits, self.vain_rounds, 0 if waits else self.unawaited + 1)


@dataclass(frozen=True, slots=True)
class Standing:
    """Whether a drafter's blocks are as good as they were."""

    proven: int = 0  # blocks of which something was accepted
    failed: int = 0  # blocks of which nothing was, up to the last that was proven
    rejected: int = 0  # blocks since then

    def after(self, accepted: int) -> "Standing":
        """A block was verified."""
        if accepted:
            return Standing(self.proven + 1, self.failed + self.rejected)
        return Standing(self.proven, self.failed, self.rejected + 1)


@dataclass(frozen=True, slots=True)
class Trials:
    """For how long drafts are left off that do not pay, and how the trials go that are made now and then."""

    paused: int = 0  # rounds for which nothing was asked for
    pause: int = FIRST_PAUSE  # rounds after which to try again
    rounds: int = 0  # of the trial that is on since then, or since something was accepted in it; 0: none has begun

    @property
    def is_on(self) -> bool:
        """Whether blocks are asked for only to see whether they would pay by now."""
        return self.paused >= self.pause

    def after_pause(self) -> "Trials":
        """A round passed for which nothing was asked for."""
        return Trials(self.paused + 1, self.pause, self.rounds)

    def after_round(self) -> "Trials":
        """A block is asked for to see what becomes of it."""
        return Trials(self.paused, self.pause, self.rounds + 1)

    def after_success(self) -> "Trials":
        """Something was accepted."""
        return Trials(self.paused, self.pause, 1) if self.rounds else self

    def after_failure(self) -> "Trials":
        """A trial brought nothing."""
        return Trials(1, min(2 * self.pause, LONGEST_PAUSE))


PAYING = Trials()


@dataclass(frozen=True, slots=True)
class Fleet:
    """What all sessions of a replica have shown, for what little is known of one."""

    chances: Chances = Chances()
    too_soon: int = 0  # rounds of any sessions before the next trial may begin

    def after_block(self, asked: int, drafted: int, accepted: int) -> "Fleet":
        """A block was verified."""
        return Fleet(self.chances.after(asked, drafted, accepted), self.too_soon)

    def after_round(self, is_trial: bool) -> "Fleet":
        """A session was decided about."""
        if is_trial:
            return Fleet(self.chances, self.too_soon + TRIED_ONE_IN)
        return Fleet(self.chances, self.too_soon - 1) if self.too_soon else self


@dataclass(frozen=True, slots=True)
class Yield:
    """What a session's blocks have brought, and how they come.

    Of parts, because few of them change at once, and some value changes several times in each round.
    """

    chances: Chances = Chances()  # of a block's tokens
    arrivals: Arrivals = Arrivals()
    standing: Standing = Standing()
    trials: Trials = PAYING

    def after_block(self, asked: int, drafted: int, accepted: int) -> "Yield":
        """A block was verified."""
        return Yield(
            self.chances.after(asked, drafted, accepted),
            self.arrivals,
            self.standing.after(accepted),
            self.trials.after_success() if accepted else self.trials,
        )

    def after_arrival(self, delay_s: float) -> "Yield":
        """A block came; the drafter lives."""
        seen = self.arrivals
        return self._coming(Arrivals(0.7 * seen.delay_s + 0.3 * delay_s, seen.hits, 0, seen.unawaited))

    def after_verdict(self, hit: bool) -> "Yield":
        """A verdict went out that asked for a block; `hit`: it was there already."""
        seen = self.arrivals
        if hit:
            return self._coming(Arrivals(seen.delay_s, 0.9 * seen.hits + 0.1, 0, seen.unawaited))
        return self._coming(Arrivals(seen.delay_s, 0.9 * seen.hits, seen.vain_rounds, seen.unawaited))

    def after_plain_round(self) -> "Yield":
        """The target went on without a block."""
        seen = self.arrivals
        return self._coming(Arrivals(seen.delay_s, seen.hits, seen.vain_rounds + 1, seen.unawaited))

    def after_paying(self, waits: bool) -> "Yield":
        """Drafting was found to pay, and a block is asked for; `waits`: and is worth waiting for."""
        arrivals = self.arrivals.asked_for(waits)
        if arrivals is self.arrivals and self.trials == PAYING:
            return self
        return Yield(self.chances, arrivals, self.standing, PAYING)

    def after_losing(self, trials: Trials) -> "Yield":
        """Drafting was found not to pay; `trials`: what is done about it."""
        return Yield(self.chances, self.arrivals, self.standing, trials)

    def after_trial(self) -> "Yield":
        """A block is asked for that should not pay; it is waited for whatever became of those before it."""
        seen = self.arrivals
        arrivals = Arrivals(seen.delay_s, seen.hits, 0, seen.unawaited)
        return Yield(self.chances, arrivals, self.standing, self.trials.after_round())

    def after_alarm(self) -> "Yield":
        """The drafter was told to begin anew."""
        return Yield(self.chances, self.arrivals, Standing(), self.trials)

    def _coming(self, arrivals: Arrivals) -> "Yield":
        return Yield(self.chances, arrivals, self.standing, self.trials)


@dataclass(frozen=True)
class Cost:
    """Time of a draft: `base_s` + `token_s` per token, by least squares over decayed measurements."""

    weight: float = 0.0
    tokens: float = 0.0  # weighted sums: of tokens, seconds, tokens squared, tokens x seconds
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0

    @classmethod
    def profiled(cls, measured: Iterable[tuple[int, float]]) -> "Cost":
        """From measured (tokens, seconds)."""
        cost = cls()
        for tokens, seconds in measured:
            cost = cost.after(tokens, seconds)
        return cost

    def after(self, tokens: int, seconds: float) -> "Cost":
        keep = 0.99
        return Cost(
            keep * self.weight + 1,
            keep * self.tokens + tokens,
            keep * self.seconds + seconds,
            keep * self.tokens_squared + tokens * tokens,
            keep * self.product + tokens * seconds,
        )

    @cached_property
    def token_s(self) -> float:
        """Of one token more; 0 while all steps were of one size."""
        spread = self.weight * self.tokens_squared - self.tokens**2
        if spread <= 1e-6 * self.tokens_squared:
            return 0.0
        slope = (self.weight * self.product - self.tokens * self.seconds) / spread
        return min(max(0.0, slope), self.seconds / self.tokens)

    @cached_property
    def base_s(self) -> float:
        """Before the first token."""
        return max(0.0, self.seconds - self.token_s * self.tokens) / self.weight if self.weight else 0.0


@dataclass(frozen=True)
class Load:
    """What the replica is doing now."""

    step: StepCost = field(default_factory=lambda: StepCost.profiled(None))
    draft: Cost = field(default_factory=Cost)  # from a verdict to the arrival of a block that was not there already
    sessions: int = 1  # that are decoding
    gain: float = 1.0  # throughput of late over that of plain decoding
    speculates: bool = True  # whether that is not known to lose

    def after_draft(self, tokens: int, delay_s: float) -> "Load":
        """A block of so many tokens came, so long after the verdict that asked for it."""
        return Load(self.step, self.draft.after(tokens, delay_s), self.sessions, self.gain, self.speculates)

    @cached_property
    def plain_rate(self) -> float:
        """Tokens a second without speculation; 0: not known yet."""
        step_s = self.step.plain_s(self.sessions)
        return self.sessions / step_s if step_s else 0.0

    @cached_property
    def rate(self) -> float:
        """Tokens a second, which is what a second is worth."""
        return max(1.0, self.gain) * self.plain_rate

    @cached_property
    def row_s(self) -> float:
        """Of one session more in a step."""
        return max(0.0, self.step.plain_s(self.sessions + 1) - self.step.plain_s(self.sessions))

    @cached_property
    def token_s(self) -> tuple[float, ...]:
        """Of the first, second, ... draft token of each session."""
        rows = self.sessions
        steps = [self.step.drafts_s(rows, rows * (1 + length)) for length in range(POSITIONS + 1)]
        return tuple([max(0.0, later - earlier) / rows for earlier, later in pairwise(steps)])


# ---------------------------------------------------------------- what is decided


@dataclass(frozen=True, slots=True)
class Ask:
    """What a drafter is asked for after a verdict, and what is expected of it."""

    tokens: int = 0  # longest block
    worth: float = 0.0  # tokens that the block brings, less what its verification costs
    least_chance: float = 0.0  # of a token to be accepted, below which it is not worth verifying
    waits: bool = False  # whether a step may wait for it; if not, what is there in time is used
    sits_out: bool = False  # whether the session had better wait for the block while others go on


@dataclass(frozen=True, slots=True)
class Awaited:
    """A block that a step could wait for."""

    worth: float  # tokens
    in_s: float  # from when the step could begin to when the block is expected


class Pacing(Protocol):
    """Decides for the target's leader, at every step."""

    def ask(self, blocks: Yield, fleet: Fleet, limit: int, load: Load) -> tuple[Ask, Yield]:
        """How long a block to ask for next, up to `limit`, and what to remember of the decision."""
        ...

    def patience_s(self, ask: Ask, load: Load) -> float:
        """How long a session stays out of steps for its block."""
        ...

    def hold_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """How long a step that could begin waits for further blocks; their sessions go without them then."""
        ...


class Adaptive:
    """Spends time on drafts where they bring more than it is worth."""

    def ask(self, blocks: Yield, fleet: Fleet, limit: int, load: Load) -> tuple[Ask, Yield]:
        """As far as each further token is likely enough to be accepted; nothing if the whole does not pay.

        What does not pay is tried again after a pause, by few tokens and for as long as they are accepted; of many
        sessions few try.
        """
        if not load.speculates:
            return Ask(), blocks
        ask = self._paying(blocks, fleet, limit, load)
        if ask.tokens:
            return ask, blocks.after_paying(ask.waits)
        if not blocks.trials.is_on or (fleet.too_soon and not blocks.trials.rounds):
            return Ask(), blocks.after_losing(blocks.trials.after_pause())
        if blocks.trials.rounds < TRIAL_ROUNDS:
            length = min(TRIAL_TOKENS, limit)
            worth = sum([survival + luck for survival, luck, _ in blocks.chances.outlook(fleet.chances, length)])
            return Ask(length, worth, waits=True), blocks.after_trial()
        return Ask(), blocks.after_losing(blocks.trials.after_failure())

    def patience_s(self, ask: Ask, load: Load) -> float:
        """As long as the session's own time is worth less than what the block brings: others go on meanwhile."""
        return ask.worth * load.sessions / load.rate if ask.sits_out else 0.0

    def hold_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """As long as the time of all is worth less than what the blocks bring that are worth waiting for.

        Those are the first to come, as many as bring most. One that does not come when it should costs as much again.
        """
        best = worth = total = 0.0
        for block in sorted(awaited, key=lambda block: block.in_s):
            total += block.worth
            gain = total - load.rate * max(0.0, block.in_s)
            if gain > best:
                best, worth = gain, total
        return worth / load.rate if worth and load.rate else 0.0  # nothing is waited before a step was measured

    def _paying(self, blocks: Yield, fleet: Fleet, limit: int, load: Load) -> Ask:
        """What pays best: a block that the next step waits for if it is not there, or only what is there in time.

        Each token brings its survival and costs its part of the step; a wait is shared by those that wait.
        """
        arrivals, draft_token_s = blocks.arrivals, load.draft.token_s
        second = load.rate * (TAKEN_UP if blocks.trials.paused else KEPT_UP)  # what one is worth, in tokens
        waiting = second / max(1.0, load.sessions * (1 - arrivals.hits))
        least_chance = min(1.0, second * load.token_s[0])
        tokens = waited_for = 0
        worth = waited_worth = 0.0
        gain = -waiting * load.draft.base_s
        for (survival, luck, reach), token_s in zip(
            blocks.chances.outlook(fleet.chances, limit), load.token_s, strict=False
        ):
            brings = survival + luck - second * reach * token_s
            if brings <= 0:
                break
            wait = waiting * reach * draft_token_s
            if waited_for == tokens and brings > wait:
                waited_for, waited_worth, gain = waited_for + 1, waited_worth + brings, gain + brings - wait
            tokens, worth = tokens + 1, worth + brings
        if arrivals.unawaited >= ASK_AGAIN and tokens:
            return Ask(tokens, worth, least_chance, waits=True)
        if gain > GOING_ON * worth:
            return self._awaited(waited_for, waited_worth, least_chance, arrivals, load)
        return Ask(tokens, worth, least_chance) if arrivals.hits * worth > LEAST_GAIN else Ask()

    def _awaited(self, tokens: int, worth: float, least_chance: float, arrivals: Arrivals, load: Load) -> Ask:
        """Every round in which no block arrives at all halves what is expected, so a dead drafter costs little.

        A session that stays out of a step loses a token now; one that goes along without a block may have none after
        it either.
        """
        worth *= 0.5**arrivals.vain_rounds
        sits_out = (1 - arrivals.hits) * worth > 1 - load.rate * load.row_s
        return Ask(tokens, worth, least_chance, True, sits_out)


@dataclass(frozen=True, slots=True)
class LockStep:
    """The executable specification: draft for all, verify all, commit, at one fixed length.

    `patience` bounds the wait for a drafter that is gone.
    """

    patience: float = 2.0

    def ask(self, blocks: Yield, fleet: Fleet, limit: int, load: Load) -> tuple[Ask, Yield]:
        return Ask(limit, worth=float(blocks.arrivals.vain_rounds == 0), waits=True, sits_out=True), blocks

    def patience_s(self, ask: Ask, load: Load) -> float:
        return self.patience if ask.worth else 0.0

    def hold_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        return self.patience if any(block.worth for block in awaited) else 0.0


def out_of_step(blocks: Yield) -> bool:
    """Whether a drafter's rejections in a row are too many for the acceptance that it had before them."""
    seen = blocks.standing
    if seen.proven < PROOF:
        return False
    usual_failure = (seen.failed + 1) / (seen.proven + seen.failed + 1)
    return usual_failure**seen.rejected < ALARM
