"""How far to draft, how long to wait for blocks, and what is learnt from how they fared.

Pure arithmetic over measurements. The one idea: at its best a replica commits `rate` tokens a second, so a second is
worth `rate` tokens; time is spent on something only if it brings more than that (Dinkelbach's method for the maximum
of a ratio). Knows nothing of sessions, streams or clocks.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

PROBE_EVERY = 32  # plain rounds after which a drafter that sent nothing is waited for once more
FIRST_PAUSE, LONGEST_PAUSE = 16, 512  # rounds without drafts before they are tried again; doubles while they do not pay
TRIAL_ROUNDS = 2  # that a trial may take until something is accepted
MEMORY = 0.06  # weight of the latest block in a session's chances
FLEET_STRENGTH = 3.0  # blocks that a guess counts for, before anything is known
SESSION_STRENGTH = 8.0  # blocks that what others' blocks brought counts for, before a session's own
KEPT_UP, TAKEN_UP = 1.0, 1.15  # times its cost that drafting has to bring; the gap keeps noise from switching it
ALARM = 1e-4  # chance of so many rejections in a row at which a drafter is taken for out of step
PROOF = 8  # blocks that must have been good before, or there is no history to fall short of
POSITIONS = 16  # of a block, that are told apart
PRIOR = tuple(0.5**position for position in range(1, POSITIONS + 1))
ALL_DRAFTED = (1.0,) * POSITIONS


# ---------------------------------------------------------------- what is measured


@dataclass(frozen=True, slots=True)
class Chances:
    """How often each position of a block was asked for, and how often it was reached; decayed counts."""

    asked: tuple[float, ...] = (0.0,) * POSITIONS
    reached: tuple[float, ...] = (0.0,) * POSITIONS

    def after(self, asked: int, reached: int) -> "Chances":
        """What was not asked for for long is forgotten, and so is tried again."""
        return Chances(_counted(self.asked, asked), _counted(self.reached, reached))

    def given(self, prior: tuple[float, ...], strength: float) -> tuple[float, ...]:
        """The chance of each position of `prior`, which counts for so many blocks, corrected by what was seen."""
        seen = zip(prior, self.asked, self.reached, strict=False)
        return tuple([(strength * expected + reached) / (strength + asked) for expected, asked, reached in seen])

    def hoped(self, prior: tuple[float, ...], strength: float) -> tuple[float, ...]:
        """The same and its standard error, which is how far luck alone may have moved it."""
        hoped = []
        for expected, asked, reached in zip(prior, self.asked, self.reached, strict=False):
            blocks = strength + asked
            chance = (strength * expected + reached) / blocks
            hoped.append(chance + math.sqrt(chance * (1 - chance) / blocks))
        return tuple(hoped)


def _counted(counts: tuple[float, ...], positions: int) -> tuple[float, ...]:
    """Decayed, and one more for each of the first `positions`."""
    keep = 1 - MEMORY
    return (*[keep * count + 1 for count in counts[:positions]], *[keep * count for count in counts[positions:]])


@dataclass(frozen=True)
class Yield:
    """What a session's blocks have brought, and how long they take to come."""

    accepted: Chances = field(default_factory=Chances)  # of a block's tokens
    drafted: Chances = field(default_factory=Chances)  # the same: blocks may end in doubt
    delay_s: float = 0.0  # from a verdict to the arrival of the next block, when it was not there already; decayed
    hits: float = 0.0  # share of blocks that were there already; decayed
    vain_rounds: int = 0  # plain rounds since a block last arrived
    proven: int = 0  # blocks of which something was accepted
    failed: int = 0  # blocks of which nothing was, up to the last that was proven
    rejected: int = 0  # blocks since then
    paused: int = 0  # rounds for which nothing was asked for
    pause: int = FIRST_PAUSE  # rounds after which to try again
    trial: int = 0  # rounds of the trial that is on since then, or since something was accepted in it

    def after_block(self, asked: int, drafted: int, accepted: int) -> "Yield":
        """A block was verified."""
        proven, failed, rejected, trial = self.proven, self.failed, self.rejected + 1, self.trial
        if accepted:
            proven, failed, rejected, trial = self.proven + 1, self.failed + self.rejected, 0, 0
        return replace(
            self,
            accepted=self.accepted.after(asked, accepted),
            drafted=self.drafted.after(asked, drafted),
            proven=proven,
            failed=failed,
            rejected=rejected,
            trial=trial,
        )

    def after_arrival(self, delay_s: float) -> "Yield":
        """A block came; the drafter lives."""
        return replace(self, delay_s=0.7 * self.delay_s + 0.3 * delay_s, hits=0.9 * self.hits, vain_rounds=0)

    def after_hit(self) -> "Yield":
        """The block for a verdict was there before it."""
        return replace(self, hits=0.9 * self.hits + 0.1, vain_rounds=0)

    def after_plain_round(self) -> "Yield":
        """The target went on without a block."""
        return replace(self, vain_rounds=self.vain_rounds + 1)

    def after_paying(self) -> "Yield":
        """Drafting was found to pay."""
        was_paying = self.paused == 0 and self.trial == 0 and self.pause == FIRST_PAUSE
        return self if was_paying else replace(self, paused=0, pause=FIRST_PAUSE, trial=0)

    def after_alarm(self) -> "Yield":
        """The drafter was told to begin anew."""
        return replace(self, proven=0, failed=0, rejected=0)

    @property
    def is_on_trial(self) -> bool:
        """Whether blocks are asked for only to see whether they would pay by now."""
        return self.paused >= self.pause

    # Kept once computed, because every other session's chances begin with those of all.

    @cached_property
    def usual_survival(self) -> tuple[float, ...]:
        """Chance that the first, second, ... token asked for is accepted, all before it too; for one like these."""
        return self.accepted.given(PRIOR, FLEET_STRENGTH)

    @cached_property
    def usual_reach(self) -> tuple[float, ...]:
        """Chance that it is drafted at all."""
        return self.drafted.given(ALL_DRAFTED, FLEET_STRENGTH)


@dataclass(frozen=True)
class Cost:
    """Time of a target step or a draft: `base_s` + `token_s` per token, by least squares over decayed measurements.

    The first measurements may come from a profile at start; live ones refine them.
    """

    weight: float = 0.0
    tokens: float = 0.0  # weighted sums: of tokens, seconds, tokens squared, tokens x seconds
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0
    latest_s: float = 0.0  # a decayed mean, whatever the size

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
            weight=keep * self.weight + 1,
            tokens=keep * self.tokens + tokens,
            seconds=keep * self.seconds + seconds,
            tokens_squared=keep * self.tokens_squared + tokens * tokens,
            product=keep * self.product + tokens * seconds,
            latest_s=0.9 * self.latest_s + 0.1 * seconds if self.latest_s else seconds,
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

    step: Cost = field(default_factory=Cost)
    draft: Cost = field(default_factory=Cost)  # from a verdict to the arrival of a block that was not there already
    sessions: int = 1  # that are decoding
    gain: float = 1.0  # throughput of late over that of plain decoding; decayed
    fleet: Yield = field(default_factory=Yield)  # of all sessions' blocks: what to expect where little is known

    @property
    def plain_rate(self) -> float:
        """Tokens a second without speculation; 0: not known yet."""
        step_s = self.step.base_s + self.step.token_s * self.sessions
        return self.sessions / step_s if step_s else 0.0

    @cached_property
    def rate(self) -> float:
        """Tokens a second, which is what a second is worth."""
        return self.gain * self.plain_rate

    def survival(self, blocks: Yield) -> tuple[float, ...]:
        """Chance that the first, second, ... token asked for is accepted, all before it too."""
        return blocks.accepted.given(self.fleet.usual_survival, SESSION_STRENGTH)

    def hoped_survival(self, blocks: Yield, positions: int) -> tuple[float, ...]:
        """The same for the first positions, as high as it may well be: a few rejections in a row prove nothing."""
        return blocks.accepted.hoped(self.fleet.usual_survival[:positions], SESSION_STRENGTH)

    def reach(self, blocks: Yield) -> tuple[float, ...]:
        """Chance that it is drafted at all."""
        return blocks.drafted.given(self.fleet.usual_reach, SESSION_STRENGTH)


# ---------------------------------------------------------------- what is decided


class Pacing(Protocol):
    """Decides for the target's leader, at every step."""

    def patience_s(self, blocks: Yield, asked: int, load: Load) -> float:
        """Longest wait for a session's block of up to `asked` tokens."""
        ...

    def hold_s(self, load: Load) -> float:
        """How long sessions that are ready wait for others whose blocks are expected by then."""
        ...

    def draft_tokens(self, blocks: Yield, limit: int, load: Load) -> tuple[int, Yield]:
        """Longest block to ask for next, up to `limit`, and what to remember of the decision."""
        ...


class Adaptive:
    """Spends time on drafts where they bring more than it is worth."""

    def patience_s(self, blocks: Yield, asked: int, load: Load) -> float:
        """As long as the wait is worth less than the tokens that the block brings; 0 if it is not expected by then.

        It is the session's own time: others go on meanwhile, or wait for blocks themselves. Every round in which no
        block arrives at all halves it, so that a dead drafter costs a few short waits.
        """
        step_s = load.step.latest_s
        if blocks.vain_rounds > 0 and blocks.vain_rounds % PROBE_EVERY == 0:
            return step_s
        rate = load.rate / load.sessions
        brings = 1.0 if blocks.is_on_trial else sum(load.hoped_survival(blocks, asked))  # on trial it is to show it
        limit = brings / rate if rate else 0.0
        return limit * 0.5**blocks.vain_rounds if blocks.delay_s < limit else 0.0

    def hold_s(self, load: Load) -> float:
        """A step for all costs less than two for a part each by the base of a step."""
        return load.step.base_s

    def draft_tokens(self, blocks: Yield, limit: int, load: Load) -> tuple[int, Yield]:
        """As far as each further token is likely enough to be accepted; nothing if the whole does not pay.

        What does not pay is tried again after a pause, by single tokens and for as long as they are accepted.
        """
        if paying := self._paying_length(blocks, limit, load):
            return paying, blocks.after_paying()
        if not blocks.is_on_trial:
            return 0, replace(blocks, paused=blocks.paused + 1)
        if blocks.trial < TRIAL_ROUNDS:
            return 1, replace(blocks, trial=blocks.trial + 1, vain_rounds=0)
        return 0, replace(blocks, paused=1, pause=min(2 * blocks.pause, LONGEST_PAUSE), trial=0)

    def _paying_length(self, blocks: Yield, limit: int, load: Load) -> int:
        """Each token brings its survival; it costs its part of the step and, on a miss, of the wait."""
        second = load.rate * (TAKEN_UP if blocks.paused else KEPT_UP)  # what one is worth, in tokens
        missed = (1 - blocks.hits) / load.sessions  # while one waits, others are served
        token_s = load.step.token_s + missed * load.draft.token_s
        length, gain = 0, -second * missed * load.draft.base_s
        for survival, reach in zip(load.hoped_survival(blocks, limit), load.reach(blocks), strict=False):
            if survival <= second * reach * token_s:
                break
            length, gain = length + 1, gain + survival - second * reach * token_s
        return length if gain > 0 else 0


@dataclass(frozen=True, slots=True)
class LockStep:
    """The executable specification: draft for all, verify all, commit, at one fixed length.

    `patience` bounds the wait for a drafter that is gone.
    """

    patience: float = 2.0

    def patience_s(self, blocks: Yield, asked: int, load: Load) -> float:
        return self.patience if blocks.vain_rounds == 0 else 0.0

    def hold_s(self, load: Load) -> float:
        return self.patience

    def draft_tokens(self, blocks: Yield, limit: int, load: Load) -> tuple[int, Yield]:
        return limit, blocks


def out_of_step(blocks: Yield) -> bool:
    """Whether a drafter's rejections in a row are too many for the acceptance that it had before them."""
    usual_failure = (blocks.failed + 1) / (blocks.proven + blocks.failed + 1)
    return blocks.proven >= PROOF and usual_failure**blocks.rejected < ALARM
