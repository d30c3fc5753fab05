"""Estimators for speculation control: acceptance of blocks by node, cost of steps, and weighted means.

A block's nodes come in falling order of probability, so node k of any tree is its k-th likeliest, and its acceptance
rate is the value of a k-th token. In a chain, k is the position. The statistics are kept three times: per session, over
some tens of blocks; per replica, for sessions with few blocks; and as the replica's counts since startup, for planning
a fleet.

A profile at startup gives the shape of step cost over rows and tokens; live steps give its scale. Live steps are much
alike, so a curve fitted to them alone would not predict other sizes, in particular the non-speculative steps that
speculation is compared with. Those are rare where speculation pays, and a machine's pace drifts between them, so their
estimate is kept relative to the pace of the speculative steps around them.

All estimators are immutable; each measurement makes a new value. `memory` is the weight of the latest measurement, so
about 1 / memory of them count. Pure arithmetic; callers pass times in.
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise, zip_longest

from cluster.costs import ForwardCost
from protos.frozen import value

MIN_SPREAD = 1e-6  # spread of x relative to its squares; below it, all x were the same up to rounding


def blend(old: float, new: float, memory: float) -> float:
    return (1 - memory) * old + memory * new


@value
class Mean:
    """A mean with equal weights until a measurement weighs only `memory`, and exponentially weighted after that."""

    count: int = 0
    value: float = 0.0

    def after(self, measured: float, memory: float) -> "Mean":
        return Mean(self.count + 1, blend(self.value, measured, max(memory, 1 / (self.count + 1))))


@value
class Pairs:
    """Statistics of paired measurements x and y: decayed sums, their ratio, and a least-squares line."""

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
        """Ratio of the sums, y over x; 1 before any measurement."""
        return self.y / self.x if self.x else 1.0

    @property
    def ratio_error(self) -> float:
        """Standard error of the ratio, if the pairs are independent."""
        ratio = self.ratio
        squares = self.y_squares - 2 * ratio * self.products + ratio * ratio * self.x_squares
        return math.sqrt(max(0.0, squares)) / self.x if self.x else 0.0

    @property
    def slope(self) -> float:
        """Slope of the least-squares line, clamped so that neither it nor the value at x = 0 is negative.

        Durations neither fall with x nor start below 0. The slope is 0 while all x are the same.
        """
        spread = self.weight * self.x_squares - self.x**2
        if spread <= MIN_SPREAD * self.x_squares:
            return 0.0
        slope = (self.weight * self.products - self.x * self.y) / spread
        return min(max(0.0, slope), self.y / self.x)

    @property
    def base(self) -> float:
        """Value of the line at x = 0."""
        return max(0.0, self.y - self.slope * self.x) / self.weight if self.weight else 0.0


MAX_POSITIONS = 16  # most nodes of a block that are counted separately; requests are no longer
ACCEPTANCE_MEMORY = 0.06  # weight of the latest block: a text is as predictable as its last paragraph
REPLICA_STRENGTH = 3.0  # weight of PRIOR in blocks: a replica's first blocks soon outweigh it
SESSION_STRENGTH = 8.0  # weight of other sessions in blocks: with half of all blocks good, four bad ones prove nothing
PRIOR = tuple(
    0.5**position for position in range(1, MAX_POSITIONS + 1)
)  # optimistic acceptance, so that blocks are tried
MIN_REACHED = 32  # blocks that must reach a position before its rate is published: an error below 0.09


@value
class Chances:
    """Decayed counts of how often each node of a block was requested, drafted and accepted.

    The counts extend to the longest block requested, a few nodes for most sessions. A block may end early when the
    drafter is in doubt.
    """

    requested: tuple[float, ...] = ()
    drafted: tuple[float, ...] = ()  # for the same nodes as `requested`, like `accepted`
    accepted: tuple[float, ...] = ()

    def after(self, requested: int, drafted: int, accepted: Container[int]) -> "Chances":
        """Returns the counts after a verified block with these nodes accepted.

        Counts of nodes that are not requested for long decay, so these nodes are tried again.
        """
        new = (0.0,) * (min(requested, MAX_POSITIONS) - len(self.requested))
        return Chances(
            _decayed(self.requested + new, range(requested)),
            _decayed(self.drafted + new, range(drafted)),
            _decayed(self.accepted + new, accepted),
        )

    def outlook(self, others: "Chances", positions: int) -> list[tuple[float, float, float]]:
        """Returns expectations for the first nodes of the next block, one triple for each node.

        The triple holds the cumulative acceptance probability, its standard error (an exploration bonus, since a few
        rejections in a row prove nothing), and the probability that the node is drafted at all. `others` holds the
        counts over all sessions, which stand in while this session has few blocks.
        """
        counts = others.requested, others.drafted, others.accepted, self.requested, self.drafted, self.accepted
        seen = islice(zip_longest(PRIOR, *counts, fillvalue=0.0), min(positions, MAX_POSITIONS))
        outlook = []
        for prior, o_requested, o_drafted, o_accepted, requested, drafted, accepted in seen:
            usual = REPLICA_STRENGTH + o_requested
            blocks = SESSION_STRENGTH + requested
            p_accepted = (SESSION_STRENGTH * ((REPLICA_STRENGTH * prior + o_accepted) / usual) + accepted) / blocks
            p_drafted = (SESSION_STRENGTH * ((REPLICA_STRENGTH + o_drafted) / usual) + drafted) / blocks
            outlook.append((p_accepted, math.sqrt(p_accepted * (1 - p_accepted) / blocks), p_drafted))
        return outlook


def _decayed(counts: tuple[float, ...], nodes: Container[int]) -> tuple[float, ...]:
    """Returns decayed counts, with 1 added for each of `nodes`."""
    return tuple([(1 - ACCEPTANCE_MEMORY) * count + (node in nodes) for node, count in enumerate(counts)])


@value
class ReplicaStats:
    """Statistics over all sessions of a replica."""

    chances: Chances = Chances()
    delay: Pairs = Pairs()  # seconds from a verdict to its block over the block's tokens, blocks sent ahead excluded


@dataclass(slots=True)
class SessionStats:
    """Results of a session's blocks, their delays, and whether the session goes without drafts."""

    chances: Chances = Chances()
    delay_s: float = 0.0  # seconds from a verdict to the next block, without hits; decayed
    hits: float = 0.5  # share of verdicts whose next block had already arrived; decayed
    missed_rounds: int = 0  # rounds without a block since the latest one
    unawaited: int = 0  # rounds in a row whose block was not worth a wait
    is_left_off: bool = False  # True: no blocks are requested, because they did not pay
    is_on_trial: bool = False  # True: blocks are tried nevertheless, and may be tried once more

    def block_verified(self, requested: int, drafted: int, accepted: Sequence[int]) -> None:
        """Records the accepted nodes of a block with `drafted` of the `requested` nodes."""
        self.chances = self.chances.after(requested, drafted, accepted)
        if accepted:
            self.is_on_trial = self.is_left_off

    def nothing_drafted(self, requested: int) -> None:
        """Records that the drafter had no block: counts as a requested block without any node."""
        self.chances = self.chances.after(requested, 0, ())

    def block_arrived(self, delay_s: float) -> None:
        """Records a block, or the drafter's answer that it has none; either shows that the drafter is alive."""
        self.delay_s = blend(self.delay_s, delay_s, ACCEPTANCE_MEMORY)
        self.missed_rounds = 0

    def verdict_sent(self, hit: bool) -> None:
        """Records a verdict that requested a block; `hit`: the block had already arrived."""
        self.hits = blend(self.hits, hit, ACCEPTANCE_MEMORY)
        if hit:
            self.missed_rounds = 0

    def non_speculative_round(self) -> None:
        """Records that the target continued without a block."""
        self.missed_rounds += 1

    def request_sent(self, is_sent: bool, is_awaited: bool, is_trial: bool) -> None:
        """Records whether a block is requested now, whether it is worth a wait, and whether the request is a trial.

        A trial has two blocks, because the drafter may not be ready for the first. It continues while blocks are
        accepted.
        """
        if is_sent:
            self.unawaited = 0 if is_awaited else self.unawaited + 1
        if not is_trial:
            self.is_left_off = not is_sent
            self.is_on_trial = False
        elif self.is_left_off:
            self.is_on_trial = not self.is_on_trial


@value
class AcceptanceCounts:
    """Block counts per draft position since startup, up to the longest draft requested so far (at most MAX_POSITIONS
    positions).
    """

    reached: tuple[int, ...] = ()  # blocks requested to this position or further, with all positions before it accepted
    accepted: tuple[int, ...] = ()  # blocks among `reached` with this position accepted too

    def after(self, requested: int, accepted: int) -> "AcceptanceCounts":
        """Returns the counts after a verified block.

        A block that the drafter ended early counts as rejected where it ended.
        """
        positions = range(min(requested, MAX_POSITIONS))
        reached = tuple([int(position <= accepted) for position in positions])
        stood = tuple([int(position < accepted) for position in positions])
        return self + AcceptanceCounts(reached, stood)

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        """Returns the sums of two replicas' counts, or of earlier and later blocks."""
        return AcceptanceCounts(_sums(self.reached, other.reached), _sums(self.accepted, other.accepted))

    def by_position(self) -> tuple[float, ...]:
        """Returns each position's acceptance probability given earlier ones, up to the first with too few blocks."""
        rates: list[float] = []
        for reached, accepted in zip(self.reached, self.accepted, strict=True):
            if reached < MIN_REACHED:
                break
            rates.append(accepted / reached)
        return tuple(rates)


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([a + b for a, b in zip_longest(one, other, fillvalue=0)])


COST_MEMORY = 0.05  # weight of the latest step: about twenty steps count, or one second
# Weight of the latest non-speculative step: the steps of one look outweigh all earlier ones. The cost of drafters on
# the target's own machine changes within seconds; with older looks, a loss of 5 % was taken for a gain of 5 %.
NON_SPECULATIVE_MEMORY = 0.15
COMPARED_STEPS = 8  # non-speculative steps in a row compared with the speculative ones before; later ones set the pace
UNPROFILED_COST = ForwardCost(by_tokens=((1, 1.0),))  # without a profile, further tokens are assumed to cost nothing


def pace_after(pace: Mean, ratio: float, memory: float = COST_MEMORY) -> Mean:
    """Returns the pace, as a multiple of the profile's shape, after one more step or pass.

    A measurement counts for at most twice the current pace, so a hanging step has little effect.
    """
    return pace.after(min(ratio, 2 * pace.value or ratio), memory)


@dataclass(frozen=True, slots=True)
class StepCost:
    """Duration of a step, in seconds, by its rows and tokens; 0 while unknown."""

    shape: ForwardCost
    pace: Mean  # speculative steps as a multiple of the shape, without the wait before them
    plain: Mean = Mean()  # non-speculative steps as a multiple of `pace`, from one step's end to the next
    prompts: Mean = Mean()  # the same for non-speculative steps with prompts, since a profile has short rows
    non_speculative_run: int = COMPARED_STEPS  # non-speculative steps since the last speculative one

    @classmethod
    def profiled(cls, profile: ForwardCost | None) -> "StepCost":
        return cls(profile or UNPROFILED_COST, Mean(0, float(profile is not None)))

    def after_non_speculative(self, rows: int, seconds: float) -> "StepCost":
        """Records a step without drafts for which none were requested."""
        ratio = seconds / self.shape.seconds(rows, rows)
        run = self.non_speculative_run + 1
        if run > COMPARED_STEPS:
            return replace(
                self, pace=pace_after(self.pace, ratio / self._non_speculative_scale), non_speculative_run=run
            )
        plain = pace_after(self.plain, ratio / self.pace.value, NON_SPECULATIVE_MEMORY)
        return replace(self, plain=plain, non_speculative_run=run)

    def after_prompts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """Records a step without drafts in which some rows feed prompts."""
        if not self.pace.value:
            return self  # no pace yet to compare with
        ratio = seconds / self.shape.seconds(rows, tokens) / self.pace.value
        return replace(self, prompts=pace_after(self.prompts, ratio))

    def after_drafts(self, rows: int, tokens: int, seconds: float) -> "StepCost":
        """Records a step made while drafters were at work."""
        return replace(
            self, pace=pace_after(self.pace, seconds / self.shape.seconds(rows, tokens)), non_speculative_run=0
        )

    def non_speculative_s(self, rows: int) -> float:
        """Returns the seconds of a step of one token per row while no drafter works."""
        return self._non_speculative_scale * self.pace.value * self.shape.seconds(rows, rows)

    def prompts_s(self, rows: int, tokens: int) -> float:
        """Returns the seconds of a step that also feeds prompts while no drafter works; 0 before any such step."""
        return self.prompts.value * self.pace.value * self.shape.seconds(rows, tokens)

    def drafts_s(self, rows: int, tokens: float) -> float:
        """Returns the seconds of a step of `tokens` tokens in all, drafts among them."""
        return self.pace.value * self.shape.seconds(rows, tokens)

    @property
    def cost(self) -> ForwardCost:
        """Current cost of speculative steps."""
        return self.shape.times(self.pace.value) if self.pace.count else self.shape

    @property
    def non_speculative_cost(self) -> ForwardCost | None:
        """Current cost of steps of one token per row while no drafter works, including the time between steps.

        None until such a step has been compared with speculative ones.
        """
        return self.shape.times(self._non_speculative_scale * self.pace.value) if self.plain.count else None

    @property
    def _non_speculative_scale(self) -> float:
        return self.plain.value if self.plain.count else 1.0


@dataclass(frozen=True)
class Load:
    """The replica's current load and the value of a second."""

    step: StepCost = field(default_factory=lambda: StepCost.profiled(None))
    sessions: int = 1  # number of sessions that are decoding
    gain: float = 1.0  # recent throughput as a multiple of that of non-speculative decoding
    speculates: bool = True  # False while speculation is known to lose

    @cached_property
    def non_speculative_rate(self) -> float:
        """Tokens per second without speculation; 0 while unknown."""
        step_s = self.step.non_speculative_s(self.sessions)
        return self.sessions / step_s if step_s else 0.0

    @cached_property
    def rate(self) -> float:
        """Tokens per second with or without speculation, whichever is faster: the value of a second."""
        return max(1.0, self.gain) * self.non_speculative_rate

    @cached_property
    def token_s(self) -> tuple[float, ...]:
        """Seconds that the first, second, ... draft token of each session adds to a step."""
        rows = self.sessions
        steps = [self.step.drafts_s(rows, rows * (1 + length)) for length in range(MAX_POSITIONS + 1)]
        return tuple([max(0.0, later - earlier) / rows for earlier, later in pairwise(steps)])
