"""Decisions about speculation: each session's draft length, the wait for blocks, and whether speculation pays at all.

Input: measured times of steps and blocks, and which nodes of each block were accepted. Output: a `DraftingDecision` for
each session after each verdict, the time that a step may wait for blocks, and the drafters that can be relied on. Pure;
callers pass times in.

Start with `pacer.py`, which a target's leader calls. `policy.py` is the rule, `gate.py` turns speculation off where it
was measured to lose, `step_cost.py` and `acceptance.py` are the estimates, and `health.py` holds the circuit breakers.
"""
