"""Pacing of one target replica: measurements of its steps and blocks, and from them each session's next draft request.

The policy is pure; the pacer holds the replica's current measurements.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cluster.costs import ForwardCost
from cluster.speculation.acceptance import AcceptanceCounts, Chances, ReplicaStats, SessionStats
from cluster.speculation.cost_model import Load, StepCost
from cluster.speculation.ewma import Pairs
from cluster.speculation.kill_switch import SpeculationGate, octave
from cluster.speculation.policy import DraftingDecision, Pacing

DELAY_MEMORY = 0.01  # weight of the latest block's delay: delays are noisy, and those of all sessions count
# Rounds without a wait after which a session waits for a block once: otherwise blocks that were slow once would be
# taken to be slow forever. Waiting in one of a hundred rounds held every sixth step of sixteen sessions and lost 4 %.
TIMED_AGAIN = 64


@dataclass(frozen=True, slots=True)
class StepShape:
    """Contents of a step that its time depends on."""

    rows: int
    tokens: int  # over all rows
    decoding: int  # sessions that it could have decided for: those past their prompts, and those that waited
    prompts: int = 0  # rows that feed prompts
    prompt_tokens: int = 0  # tokens of those rows
    is_drafted_for: bool = False  # True if drafters were asked for blocks for it
    is_open_to_drafts: bool = False  # True if the request of any of its sessions allows drafts


class Pacer:
    """Learns from steps, blocks and answers; decides the request to each session's drafter."""

    def __init__(self, policy: Pacing, profile: ForwardCost | None) -> None:
        self.load = Load(StepCost.profiled(profile))
        self.acceptance = AcceptanceCounts()  # all blocks since startup
        self.chosen: Counter[int] = Counter()  # number of requests by draft length
        self.blocks_timed = 0  # blocks that arrived after they were requested
        self.block_delay_s = 0.0  # sum of their delays
        self._policy = policy
        self._gate = SpeculationGate()
        self._chances = Chances()  # over all sessions' blocks
        # seconds over tokens, by octave of the number of sessions, which are drafted for together
        self._delays: defaultdict[int, Pairs] = defaultdict(Pairs)
        self._was_drafted_for = False  # whether the latest step was

    def step_made(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """Records a step that computed for `seconds` and committed `committed` tokens of sessions past their prompts.

        `took_s` starts when the step could have begun, so it includes the wait before the step. A step after one that
        was drafted for counts as speculative too, because drafters may still be at work beside it.
        """
        speculates = step.is_drafted_for or self._was_drafted_for
        self._was_drafted_for = step.is_drafted_for
        took_s = took_s or seconds  # a coarse clock may have measured 0
        if step.decoding and speculates:
            self._speculated(step, committed, seconds, took_s)
        elif step.decoding:
            self._decoded_plainly(step, took_s)
        if not step.is_drafted_for and step.is_open_to_drafts:
            self._gate.plain_step(self.load.sessions)

    def block_verified(self, asked: int, room: int, drafted: int, accepted: Sequence[int]) -> None:
        """Records the accepted nodes of a block of `drafted` nodes, of `asked` requested.

        `room` is the number of tokens that the session's length limit left for it.
        """
        self._chances = self._chances.after(asked, drafted, accepted)
        self.acceptance = self.acceptance.after(min(asked, room), len(accepted))

    def block_arrived(self, tokens: int, delay_s: float) -> None:
        """Records a block of `tokens` tokens that arrived `delay_s` seconds after the verdict that asked for it."""
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
        is_due = stats.is_on_trial or self._gate.may_try if is_left_off else stats.unawaited >= TIMED_AGAIN
        decision = self._policy.decide(stats, replica, limit, self.load, is_due)
        if speculates:
            stats.decided(decision.tokens > 0, decision.hold_step, decision.is_trial)
        self._gate.round(sessions, decision.is_trial and is_left_off)
        self.chosen[decision.tokens] += 1
        return decision

    def _speculated(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        """Passes the gate the whole time of a speculative step and the time of non-speculative steps for the same
        work."""
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
        """Returns the seconds of a non-speculative step that feeds the same prompts, and a token to each other session.

        0 while that is unknown.
        """
        if not step.prompts:
            return self.load.step.plain_s(step.decoding)
        return self.load.step.prompts_s(step.decoding + step.prompts, step.decoding + step.prompt_tokens)
