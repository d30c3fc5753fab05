"""Decides the sizes of target pools and draft pools from the replicas' reports. Pure.

Inputs are `TargetReport` and `DraftReport` metrics, the pools' current sizes and bounds, and the scaling settings
reported by target replicas. The output is a size for each pool, with a reason. Each resource yields a need, a possibly
fractional number of replicas; the largest need counts. A pool grows after a short delay and shrinks after a long one.
Each target pool scales alone. A draft pool scales by the sum of the needs of all target pools that it serves: those
whose replicas report its settings.

Ray Serve calls the policies below for the application or for a single deployment. Serve's controller pickles a policy
by value, with this module, and calls it ten times a second. The module therefore imports no other project code and
never blocks. Policy arguments are part of Serve's application version, so a change of arguments would restart every
replica. Scaling settings are sent with the targets' reports instead: a running replica accepts new settings and
includes them in its next report.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar


@dataclass(frozen=True)
class TargetReport:
    """Report of one target replica. Counts are current; shares and times cover the time since the previous report."""

    running: float = 0.0  # number of sessions in the cache
    queued: float = 0.0  # number of sessions waiting for admission to the cache
    drafted: float = 0.0  # number of running sessions with a drafter and a draft request
    undrafted: float = 0.0  # number of running sessions with a draft request but no drafter
    waiting: float = 0.0  # share of serving time spent outside steps, usually waiting for blocks
    cache: float = 0.0  # share of pages held by sessions
    unread: float = 0.0  # number of sessions that have no output token yet
    first_token_s: float = 0.0  # mean time to first token; includes the wait so far of sessions without a token
    backlog_s: float = 0.0  # estimated prefill time of the `unread` sessions
    gain: float = 1.0  # throughput with speculation divided by throughput without; 1 if unknown or off


@dataclass(frozen=True)
class DraftReport:
    """Report of one drafter for the time since its previous report."""

    shared: float = 0.0  # excess time of requested passes over single-session passes, as a share of time
    late: float = 0.0  # share of requested blocks that were late


Report = TypeVar("Report", TargetReport, DraftReport)


def reported(kind: type[Report], metrics: Mapping[str, Mapping[Any, float]]) -> list[Report]:
    """Builds the reports of all replicas with a complete set of metrics; `metrics` maps name and replica to value."""
    names = [field.name for field in fields(kind)]
    return [kind(**{name: metrics[name][replica] for name in names}) for replica in reporting_replicas(names, metrics)]


def reporting_replicas(names: Iterable[str], metrics: Mapping[str, Mapping[Any, float]]) -> list[Any]:
    """Returns the replicas that have reported all named metrics, in a stable order."""
    reports = [metrics.get(name, {}) for name in names]
    return sorted(set.intersection(*(set(values) for values in reports)), key=str)


class CounterDeltas:
    """Growth of counters between calls."""

    def __init__(self) -> None:
        self._before: dict[str, float] = {}

    def of(self, **counters: float) -> dict[str, float]:
        """Returns each counter's growth since the previous call; the first call returns the counters themselves."""
        grown = {name: value - self._before.get(name, 0.0) for name, value in counters.items()}
        self._before = counters
        return grown


def share(part: float, whole: float) -> float:
    """Returns `part / whole`, or 0 if `whole` is 0."""
    return part / whole if whole > 0 else 0.0


@dataclass(frozen=True)
class StabilizationWindow:
    """History of a pool's needed size, by level; a need for three replicas also counts for levels one and two.

    The window suppresses noise. The pool grows to the smallest size needed during the whole up delay, and shrinks to
    the largest size needed within the down delay.
    """

    since: Mapping[int, float] = field(default_factory=dict)  # start of the need for each level
    last: Mapping[int, float] = field(default_factory=dict)  # latest need for each level

    @classmethod
    def at_start(cls, present: int, now: float) -> "StabilizationWindow":
        """Returns a new history in which the present size was needed until now."""
        return cls({}, dict.fromkeys(range(1, present + 1), now))

    def after(self, desired: int, now: float) -> "StabilizationWindow":
        """Returns the history extended by the latest need."""
        levels = range(1, desired + 1)
        return StabilizationWindow(
            {level: self.since.get(level, now) for level in levels}, {**self.last, **dict.fromkeys(levels, now)}
        )

    def size(self, present: int, now: float, up_delay_s: float, down_delay_s: float) -> int:
        """Returns the pool's size according to the history."""
        least = max((level for level, since in self.since.items() if now - since >= up_delay_s), default=0)
        most = max((level for level, last in self.last.items() if now - last <= down_delay_s), default=0)
        return min(max(present, least), most)


DEFAULT_UTILIZATION = 0.5  # desired utilization; the spare half absorbs load while new replicas start
MAX_CACHE_SHARE = 0.8  # desired limit on the share of held pages; above it, long sessions preempt others
MAX_LOST_SHARE = 0.125  # tolerated share of late blocks, or of target time spent waiting, before drafters are added
# Margin above the need when a pool shrinks: with fewer replicas, sessions take longer, which raises concurrency.
RESERVE_SHARE = 0.25


@dataclass(frozen=True)
class TargetScaling:
    """Scaling settings of the target pool."""

    sessions_per_replica: float  # without speculation; scaled by the measured gain, up to `max_sessions`
    max_sessions: float  # maximum number of sessions per replica
    first_token_s: float  # time to first token above which waiting prompts add replicas
    up_delay_s: float
    down_delay_s: float


@dataclass(frozen=True)
class DraftScaling:
    """Scaling settings of the draft pool: by demand for drafts, or by the size of the target pool."""

    sessions_per_replica: float
    up_delay_s: float
    down_delay_s: float
    per_target: float | None = None  # fixed number of drafters per target replica; None: scale by demand


@dataclass(frozen=True)
class Need:
    """The number of replicas needed by a pool, and the reason."""

    replicas: float
    why: str
    reserve: float = RESERVE_SHARE  # margin above `replicas` when the pool shrinks

    def size(self, present: int) -> int:
        """Returns the needed size; shrinks below `present` only with a margin."""
        enough = math.ceil(self.replicas)
        return enough if enough > present else min(present, math.ceil(self.replicas * (1 + self.reserve)))


def target_need(reports: Sequence[TargetReport], scaling: TargetScaling, present: int) -> Need | None:
    """Returns the need of the target pool, which has `present` replicas; None before the first report."""
    if not reports:
        return None
    return _largest(_session_need(reports, scaling), _cache(reports), _prompts(reports, scaling, present))


def draft_need(
    targets: Sequence[TargetReport], drafters: Sequence[DraftReport], scaling: DraftScaling, present: int
) -> Need | None:
    """Returns the need of the draft pool, which has `present` replicas; None before the first report of a target.

    Includes sessions without a drafter, because none exists or all refused. A pool can therefore grow from zero, and a
    pool that gives up sessions grows.
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
        sessions_needed, shared / DEFAULT_UTILIZATION * (sessions_needed / drafted if drafted else 1.0)
    )  # at most one drafter per session
    delays = f"{late:.0%} of the blocks late, {waiting:.0%} of a target's time waiting"
    if max(late, waiting) <= MAX_LOST_SHARE:
        work = min(work, present)  # the drafters keep up; add none
    return _largest(
        sessions, Need(work, f"sharing drafters among sessions costs the time of {shared:.2f} drafters, {delays}")
    )


def fixed_ratio_need(targets: int | None, per_target: float) -> Need | None:
    """Returns the need of a draft pool with a fixed ratio to the target pool; None if the target pool's size is
    unknown.
    """
    if targets is None:
        return None
    return Need(per_target * targets, f"{per_target:g} for each of {targets} target replicas", reserve=0.0)


def _largest(*needs: Need) -> Need:
    return max(needs, key=lambda need: need.replicas)


def _session_need(reports: Sequence[TargetReport], scaling: TargetScaling) -> Need:
    """Returns the need by sessions. A replica's share is scaled by the speculation gain, up to `max_sessions`."""
    load = 0.0
    for report in reports:
        aim = min(scaling.max_sessions, scaling.sessions_per_replica * max(1.0, report.gain))
        load += (report.running + report.queued) / aim
    running = sum(report.running for report in reports)
    queued = sum(report.queued for report in reports)
    gain = max(report.gain for report in reports)
    each = f"{scaling.sessions_per_replica:g} for each replica"
    by_gain = f", times a gain of {gain:.2f} from speculation" if gain > 1 else ""
    return Need(load, f"{running:.1f} sessions run and {queued:.1f} queue, {each}{by_gain}")


def _cache(reports: Sequence[TargetReport]) -> Need:
    used_replicas = sum(report.cache for report in reports)
    return Need(used_replicas / MAX_CACHE_SHARE, f"sessions hold the pages of {used_replicas:.2f} replicas")


def _prompts(reports: Sequence[TargetReport], scaling: TargetScaling, present: int) -> Need:
    """Returns the need by time to first token, at most one replica per waiting prompt.

    Releases replicas when fewer can keep the time to first token within its limit.
    """
    unread = sum(report.unread for report in reports)
    wait_s = max(max(report.first_token_s, report.backlog_s) for report in reports)
    over = wait_s / scaling.first_token_s
    enough = len(reports) * over if over > 1 else min(present, len(reports) * over / DEFAULT_UTILIZATION)
    return Need(min(unread, enough), f"{unread:.1f} prompts wait at once, {wait_s:.1f} s for their first tokens")


@dataclass(frozen=True)
class Pool:
    """Current state of a pool; `size` includes starting replicas."""

    size: int
    least: int
    most: int
    stabilization: StabilizationWindow | None = None  # history of needs; None: none yet


@dataclass(frozen=True)
class PoolDecision:
    """The chosen size of a pool, and the reason."""

    size: int  # size to apply now
    desired: int  # size to apply once the need has persisted
    why: str
    stabilization: StabilizationWindow = field(default_factory=StabilizationWindow)


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
    """Decides the size of the draft pool; `target_size` is the target pool's size, or None if unknown."""
    if scaling.per_target is None:
        need = draft_need(targets, reports, scaling, pool.size)
    else:
        need = fixed_ratio_need(target_size, scaling.per_target)
    return _decide(pool, need, now, scaling.up_delay_s, scaling.down_delay_s)


def stay(pool: Pool, now: float) -> PoolDecision:
    """Keeps a pool's size, clamped to its bounds, until a replica has reported scaling settings."""
    return _decide(pool, None, now, 0.0, 0.0)


def _decide(pool: Pool, need: Need | None, now: float, up_delay_s: float, down_delay_s: float) -> PoolDecision:
    """Decides a pool's size. Without reports, keeps the current size, so that missing reports never shrink the pool."""
    need = need or Need(pool.size, "no target replica has reported")
    desired = min(max(need.size(pool.size), pool.least), pool.most)
    stabilization = (pool.stabilization or StabilizationWindow.at_start(pool.size, now)).after(desired, now)
    size = stabilization.size(pool.size, now, up_delay_s, down_delay_s)
    return PoolDecision(min(max(size, pool.least), pool.most), desired, need.why, stabilization)


Settings = Mapping[str, Mapping[str, float | None]]  # settings by deployment and name
Scaling = TypeVar("Scaling", TargetScaling, DraftScaling)


def as_numbers(settings: Settings) -> dict[str, float]:
    """Returns the settings as metrics; omits settings that are None."""
    named = {_name(pool, name): value for pool, one in settings.items() for name, value in one.items()}
    return {name: value for name, value in named.items() if value is not None}


def reported_settings(kind: type[Scaling], pool: str, metrics: Mapping[str, Mapping[Any, float]]) -> Scaling | None:
    """Reads one pool's settings from metrics by name and replica; `pool` is its deployment.

    Returns None until a replica has reported every required setting. During an update, replicas report different
    settings; the choice among them is arbitrary.
    """
    names = {field.name: _name(pool, field.name) for field in fields(kind)}
    always = [names[field.name] for field in fields(kind) if field.default is not None]
    replicas = reporting_replicas(always, metrics)
    if not replicas:
        return None
    arguments: dict[str, Any] = {field: metrics.get(name, {}).get(replicas[-1]) for field, name in names.items()}
    return kind(**arguments)


def _name(pool: str, name: str) -> str:
    return f"{pool}_{name}"


TARGET = "Target"  # deployments of the only, or default, target pool and draft pool
DRAFTER = "Drafter"


def deployment_of(pool: str, name: str | None) -> str:
    """Returns the deployment of a pool with this name; None stands for the only, or default, pool."""
    return pool if name is None else f"{pool}-{name}"


def kind_of(deployment: str) -> str:
    """Returns TARGET or DRAFTER for a pool's deployment, and the name of other deployments."""
    return deployment.partition("-")[0]


class Observed(Protocol):
    """The attributes of Serve's AutoscalingContext used in this module."""

    deployment_name: str
    aggregated_metrics: Mapping[str, Mapping[Any, float]]  # metrics by name and replica
    target_num_replicas: int
    capacity_adjusted_min_replicas: int
    capacity_adjusted_max_replicas: int
    current_time: float
    policy_state: Mapping[str, Any]


Decisions = tuple[dict[Any, int], dict[Any, dict[str, Any]]]


class PoolsPolicy:
    """Application-level policy, which sees all pools. Scaling settings come from the target replicas' reports."""

    def __call__(self, observed: Mapping[Any, Observed]) -> Decisions:
        """Returns sizes and policy states by deployment; omits deployments that are not pools."""
        decided: dict[Any, PoolDecision] = {}
        targets: list[tuple[Observed, PoolDecision]] = []
        for key, one in observed.items():
            if kind_of(one.deployment_name) == TARGET:
                decided[key] = _targets(one)
                targets.append((one, decided[key]))
        for key, one in observed.items():
            if kind_of(one.deployment_name) == DRAFTER:
                decided[key] = _drafters(one, targets)
        sizes = {key: decision.size for key, decision in decided.items()}
        return sizes, {key: {"stabilization": decision.stabilization} for key, decision in decided.items()}


class PoolAlone:
    """Policy of a single deployment, used when Serve does not call `PoolsPolicy`: targets scale, drafters keep their
    number.
    """

    def __call__(self, observed: Observed) -> tuple[int, dict[str, Any]]:
        """Returns the wanted size and the policy state."""
        assert kind_of(observed.deployment_name) in (TARGET, DRAFTER), f"a policy for {observed.deployment_name}"
        sizes, states = PoolsPolicy()({"": observed})
        return sizes[""], states[""]


def _targets(one: Observed) -> PoolDecision:
    metrics = one.aggregated_metrics
    scaling = reported_settings(TargetScaling, one.deployment_name, metrics)
    if scaling is None:
        return stay(_pool(one), one.current_time)
    return decide_targets(_pool(one), reported(TargetReport, metrics), scaling, one.current_time)


def _drafters(one: Observed, targets: Sequence[tuple[Observed, PoolDecision]]) -> PoolDecision:
    """Sizes a draft pool by the target pools that report its settings."""
    scaling: DraftScaling | None = None
    reports: list[TargetReport] = []
    target_size = 0
    for target, decision in targets:
        settings = reported_settings(DraftScaling, one.deployment_name, target.aggregated_metrics)
        if settings is not None:
            scaling = settings
            reports += reported(TargetReport, target.aggregated_metrics)
            target_size += decision.size
    if scaling is None:
        return stay(_pool(one), one.current_time)
    own = reported(DraftReport, one.aggregated_metrics)
    return decide_drafters(_pool(one), own, scaling, reports, target_size, one.current_time)


def _pool(observed: Observed) -> Pool:
    stabilization: StabilizationWindow | None = observed.policy_state.get("stabilization")
    least = observed.capacity_adjusted_min_replicas
    return Pool(observed.target_num_replicas, least, observed.capacity_adjusted_max_replicas, stabilization)


__all__ = ["PoolAlone", "PoolsPolicy"]
