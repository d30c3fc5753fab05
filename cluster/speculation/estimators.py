"""Estimators for speculation control: acceptance by node, step cost, and weighted means.

The nodes of a block are sorted by probability, so the acceptance rate of node k is the value of a k-th draft token. In
a chain, k is the position. There are three sets of statistics: per session, over tens of blocks; per replica, for
sessions with few blocks; and the replica's totals since startup, for capacity planning.

A startup profile gives the shape of step cost over rows and tokens; live steps give its scale. Live steps have similar
sizes, so a curve fitted to them alone would not predict other sizes, such as non-speculative steps. Where speculation
pays, non-speculative steps are rare and the machine's pace drifts between them. Their cost is therefore estimated
relative to the pace of the surrounding speculative steps.

Estimators are immutable; each measurement creates a new value. `memory` is the weight of the latest measurement, so the
effective window is about 1 / memory measurements. Pure arithmetic; callers pass times in.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, zip_longest

from cluster.costs import ForwardCost
from protos.frozen import value

MIN_SPREAD = 1e-6  # relative spread of x below which all x are equal up to rounding


def blend(old: float, new: float, memory: float) -> float:
    return (1 - memory) * old + memory * new


@value
class Mean:
    """An exponentially weighted mean that starts as a plain average of the first 1 / memory measurements."""

    count: int = 0
    value: float = 0.0

    def after(self, measured: float, memory: float) -> "Mean":
        return Mean(self.count + 1, blend(self.value, measured, max(memory, 1 / (self.count + 1))))


@value
class Pairs:
    """Statistics of paired measurements (x, y): decayed sums, their ratio, and a least-squares line."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    x_squares: float = 0.0
    y_squares: float = 0.0
    products: float = 0.0

    def after(self, x: float, y: float, memory: float) -> "Pairs":
        decay = 1 - memory
        return Pairs(
            decay * self.weight + 1,
            decay * self.x + x,
            decay * self.y + y,
            decay * self.x_squares + x * x,
            decay * self.y_squares + y * y,
            decay * self.products + x * y,
        )

    @property
    def ratio(self) -> float:
        """Ratio of the sums, y over x; 1 without measurements."""
        return self.y / self.x if self.x else 1.0

    @property
    def ratio_error(self) -> float:
        """Standard error of the ratio for independent pairs."""
        ratio = self.ratio
        squares = self.y_squares - 2 * ratio * self.products + ratio * ratio * self.x_squares
        return math.sqrt(max(0.0, squares)) / self.x if self.x else 0.0

    @property
    def slope(self) -> float:
        """Slope of the least-squares line, clamped so that slope and intercept are non-negative.

        Durations neither decrease with x nor start below 0. The slope is 0 while all x are equal.
        """
        spread = self.weight * self.x_squares - self.x**2
        if spread <= MIN_SPREAD * self.x_squares:
            return 0.0
        slope = (self.weight * self.products - self.x * self.y) / spread
        return min(max(0.0, slope), self.y / self.x)

    @property
    def base(self) -> float:
        """Intercept of the line."""
        return max(0.0, self.y - self.slope * self.x) / self.weight if self.weight else 0.0


MAX_POSITIONS = 16  # maximum number of nodes counted per block, and maximum requested length
ACCEPTANCE_MEMORY = 0.06  # weight of the latest block; predictability varies by paragraph
REPLICA_STRENGTH = 3.0  # weight of PRIOR, in blocks; a replica's first blocks soon outweigh it
SESSION_STRENGTH = 8.0  # weight of other sessions, in blocks; four bad blocks prove nothing at a usual rate of 0.5
PRIOR = tuple(0.5**position for position in range(1, MAX_POSITIONS + 1))  # optimistic prior, so that blocks are tried
MIN_REACHED = 32  # minimum blocks before a position's rate is published: standard error below 0.09


@value
class Chances:
    """Decayed counts of requested, drafted and accepted nodes, by node index.

    The counts are as long as the longest requested block. A drafter may end a block early.
    """

    requested: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()  # same length as `requested`
    accepted: tuple[float, ...] = ()

    def after(self, requested: int, drafted: int, accepted: Container[int]) -> "Chances":
        """Returns the counts after a verified block; `accepted` contains the indices of accepted nodes.

        Counts of nodes that are not requested decay, so that these nodes are tried again.
        """
        new = (0.0,) * (min(requested, MAX_POSITIONS) - len(self.requested))
        decay = 1 - ACCEPTANCE_MEMORY
        return Chances(
            tuple([decay * count + (node < requested) for node, count in enumerate(self.requested + new)]),
            tuple([decay * count + (node < drafted) for node, count in enumerate(self.drafted + new)]),
            tuple([decay * count + (node in accepted) for node, count in enumerate(self.accepted + new)]),
        )

    def expectations_of(self, others: "Chances", positions: int) -> list[tuple[float, float, float]]:
        """Returns one triple of expectations for each of the first `positions` nodes of the next block.

        A triple contains the cumulative acceptance probability, its standard error (an exploration bonus), and the
        probability that the node is drafted. `others` contains the counts of all sessions; they dominate while this
        session has few blocks.
        """
        counts = others.requested, others.drafted, others.accepted, self.requested, self.drafted, self.accepted
        seen = islice(zip_longest(PRIOR, *counts, fillvalue=0.0), min(positions, MAX_POSITIONS))
        expectations = []
        for prior, o_requested, o_drafted, o_accepted, requested, drafted, accepted in seen:
            usual = REPLICA_STRENGTH + o_requested
            blocks = SESSION_STRENGTH + requested
            p_accepted = (SESSION_STRENGTH * ((REPLICA_STRENGTH * prior + o_accepted) / usual) + accepted) / blocks
            p_drafted = (SESSION_STRENGTH * ((REPLICA_STRENGTH + o_drafted) / usual) + drafted) / blocks
            expectations.append((p_accepted, math.sqrt(p_accepted * (1 - p_accepted) / blocks), p_drafted))
        return expectations


@value
class ReplicaStats:
    """Statistics over all sessions of a replica."""

    chances: Chances = Chances()
    delay: Pairs = Pairs()  # block delay in seconds over the number of tokens, without lookahead blocks


@dataclass(slots=True)
class SessionStats:
    """Statistics of a session's blocks and their delays, and its speculation state."""

    chances: Chances = Chances()
    delay_s: float = 0.0  # decayed mean delay from a verdict to its block, in seconds, without hits
    hits: float = 0.5  # decayed share of verdicts whose next block had already arrived
    missed_rounds: int = 0  # number of rounds since the latest block
    rounds_without_wait: int = 0  # consecutive rounds whose block was not worth a wait
    is_disabled: bool = False  # True: no blocks are requested because they did not pay
    is_on_trial: bool = False  # True: a trial is in progress and may continue

    def block_verified(self, requested: int, drafted: int, accepted: Sequence[int]) -> None:
        """Records the accepted nodes of a block with `drafted` of the `requested` nodes."""
        self.chances = self.chances.after(requested, drafted, accepted)
        if accepted:
            self.is_on_trial = self.is_disabled

    def no_draft_received(self, requested: int) -> None:
        """Records a NoDraft, which counts as a requested block without nodes."""
        self.chances = self.chances.after(requested, 0, ())

    def block_arrived(self, delay_s: float) -> None:
        """Records a block or NoDraft; both show that the drafter is alive."""
        self.delay_s = blend(self.delay_s, delay_s, ACCEPTANCE_MEMORY)
        self.missed_rounds = 0

    def verdict_sent(self, hit: bool) -> None:
        """Records a verdict with a draft request; `hit` is True if the block had already arrived."""
        self.hits = blend(self.hits, hit, ACCEPTANCE_MEMORY)
        if hit:
            self.missed_rounds = 0

    def non_speculative_round(self) -> None:
        """Records a round without a block."""
        self.missed_rounds += 1

    def request_sent(self, is_sent: bool, is_awaited: bool, is_trial: bool) -> None:
        """Records a decision: whether a block is requested, whether it is worth a wait, and whether it is a trial.

        A trial has two blocks, because the drafter may not be ready for the first. It continues while blocks have
        accepted tokens.
        """
        if is_sent:
            self.rounds_without_wait = 0 if is_awaited else self.rounds_without_wait + 1
        if not is_trial:
            self.is_disabled = not is_sent
            self.is_on_trial = False
        elif self.is_disabled:
            self.is_on_trial = not self.is_on_trial


@value
class AcceptanceCounts:
    """Block counts by draft position since startup, up to the longest requested draft (at most MAX_POSITIONS)."""

    reached: tuple[int, ...] = ()  # number of blocks requested up to this position with all earlier positions accepted
    accepted: tuple[int, ...] = ()  # number of `reached` blocks with this position accepted

    @classmethod
    def of(cls, blocks: Mapping[tuple[int, int], int]) -> "AcceptanceCounts":
        """Returns the counts of verified blocks, given their number by (requested, accepted) tokens.

        A block that ended early counts as rejected at its end.
        """
        positions = range(min(max([requested for requested, _ in blocks], default=0), MAX_POSITIONS))
        reached = [
            sum([count for (requested, accepted), count in blocks.items() if at < requested and at <= accepted])
            for at in positions
        ]
        stood = [
            sum([count for (requested, accepted), count in blocks.items() if at < min(requested, accepted)])
            for at in positions
        ]
        return cls(tuple(reached), tuple(stood))

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        """Returns the sum of two counts."""
        return AcceptanceCounts(_sums(self.reached, other.reached), _sums(self.accepted, other.accepted))

    def by_position(self) -> tuple[float, ...]:
        """Returns the conditional acceptance rate of each position; stops at the first position with too few blocks."""
        rates: list[float] = []
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            if reached < MIN_REACHED:
                break
            rates.append(accepted / reached)
        return tuple(rates)


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([a + b for a, b in zip_longest(one, other, fillvalue=0)])


COST_MEMORY = 0.05  # weight of the latest step; about 20 steps count, or one second
# Weight of the latest non-speculative step: one look outweighs all earlier looks. The cost of drafters on the same
# machine changes within seconds; with more weight on older looks, a loss of 5 % appeared as a gain of 5 %.
NON_SPECULATIVE_MEMORY = 0.15
COMPARED_STEPS = 8  # consecutive non-speculative steps to compare with the speculative pace; later steps set the pace
UNPROFILED_COST = ForwardCost(by_tokens=((1, 1.0),))  # without a profile, additional tokens are assumed to be free


def pace_after(pace: Mean, ratio: float, memory: float = COST_MEMORY) -> Mean:
    """Returns the pace, relative to the profile, after another step or pass.

    Measurements are capped at twice the current pace, so a stalled step has little effect.
    """
    return pace.after(min(ratio, 2 * pace.value or ratio), memory)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Step duration in seconds by rows and tokens; 0 while unknown."""

    shape: ForwardCost
    pace: Mean  # speculative steps relative to `shape`, without the wait before them
    plain: Mean = Mean()  # non-speculative steps relative to `pace`, measured from step end to step end
    prompts: Mean = Mean()  # the same for non-speculative steps with prompts
    non_speculative_run: int = COMPARED_STEPS  # number of non-speculative steps since the latest speculative step

    @classmethod
    def profiled(cls, profile: ForwardCost | None) -> "StepCost":
        return cls(profile or UNPROFILED_COST, Mean(0, float(profile is not None)))

    def after_non_speculative(self, rows: int, seconds: float) -> "StepCost":
        """Records a non-speculative step without prompts."""
        ratio = seconds / self.shape.seconds(rows, rows)
        run = self.non_speculative_run + 1
        if run > COMPARED_STEPS:
            return replace(
                self, pace=pace_after(self.pace, ratio / self._non_speculative_scale), non_speculative_run=run
            )
        plain = pace_after(self.plain, ratio / self.pace.value, NON_SPECULATIVE_MEMORY)
        return replace(self, plain=plain, non_speculative_run=run)

    def after_prompts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """Records a non-speculative step that also feeds prompts."""
        if not self.pace.value:
            return self  # no pace for comparison yet
        ratio = seconds / self.shape.seconds(rows, tokens) / self.pace.value
        return replace(self, prompts=pace_after(self.prompts, ratio))

    def after_drafts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """Records a step during which drafters were running."""
        return replace(
            self, pace=pace_after(self.pace, seconds / self.shape.seconds(rows, tokens)), non_speculative_run=0
        )

    def non_speculative_s(self, rows: int) -> float:
        """Returns the duration of a step of one token per row while no drafter runs, in seconds."""
        return self._non_speculative_scale * self.pace.value * self.shape.seconds(rows, rows)

    def prompts_s(self, rows: int, tokens: int) -> float:
        """Returns the duration of a step with prompts while no drafter runs, in seconds; 0 while unknown."""
        return self.prompts.value * self.pace.value * self.shape.seconds(rows, tokens)

    def drafts_s(self, rows: int, tokens: float) -> float:
        """Returns the duration of a speculative step in seconds; `tokens` includes draft tokens."""
        return self.pace.value * self.shape.seconds(rows, tokens)

    @property
    def non_speculative_pace(self) -> float:
        """Duration of non-speculative steps relative to the profile."""
        return self._non_speculative_scale * self.pace.value

    @property
    def cost(self) -> ForwardCost:
        """Current cost of speculative steps."""
        return self.shape.times(self.pace.value) if self.pace.count else self.shape

    @property
    def non_speculative_cost(self) -> ForwardCost | None:
        """Current cost of a step with one token per row and no running drafter, with the time to the next step.

        None until such a step has been compared with speculative steps.
        """
        return self.shape.times(self._non_speculative_scale * self.pace.value) if self.plain.count else None

    @property
    def _non_speculative_scale(self) -> float:
        return self.plain.value if self.plain.count else 1.0


@dataclass(frozen=True)
class Load:
    """The replica's current load and the value of a second."""

    step: StepCost = field(default_factory=lambda: StepCost.profiled(None))
    sessions: int = 1  # number of decoding sessions
    gain: float = 1.0  # recent throughput relative to non-speculative decoding
    speculates: bool = True  # False while speculation is switched off

    @cached_property
    def non_speculative_rate(self) -> float:
        """Throughput without speculation, in tokens per second; 0 while unknown."""
        step_s = self.step.non_speculative_s(self.sessions)
        return self.sessions / step_s if step_s else 0.0

    @cached_property
    def rate(self) -> float:
        """Throughput of the faster mode, in tokens per second, which is the value of a second."""
        return max(1.0, self.gain) * self.non_speculative_rate

    @cached_property
    def token_s(self) -> tuple[float, ...]:
        """Seconds added to a step by each session's k-th draft token, by k."""
        rows = self.sessions
        steps = [self.step.drafts_s(rows, rows * (1 + length)) for length in range(MAX_POSITIONS + 1)]
        return tuple([max(0.0, later - earlier) / rows for earlier, later in pairwise(steps)])
