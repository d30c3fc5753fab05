"""Speculation controller of one target replica: computes draft requests from measured steps and blocks.

The policy chooses draft lengths and waits by the value of time. A replica commits up to `rate` tokens per second, so a
second is worth `rate` tokens. The policy spends time only where it gains more tokens than that (Dinkelbach's method for
maximizing a ratio). Its inputs are measured costs (`load`) and the results of past blocks (`stats`).

The estimates miss some costs, such as contention with drafters on the same machine, but measured throughput includes
them. At loads where speculation was slower than non-speculative decoding, the kill switch turns speculation off for a
while, whatever the estimates. Trials against the estimates share one budget, `TRIAL_SHARE`. Pure; the module reads no
clock.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from cluster.costs import ForwardCost
from cluster.speculation.estimators import AcceptanceCounts, Chances, Load, Pairs, ReplicaStats, SessionStats, StepCost
from protos.frozen import value

TRIAL_TOKENS = 2  # draft length of a trial: cheap, but long enough to detect better acceptance
MIN_LOOKAHEAD_GAIN = 0.02  # minimum gain of drafting ahead, in tokens per round
RESUME_RATIO = 1.15  # hysteresis: ratio of value to cost at which drafting resumes


@value
class DraftingDecision:
    """The draft request after a verdict, and its expected value."""

    tokens: int = 0  # draft length; 0: no block is requested
    worth: float = 0.0  # expected gain of the block minus its verification cost, in tokens
    least_chance: float = 0.0  # minimum acceptance probability of a token worth verifying
    hold_step: bool = False  # True: a step may wait for the block; False: the block is used only if it arrives in time
    skip_for_s: float = 0.0  # time for which the session may skip steps of other sessions
    is_trial: bool = False  # True: requested for measurement, without an expected gain


@value
class ExpectedBlock:
    """A block that the next step could wait for."""

    worth: float  # expected gain, in tokens
    in_s: float  # expected arrival, in seconds after the earliest start of the step


class PacingPolicy(Protocol):
    """Interface of policies for a target's draft lengths and waits."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, allows_trial: bool
    ) -> DraftingDecision:
        """Returns the request for the session's next block, of at most `limit` tokens.

        `allows_trial` permits a trial, which is a request without an expected gain.
        """
        ...

    def hold_for_s(self, expected: Sequence[ExpectedBlock], load: Load) -> float:
        """Returns the maximum wait of a step that could start now, in seconds."""
        ...


class Adaptive:
    """Requests and awaits drafts only if their expected gain exceeds the cost of the time."""

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, allows_trial: bool
    ) -> DraftingDecision:
        """Extends the draft while each further token pays; requests no block if the block as a whole does not pay.

        With `allows_trial`, a session without drafts tries a short block, and a session that does not wait for blocks
        waits once to measure their delay.
        """
        if not load.speculates:
            return DraftingDecision()
        decision = self._best_request(stats, replica, limit, load)
        if decision.hold_step or not allows_trial:
            return decision
        if decision.tokens:
            return DraftingDecision(decision.tokens, decision.worth, decision.least_chance, True, is_trial=True)
        if not stats.is_disabled:
            return decision  # drafting stops just now; too early for a trial
        tokens = min(TRIAL_TOKENS, limit)
        optimistic_gains = [
            chance + bonus for chance, bonus, _ in stats.chances.expectations_of(replica.chances, tokens)
        ]
        return DraftingDecision(tokens, sum(optimistic_gains), hold_step=True, is_trial=True)

    def hold_for_s(self, expected: Sequence[ExpectedBlock], load: Load) -> float:
        """Returns the longest wait whose cost does not exceed the gain from the awaited blocks.

        The awaited blocks are the earliest ones, up to the number with the largest net gain. If they are late, the wait
        costs at most their expected gain.
        """
        best = worth = total = 0.0
        for block in sorted(expected, key=lambda block: block.in_s):
            total += block.worth
            gain = total - load.rate * max(0.0, block.in_s)
            if gain > best:
                best = gain
                worth = total
        return worth / load.rate if load.rate else 0.0  # the value of time is unknown before the first step

    def _best_request(self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load) -> DraftingDecision:
        """Returns the most valuable request: an awaited block, or a block used only if it arrives in time.

        Each token gains its acceptance probability and costs its share of the step. Sessions that wait at the same time
        share the cost.
        """
        draft_token_s = replica.delay.slope
        token_value_per_s = load.rate * (RESUME_RATIO if stats.is_disabled else 1.0)  # value of a second, in tokens
        waiting = token_value_per_s / max(1.0, load.sessions * (1 - stats.hits))
        least_chance = min(1.0, token_value_per_s * load.token_s[0])
        tokens = awaited_tokens = 0
        worth = awaited_worth = 0.0
        gain = -waiting * replica.delay.base
        for (p_accepted, exploration_bonus, p_drafted), token_s in zip(
            stats.chances.expectations_of(replica.chances, limit), load.token_s, strict=False
        ):
            gain_of_token = p_accepted + exploration_bonus - token_value_per_s * p_drafted * token_s
            if gain_of_token <= 0:
                break
            wait = waiting * p_drafted * draft_token_s
            if awaited_tokens == tokens and gain_of_token > wait:
                awaited_tokens = awaited_tokens + 1
                awaited_worth = awaited_worth + gain_of_token
                gain = gain + gain_of_token - wait
            tokens = tokens + 1
            worth = worth + gain_of_token
        if gain > 0:
            return self._request_with_wait(awaited_tokens, awaited_worth, least_chance, stats, load)
        return (
            DraftingDecision(tokens, worth, least_chance)
            if stats.hits * worth > MIN_LOOKAHEAD_GAIN
            else DraftingDecision()
        )

    def _request_with_wait(
        self, tokens: int, worth: float, least_chance: float, stats: SessionStats, load: Load
    ) -> DraftingDecision:
        """Returns a request with a wait. Each round without a block halves the expected gain, so a dead drafter costs
        little.

        A session that skips a step loses a token. A session that joins without a block may lack one after the step too.
        The session therefore skips while its own time is worth less than the block's gain.
        """
        worth *= 0.5**stats.missed_rounds
        skips = load.rate > 0 and (1 - stats.hits) * worth > 1
        skip_for_s = worth * load.sessions / load.rate if skips else 0.0
        return DraftingDecision(tokens, worth, least_chance, True, skip_for_s)


@dataclass(frozen=True, slots=True)
class ReferenceLoop:
    """Lock-step policy with a fixed draft length: drafts for all sessions, then verifies all.

    `patience` is the maximum wait for the blocks of a lost drafter, in seconds.
    """

    patience: float = 2.0

    def decide(
        self, stats: SessionStats, replica: ReplicaStats, limit: int, load: Load, allows_trial: bool
    ) -> DraftingDecision:
        is_responsive = stats.missed_rounds == 0
        return DraftingDecision(limit, float(is_responsive), hold_step=True, skip_for_s=self.patience * is_responsive)

    def hold_for_s(self, expected: Sequence[ExpectedBlock], load: Load) -> float:
        return self.patience if any(block.worth for block in expected) else 0.0


TRIAL_SHARE = 0.01  # approximate share of time for losing trials, and for non-speculative steps where speculation wins
GAIN_MEMORY = 0.02  # weight of the latest step: about 50 steps reveal a gain of 1.25 despite deviations of 0.8
MIN_ERROR_SHARE = 0.5  # share of the error kept at full memory; without it, gains of 5 % were often mistaken for losses
MIN_LOSS_STEPS = 12  # minimum decayed steps before a loss counts; a short benchmark of 16 sessions has 100 steps
LOOK_STEPS = 8  # non-speculative steps per look, which measures their current cost
MIN_LOOKS = 2  # minimum looks before a loss counts: eight lucky steps once turned speculation off for half a run
MAX_PAUSE_STEPS = 8192  # a few minutes; drafters or load may change in that time
CHANGED_PACE = 1.2  # ratio between paces of non-speculative steps that shows that the machine's other work has changed


def octave(count: int) -> int:
    """Returns log2 of `count`, rounded to the nearest integer: 3 to 5, 6 to 11, and 12 to 22 form groups."""
    return (count * count).bit_length() // 2


@dataclass(slots=True)
class _AtLoad:
    """Measured speculation gain at one load, and its schedule of non-speculative steps."""

    speedup: Pairs = Pairs()  # (seconds with speculation, seconds without) for the same tokens
    steps: int = 0  # speculative steps since the latest look
    looks: int = 0  # number of looks
    pause_left: int = 0  # remaining non-speculative steps
    pause: int = 0  # length of the latest pause, in steps; 0: no recent loss
    pace: float = 0.0  # pace of non-speculative steps at the latest loss

    @property
    def best_gain(self) -> float:
        """Optimistic estimate of the gain: the measured gain plus one standard error after a recent loss, otherwise
        plus two.

        The margin shrinks as the memory fills. With a fixed margin, a loss of 4 % (about the standard error of 50
        steps) persisted for a third of 600 steps.
        """
        errors = (1 if self.pause else 2) * max(MIN_ERROR_SHARE, 1 - GAIN_MEMORY * self.speedup.weight)
        return self.speedup.ratio + errors * self.speedup.ratio_error

    @property
    def is_losing(self) -> bool:
        return self.looks >= MIN_LOOKS and self.speedup.weight >= MIN_LOSS_STEPS and self.best_gain < 1.0

    @property
    def next_look_after(self) -> float:
        """Number of speculative steps before the next look, so that looks cost about `TRIAL_SHARE` of the time.

        A look forgoes the gain of speculation. Looks are therefore frequent at a gain near 1, and immediate at an
        apparent loss. The first looks come sooner, because the first steps are not typical.
        """
        factor = min(float(LOOK_STEPS) ** min(self.looks, 3), 1 / TRIAL_SHARE)
        return max(LOOK_STEPS, LOOK_STEPS * (self.best_gain - 1) * factor)

    @property
    def next_pause(self) -> int:
        """Number of steps to leave speculation off, so that its next trial costs `TRIAL_SHARE` of them.

        The pause at least doubles after each further loss. A trial costs several percent more than its steps show,
        because drafters must first read the tokens that they missed.
        """
        lost = self.speedup.weight * (1 - self.speedup.ratio)  # in non-speculative steps
        return int(min(max(lost / TRIAL_SHARE, 2 * self.pause, LOOK_STEPS), MAX_PAUSE_STEPS))

    def start_pause(self, steps: int) -> None:
        """Schedules `steps` non-speculative steps, which also measure their current cost."""
        self.pause_left = steps
        self.steps = 0
        self.looks += 1


class KillSwitch:
    """Turns speculation on and off by load, measured as the octave of the number of concurrent sessions.

    All sessions share one budget for trials.
    """

    def __init__(self) -> None:
        self._loads: defaultdict[int, _AtLoad] = defaultdict(_AtLoad)
        self._owed = 0.0  # number of decisions until the latest trials are paid for

    def is_on(self, sessions: int) -> bool:
        """Returns True if speculation is on at this load."""
        return self._at(sessions).pause_left == 0

    def gain(self, sessions: int) -> float:
        """Returns the ratio of speculative to non-speculative throughput; 1 while unknown."""
        return self._at(sessions).speedup.ratio

    @property
    def allows_trial(self) -> bool:
        """True if the budget permits a trial."""
        return self._owed <= 0

    def round(self, sessions: int, is_trial: bool) -> None:
        """Records a decision for one of `sessions` sessions.

        All of them pay for a trial, because it delays their common step.
        """
        self._owed = max(0.0, self._owed - 1) + is_trial * sessions / TRIAL_SHARE

    def non_speculative_step(self, sessions: int, pace: float) -> None:
        """Records a step without drafts in which drafts were allowed.

        `pace` is the current pace of such steps. If it has changed since the loss, the pause ends.
        """
        at = self._at(sessions)
        at.pause_left = max(0, at.pause_left - 1)
        if at.pause and not 1 / CHANGED_PACE < pace / at.pace < CHANGED_PACE:
            at.pause = at.pause_left = 0

    def step(self, sessions: int, non_speculative_s: float, seconds: float, pace: float) -> None:
        """Records a speculative step of `seconds`; its tokens would take `non_speculative_s` without speculation.

        `pace` is the current pace of non-speculative steps.
        """
        at = self._at(sessions)
        at.steps += 1
        if at.looks:
            at.speedup = at.speedup.after(seconds, non_speculative_s, GAIN_MEMORY)
        if at.is_losing:
            at.pause = at.next_pause
            at.pace = pace
            at.speedup = Pairs()
            at.start_pause(at.pause)
        elif at.steps >= at.next_look_after:
            if at.looks < MIN_LOOKS:
                at.speedup = Pairs()
            if at.speedup.weight >= MIN_LOSS_STEPS:
                at.pause //= 2  # no loss since the latest look
            at.start_pause(LOOK_STEPS)

    def _at(self, sessions: int) -> _AtLoad:
        return self._loads[octave(sessions)]


DELAY_MEMORY = 0.01  # weight of the latest block's delay; delays are noisy, and all sessions contribute
# Every 64 rounds, a session waits once to refresh the delay estimate. Without this, a drafter that was slow once would
# count as slow forever. With waits in 1 % of the rounds, 16 sessions delayed every sixth step and lost 4 %.
MAX_UNAWAITED_ROUNDS = 64


@dataclass(frozen=True, slots=True)
class StepShape:
    """Shape of a step, which determines its duration."""

    rows: int
    tokens: int  # number of tokens over all rows
    decoding: int  # number of sessions past their prompts, including waiting ones
    prompts: int = 0  # number of rows that feed prompts
    prompt_tokens: int = 0  # number of tokens in those rows
    is_drafted_for: bool = False  # True if blocks were requested for this step
    is_open_to_drafts: bool = False  # True if a session in the step allows drafts


class SpeculationController:
    """Learns from steps, blocks and answers; decides each session's draft request."""

    def __init__(self, policy: PacingPolicy, profile: ForwardCost | None) -> None:
        self.load = Load(StepCost.profiled(profile))
        self._blocks: Counter[tuple[int, int]] = Counter()  # all blocks since startup, by (requested, accepted) tokens
        self.chosen: Counter[int] = Counter()  # number of draft requests, by draft length
        self.blocks_timed = 0  # number of blocks with a measured delay
        self.block_delay_s = 0.0  # total delay of these blocks after their verdicts, in seconds
        self._policy = policy
        self._kill_switch = KillSwitch()
        self._chances = Chances()  # counts of all sessions' blocks
        # Block delay in seconds over the number of tokens, by octave of the number of sessions.
        self._delays: defaultdict[int, Pairs] = defaultdict(Pairs)
        self._was_drafted_for = False  # True if blocks were requested for the latest step
        self._draft_version = 0  # newest version of a learned draft

    def record_step(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """Records a step of `seconds` that committed `committed` tokens of sessions past their prompts.

        `took_s` also includes the wait before the step. The step after a speculative step counts as speculative too,
        because drafters may still be running.
        """
        speculates = step.is_drafted_for or self._was_drafted_for
        self._was_drafted_for = step.is_drafted_for
        took_s = took_s or seconds  # a coarse clock may measure 0
        if step.decoding and speculates:
            self._speculated(step, committed, seconds, took_s)
        elif step.decoding:
            self._decoded_plainly(step, took_s)
        if not step.is_drafted_for and step.is_open_to_drafts:
            self._kill_switch.non_speculative_step(self.load.sessions, self.load.step.non_speculative_pace)

    def draft_attached(self, version: int) -> None:
        """Forgets what earlier drafts gained once a newer version drafts, so that losses of theirs do not delay it."""
        if version > self._draft_version:
            self._draft_version = version
            self._kill_switch = KillSwitch()
            self._chances = Chances()

    def block_verified(self, requested: int, room: int, drafted: int, accepted: Sequence[int]) -> None:
        """Records a verified block: `requested` and `drafted` nodes, and the indices of the accepted nodes.

        `room` is the maximum block length under the session's length limit.
        """
        self._chances = self._chances.after(requested, drafted, accepted)
        self._blocks[min(requested, room), len(accepted)] += 1

    @property
    def acceptance(self) -> AcceptanceCounts:
        """Counts of all blocks since startup."""
        return AcceptanceCounts.of(self._blocks)

    def block_arrived(self, tokens: int, delay_s: float) -> None:
        """Records a block of `tokens` tokens that arrived `delay_s` seconds after its verdict."""
        self.blocks_timed += 1
        self.block_delay_s += delay_s
        at = octave(self.load.sessions)
        self._delays[at] = self._delays[at].after(tokens, delay_s, DELAY_MEMORY)

    def decide(self, stats: SessionStats, limit: int, sessions: int) -> DraftingDecision:
        """Returns the request for the next block, of at most `limit` tokens, for one of `sessions` sessions."""
        gain = self._kill_switch.gain(sessions)
        speculates = self._kill_switch.is_on(sessions)
        if (sessions, gain, speculates) != (self.load.sessions, self.load.gain, self.load.speculates):
            self.load = replace(self.load, sessions=sessions, gain=gain, speculates=speculates)
        replica = ReplicaStats(self._chances, self._delays[octave(sessions)])
        is_disabled = stats.is_disabled
        is_due = (
            stats.is_on_trial or self._kill_switch.allows_trial
            if is_disabled
            else stats.rounds_without_wait >= MAX_UNAWAITED_ROUNDS
        )
        decision = self._policy.decide(stats, replica, limit, self.load, is_due)
        if speculates:
            stats.request_sent(decision.tokens > 0, decision.hold_step, decision.is_trial)
        self._kill_switch.round(sessions, decision.is_trial and is_disabled)
        self.chosen[decision.tokens] += 1
        return decision

    def _speculated(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """Reports a speculative step's duration to the kill switch, with the non-speculative duration for the same
        work.
        """
        load = self.load
        cost = load.step
        token_s = cost.non_speculative_s(step.decoding) / step.decoding
        if non_speculative_s := self._non_speculative_s(step):
            self._kill_switch.step(
                load.sessions,
                non_speculative_s + (committed - step.decoding) * token_s,
                took_s,
                cost.non_speculative_pace,
            )
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
        """Returns the duration of a non-speculative step with the same prompts and one token per other session.

        Returns 0 if it is unknown.
        """
        if not step.prompts:
            return self.load.step.non_speculative_s(step.decoding)
        return self.load.step.prompts_s(step.decoding + step.prompts, step.decoding + step.prompt_tokens)
