"""Simulation of the whole system under a virtual clock: real schedulers, with costs instead of models and network.

Start at `world.py`: it builds a run from a `SimulationConfig` (`config.py`), executes it and checks the outcome.
`simulated_router.py`, `simulated_drafter.py` and `simulated_target.py` are the processes, `network.py` connects them
and `oracle.py` replaces both models. `random_scenario.py` and `faults.py` draw random systems and faults. Imports no
torch, gRPC or Ray.
"""
