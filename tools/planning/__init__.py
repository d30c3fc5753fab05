"""`slipstream plan`: finds the best fleet for a load at given costs.

- `command.py` turns the command's options into a `PlanInput`.
- `plan.py` runs the search: short simulations select promising fleets, full simulations decide. Start here.
- `trial.py` simulates one candidate fleet, ranks the results, and finds the limits of a fleet's gain.
- `estimates.py` defines the input types and closed formulas, which also estimate in-process drafting.
- `plan_report.py` prints tables, JSON and a chart, and compares formulas with simulations (`--theory`).

Every candidate, including non-speculative decoding, runs in the simulator with the real schedulers, since no simple
formula models targets that wait for a shared drafter.
"""
