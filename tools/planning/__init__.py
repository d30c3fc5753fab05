"""`slipstream plan`: finds the fleet that serves a load best.

`command.py` and `plan_request.py` turn options into a `PlanInput` (`inputs.py`). `plan.py` simulates candidate
fleets through `trial.py` and compares them; `break_even.py` finds where the gain ends. `expectation.py` and
`formulas.py` are the closed forms, `theory.py` checks them against the simulator, and `plan_report.py` shows the
result. Start with `plan.py`.
"""
