"""From a step plan to its outcomes.

`executor` runs a plan on one rank: it feeds the rows, then samples and decides beside the logits. `runner` makes the
forward over ragged rows and measures what steps cost. `tensor_parallel` runs one executor's forwards on several ranks,
each a Ray actor, and is the engine a target replica uses; `process` and `memory` set up a rank's cores, device and
cache size.
"""
