"""Decisions about speculation: each session's draft length, the wait for blocks, and whether speculation pays at all.

Input: measured times of steps and blocks, and which nodes of each block were accepted. Output: a `DraftingDecision` for
each session after each verdict, the time that a step may wait for blocks, and the drafters that can be relied on. Pure;
callers pass times in.

Start with `pacer.py`, which a target's leader calls. `policy.py` is the rule, `kill_switch.py` turns speculation off
where it was measured to lose, `cost_model.py` and `acceptance.py` are the estimates, and `circuit_breaker.py` holds the
circuit breakers.
"""
