"""Speculation controller of one target replica: computes draft requests from measured steps and blocks.

A draft is worth its expected accepted tokens minus the tokens that its time would yield otherwise. The draft length
maximizes this value, and is 0 where no length gains. A step's time is priced at the current throughput (Dinkelbach's
method for maximizing a ratio), and a wait at the throughput of non-speculative steps, which would fill it.

Estimates miss some costs, such as contention with drafters on the same machine, but measured throughput includes them.
Where speculation was slower than non-speculative decoding at the same load, the kill switch turns it off.

When no draft length pays, one session at a time requests a probe block, with exponential backoff up to a few seconds
(`Adaptive`). After a loss, the pause of the kill switch lasts until a trial would cost one percent of it, or until
non-speculative steps change their pace. Pure; reads no clock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.costs import ForwardCost
from cluster.speculation.estimators import (
    REPLICA_MEMORY,
    SILENT_AFTER,
    AcceptanceCounts,
    DraftValue,
    Load,
    NodeRates,
    Pairs,
    StepCost,
    blend,
    chances_at,
)
from protos.frozen import value

FIRST_PAUSE_S = 0.25  # pause after a failed test; doubles after each further one
MAX_PAUSE_S = 4.0  # upper bound of the pause
CHANGED_PACE = 1.2  # minimum ratio between paces of non-speculative steps that indicates a change of other load


def has_pace_changed(pace: float, earlier: float) -> bool:
    """Returns True if other load on the machine has probably changed since non-speculative steps had the earlier pace.

    A failure at the earlier pace then says little about speculation now.
    """
    return not earlier / CHANGED_PACE < pace < CHANGED_PACE * earlier


@dataclass(slots=True)
class Backoff:
    """Exponential backoff after failed tests."""

    pause_s: float = 0.0  # latest pause; 0: no recent failure
    until: float = 0.0  # end of the pause

    def failed(self, now: float, least_s: float = 0.0) -> None:
        """Starts the next pause, of at least `least_s` seconds."""
        self.pause_s = min(max(FIRST_PAUSE_S, 2 * self.pause_s), MAX_PAUSE_S)
        self.until = now + max(self.pause_s, least_s)

    def reset(self) -> None:
        self.pause_s = self.until = 0.0


@value
class DraftingDecision:
    """The draft request after a verdict, and its expected value."""

    tokens: int = 0  # draft length; 0: no block is requested
    worth: float = 0.0  # expected gain of the block minus its verification cost, in tokens
    least_chance: float = 0.0  # minimum acceptance probability of a token worth verifying
    hold_step: bool = False  # True: a step may wait for the block; False: the block is used only if it arrives in time
    skip_for_s: float = 0.0  # time for which the session may skip steps of other sessions


NO_DRAFT = DraftingDecision()


@value
class ExpectedBlock:
    """A block that the next step could wait for."""

    worth: float  # expected gain, in tokens
    in_s: float  # expected arrival, in seconds after the earliest start of the step


class PacingPolicy(Protocol):
    """Interface of policies for a target's draft lengths and waits."""

    def decide(self, drafts: DraftValue, limit: int, load: Load, now: float) -> DraftingDecision:
        """Returns the request for the session's next block, of at most `limit` tokens."""
        ...

    def hold_for_s(self, expected: Sequence[ExpectedBlock], load: Load) -> float:
        """Returns the maximum wait of a step that could start now, in seconds."""
        ...


# Approximate share of time for losing trials, for waits of probes, and for looks at non-speculative steps.
TRIAL_SHARE = 0.01
MIN_PROBE_STEPS = 16  # minimum pause between probes, in steps
PROBE_TOKENS = 2  # draft length of a probe: cheap, but long enough to detect better acceptance
MIN_LOOKAHEAD_GAIN = 0.02  # minimum gain of drafting ahead, in tokens per round


class Adaptive:
    """Requests and awaits drafts only if their expected gain exceeds the cost of the time.

    Decisions depend on a session only through the level of its value, so each is computed once per load.
    """

    def __init__(self) -> None:
        self._load = Load()
        self._decisions: dict[tuple[int, int], DraftingDecision] = {}  # by (level, limit)
        self._probes = Backoff()
        self._failed_at_pace = 0.0  # pace of non-speculative steps at the latest failed probe

    def decide(self, drafts: DraftValue, limit: int, load: Load, now: float) -> DraftingDecision:
        """Returns the best request for the session's level. If steps would not wait for it, a probe may replace it.

        A probe continues while its accepted tokens are worth its cost.
        """
        if load is not self._load:
            if not self._load.speculates:
                self._probes.until = 0.0
            self._load = load
            self._decisions = {}
        if not load.speculates:
            drafts.probe_tokens = 0
            return NO_DRAFT
        level = drafts.level
        decision = self._decisions.get((level, limit))
        if decision is None:
            decision = self._decisions[level, limit] = best_request(level, limit, load)
        if decision.hold_step:
            if drafts.probe_tokens:
                drafts.probe_tokens = 0
                self._probes.reset()
            return decision
        return self._probe(drafts, limit, decision, now)

    def hold_for_s(self, expected: Sequence[ExpectedBlock], load: Load) -> float:
        """Returns the longest wait whose cost does not exceed the gain from the awaited blocks.

        The awaited blocks are the earliest ones, up to the number with the largest net gain. If they are late, the wait
        costs at most their expected gain.
        """
        rate = load.non_speculative_rate
        best = worth = total = 0.0
        for block in sorted(expected, key=lambda block: block.in_s):
            total += block.worth
            gain = total - rate * max(0.0, block.in_s)
            if gain > best:
                best = gain
                worth = total
        return worth / rate if rate else 0.0  # the value of time is unknown before the first step

    def _probe(self, drafts: DraftValue, limit: int, decision: DraftingDecision, now: float) -> DraftingDecision:
        """Returns `decision`, or a request for a few tokens if a probe is due.

        A probe is awaited for a small share of the pause before it. Until the drafter's first answer, which may include
        prefill, the request is not awaited. The backoff restarts when the pace of non-speculative steps changes, for
        example when other load on the machine ends.
        """
        load = self._load
        pace = load.step.non_speculative_pace
        least_s = MIN_PROBE_STEPS * load.step.non_speculative_s(load.sessions)
        if drafts.probe_tokens:
            verified_s = sum(load.token_s[: drafts.probe_tokens])
            drafts.probe_tokens = 0
            if drafts.accepted > waiting_cost(load) * drafts.delay_s + load.rate * verified_s:
                drafts.log_odds = max(0.0, drafts.log_odds)
                self._probes.reset()
            else:
                self._probes.failed(now, least_s)
                self._failed_at_pace = pace
        elif self._probes.pause_s and has_pace_changed(pace, self._failed_at_pace):
            self._probes.reset()
        tokens = decision.tokens or min(PROBE_TOKENS, limit)
        if drafts.awaits_first_answer:
            if not drafts.has_drafted:
                return DraftingDecision(tokens)
        elif now < self._probes.until or not drafts.is_attached:
            return decision
        self._probes.until = now + max(FIRST_PAUSE_S, least_s)  # allows one probe at a time
        drafts.awaits_first_answer = not drafts.has_drafted
        if drafts.awaits_first_answer:
            return DraftingDecision(tokens)
        drafts.probe_tokens = tokens
        worth = max(float(tokens), load.non_speculative_rate * TRIAL_SHARE * self._probes.pause_s)
        return DraftingDecision(tokens, worth, decision.least_chance, hold_step=True)


def waiting_cost(load: Load) -> float:
    """Returns the cost of one second of waiting, in tokens per session. Sessions that wait together share it."""
    return load.non_speculative_rate / max(1.0, load.sessions * (1 - load.hits))


def best_request(level: int, limit: int, load: Load) -> DraftingDecision:
    """Returns the most valuable request: an awaited block, or a block used only if it arrives in time.

    Each token gains its acceptance probability and costs its share of the step. Sessions that wait at the same time
    share the cost of the wait. A session that skips a step loses a token. A session that joins without a block may lack
    one after the step too. The session therefore skips while its own time is worth less than the block's gain.
    """
    rate = load.non_speculative_rate
    waiting = waiting_cost(load)
    token_wait = waiting * load.delay.slope
    tokens = awaited_tokens = 0
    worth = awaited_worth = 0.0
    gain = -waiting * load.delay.base
    for p_accepted, token_s in zip(chances_at(level, load.accepted[:limit]), load.token_s, strict=False):
        gain_of_token = p_accepted - load.rate * token_s
        if gain_of_token <= 0:
            break
        if awaited_tokens == tokens and gain_of_token > token_wait:
            awaited_tokens += 1
            awaited_worth += gain_of_token
            gain += gain_of_token - token_wait
        tokens += 1
        worth += gain_of_token
    least_chance = min(1.0, load.rate * load.token_s[0])
    if gain > 0:
        skips = rate > 0 and (1 - load.hits) * awaited_worth > 1
        skip_for_s = awaited_worth * load.sessions / rate if skips else 0.0
        return DraftingDecision(awaited_tokens, awaited_worth, least_chance, True, skip_for_s)
    return DraftingDecision(tokens, worth, least_chance) if load.hits * worth > MIN_LOOKAHEAD_GAIN else NO_DRAFT


@dataclass(frozen=True, slots=True)
class LockStep:
    """Lock-step policy with a fixed draft length: drafts for all sessions, then verifies all.

    `patience` is the maximum wait of a step for blocks, in seconds.
    """

    patience: float = 2.0

    def decide(self, drafts: DraftValue, limit: int, load: Load, now: float) -> DraftingDecision:
        is_responsive = drafts.missed == 0
        return DraftingDecision(limit, float(is_responsive), hold_step=True, skip_for_s=self.patience * is_responsive)

    def hold_for_s(self, expected: Sequence[ExpectedBlock], load: Load) -> float:
        return self.patience if any(block.worth for block in expected) else 0.0


FIRST_WAIT_STEPS = 4  # steps until a silent drafter is awaited again; doubles up to MAX_WAIT_STEPS
MAX_WAIT_STEPS = 128


class SilentDrafters:
    """Tracks drafters that steps no longer wait for after several missed steps, except at growing intervals.

    Silence is a property of the drafter, so new sessions do not wait for it either.
    """

    def __init__(self) -> None:
        self._missed: Counter[str] = Counter()  # consecutive missed steps, by drafter

    def missed(self, drafters: Iterable[str]) -> None:
        """Records that these drafters did not answer a request for the latest step."""
        self._missed.update(drafters)

    def answered(self, drafter: str) -> None:
        """Records a drafter's message, or the loss of its stream."""
        self._missed.pop(drafter, None)

    def is_awaited(self, drafter: str) -> bool:
        """Returns True if the next step may wait for the drafter."""
        silent = self._missed[drafter] - SILENT_AFTER
        if silent < 0:
            return True
        turns, rest = divmod(silent + 1, FIRST_WAIT_STEPS)
        return not rest and (turns.bit_count() == 1 or turns % (MAX_WAIT_STEPS // FIRST_WAIT_STEPS) == 0)


GAIN_MEMORY = 0.02  # weight of the latest step: about 50 steps reveal a gain of 1.25 despite deviations of 0.8
MIN_ERROR_SHARE = 0.5  # share of the error kept at full memory; without it, gains of 5 % were often mistaken for losses
MIN_LOSS_STEPS = 12  # minimum decayed steps before a loss counts; a short benchmark of 16 sessions has 100 steps
LOOK_STEPS = 8  # non-speculative steps per look, which measures their current cost
MIN_LOOKS = 2  # minimum looks before a loss counts: eight lucky steps once turned speculation off for half a run
MAX_PAUSE_STEPS = 8192  # a few minutes; drafters or load may change in that time


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
    """Turns speculation on and off by load, measured as the octave of the number of concurrent sessions."""

    def __init__(self) -> None:
        self._loads: defaultdict[int, _AtLoad] = defaultdict(_AtLoad)

    def is_on(self, sessions: int) -> bool:
        """Returns True if speculation is on at this load."""
        return self._at(sessions).pause_left == 0

    def gain(self, sessions: int) -> float:
        """Returns the ratio of speculative to non-speculative throughput; 1 while unknown."""
        return self._at(sessions).speedup.ratio

    def non_speculative_step(self, sessions: int, pace: float) -> None:
        """Records a step without drafts in which drafts were allowed.

        `pace` is the current pace of such steps. If it has changed since the loss, the pause ends.
        """
        at = self._at(sessions)
        at.pause_left = max(0, at.pause_left - 1)
        if at.pause and has_pace_changed(pace, at.pace):
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


REFRESH_STEPS = 8  # maximum age of the snapshot of estimates, in steps
FORGET_AFTER_S = 300.0  # time without drafters after which their estimates are forgotten


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
        self._blocks: Counter[tuple[int, int]] = Counter()  # all blocks since startup, by (requested, accepted) tokens
        self.chosen: Counter[int] = Counter()  # number of draft requests, by draft length
        self.blocks_timed = 0  # number of blocks with a measured delay
        self.block_delay_s = 0.0  # total delay of these blocks after their verdicts, in seconds
        self._policy = policy
        self._kill_switch = KillSwitch()
        self._rates = NodeRates()
        self._hits = 0.5
        self._delay = Pairs()
        self._was_drafted_for = False  # True if blocks were requested for the latest step
        self._undrafted_since: float | None = None  # time of the first decision after the last drafter left
        self._draft_version = 0  # newest version of a learned draft
        self._steps = 0  # number of steps since the snapshot
        self._expectations: dict[tuple[int, int], float] = {}  # accepted tokens by (level, requested tokens)
        self.load = Load(StepCost(profile))

    def record_step(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """Records a step of `seconds` that committed `committed` tokens of sessions past their prompts.

        `took_s` also includes the wait before the step. The step after a speculative step counts as speculative too,
        because drafters may still be running.
        """
        self._steps += 1
        speculates = step.is_drafted_for or self._was_drafted_for
        self._was_drafted_for = step.is_drafted_for
        took_s = took_s or seconds  # a coarse clock may measure 0
        cost = self.load.step
        if step.decoding and speculates:
            self._speculated(step, committed, seconds, took_s)
        elif step.decoding and step.prompts:
            cost.with_prompts(step.rows, step.tokens, took_s)
        elif step.decoding:
            cost.non_speculative(step.rows, took_s)
        if not step.is_drafted_for and step.is_open_to_drafts:
            self._kill_switch.non_speculative_step(self.load.sessions, cost.non_speculative_pace)

    def draft_attached(self, version: int) -> None:
        """Resets the kill switch and the acceptance rates when a drafter with a newer draft version attaches, so that
        losses of older versions do not delay it.
        """
        if version > self._draft_version:
            self._draft_version = version
            self._kill_switch = KillSwitch()
            self._rates = NodeRates()
            self._steps = REFRESH_STEPS

    def block_verified(
        self, drafts: DraftValue, requested: int, room: int, drafted: int, accepted: Sequence[int]
    ) -> None:
        """Records a verified block or a confirmed NoDraft (`drafted` is 0): the numbers of requested and drafted nodes,
        and the indices of the accepted nodes.

        `room` is the maximum block length under the session's length limit.
        """
        drafts.update(len(accepted), self._expected(drafts, drafted or requested))
        self._rates.block_verified(drafted or 1, accepted)  # a NoDraft counts like a rejected token
        self._blocks[min(requested, room), len(accepted)] += 1

    @property
    def acceptance(self) -> AcceptanceCounts:
        """Counts of all blocks since startup."""
        return AcceptanceCounts.of(self._blocks)

    def block_missed(self, drafts: DraftValue, requested: int, waited_s: float) -> None:
        """Records that no block came although a step waited for `waited_s` seconds.

        A wait shorter than the usual delay proves nothing. After a longer one, the delay is unknown, and counts as
        twice the wait, as in the backoff of RFC 6298.
        """
        if waited_s <= self._delay.at(requested):
            return
        self._delay = self._delay.after(requested, 2 * waited_s, REPLICA_MEMORY)
        if drafts.has_drafted:
            drafts.update(0, self._expected(drafts, requested))

    def block_arrived(self, tokens: int, delay_s: float) -> None:
        """Records a block of `tokens` tokens that arrived `delay_s` seconds after its verdict."""
        self.blocks_timed += 1
        self.block_delay_s += delay_s
        self._delay = self._delay.after(tokens, delay_s, REPLICA_MEMORY)

    def decide(self, drafts: DraftValue, limit: int, sessions: int, now: float) -> DraftingDecision:
        """Returns the request for the next block, of at most `limit` tokens, for one of `sessions` sessions."""
        self._forget_absent_drafters(drafts.is_attached, now)
        speculates = self._kill_switch.is_on(sessions)
        load = self.load
        if self._steps >= REFRESH_STEPS or sessions != load.sessions or speculates != load.speculates:
            self._refresh(sessions, speculates)
        if drafts.was_requested:
            self._hits = blend(self._hits, drafts.has_hit, REPLICA_MEMORY)
        decision = self._policy.decide(drafts, limit, self.load, now)
        drafts.was_requested = decision.tokens > 0
        self.chosen[decision.tokens] += 1
        return decision

    def _forget_absent_drafters(self, is_attached: bool, now: float) -> None:
        """Forgets acceptance and delays after a long time without drafters.

        Only a request lets an empty draft pool grow, and no measurement could correct bad estimates.
        """
        if is_attached:
            self._undrafted_since = None
        elif self._undrafted_since is None:
            self._undrafted_since = now
        elif now - self._undrafted_since > FORGET_AFTER_S:
            self._undrafted_since = now
            self._rates = NodeRates()
            self._delay = Pairs()
            self._steps = REFRESH_STEPS

    def _expected(self, drafts: DraftValue, requested: int) -> float:
        """Returns the number of accepted tokens of a block of `requested` tokens that the estimates predict."""
        key = drafts.level, requested
        expected = self._expectations.get(key)
        if expected is None:
            expected = self._expectations[key] = sum(chances_at(drafts.level, self.load.accepted[:requested]))
        return expected

    def _refresh(self, sessions: int, speculates: bool) -> None:
        """Takes a snapshot of all estimates."""
        self._steps = 0
        self._expectations.clear()
        gain = self._kill_switch.gain(sessions)
        accepted = tuple(self._rates.accepted)
        self.load = Load(self.load.step, sessions, gain, speculates, accepted, self._hits, self._delay)

    def _speculated(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """Reports a speculative step's duration to the kill switch, with the non-speculative duration for the same
        work.
        """
        cost = self.load.step
        token_s = cost.non_speculative_s(step.decoding) / step.decoding
        if non_speculative_s := self._non_speculative_s(step):
            expected_s = non_speculative_s + (committed - step.decoding) * token_s
            self._kill_switch.step(self.load.sessions, expected_s, took_s, cost.non_speculative_pace)
        if not step.prompts:
            cost.with_drafts(step.rows, step.tokens, seconds or took_s)

    def _non_speculative_s(self, step: StepShape) -> float:
        """Returns the duration of a non-speculative step with the same prompts and one token per other session.

        Returns 0 if it is unknown.
        """
        if not step.prompts:
            return self.load.step.non_speculative_s(step.decoding)
        return self.load.step.prompts_s(step.decoding + step.prompts, step.decoding + step.prompt_tokens)
