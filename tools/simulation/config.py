"""Parameters of a simulated run, and random draws of them.

A run is described by data only: fleet, costs, load, speculation and faults. `random_scenario` draws all of them from a
seed. Thousands of runs reach unforeseen states: full queues, small caches, drafters faster than the network.
"""

import random
from dataclasses import dataclass, field
from enum import Enum

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.speculation.controller import Adaptive, LockStep, PacingPolicy
from tools.simulation.network import KEEPALIVE_S, NO_NETWORK_FAULTS, NetworkFaults
from tools.simulation.oracle import ClosedLoop, DraftQuality, Poisson, Workload

MAX_TARGET_FAULTS = 2  # maximum losses of targets per session


class Kind(Enum):
    DIES = "dies"  # stops immediately; another process replaces it after `seconds`
    HANGS = "hangs"  # handles no events for `seconds`, then all pending events
    STALLS = "stalls"  # delays computations for `seconds`, but still receives messages
    SLOWS_DOWN = "slows down"  # computes more slowly for `seconds`
    IS_CUT_OFF = "is cut off"  # loses all its streams, but keeps running
    LEAVES = "leaves"  # ends as planned within `seconds`; another process replaces it
    DRAFTS_NOISE = "drafts noise"  # drafters only; drafts wrong tokens for `seconds`, as with damaged weights


LASTING = (Kind.HANGS, Kind.STALLS, Kind.SLOWS_DOWN, Kind.DRAFTS_NOISE)


class Role(Enum):
    ROUTER = "router"
    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of one process of a role: number `index`, modulo the number of live processes."""

    at_s: float
    role: Role
    index: int
    kind: Kind
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Faults:
    """All faults of a run."""

    network_faults: NetworkFaults = NO_NETWORK_FAULTS
    faults: tuple[Fault, ...] = ()


def random_faults(seed: int, span_s: float) -> Faults:
    """Draws network faults and process faults within `span_s`, with target failures that every session survives."""
    rng = random.Random(f"fault_plan {seed}")
    max_delay_s = rng.choice((0.0, 0.005, 0.1))
    network_faults = NetworkFaults(
        rng.uniform(0, 0.3), rng.uniform(0, 0.3), max_delay_s, stale_frames=rng.random() < 0.5
    )
    roles = rng.choices((Role.TARGET, Role.DRAFTER, Role.ROUTER), (4, 5, 1), k=rng.randrange(7))
    targets = [role for role in roles if role is Role.TARGET][:MAX_TARGET_FAULTS]
    others = [role for role in roles if role is not Role.TARGET]
    faults = (_fault(rng, role, span_s) for role in targets + others)
    return Faults(network_faults, tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _fault(rng: random.Random, role: Role, span_s: float) -> Fault:
    kind = Kind.DIES if role is Role.ROUTER else rng.choice(list(Kind))
    long = 1.5 * KEEPALIVE_S if kind in LASTING else span_s  # seconds; peers wait about KEEPALIVE_S
    return Fault(rng.uniform(0, span_s), role, rng.randrange(1000), kind, rng.uniform(0, long))


@dataclass(frozen=True, slots=True)
class Fleet:
    """Number and capacity of processes by role."""

    targets: int = 1
    drafters: int = 1
    routers: int = 1
    sessions_per_target: int = 64
    sessions_per_drafter: int = 64
    step_tokens: int = 2048
    pages_per_target: int = 4096
    page_size: int = 16
    target_wait_s: float = 60.0


class Mode(Enum):
    """Schedule of drafting and verification; the values of `speculation.schedule`, and one for comparison."""

    LOCK_STEP = "lock_step"  # reference: draft for all sessions, then verify all
    NO_LOOKAHEAD = "no_lookahead"  # adaptive, but drafters do not draft ahead of verdicts
    ADAPTIVE = "adaptive"  # the pacing policy sets waits and draft lengths; drafters also draft ahead of verdicts


@dataclass(frozen=True, slots=True)
class Speculation:
    """Draft length, draft quality and mode of speculation."""

    draft_tokens: int  # draft length; 0 for non-speculative decoding
    draft: DraftQuality
    mode: Mode = Mode.ADAPTIVE

    @property
    def pacing(self) -> PacingPolicy:
        return LockStep() if self.mode is Mode.LOCK_STEP else Adaptive()


@dataclass(frozen=True, slots=True)
class SimulationConfig:
    """All parameters of one run."""

    costs: CostModel
    speculation: Speculation
    load: Workload
    fleet: Fleet = field(default_factory=Fleet)
    fault_plan: Faults = field(default_factory=Faults)
    seed: int = 0
    warm_up_tokens: int = 0  # committed tokens of all sessions before speeds and latencies count
    max_events: int | None = None  # simulated events after which no session begins; None: unlimited


LONG = 0.15  # share of scenarios with answers that take seconds


def random_scenario(seed: int) -> SimulationConfig:
    """Draws all parameters of a short run, which takes milliseconds of real time."""
    rng = random.Random(f"random_scenario {seed}")
    load = _load(rng)
    return SimulationConfig(
        _costs(rng),
        Speculation(rng.randrange(7), _draft(rng), rng.choice(list(Mode))),
        load,
        _fleet(rng, load),
        random_faults(seed, span_s=1.0),
        seed,
    )


def _draft(rng: random.Random) -> DraftQuality:
    return DraftQuality((rng.uniform(0.3, 1.0),), branches=rng.random() < 0.5)


def _costs(rng: random.Random) -> CostModel:
    return CostModel(
        target=ForwardCost.linear(rng.choice((0.002, 0.02)), per_token_s=rng.choice((0.0, 0.0005))),
        draft=DraftCost(forward=ForwardCost.linear(rng.choice((0.0005, 0.004)))),
        hop_s=rng.choice((0.0, 0.0003, 0.01)),
    )


def _load(rng: random.Random) -> Workload:
    arrivals = ClosedLoop(rng.randrange(1, 9)) if rng.random() < 0.7 else Poisson(rng.uniform(5, 50))
    prompt_tokens = rng.randrange(1, 40)
    is_long = rng.random() < LONG
    if is_long:  # long enough to give up, retry and trust drafters again
        return Workload(arrivals, 6, prompt_tokens, rng.randrange(150, 400))
    return Workload(arrivals, 12, prompt_tokens, rng.randrange(1, 33), stopping=0.3)


def _fleet(rng: random.Random, load: Workload) -> Fleet:
    page_size = rng.choice((4, 16))
    longest = -(-(load.prompt_tokens + load.new_tokens) // page_size)
    return Fleet(
        targets=rng.randrange(1, 4),
        drafters=rng.randrange(4),
        routers=rng.randrange(1, 3),
        sessions_per_target=rng.randrange(1, 6),
        sessions_per_drafter=rng.randrange(1, 9),
        step_tokens=rng.choice((8, 64)),
        pages_per_target=longest + rng.randrange(3 * longest),
        page_size=page_size,
    )
