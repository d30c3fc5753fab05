"""Faults of a simulated run with their times: data, drawn from a seed or written down."""

import random
from dataclasses import dataclass
from enum import Enum

from tools.simulation.network import CALM, KEEPALIVE_S, Weather

MAX_TARGET_FAULTS = 2  # a session survives this many lost targets


class Kind(Enum):
    DIES = "dies"  # and is replaced after `seconds`
    HANGS = "hangs"  # for `seconds`, then continues as if nothing had happened
    STALLS = "stalls"  # computes nothing for `seconds`, but still receives messages
    SLOWS_DOWN = "slows down"  # for `seconds`
    IS_CUT_OFF = "is cut off"  # all its streams break; the process keeps running
    LEAVES = "leaves"  # planned, within `seconds`; it is replaced
    DRAFTS_NOISE = "drafts noise"  # drafters only, for `seconds`, as if its weights were damaged


LASTING = (Kind.HANGS, Kind.STALLS, Kind.SLOWS_DOWN, Kind.DRAFTS_NOISE)


class Role(Enum):
    ROUTER = "router"
    DRAFTER = "drafter"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of the `index`-th living process of a role, modulo their number, when it occurs."""

    at_s: float
    role: Role
    index: int
    kind: Kind
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """All faults of one run."""

    weather: Weather = CALM
    faults: tuple[Fault, ...] = ()


def random_fault_plan(seed: int, span_s: float) -> FaultPlan:
    """Draws weather and faults within `span_s`; targets fail at most as often as a session survives."""
    rng = random.Random(f"fault_plan {seed}")
    late_s = rng.choice((0.0, 0.005, 0.1))
    weather = Weather(rng.uniform(0, 0.3), rng.uniform(0, 0.3), late_s, ghosts=rng.random() < 0.5)
    roles = rng.choices((Role.TARGET, Role.DRAFTER, Role.ROUTER), (4, 5, 1), k=rng.randrange(7))
    targets = [role for role in roles if role is Role.TARGET][:MAX_TARGET_FAULTS]
    others = [role for role in roles if role is not Role.TARGET]
    faults = (_fault(rng, role, span_s) for role in targets + others)
    return FaultPlan(weather, tuple(sorted(faults, key=lambda fault: fault.at_s)))


def _fault(rng: random.Random, role: Role, span_s: float) -> Fault:
    kind = Kind.DIES if role is Role.ROUTER else rng.choice(list(Kind))
    long = 1.5 * KEEPALIVE_S if kind in LASTING else span_s  # both shorter and longer than peers tolerate
    return Fault(rng.uniform(0, span_s), role, rng.randrange(1000), kind, rng.uniform(0, long))
