"""The target's engine: executes step plans and returns outcomes.

`executor` runs a plan on one rank: it feeds the rows, then samples and decides on the device that holds the logits.
`runner` makes one forward over ragged rows and measures step costs. `tensor_parallel` is the engine of a target replica
and runs one executor's forwards on several ranks, each a Ray actor. `step_link` connects the coordinator with the
leading rank, and that rank with its followers; `step_codec` and `forward_codec` encode the messages. `process` and
`memory` set up a rank's cores, device and cache size.
"""
