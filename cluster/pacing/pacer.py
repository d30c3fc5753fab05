"""Pacing of one target replica: what its steps and its blocks teach, and what they make of each session's next block.

The policy is pure; this is the one place that holds what is known of the replica by now.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.costs import ForwardCost
from cluster.pacing.acceptance import AcceptanceCounts, Chances, ReplicaStats, SessionStats
from cluster.pacing.gate import SpeculationGate, octave
from cluster.pacing.policy import DraftingDecision, Pacing
from cluster.pacing.smoothing import Pairs
from cluster.pacing.step_cost import Load, StepCost

DELAY_MEMORY = 0.01  # weight of the latest block in how long blocks take: they are noisy, and all sessions' count
# Rounds of a session that waited for no block, after which one is waited for: else blocks that took long once are taken
# to do so for ever. One in a hundred rounds of all sessions held every sixth step of sixteen, and lost 4 %.
TIMED_AGAIN = 64


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computed, as far as its time depends on it."""

    rows: int
    tokens: int  # of all rows
    decoding: int  # sessions that it could have decided for: those in it past their prompts, and those that waited
    prompts: int = 0  # rows that feed prompts
    prompt_tokens: int = 0  # of them
    is_drafted_for: bool = False  # whether drafters were asked for blocks for it
    is_open_to_drafts: bool = False  # whether the request of any of its sessions allows drafts


class Pacer:
    """Learns from steps, blocks and answers; decides what each session's drafter is asked for."""

    def __init__(self, policy: Pacing, profile: ForwardCost | None) -> None:
        self.load = Load(StepCost.profiled(profile))
        self.acceptance = AcceptanceCounts()  # of all blocks since the beginning
        self.chosen: Counter[int] = Counter()  # how often a block of so many tokens was asked for
        self.blocks_timed = 0  # that came after they were asked for
        self.block_delay_s = 0.0  # of them together
        self._policy = policy
        self._gate = SpeculationGate()
        self._chances = Chances()  # of all sessions' blocks
        # seconds over tokens, by octaves of sessions: they are drafted for together
        self._delays: defaultdict[int, Pairs] = defaultdict(Pairs)
        self._was_drafted_for = False  # the latest step

    def step_made(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """A step computed for so long and committed so many tokens of sessions past their prompts.

        `took_s` is from when it could have begun, the wait before it included. A step after one that was drafted for
        is speculation's too: drafters may still be at work beside it.
        """
        speculates = step.is_drafted_for or self._was_drafted_for
        self._was_drafted_for = step.is_drafted_for
        took_s = took_s or seconds  # clocks may be too coarse to tell
        if step.decoding and speculates:
            self._speculated(step, committed, seconds, took_s)
        elif step.decoding:
            self._decoded_plainly(step, took_s)
        if not step.is_drafted_for and step.is_open_to_drafts:
            self._gate.plain_step(self.load.sessions)

    def block_verified(self, asked: int, room: int, drafted: int, accepted: Sequence[int]) -> None:
        """Of a block of up to `asked` nodes these were accepted; the session's length limit left `room` for it."""
        self._chances = self._chances.after(asked, drafted, accepted)
        self.acceptance = self.acceptance.after(min(asked, room), len(accepted))

    def block_arrived(self, tokens: int, delay_s: float) -> None:
        """A block of so many tokens came, so long after the verdict that asked for it."""
        self.blocks_timed += 1
        self.block_delay_s += delay_s
        at = octave(self.load.sessions)
        self._delays[at] = self._delays[at].after(tokens, delay_s, DELAY_MEMORY)

    def decide(self, stats: SessionStats, limit: int, sessions: int) -> DraftingDecision:
        """How long a block to ask for next, up to `limit`, for one of so many sessions."""
        gain = self._gate.gain(sessions)
        speculates = self._gate.is_on(sessions)
        if (sessions, gain, speculates) != (self.load.sessions, self.load.gain, self.load.speculates):
            self.load = replace(self.load, sessions=sessions, gain=gain, speculates=speculates)
        replica = ReplicaStats(self._chances, self._delays[octave(sessions)])
        is_left_off = stats.is_left_off
        is_due = stats.is_on_trial or self._gate.may_try if is_left_off else stats.unawaited >= TIMED_AGAIN
        decision = self._policy.decide(stats, replica, limit, self.load, is_due)
        if speculates:
            stats.decided(decision.tokens > 0, decision.hold_step, decision.is_trial)
        self._gate.round(sessions, decision.is_trial and is_left_off)
        self.chosen[decision.tokens] += 1
        return decision

    def _speculated(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """What the gate goes by: all that the step took, against what plain steps take for what it did."""
        load = self.load
        cost = load.step
        token_s = cost.plain_s(step.decoding) / step.decoding
        if plain_s := self._plain_s(step):
            self._gate.step(load.sessions, plain_s + (committed - step.decoding) * token_s, took_s)
        if not step.prompts:
            self.load = replace(load, step=cost.after_drafts(step.rows, step.tokens, seconds))

    def _decoded_plainly(self, step: StepShape, took_s: float) -> None:
        cost = self.load.step
        if step.prompts:
            cost = cost.after_prompts(step.rows, step.tokens, took_s)
        else:
            cost = cost.after_plain(step.rows, took_s)
        self.load = replace(self.load, step=cost)

    def _plain_s(self, step: StepShape) -> float:
        """A plain step that feeds the same prompts, and a token to each session past its own; 0: not known yet."""
        if not step.prompts:
            return self.load.step.plain_s(step.decoding)
        return self.load.step.prompts_s(step.decoding + step.prompts, step.decoding + step.prompt_tokens)
