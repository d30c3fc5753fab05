"""Command line of the simulator: `random_scenarios` runs thousands of fault schedules, `scale` one large fleet.

Prints the seed and the violated check of each failed run; the seed reproduces the run.
"""

import argparse
import gc
import time

from cluster.costs import CostModel, DraftCost, ForwardCost
from tools.simulation.config import Fleet, Mode, SimulationConfig, Speculation, random_scenario
from tools.simulation.oracle import ClosedLoop, DraftQuality, Workload
from tools.simulation.world import World


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.simulation", description=__doc__)
    commands = parser.add_subparsers(required=True)
    random_scenarios = commands.add_parser("random_scenarios", help="random fault schedules")
    random_scenarios.add_argument("--count", type=int, default=3000)
    random_scenarios.add_argument("--first", type=int, default=0, help="seed of the first run")
    random_scenarios.set_defaults(run=_random_scenarios)
    scale = commands.add_parser("scale", help="one run of a large fleet")
    scale.add_argument("--targets", type=int, default=200)
    scale.add_argument("--drafters", type=int, default=800)
    scale.add_argument("--sessions", type=int, default=20_000, help="concurrent sessions, with 64 tokens each")
    scale.add_argument("--mode", type=Mode, default=Mode.ADAPTIVE, help=", ".join(mode.value for mode in Mode))
    scale.set_defaults(run=_scale)
    arguments = parser.parse_args()
    arguments.run(arguments)


def _random_scenarios(arguments: argparse.Namespace) -> None:
    began = time.perf_counter()
    failed = 0
    for seed in range(arguments.first, arguments.first + arguments.count):
        try:
            World(random_scenario(seed)).run()
        except AssertionError as error:
            failed += 1
            print(f"seed {seed}: {error}")
    print(f"{arguments.count} random scenarios, {failed} failed, {time.perf_counter() - began:.1f} s")
    raise SystemExit(failed > 0)


def _scale(arguments: argparse.Namespace) -> None:
    costs = CostModel(
        target=ForwardCost.linear(0.02, per_token_s=0.00002),
        draft=DraftCost(forward=ForwardCost.linear(0.002, 0.00005)),
    )
    load = Workload(ClosedLoop(arguments.sessions), arguments.sessions)
    fleet = Fleet(arguments.targets, arguments.drafters, routers=8, sessions_per_target=128, step_tokens=4096)
    gc.disable()  # there are no reference cycles, and scanning millions of objects is slow
    began = time.perf_counter()
    cpu = time.process_time()
    report = World(SimulationConfig(costs, Speculation(5, DraftQuality((0.8,)), arguments.mode), load, fleet)).run()
    print(report)
    print(f"{time.perf_counter() - began:.1f} s, including {time.process_time() - cpu:.1f} s of processor time")
    gc.freeze()  # skip the collection at exit, which takes seconds


if __name__ == "__main__":
    main()
