"""Decides the sizes of the target pool and the draft pool, from the replicas' reports alone. Pure.

Input: `TargetReport` and `DraftReport` metrics, the pools' current sizes and bounds, and the settings that target
replicas report. Output: a size for each pool, with the reason for it. A pool's need is a number of replicas and may be
fractional; the largest need counts. A new size is adopted once the need has lasted long enough: briefly upwards, long
downwards.

Ray Serve calls the policies below, for the whole application or for one deployment. Serve's controller pickles them by
value, with this whole module, and calls them ten times a second. So this module imports no other project code, and
nothing here waits. Serve counts a policy's arguments as part of the application's version, and changing them would
replace every replica. Scaling settings therefore travel with the targets' reports: a replica that receives new settings
keeps running, and its next report contains them.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True)
class TargetReport:
    """Report of one target replica. Counts are current; shares and times cover the time since the previous report."""

    running: float = 0.0  # number of sessions in the cache
    queued: float = 0.0  # number of sessions that wait for admission to the cache
    drafted: float = 0.0  # running sessions with a drafter from which tokens are requested
    undrafted: float = 0.0  # running sessions that want drafts but have no drafter
    waiting: float = 0.0  # share of the time with sessions that was spent in no step, usually waiting for blocks
    cache: float = 0.0  # share of the pages that sessions hold
    unread: float = 0.0  # number of sessions without their first token
    first_token_s: float = 0.0  # mean time to the first token; sessions without one count with their time so far
    backlog_s: float = 0.0  # estimated time to compute the prompts of `unread` sessions
    gain: float = 1.0  # throughput with speculation over throughput without; 1: no gain, or unknown


@dataclass(frozen=True)
class DraftReport:
    """Report of one drafter on the time since its previous report."""

    shared: float = 0.0  # share of the time that requested passes took beyond passes for one session
    late: float = 0.0  # share of the requested blocks that were late


Report = TypeVar("Report", TargetReport, DraftReport)


def reported(kind: type[Report], metrics: Mapping[str, Mapping[Any, float]]) -> list[Report]:
    """Builds reports from metrics by name and replica, for replicas that have reported every metric of the kind."""
    names = [field.name for field in fields(kind)]
    return [kind(**{name: metrics[name][replica] for name in names}) for replica in tellers(names, metrics)]


def tellers(names: Iterable[str], metrics: Mapping[str, Mapping[Any, float]]) -> list[Any]:
    """Returns the replicas that have reported all of these metrics, in a stable order."""
    told = [metrics.get(name, {}) for name in names]
    return sorted(set.intersection(*(set(values) for values in told)), key=str)


class CounterDeltas:
    """Growth of counters between calls."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def of(self, **counters: float) -> dict[str, float]:
        """Returns how much each counter has grown since the previous call, or since 0 at the first call."""
        grown = {name: value - self._before.get(name, 0.0) for name, value in counters.items()}
        self._before = counters
        return grown


def share(part: float, whole: float) -> float:
    """Returns `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class StabilizationWindow:
    """A pool's needs so far, by level: a need for three replicas counts for levels two and one, too.

    This damps noise. The size grows to the smallest need throughout the upward delay, and shrinks to the largest need
    within the downward delay.
    """

    since: Mapping[int, float] = field(default_factory=dict)  # by level: time since which at least this size was needed
    last: Mapping[int, float] = field(default_factory=dict)  # by level: last time that at least this size was needed

    @classmethod
    def at_start(cls, present: int, now: float) -> "StabilizationWindow":
        """Returns an empty history, as if the present size had been needed until now."""
        return cls({}, dict.fromkeys(range(1, present + 1), now))

    def after(self, wished: int, now: float) -> "StabilizationWindow":
        """Returns the history with the latest need added."""
        levels = range(1, wished + 1)
        return StabilizationWindow(
            {level: self.since.get(level, now) for level in levels}, {**self.last, **dict.fromkeys(levels, now)}
        )

    def size(self, present: int, now: float, up_delay_s: float, down_delay_s: float) -> int:
        """Returns the size that the pool should have now."""
        least = max((level for level, since in self.since.items() if now - since >= up_delay_s), default=0)
        most = max((level for level, last in self.last.items() if now - last <= down_delay_s), default=0)
        return min(max(present, least), most)


DEFAULT_UTILISATION = 0.5  # default utilisation: a pool can take twice its load while further replicas start
MAX_CACHE_SHARE = 0.8  # share of the pages that sessions may hold: beyond it, a long session preempts others
MAX_LOST_SHARE = 0.125  # share of blocks, or of a target's time, whose loss is tolerated before drafters are added
# Margin over the need before a pool shrinks: fewer replicas are slower, so sessions last longer and more run at once.
RESERVE_SHARE = 0.25


@dataclass(frozen=True)
class TargetScaling:
    """Rules by which the target pool follows its load."""

    sessions_per_replica: float  # without speculation; multiplied by the measured gain, up to `max_sessions`
    max_sessions: float  # most sessions that one replica accepts
    first_token_s: float  # time to first token beyond which waiting prompts call for another replica
    up_delay_s: float
    down_delay_s: float


@dataclass(frozen=True)
class DraftScaling:
    """Rules by which the draft pool follows the demand for drafts, or the size of the target pool."""

    sessions_per_replica: float
    up_delay_s: float
    down_delay_s: float
    per_target: float | None = None  # drafters per target replica, independent of demand; None: by need


@dataclass(frozen=True)
class Need:
    """The number of replicas that one pool needs, and why."""

    replicas: float
    why: str

    def size(self, present: int) -> int:
        """Returns the replicas needed; fewer than at present only if those suffice with a margin."""
        enough = math.ceil(self.replicas)
        return enough if enough > present else min(present, math.ceil(self.replicas * (1 + RESERVE_SHARE)))


def target_need(reports: Sequence[TargetReport], scaling: TargetScaling, present: int) -> Need | None:
    """Returns the target pool's need with `present` replicas; None until one of them has reported."""
    if not reports:
        return None
    return _largest(_session_need(reports, scaling), _cache(reports), _prompts(reports, scaling, present))


def draft_need(
    targets: Sequence[TargetReport], drafters: Sequence[DraftReport], scaling: DraftScaling, present: int
) -> Need | None:
    """Returns the draft pool's need with `present` replicas; None until a target has reported the demand.

    Sessions without a drafter, because there is none or because drafters refused them, count like those with one. So a
    pool can grow from zero, and one that sheds sessions grows.
    """
    if not targets:
        return None
    drafted = sum(report.drafted for report in targets)
    undrafted = sum(report.undrafted for report in targets)
    sessions_needed = drafted + undrafted
    sessions = Need(
        sessions_needed / scaling.sessions_per_replica,
        f"{sessions_needed:.1f} sessions want drafts ({undrafted:.1f} have no drafter),"
        f" {scaling.sessions_per_replica:g} each",
    )
    late = max((report.late for report in drafters), default=0.0)
    waiting = max(report.waiting for report in targets)
    shared = sum(report.shared for report in drafters)
    work = min(
        sessions_needed, shared / DEFAULT_UTILISATION * (sessions_needed / drafted if drafted else 1.0)
    )  # a session has one drafter at most
    felt = f"{late:.0%} of the blocks late, {waiting:.0%} of a target's time waiting"
    if max(late, waiting) <= MAX_LOST_SHARE:
        work = min(work, present)  # drafters keep up, so no more are needed
    return _largest(sessions, Need(work, f"drafters busy with more than one session for {shared:.2f} of them, {felt}"))


def coupled_need(targets: int | None, per_target: float) -> Need | None:
    """Returns the need of a draft pool that follows the size of the target pool; None while that is unknown."""
    if targets is None:
        return None
    return Need(per_target * targets, f"{per_target:g} for each of {targets} target replicas")


def _largest(*needs: Need) -> Need:
    return max(needs, key=lambda need: need.replicas)


def _session_need(reports: Sequence[TargetReport], scaling: TargetScaling) -> Need:
    """Returns the need by sessions; speculation lets a replica serve more at the same speed, up to `max_sessions`."""
    load = 0.0
    for report in reports:
        aim = min(scaling.max_sessions, scaling.sessions_per_replica * max(1.0, report.gain))
        load += (report.running + report.queued) / aim
    running = sum(report.running for report in reports)
    queued = sum(report.queued for report in reports)
    gain = max(report.gain for report in reports)
    each = f"{scaling.sessions_per_replica:g} each without speculation, whose gain is {gain:.2f}"
    return Need(load, f"{running:.1f} sessions run and {queued:.1f} queue, {each}")


def _cache(reports: Sequence[TargetReport]) -> Need:
    used_replicas = sum(report.cache for report in reports)
    return Need(used_replicas / MAX_CACHE_SHARE, f"sessions hold the pages of {used_replicas:.2f} replicas")


def _prompts(reports: Sequence[TargetReport], scaling: TargetScaling, present: int) -> Need:
    """Returns the need by the time to first token, at most one replica per prompt that waits now.

    Releases replicas once the time is so short that fewer replicas keep it within bounds.
    """
    unread = sum(report.unread for report in reports)
    wait_s = max(max(report.first_token_s, report.backlog_s) for report in reports)
    over = wait_s / scaling.first_token_s
    enough = len(reports) * over if over > 1 else min(present, len(reports) * over / DEFAULT_UTILISATION)
    return Need(min(unread, enough), f"{unread:.1f} prompts wait at once, {wait_s:.1f} s for their first tokens")


@dataclass(frozen=True)
class Pool:
    """A pool's current state: its size including starting replicas, its bounds, and its earlier needs."""

    size: int
    least: int
    most: int
    wishes: StabilizationWindow | None = None  # None: no history


@dataclass(frozen=True)
class PoolDecision:
    """The decided size of a pool, and its reason."""

    size: int  # size to have now
    wished: int  # size to have once the need has lasted long enough
    why: str
    wishes: StabilizationWindow = field(default_factory=StabilizationWindow)


def decide_targets(pool: Pool, reports: Sequence[TargetReport], scaling: TargetScaling, now: float) -> PoolDecision:
    """Decides the size of the target pool."""
    need = target_need(reports, scaling, pool.size)
    return _decide(pool, need, now, scaling.up_delay_s, scaling.down_delay_s)


def decide_drafters(
    pool: Pool,
    reports: Sequence[DraftReport],
    scaling: DraftScaling,
    targets: Sequence[TargetReport],
    target_size: int | None,
    now: float,
) -> PoolDecision:
    """Decides the size of the draft pool, given that of the target pool; `target_size` is None if unknown."""
    if scaling.per_target is None:
        need = draft_need(targets, reports, scaling, pool.size)
    else:
        need = coupled_need(target_size, scaling.per_target)
    return _decide(pool, need, now, scaling.up_delay_s, scaling.down_delay_s)


def stay(pool: Pool, now: float) -> PoolDecision:
    """Keeps a pool at its size, within its bounds, while no replica has reported how it should scale."""
    return _decide(pool, None, now, 0.0, 0.0)


def _decide(pool: Pool, need: Need | None, now: float, up_delay_s: float, down_delay_s: float) -> PoolDecision:
    """Decides a pool's size. Without reports the size stays, because losing the reports must not shrink the pool."""
    need = need or Need(pool.size, "no target replica has reported")
    wished = min(max(need.size(pool.size), pool.least), pool.most)
    wishes = (pool.wishes or StabilizationWindow.at_start(pool.size, now)).after(wished, now)
    size = wishes.size(pool.size, now, up_delay_s, down_delay_s)
    return PoolDecision(min(max(size, pool.least), pool.most), wished, need.why, wishes)


Settings = Mapping[str, Mapping[str, float | None]]  # setting by pool and name
Scaling = TypeVar("Scaling", TargetScaling, DraftScaling)


def as_numbers(settings: Settings) -> dict[str, float]:
    """Returns the settings as metrics, without those that are None."""
    named = {_name(pool, name): value for pool, one in settings.items() for name, value in one.items()}
    return {name: value for name, value in named.items() if value is not None}


def told(kind: type[Scaling], pool: str, metrics: Mapping[str, Mapping[Any, float]]) -> Scaling | None:
    """Returns the settings of one pool from metrics by name and replica.

    Returns None until a replica has reported all settings whose default is not None. While an update runs, replicas
    report different settings; any of them is used.
    """
    names = {field.name: _name(pool, field.name) for field in fields(kind)}
    always = [names[field.name] for field in fields(kind) if field.default is not None]
    replicas = tellers(always, metrics)
    if not replicas:
        return None
    arguments: dict[str, Any] = {field: metrics.get(name, {}).get(replicas[-1]) for field, name in names.items()}
    return kind(**arguments)


def _name(pool: str, name: str) -> str:
    return f"{pool}_{name}"


TARGET = "target"
DRAFT = "draft"
POOLS = {"Target": TARGET, "Drafter": DRAFT}  # pool by deployment name


class Observed(Protocol):
    """The attributes of Serve's AutoscalingContext that are read here."""

    deployment_name: str
    aggregated_metrics: Mapping[str, Mapping[Any, float]]  # metric by name and replica
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    current_time: float
    policy_state: Mapping[str, Any]


Decisions = tuple[dict[Any, int], dict[Any, dict[str, Any]]]


class PoolsPolicy:
    """Policy of the application, with both pools visible. Target replicas report how the pools should scale."""

    def __call__(self, observed: Mapping[Any, Observed]) -> Decisions:
        """Returns sizes and policy states by deployment; none for deployments that are not pools."""
        named = {one.deployment_name: (key, one) for key, one in observed.items()}
        pools = {POOLS[name]: pool for name, pool in named.items() if name in POOLS}
        decided: dict[Any, PoolDecision] = {}
        metrics: Mapping[str, Mapping[Any, float]] = {}
        targets: list[TargetReport] = []
        target_size: int | None = None
        if TARGET in pools:
            key, one = pools[TARGET]
            metrics = one.aggregated_metrics
            targets = reported(TargetReport, metrics)
            scaling = told(TargetScaling, TARGET, metrics)
            now = one.current_time
            decided[key] = decide_targets(_pool(one), targets, scaling, now) if scaling else stay(_pool(one), now)
            target_size = decided[key].size
        if DRAFT in pools:
            key, one = pools[DRAFT]
            decided[key] = _drafters(one, told(DraftScaling, DRAFT, metrics), targets, target_size)
        sizes = {key: decision.size for key, decision in decided.items()}
        return sizes, {key: {"wishes": decision.wishes} for key, decision in decided.items()}


class PoolAlone:
    """Policy of a single deployment where Serve does not use `PoolsPolicy`: targets still scale, drafters stay."""

    def __call__(self, observed: Observed) -> tuple[int, dict[str, Any]]:
        """Returns the wanted size and the policy state."""
        assert observed.deployment_name in POOLS, f"a policy for {observed.deployment_name}, expected {set(POOLS)}"
        sizes, states = PoolsPolicy()({"": observed})
        return sizes[""], states[""]


def _drafters(
    one: Observed, scaling: DraftScaling | None, targets: list[TargetReport], target_size: int | None
) -> PoolDecision:
    pool = _pool(one)
    if scaling is None:
        return stay(pool, one.current_time)
    reports = reported(DraftReport, one.aggregated_metrics)
    return decide_drafters(pool, reports, scaling, targets, target_size, one.current_time)


def _pool(observed: Observed) -> Pool:
    wishes: StabilizationWindow | None = observed.policy_state.get("wishes")
    least = observed.capacity_adjusted_min_replicas
    return Pool(observed.target_num_replicas, least, observed.capacity_adjusted_max_replicas, wishes)


__all__ = ["PoolAlone", "PoolsPolicy"]
