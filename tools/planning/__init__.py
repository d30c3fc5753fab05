"""Implements `slipstream plan`: finds the fleet that serves a load best at given costs.

- `command.py` turns the command's options into a `PlanInput`.
- `plan.py` runs the search. Short simulations select promising fleets, full ones decide. Start here.
- `trial.py` simulates one candidate fleet, ranks the results, and finds the limits of a fleet's gain.
- `estimates.py` holds the input types and the closed formulas, which also estimate in-process drafting.
- `plan_report.py` prints tables, JSON and a chart, and compares formulas with simulations (`--theory`).

Every candidate, including non-speculative decoding, runs through the simulator with the real schedulers: targets that
share a drafter wait for it in ways that no simple formula captures.
"""
