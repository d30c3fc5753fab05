"""Models and the processes that run them: drafters, targets, their engines, and gRPC between them.

A target replica (`target.py`) is a coordinator and one rank per tensor-parallel share. The coordinator owns the
verification scheduler and the streams; rank 0 receives one plan per step and returns one outcome per row
(`engine/executor.py`). A step is a ragged batch: prompt chunks, blocks to verify and single tokens share one forward
over a paged KV cache (`engine/runner.py`, `attention`, `compute/kv_cache.py`). `sampling` accepts or rejects draft
tokens on the device that holds the logits. Each position is conditioned on the draft tokens before it.

A drafter (`drafter.py`) owns the draft scheduler and one drafting method: a draft model, n-grams, or a head that reads
the target's hidden states. After sending a block, it drafts ahead of the verdict.

`speculative_decoding.py` contains the algorithm on one screen; the engine must commit the same tokens. Noise is a pure
function of (seed, choice, position, purpose, token id), so drafter and target draw the same noise on any device.

Models run in transformers' own code with `paged_attention`; Llama-like models run in a leaner decoder. At load,
a model that cannot be proved exact is refused. This package is independent of HTTP, text and the ledger. Importing it
does not import torch.
"""
