"""Simulates the whole system under a virtual clock.

Routers, drafters and targets run their real ledgers, schedulers and speculation control. Two things are replaced:
`network.py` delivers messages with delays, losses and broken streams instead of gRPC, and `oracle.py` answers for both
models. A target's text is a pseudo-random function of seed, session and position, so "the output equals non-speculative
decoding" is a comparison of integers under any schedule and any faults. A `CostModel` sets the virtual time of forward
passes.

- `config.py`: parameters of a run (`SimulationConfig`), its faults, and random draws of both.
- `world.py`: builds the processes, runs the workload, checks the invariants, and reports speeds. Start here.
- `actors.py`: the simulated router, drafter and target around their real schedulers.

The same seed gives the same run. The package imports no torch, gRPC or Ray. The planner (`tools/planning`) runs on it,
as do thousands of random fault schedules (`python -m tools.simulation random_scenarios`).
"""
