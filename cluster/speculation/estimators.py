"""Estimators for speculation control: acceptance by node, the value of a session's drafts, step cost, weighted means.

The nodes of a block are sorted by probability, so the acceptance rate of node k is the value of a k-th draft token. In
a chain, k is the position. A replica estimates these rates over all sessions. A session's own estimate is one number:
the log odds of acceptance relative to the replica's rates (`DraftValue`).

A startup profile gives the shape of step cost over rows and tokens; live steps give its scale. Live steps have similar
sizes, so a curve fitted to them alone would not predict other sizes, such as non-speculative steps. Where speculation
pays, non-speculative steps are rare and the machine's pace drifts between them. Their cost is therefore estimated
relative to the pace of the surrounding speculative steps.

`memory` is the weight of the latest measurement, so the effective window is about 1 / memory measurements. Pure
arithmetic; callers pass times in.
"""

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, zip_longest

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

    def at(self, x: float) -> float:
        """Returns the line's value at x; 0 without measurements."""
        slope = self.slope
        return max(0.0, self.y - slope * self.x) / self.weight + slope * x if self.weight else 0.0


MAX_POSITIONS = 16  # maximum number of nodes with an estimate; also the longest draft that `Adaptive` requests
REPLICA_MEMORY = 0.04  # weight of the latest block of any session
FIRST_CHANCE = 0.5  # acceptance rate of each node, given the previous one, before the first block
PRIOR_BLOCKS = 3.0  # weight of FIRST_CHANCE, in blocks
RETRY_MEMORY = 0.1  # weight of extrapolation for nodes beyond the requested ones, relative to a measurement


class NodeRates:
    """Acceptance rates of drafted nodes, by node, over all sessions of a replica.

    Nodes that are requested but not drafted do not count: a drafter ends a block early where it is not confident, and
    a lookahead block is as long as the time for drafting allowed. The next node beyond the drafted ones is extrapolated
    geometrically, so that lengths grow again.
    """

    def __init__(self) -> None:
        self.accepted = [FIRST_CHANCE ** (node + 1) for node in range(MAX_POSITIONS)]
        self._blocks = [PRIOR_BLOCKS] * MAX_POSITIONS

    def block_verified(self, drafted: int, accepted: Container[int]) -> None:
        """Records a verified block of `drafted` nodes; `accepted` contains the indices of accepted nodes."""
        drafted = min(drafted, MAX_POSITIONS)
        rates = self.accepted
        for node in range(drafted):
            self._blocks[node] += 1
            rates[node] += max(REPLICA_MEMORY, 1 / self._blocks[node]) * ((node in accepted) - rates[node])
        if 1 <= drafted < MAX_POSITIONS:
            before = rates[drafted - 2] if drafted > 1 else 1.0
            guess = rates[drafted - 1] ** 2 / before if before else 0.0
            weight = RETRY_MEMORY * REPLICA_MEMORY if self._blocks[drafted] > PRIOR_BLOCKS else 1.0
            rates[drafted] += weight * (guess - rates[drafted])


VALUE_RATE = 0.1  # change of a session's log odds per accepted token above or below the expectation
VALUE_MEMORY = 0.01  # share of the log odds that fades per round, so that a session tries drafts again
MAX_LOG_ODDS = 4.0
LEVELS = 2  # levels per unit of log odds
DELAY_MEMORY = 0.25  # weight of the latest block's delay
SILENT_AFTER = 3  # missed rounds or steps after which a drafter counts as silent; single late blocks prove nothing


@dataclass(slots=True)
class DraftValue:
    """Estimate of what one drafter's blocks are worth in one session.

    A rejected block, and a block that a step awaited for longer than its usual delay, count as zero accepted tokens.
    """

    log_odds: float = 0.0  # acceptance relative to the replica's rates
    delay_s: float = 0.0  # decayed mean delay from a verdict to its block; 0: unknown
    has_drafted: bool = False  # False before the drafter's first answer; misses before it prove nothing
    missed: int = 0  # number of rounds since the latest block
    accepted: int = 0  # accepted tokens of the latest round
    has_hit: bool = False  # True if the next block had already arrived at the latest verdict
    is_attached: bool = False  # True if a drafter has attached
    awaits_first_answer: bool = False  # True if a probe is due after the drafter's first answer
    probe_tokens: int = 0  # draft length of the latest request if it was a probe
    was_requested: bool = False  # True if the latest verdict came with a request

    @property
    def level(self) -> int:
        """Log odds as an integer multiple of 1 / LEVELS, rounded."""
        return round(LEVELS * self.log_odds)

    def update(self, accepted: int, expected: float) -> None:
        """Records a requested block with `accepted` of the `expected` tokens."""
        log_odds = self.log_odds + VALUE_RATE * (accepted - expected)
        self.log_odds = max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, log_odds))

    def round_ended(self, accepted: int, is_missed: bool, has_hit: bool) -> None:
        """Records a verdict: whether its block was missed, and whether the next block has already arrived."""
        self.accepted = accepted
        self.log_odds *= 1 - VALUE_MEMORY
        self.missed = 0 if has_hit else self.missed + is_missed
        self.has_hit = has_hit

    def block_arrived(self, delay_s: float | None) -> None:
        """Records a block or NoDraft; `delay_s` is None if the delay is not typical."""
        self.missed = 0
        self.has_drafted = True
        if delay_s is not None:
            self.delay_s = blend(self.delay_s, delay_s, DELAY_MEMORY) if self.delay_s else delay_s

    @property
    def is_silent(self) -> bool:
        """True after several consecutive rounds without a block."""
        return self.missed >= SILENT_AFTER


def chances_at(level: int, rates: Sequence[float]) -> list[float]:
    """Returns acceptance rates whose odds differ from `rates` by a session's level."""
    odds = math.exp(level / LEVELS)
    return [odds * rate / (1 + (odds - 1) * rate) for rate in rates]


MIN_REACHED = 32  # minimum blocks before a position's rate is published: standard error below 0.09


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


class StepCost:
    """Step duration in seconds by rows and tokens; 0 while unknown."""

    def __init__(self, profile: ForwardCost | None = None) -> None:
        self._shape = profile or UNPROFILED_COST
        self._pace = Mean(0, float(profile is not None))  # speculative steps relative to `_shape`, without waits
        self._non_speculative = Mean()  # non-speculative steps relative to `_pace`, measured from step end to step end
        self._prompts = Mean()  # the same for non-speculative steps with prompts
        self._run = COMPARED_STEPS  # number of non-speculative steps since the latest speculative step

    def non_speculative(self, rows: int, seconds: float) -> None:
        """Records a non-speculative step without prompts."""
        ratio = seconds / self._shape.seconds(rows, rows)
        self._run += 1
        if self._run > COMPARED_STEPS:
            self._pace = pace_after(self._pace, ratio / self._scale)
        else:
            self._non_speculative = pace_after(self._non_speculative, ratio / self._pace.value, NON_SPECULATIVE_MEMORY)

    def with_prompts(self, rows: int, tokens: int, seconds: float) -> None:
        """Records a non-speculative step that also feeds prompts."""
        if self._pace.value:  # else there is nothing to compare with
            self._prompts = pace_after(self._prompts, seconds / self.drafts_s(rows, tokens))

    def with_drafts(self, rows: int, tokens: int, seconds: float) -> None:
        """Records a step during which drafters were running."""
        self._pace = pace_after(self._pace, seconds / self._shape.seconds(rows, tokens))
        self._run = 0

    def non_speculative_s(self, rows: int) -> float:
        """Returns the duration of a step of one token per row while no drafter runs, in seconds."""
        return self.non_speculative_pace * self._shape.seconds(rows, rows)

    def prompts_s(self, rows: int, tokens: int) -> float:
        """Returns the duration of a step with prompts while no drafter runs, in seconds; 0 while unknown."""
        return self._prompts.value * self.drafts_s(rows, tokens)

    def drafts_s(self, rows: int, tokens: float) -> float:
        """Returns the duration of a speculative step in seconds; `tokens` includes draft tokens."""
        return self._pace.value * self._shape.seconds(rows, tokens)

    @property
    def non_speculative_pace(self) -> float:
        """Duration of non-speculative steps relative to the profile."""
        return self._scale * self._pace.value

    @property
    def non_speculative_cost(self) -> ForwardCost | None:
        """Current cost of a step with one token per row and no running drafter, with the time to the next step.

        None until such a step has been compared with speculative steps.
        """
        return self._shape.times(self.non_speculative_pace) if self._non_speculative.count else None

    @property
    def cost(self) -> ForwardCost:
        """Current cost of speculative steps."""
        return self._shape.times(self._pace.value) if self._pace.count else self._shape

    @property
    def _scale(self) -> float:
        return self._non_speculative.value if self._non_speculative.count else 1.0


@dataclass(frozen=True)
class Load:
    """Snapshot of a replica's load, costs and acceptance."""

    step: StepCost = field(default_factory=StepCost)
    sessions: int = 1  # number of decoding sessions
    gain: float = 1.0  # recent throughput relative to non-speculative decoding
    speculates: bool = True  # False while speculation is switched off
    accepted: tuple[float, ...] = tuple(NodeRates().accepted)  # acceptance rates by node
    hits: float = 0.5  # share of verdicts whose next block had already arrived
    delay: Pairs = Pairs()  # block delay in seconds over the number of tokens, without lookahead blocks

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
