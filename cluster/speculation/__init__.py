"""Decisions about speculation: each session's draft length, the wait for blocks, and whether speculation pays at all.

Input: measured times of steps and blocks, and which nodes of each block were accepted. Output: a `DraftingDecision` for
each session after each verdict, the time that a step may wait for blocks, and the drafters that can be relied on. Pure;
callers pass times in.

Start with `controller`. A target's leader calls `SpeculationController`, which holds the measurements; `Adaptive` is
the policy, and `KillSwitch` turns speculation off where it was measured to lose. `estimators` estimates acceptance and
step cost, and `circuit_breaker` has the breakers for silent or overloaded drafters.
"""
