"""Pacing of one target replica: what its steps and its blocks teach, and what they make of each session's next block.

The values are immutable and the policy is pure; this is the one place that holds what is known by now.
"""

from dataclasses import dataclass, replace

from cluster.costs import ForwardCost
from cluster.pacing.acceptance import ReplicaStats, SessionStats
from cluster.pacing.acceptance_counts import AcceptanceCounts
from cluster.pacing.draft_delay import DraftDelay
from cluster.pacing.gate import SpeculationGate
from cluster.pacing.load import Load
from cluster.pacing.policy import DraftingDecision, Pacing
from cluster.pacing.step_cost import StepCost, octave

LEAST_STEP_S = 1e-6  # that a step is taken to last: clocks are no finer


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a step computed, as far as its time depends on it."""

    rows: int = 0
    tokens: int = 0  # of all rows
    decoding: int = 0  # sessions that it could have decided for: those in it, and those that waited
    decides_all: bool = False  # whether it decides for all of its rows: none feeds a prompt
    is_drafted_for: bool = False  # whether drafters were asked for blocks for it
    is_open_to_drafts: bool = False  # whether the request of any of its sessions allows drafts


class Pacer:
    """Learns from steps, blocks and answers; decides what each session's drafter is asked for."""

    def __init__(self, policy: Pacing, profile: ForwardCost | None) -> None:
        self.load = Load(StepCost.profiled(profile))
        self.acceptance = AcceptanceCounts()  # of all blocks since the beginning
        self._policy = policy
        self._gate = SpeculationGate()
        self._replica_stats = ReplicaStats()
        self._delays: dict[int, DraftDelay] = {}  # of blocks, by octaves of sessions other than now
        self._busy_until = 0.0  # end of the latest step

    def step_made(self, step: StepShape, committed: int, seconds: float, now: float) -> None:
        """A step took so long and committed so many tokens; one that fed prompts says nothing of the rate."""
        if not step.rows:
            return
        if step.decides_all:
            took_s = now - max(self._busy_until, now - 2 * seconds)  # with the wait before it, if it was one
            self._learn(step, committed, seconds, max(LEAST_STEP_S, took_s))
        self._busy_until = now

    def block_verified(self, asked: int, room: int, drafted: int, accepted: int) -> None:
        """Of a block of up to `asked` tokens; the session's length limit left `room` for it."""
        self._replica_stats = self._replica_stats.after_block(asked, drafted, accepted)
        self.acceptance = self.acceptance.after(min(asked, room), accepted)

    def block_arrived(self, tokens: int, delay_s: float) -> None:
        """A block of so many tokens came, so long after the verdict that asked for it."""
        self._replica_stats = self._replica_stats.after_arrival(tokens, delay_s)

    def decide(self, stats: SessionStats, limit: int, sessions: int) -> tuple[DraftingDecision, SessionStats]:
        """How long a block to ask for next, up to `limit`, for one of so many sessions; and what the session keeps."""
        self._see(sessions)
        decision, stats = self._policy.decide(stats, self._replica_stats, limit, self.load)
        self._replica_stats = self._replica_stats.after_round(decision.tokens > 0 and stats.trials.is_on)
        return decision, stats

    def _learn(self, step: StepShape, committed: int, seconds: float, took_s: float) -> None:
        load = self.load
        if step.is_drafted_for:
            if plain_s := load.step.plain_s(step.decoding):
                self._gate.step(load.sessions, committed, took_s / plain_s * step.decoding)
            self.load = replace(load, step=load.step.after_drafts(step.rows, step.tokens, seconds))
        else:
            if step.is_open_to_drafts:
                self._gate.plain_step(load.sessions)
            self.load = replace(load, step=load.step.after_plain(step.rows, took_s))

    def _see(self, sessions: int) -> None:
        """So many sessions are decoding, and the gate may have changed its mind about them."""
        load = self.load
        gain = self._gate.gain(sessions)
        speculates = self._gate.is_on(sessions)
        if (sessions, gain, speculates) == (load.sessions, load.gain, load.speculates):
            return
        self._change_delay(octave(load.sessions), octave(sessions))
        self.load = replace(load, sessions=sessions, gain=gain, speculates=speculates)

    def _change_delay(self, before: int, now: int) -> None:
        """How long blocks take is known for each octave of sessions: drafters draft for all of them together."""
        if before != now:
            self._delays[before] = self._replica_stats.delay
            self._replica_stats = self._replica_stats.with_delay(self._delays.get(now, DraftDelay()))
