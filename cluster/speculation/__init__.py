"""Speculation control: each session's draft length, the wait for blocks, and whether to speculate at all.

Inputs are measured durations of steps and blocks, and the accepted nodes of each block. Outputs are a
`DraftingDecision` per session after each verdict, the maximum wait of a step for blocks, and the state of each
drafter's circuit breaker. Pure; callers pass times in.

Start with `controller`. The verification scheduler calls `SpeculationController`, which collects the measurements.
`Adaptive` is the policy, and `KillSwitch` turns speculation off where it measurably loses. `estimators` estimates
acceptance and step cost. `circuit_breaker` runs in the router, and pauses drafters without useful
blocks.
"""
