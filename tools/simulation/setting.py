"""Parameters of one simulated run: fleet, speculation, workload, costs and faults, as data."""

from dataclasses import dataclass, field
from enum import Enum

from cluster.costs import CostModel
from cluster.speculation.policy import Adaptive, LockStep, Pacing
from tools.simulation.faults import FaultPlan
from tools.simulation.oracle import DraftQuality
from tools.simulation.workload import Workload


@dataclass(frozen=True, slots=True)
class Fleet:
    """Numbers of processes, and their capacities."""

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
    """Mode of speculation."""

    LOCK_STEP = "lock-step"  # the executable specification: draft for all, verify all
    ADAPTIVE = "adaptive"  # pacing decides on waits and draft lengths
    DRAFT_AHEAD = "draft-ahead"  # adaptive, and drafters continue while a block is verified


@dataclass(frozen=True, slots=True)
class SpeculationSetting:
    """Draft length, draft quality and mode."""

    block_len: int  # 0: non-speculative decoding
    draft: DraftQuality
    mode: Mode = Mode.DRAFT_AHEAD

    @property
    def pacing(self) -> Pacing:
        return LockStep() if self.mode is Mode.LOCK_STEP else Adaptive()


@dataclass(frozen=True, slots=True)
class Setting:
    """Parameters of one run."""

    costs: CostModel
    speculation: SpeculationSetting
    load: Workload
    fleet: Fleet = field(default_factory=Fleet)
    fault_plan: FaultPlan = field(default_factory=FaultPlan)
    seed: int = 0
