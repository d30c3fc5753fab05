"""Simulates the whole system under a virtual clock.

Routers, drafters and targets run their real ledgers, schedulers and speculation control. Two parts are replaced:
`network.py` stands in for gRPC, with delays, losses and broken streams, and `oracle.py` stands in for both models. A
target's text is a pseudo-random function of seed, session and position. The check for equality with non-speculative
decoding is therefore a comparison of integers, under any schedule and any faults. A `CostModel` sets the virtual time
of forward passes.

- `config.py`: parameters and faults of a run (`SimulationConfig`), and random draws of both.
- `world.py`: builds the processes, runs the workload, checks the invariants, and reports speeds. Start here.
- `actors.py`: the simulated router, drafter and target around their real schedulers.

Equal seeds give equal runs. The package imports no torch, gRPC or Ray. The planner (`tools/planning`) and the random
fault schedules (`python -m tools.simulation random_scenarios`) use it.
"""
