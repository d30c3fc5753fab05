"""Speculation control of one target replica: from measured steps and blocks to each session's next draft request.

The policy chooses draft lengths and waits by the value of a second. At its best, a replica commits `rate` tokens per
second, so a second is worth `rate` tokens, and time is spent only where it brings more (Dinkelbach's method for
maximising a ratio). It decides from measured costs (`load`) and from the results of past blocks (`stats`).

Unknown costs, such as drafters that share memory, cores or network with the target, show only in the measured
throughput. Where speculation was slower than non-speculative decoding at a load, the kill switch turns it off for a
while, even if the estimates favour it. All trials against the estimates are charged to one budget, `TRIAL_SHARE`. Pure,
without a clock.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.costs import ForwardCost
from cluster.speculation.estimators import AcceptanceCounts, Chances, Load, Pairs, ReplicaStats, SessionStats, StepCost
from protos.frozen import value

TRIAL_TOKENS = 2  # draft length of a trial: cheap, and enough to see whether blocks have become good
MIN_LOOKAHEAD_GAIN = (
    0.02  # tokens per round that drafting ahead must bring, since a verdict and a block per round cost time
)
RESUME_RATIO = 1.15  # hysteresis: value over cost at which drafting resumes; without it, noise would toggle drafting


@value
class DraftingDecision:
    """The request to a drafter after a verdict, and its expected value."""

    tokens: int = 0  # draft length; 0: no block is requested
    worth: float = 0.0  # tokens that the block is expected to bring, less the cost of its verification
    least_chance: float = 0.0  # acceptance probability below which a token is not worth verifying
    hold_step: bool = False  # True: a step may wait for the block; False: it is used only if in time
    skip_for_s: float = 0.0  # seconds for which the session skips steps while others continue
    is_trial: bool = False  # True: the block or the wait is not expected to pay and is requested to measure it


@value
class Awaited:
    """A block that a step could wait for."""

    worth: float  # tokens that the block is expected to bring
    in_s: float  # seconds from the earliest start of the step to the block's expected arrival


class PacingPolicy(Protocol):
    """Interface of pacing policies, which decide draft lengths and waits of a target."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        """Returns the request for the session's next block, at most `limit` tokens.

        `may_try` allows a trial: a request that is not expected to pay.
        """
        ...

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """Returns how long a step that could begin waits for further blocks, in seconds."""
        ...


class Adaptive:
    """Requests drafts, and waits for them, where they bring more tokens than the time is worth."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        """Extends the draft while each further token pays; requests none if the whole block does not pay.

        With `may_try`, a session without drafts tries a few tokens, and a session that does not wait for its blocks
        waits once, to measure their delay.
        """
        if not load.speculates:
            return DraftingDecision()
        decision = self._paying(stats, replica, limit, load)
        if decision.hold_step or not may_try:
            return decision
        if decision.tokens:
            return DraftingDecision(decision.tokens, decision.worth, decision.least_chance, True, is_trial=True)
        if not stats.is_left_off:
            return decision  # it stopped drafting only now, so a trial is too early
        tokens = min(TRIAL_TOKENS, limit)
        hopes = [chance + bonus for chance, bonus, _ in stats.chances.outlook(replica.chances, tokens)]
        return DraftingDecision(tokens, sum(hopes), hold_step=True, is_trial=True)

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        """Waits while the time of all sessions costs less than the blocks worth waiting for bring.

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

        Each token brings its acceptance probability and costs its part of the step. Waiting sessions share the cost of
        a wait.
        """
        draft_token_s = replica.delay.slope
        second = load.rate * (RESUME_RATIO if stats.is_left_off else 1.0)  # value of a second, in tokens
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
        return (
            DraftingDecision(tokens, worth, least_chance)
            if stats.hits * worth > MIN_LOOKAHEAD_GAIN
            else DraftingDecision()
        )

    def _awaited(
        self, tokens: int, worth: float, least_chance: float, stats: SessionStats, load: Load
    ) -> DraftingDecision:
        """Returns a request that the step waits for. Each round without any block halves the expected worth.

        A dead drafter therefore costs little. A session that skips a step loses a token now, but one that joins without
        a block may have none after it either. It skips while its own time is worth less than the block brings.
        """
        worth *= 0.5**stats.missed_rounds
        skips = load.rate > 0 and (1 - stats.hits) * worth > 1
        skip_for_s = worth * load.sessions / load.rate if skips else 0.0
        return DraftingDecision(tokens, worth, least_chance, True, skip_for_s)


@dataclass(frozen=True, slots=True)
class ReferenceLoop:
    """The executable specification: draft for all sessions, verify all, commit, with one fixed draft length.

    `patience` bounds the wait for the blocks of a lost drafter, in seconds.
    """

    patience: float = 2.0

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        is_there = stats.missed_rounds == 0
        return DraftingDecision(limit, float(is_there), hold_step=True, skip_for_s=self.patience * is_there)

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        return self.patience if any(block.worth for block in awaited) else 0.0


TRIAL_SHARE = (
    0.01  # approximate share of time spent on losing trials, and on non-speculative steps where speculation wins
)
GAIN_MEMORY = 0.02  # weight of the latest step: about fifty show a gain of 1.25 although single steps differ by 0.8
MIN_ERROR_SHARE = 0.5  # share of the error kept at full memory: without it, gains of 5 % were often taken for losses
MIN_LOSS_STEPS = 12  # decayed steps before a loss is accepted: a short benchmark at 16 sessions has a hundred steps
LOOK_STEPS = 8  # non-speculative steps of one look at their current cost; the first look follows as many others
MIN_LOOKS = 2  # looks before a loss is accepted: eight lucky steps once turned speculation off for half a run
MAX_PAUSE_STEPS = 8192  # some minutes of steps: after that the drafters or the load may have changed


def octave(count: int) -> int:
    """Returns log2 of `count`, rounded to the nearest integer: 3 to 5, 6 to 11 and 12 to 22 are equal."""
    return (count * count).bit_length() // 2


@dataclass(slots=True)
class _AtLoad:
    """Measured gain of speculation at one load, and the schedule of non-speculative steps there."""

    brought: Pairs = Pairs()  # seconds of speculative steps, and of non-speculative decoding for the same tokens
    steps: int = 0  # speculative steps since the last look
    looks: int = 0  # looks at the cost of non-speculative steps
    off_for: int = 0  # remaining steps to make without speculation
    pause: int = 0  # steps of the latest pause; 0: no recent loss

    @property
    def best_gain(self) -> float:
        """Upper estimate of the gain: the measured gain plus its error, or twice its error without a recent loss.

        The margin shrinks as the memory fills. With a fixed margin, a loss of 4 %, about the error of fifty steps,
        persisted for a third of six hundred steps.
        """
        errors = (1 if self.pause else 2) * max(MIN_ERROR_SHARE, 1 - GAIN_MEMORY * self.brought.weight)
        return self.brought.ratio + errors * self.brought.ratio_error

    @property
    def is_losing(self) -> bool:
        return self.looks >= MIN_LOOKS and self.brought.weight >= MIN_LOSS_STEPS and self.best_gain < 1.0

    @property
    def looks_after(self) -> float:
        """Speculative steps before the next look at non-speculative ones, so that looks cost about `TRIAL_SHARE`.

        A look costs the gain that speculation would have brought. So looks are frequent when the gain is near 1, and
        immediate at an apparent loss. The first looks come sooner, because the pace of the first steps is not typical.
        """
        spared = min(float(LOOK_STEPS) ** min(self.looks, 3), 1 / TRIAL_SHARE)
        return max(LOOK_STEPS, LOOK_STEPS * (self.best_gain - 1) * spared)

    @property
    def next_pause(self) -> int:
        """Steps to leave speculation off, so that the cost of its trial is `TRIAL_SHARE` of them.

        The pause at least doubles each time speculation loses again, since it is then less likely to have begun to pay.
        A trial costs several percent more than its steps show, because drafters have to read the tokens that they
        missed.
        """
        lost = self.brought.weight * (1 - self.brought.ratio)  # measured in non-speculative steps
        return int(min(max(lost / TRIAL_SHARE, 2 * self.pause, LOOK_STEPS), MAX_PAUSE_STEPS))

    def rest(self, steps: int) -> None:
        """Schedules `steps` non-speculative steps, which also measure the current cost of such steps."""
        self.off_for = steps
        self.steps = 0
        self.looks += 1


class KillSwitch:
    """Turns speculation on and off by load: the number of concurrent sessions, in octaves.

    Trials of single sessions share one budget.
    """

    def __init__(self) -> None:
        self._loads: defaultdict[int, _AtLoad] = defaultdict(_AtLoad)
        self._owed = 0.0  # decisions, of any sessions, until the latest trials are paid for

    def is_on(self, sessions: int) -> bool:
        """Returns True if drafts should be requested at this load."""
        return self._at(sessions).off_for == 0

    def gain(self, sessions: int) -> float:
        """Returns the ratio of speculative to non-speculative throughput; 1 while unknown."""
        return self._at(sessions).brought.ratio

    @property
    def may_try(self) -> bool:
        """True if a session may start a trial of blocks that are not expected to pay."""
        return self._owed <= 0

    def round(self, sessions: int, is_trial: bool) -> None:
        """Records a decision about one of `sessions` sessions.

        A trial is charged to all of them, because their step waits and takes longer.
        """
        self._owed = max(0.0, self._owed - 1) + is_trial * sessions / TRIAL_SHARE

    def non_speculative_step(self, sessions: int) -> None:
        """Records a step without drafts whose requests allowed them."""
        at = self._at(sessions)
        at.off_for = max(0, at.off_for - 1)

    def step(self, sessions: int, non_speculative_s: float, seconds: float) -> None:
        """Records a speculative step of `seconds`, for tokens that take `non_speculative_s` without speculation."""
        at = self._at(sessions)
        at.steps += 1
        if at.looks:
            at.brought = at.brought.after(seconds, non_speculative_s, GAIN_MEMORY)
        if at.is_losing:
            at.pause = at.next_pause
            at.brought = Pairs()
            at.rest(at.pause)
        elif at.steps >= at.looks_after:
            if at.looks < MIN_LOOKS:
                at.brought = Pairs()
            if at.brought.weight >= MIN_LOSS_STEPS:
                at.pause //= 2  # speculation has not lost since the latest look
            at.rest(LOOK_STEPS)

    def _at(self, sessions: int) -> _AtLoad:
        return self._loads[octave(sessions)]


DELAY_MEMORY = 0.01  # weight of the latest block's delay: delays are noisy, and those of all sessions count
# Rounds after which a session waits for a block once: otherwise blocks that were slow once would be
# taken to be slow forever. Waiting in one of a hundred rounds held every sixth step of sixteen sessions and lost 4 %.
MAX_UNAWAITED_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class StepShape:
    """Properties of a step that its duration depends on."""

    rows: int
    tokens: int  # tokens over all rows
    decoding: int  # sessions past their prompts, whether in the step or waiting
    prompts: int = 0  # rows that feed prompts
    prompt_tokens: int = 0  # tokens of those rows
    is_drafted_for: bool = False  # True if drafters were asked for blocks for this step
    is_open_to_drafts: bool = False  # True if any of its sessions allows drafts


class SpeculationController:
    """Learns from steps, blocks and answers; decides the request to each session's drafter."""

    def __init__(self, policy: PacingPolicy, profile: ForwardCost | None) -> None:
        self.load = Load(StepCost.profiled(profile))
        self.acceptance = AcceptanceCounts()  # counts over all blocks since startup
        self.chosen: Counter[int] = Counter()  # number of draft requests, by draft length
        self.blocks_timed = 0  # number of blocks that arrived after their request
        self.block_delay_s = 0.0  # sum of their delays since the requesting verdicts, in seconds
        self._policy = policy
        self._gate = KillSwitch()
        self._chances = Chances()  # counts over all sessions' blocks
        # block delay (s) over tokens, by octave of the number of sessions, which are drafted for together
        self._delays: defaultdict[int, Pairs] = defaultdict(Pairs)
        self._was_drafted_for = False  # whether drafters were asked for blocks for the latest step

    def step_made(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """Records a step that computed for `seconds` and committed `committed` tokens of sessions past their prompts.

        `took_s` starts when the step could have begun, so it includes the wait before the step. A step after one that
        was drafted for counts as speculative too, because drafters may still be at work.
        """
        speculates = step.is_drafted_for or self._was_drafted_for
        self._was_drafted_for = step.is_drafted_for
        took_s = took_s or seconds  # a coarse clock may have measured 0
        if step.decoding and speculates:
            self._speculated(step, committed, seconds, took_s)
        elif step.decoding:
            self._decoded_plainly(step, took_s)
        if not step.is_drafted_for and step.is_open_to_drafts:
            self._gate.non_speculative_step(self.load.sessions)

    def block_verified(self, requested: int, room: int, drafted: int, accepted: Sequence[int]) -> None:
        """Records the accepted nodes of a block with `drafted` of the `requested` nodes.

        `room` is the number of draft tokens that the session's length limit allowed.
        """
        self._chances = self._chances.after(requested, drafted, accepted)
        self.acceptance = self.acceptance.after(min(requested, room), len(accepted))

    def block_arrived(self, tokens: int, delay_s: float) -> None:
        """Records a block of `tokens` tokens that arrived `delay_s` seconds after the verdict that requested it."""
        self.blocks_timed += 1
        self.block_delay_s += delay_s
        at = octave(self.load.sessions)
        self._delays[at] = self._delays[at].after(tokens, delay_s, DELAY_MEMORY)

    def decide(self, stats: SessionStats, limit: int, sessions: int) -> DraftingDecision:
        """Returns the request for the next block of one of `sessions` sessions, at most `limit` tokens."""
        gain = self._gate.gain(sessions)
        speculates = self._gate.is_on(sessions)
        if (sessions, gain, speculates) != (self.load.sessions, self.load.gain, self.load.speculates):
            self.load = replace(self.load, sessions=sessions, gain=gain, speculates=speculates)
        replica = ReplicaStats(self._chances, self._delays[octave(sessions)])
        is_left_off = stats.is_left_off
        is_due = stats.is_on_trial or self._gate.may_try if is_left_off else stats.unawaited >= MAX_UNAWAITED_ROUNDS
        decision = self._policy.decide(stats, replica, limit, self.load, is_due)
        if speculates:
            stats.request_sent(decision.tokens > 0, decision.hold_step, decision.is_trial)
        self._gate.round(sessions, decision.is_trial and is_left_off)
        self.chosen[decision.tokens] += 1
        return decision

    def _speculated(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """Reports to the kill switch a speculative step's whole time and the non-speculative time for the same work."""
        load = self.load
        cost = load.step
        token_s = cost.non_speculative_s(step.decoding) / step.decoding
        if non_speculative_s := self._non_speculative_s(step):
            self._gate.step(load.sessions, non_speculative_s + (committed - step.decoding) * token_s, took_s)
        if not step.prompts:
            self.load = replace(load, step=cost.after_drafts(step.rows, step.tokens, seconds))

    def _decoded_plainly(self, step: StepShape, took_s: float) -> None:
        cost = self.load.step
        if step.prompts:
            cost = cost.after_prompts(step.rows, step.tokens, took_s)
        else:
            cost = cost.after_non_speculative(step.rows, took_s)
        self.load = replace(self.load, step=cost)

    def _non_speculative_s(self, step: StepShape) -> float:
        """Returns the duration of a non-speculative step over the same prompts plus one token per other session.

        Returns 0 if it is unknown.
        """
        if not step.prompts:
            return self.load.step.non_speculative_s(step.decoding)
        return self.load.step.prompts_s(step.decoding + step.prompts, step.decoding + step.prompt_tokens)
