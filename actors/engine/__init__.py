"""The target's engine: executes step plans and returns outcomes.

`executor` runs a plan on one rank: it feeds the rows, then samples and decides where the logits are. `runner` makes the
forward over ragged rows and measures step costs. `tensor_parallel` runs one executor's forwards on several ranks, each
a Ray actor, and is the engine of a target replica; `process` and `memory` set up a rank's cores, device and cache size.
"""
