"""Compares speculation control with fixed draft lengths and with non-speculative decoding, in the simulator.

    python benchmarks/controller.py [--machines cpu,gpu] [--sessions 1,4,16,32] [--cases good,useless] [--json OUT]

Virtual time: the schedulers are real, the models are not. Durations of steps and drafting passes have noise. While a
drafter computes, steps of the target are slower by the machine's contention, which no cost profile contains. `fixed` is
the best of several fixed draft lengths, each drafted ahead and always awaited. For cases with an event, further columns
show the speed-up after the event, and the seconds until the speed returns: to 95 % of the speed before the event, or of
non-speculative decoding if the event lasts.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.speculation.controller import LockStep, PacingPolicy
from tools.simulation.actors import SimulatedAssignment
from tools.simulation.config import Fault, Faults, Fleet, Kind, Role, SimulationConfig, Speculation
from tools.simulation.network import Clock, Process
from tools.simulation.oracle import ClosedLoop, DraftQuality, Workload
from tools.simulation.world import World

SECONDS = 40.0  # of virtual time per run
EVENT_S = 10.0  # time of a case's event
BUSY_S = 20.0  # duration of foreign work on the machine
LENGTHS = (1, 2, 3, 5)  # fixed draft lengths
STALLS = 0.01  # share of computations that take twice as long
WARM_S = 3.0  # start of the interval before the event
WINDOW_S = 1.0  # averaging window for the time to recover


@dataclass(frozen=True)
class Machine:
    """Computation times on one kind of hardware, and the slowdown of target steps while a drafter computes."""

    costs: CostModel
    contention: float
    noise: float  # standard deviation of the logarithm of a duration


MACHINES = {
    # SmolLM2-135M and the shipped draft in bfloat16, one core each, as in docs/benchmarks.md.
    "cpu": Machine(
        CostModel(
            target=ForwardCost(
                by_tokens=((1, 0.0265), (4, 0.0315), (8, 0.043), (16, 0.065), (32, 0.115), (64, 0.215), (128, 0.42))
            ),
            draft=DraftCost(forward=ForwardCost.linear(0.003, per_row_s=0.0003), per_pass_s=0.001),
            hop_s=0.0008,
        ),
        contention=0.03,
        noise=0.1,
    ),
    # The same on a processor with AVX2 alone, which multiplies bfloat16 row by row.
    "avx2": Machine(
        CostModel(
            target=ForwardCost(
                by_tokens=((1, 0.052), (2, 0.093), (4, 0.15), (8, 0.29), (16, 0.53), (32, 1.0), (64, 2.0), (128, 4.0))
            ),
            draft=DraftCost(forward=ForwardCost.linear(0.005, per_row_s=0.0006), per_pass_s=0.002),
            hop_s=0.002,
        ),
        contention=0.03,
        noise=0.1,
    ),
    # An 8B model in captured steps and a 1B draft on another GPU.
    "gpu": Machine(
        CostModel(
            target=ForwardCost.linear(0.006, per_token_s=0.00002),
            draft=DraftCost(forward=ForwardCost.linear(0.001, per_row_s=0.000005), per_pass_s=0.0005),
            hop_s=0.0005,
        ),
        contention=0.0,
        noise=0.05,
    ),
}


@dataclass(frozen=True)
class Case:
    """One situation: draft quality, slowness of the drafter, contention, and an event."""

    acceptance: float = 0.75
    draft_slowness: float = 1.0
    contention: float = 0.0  # added to the machine's
    event: Kind | None = None  # fault of the first drafter from `EVENT_S` on
    event_s: float = 1e3
    drafters: int = 1
    busy_s: float = 0.0  # seconds of foreign work from `EVENT_S` on

    @property
    def is_lasting(self) -> bool:
        return self.event is not None and self.event_s > SECONDS

    @property
    def ends_s(self) -> float | None:
        """Time after which the speed-up is measured separately; None without an event."""
        if self.busy_s:
            return EVENT_S + self.busy_s
        return None if self.event is None else EVENT_S + (0.0 if self.is_lasting else self.event_s)


CASES = {
    "good": Case(),
    "better": Case(acceptance=0.9),
    "poor": Case(acceptance=0.4),
    "useless": Case(acceptance=0.02),
    "slow": Case(draft_slowness=8.0),
    "contended": Case(contention=0.5),
    "hangs": Case(event=Kind.STALLS),
    "one of two hangs": Case(event=Kind.STALLS, drafters=2),
    "comes back": Case(event=Kind.STALLS, event_s=8.0),
    "falls": Case(event=Kind.DRAFTS_NOISE),
    "one of two falls": Case(event=Kind.DRAFTS_NOISE, drafters=2),
    "recovers": Case(event=Kind.DRAFTS_NOISE, event_s=8.0),
    "busy": Case(busy_s=BUSY_S),
}


class FixedLength(Speculation):
    """Requests the same draft length in every round, and awaits each block."""

    @property
    def pacing(self) -> PacingPolicy:
        return LockStep(patience=0.2)


class NoisyProcess(Process):
    """Process whose computations take random durations, longer on a busy machine."""

    def __init__(self, world: "NoisyWorld", address: str, clock: Clock) -> None:
        super().__init__(address, clock)
        self._world = world
        self._is_target = address.startswith(Role.TARGET.value)
        self._rng = random.Random(f"noise {address} {world.config.seed}")

    @property
    def slowness(self) -> float:
        world = self._world
        is_busy = EVENT_S <= self.clock.now < EVENT_S + world.case.busy_s
        noise = world.machine.noise * (3 if is_busy else 1)
        factor = self._rng.lognormvariate(0.0, noise) * (2 if self._rng.random() < STALLS else 1)
        if is_busy:
            factor *= 2
        if not self._is_target:
            return factor * world.case.draft_slowness * (2 if is_busy else 1)
        is_drafting = any(drafter._pass is not None for drafter in world.drafters)
        contention = world.machine.contention + world.case.contention + (0.5 if is_busy else 0.0)
        return factor * (1 + contention * is_drafting)


class NoisyWorld(World):
    """World of one case, with the commits' times."""

    def __init__(self, config: SimulationConfig, machine: Machine, case: Case) -> None:
        self.machine = machine
        self.case = case
        self.commits: list[tuple[float, int]] = []
        super().__init__(config)

    def _process(self, role: Role) -> Process:
        self._process_count[role.value] += 1
        return NoisyProcess(self, f"{role.value}-{self._process_count[role.value]}", self.clock)

    def _record_commit(self, tokens: int) -> None:
        super()._record_commit(tokens)
        self.commits.append((self.clock.now, tokens))

    def _record_end(self, assignment: SimulatedAssignment) -> None:
        if self.clock.now < SECONDS:
            super()._record_end(assignment)
        else:
            self.over.append(assignment)

    def _check(self) -> None:
        """Skips the checks of the final state: the run ends in the middle of the load."""

    def rate(self, first_s: float, last_s: float) -> float:
        """Returns the tokens per second in an interval."""
        return sum(tokens for at, tokens in self.commits if first_s <= at < last_s) / (last_s - first_s)


def run(machine: Machine, case: Case, sessions: int, speculation: Speculation, seed: int) -> NoisyWorld:
    events = () if case.event is None else (Fault(EVENT_S, Role.DRAFTER, 0, case.event, case.event_s),)
    config = SimulationConfig(
        costs=machine.costs,
        speculation=speculation,
        load=Workload(ClosedLoop(sessions), 10**6, prompt_tokens=32, new_tokens=160),
        fleet=Fleet(drafters=case.drafters, step_tokens=512),
        fault_plan=Faults(faults=events),
        seed=seed,
    )
    world = NoisyWorld(config, machine, case)
    world.run()
    return world


@dataclass
class Figures:
    """Results of one case at one number of sessions; speed-ups are relative to non-speculative decoding."""

    machine: str
    case: str
    sessions: int
    speedup: float
    fixed: float  # speed-up of the best fixed draft length
    length: int  # that length
    after: float | None = None  # speed-up after the event
    recovery_s: float | None = None  # seconds until the speed returns; None: never


def figures_of(machine: str, case: str, sessions: int, seeds: int, is_fixed: bool) -> Figures:
    """Runs one case with the controller, with each fixed length, and without speculation."""
    settings = MACHINES[machine], CASES[case], sessions
    acceptance = CASES[case].acceptance
    quality = DraftQuality((acceptance,), min(0.4, acceptance), branches=True)

    def runs(speculation: Speculation) -> list[NoisyWorld]:
        return [run(*settings, speculation, seed) for seed in range(seeds)]

    def rate(worlds: list[NoisyWorld], first_s: float = 0.0, last_s: float = SECONDS) -> float:
        return sum(world.rate(first_s, last_s) for world in worlds) / seeds

    plain = runs(Speculation(0, quality))
    adaptive = runs(Speculation(8, quality))
    fixed = {k: rate(runs(FixedLength(k, quality))) / rate(plain) for k in LENGTHS} if is_fixed else {0: 1.0}
    length = max(fixed, key=lambda k: fixed[k])
    found = Figures(machine, case, sessions, rate(adaptive) / rate(plain), fixed[length], length)
    if (ends_s := CASES[case].ends_s) is not None:
        found.after = rate(adaptive, ends_s + 2) / rate(plain, ends_s + 2)
        goal = 0.95 * (rate(plain) if CASES[case].is_lasting else rate(adaptive, WARM_S, EVENT_S))
        starts = [ends_s + WINDOW_S / 4 * step for step in range(int(4 * (SECONDS - ends_s) / WINDOW_S) - 3)]
        found.recovery_s = next((at - ends_s for at in starts if rate(adaptive, at, at + WINDOW_S) >= goal), None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default=",".join(MACHINES))
    parser.add_argument("--sessions", default="1,4,16,32")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seeds", type=int, default=4, help="number of runs of one session; more sessions need fewer")
    parser.add_argument("--no-fixed", action="store_true", help="skip fixed draft lengths")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    table = Table("machine", "case", "sessions", "speed-up", "fixed (length)", "after event", "recovery, s")
    results = []
    for machine in arguments.machines.split(","):
        for case in arguments.cases.split(","):
            for sessions in map(int, arguments.sessions.split(",")):
                f = figures_of(machine, case, sessions, max(1, arguments.seeds // sessions), not arguments.no_fixed)
                results.append(f.__dict__)
                after = "" if f.after is None else f"{f.after:.2f}"
                recovery = "" if f.recovery_s is None else f"{f.recovery_s:.2f}"
                table.add_row(
                    machine, case, str(sessions), f"{f.speedup:.2f}", f"{f.fixed:.2f} ({f.length})", after, recovery
                )
                print(json.dumps(f.__dict__), flush=True)
    Console(width=120).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
