"""Models and the processes that run them: drafters, targets, their engines, and gRPC between them.

A target replica (`target.py`) is a coordinator and one rank per tensor-parallel share. The coordinator owns the
verification scheduler and the streams; rank 0 receives one plan per step and returns one outcome per row
(`engine/executor.py`). A step is a ragged batch: prompt chunks, blocks to verify and single tokens share one forward
over a paged KV cache (`engine/runner.py`, `attention`, `compute/kv_cache.py`). `sampling` accepts or rejects where the
logits are, position by position, taking the preceding draft tokens into account.

A drafter (`drafter.py`) owns the draft scheduler and one drafting method: a draft model, n-grams, or a head that reads
the target's hidden states. After sending a block it drafts ahead of the verdict.

`speculative_decoding.py` has the algorithm on one screen; the engine must commit the same tokens. Noise is a pure
function of (seed, choice, position, purpose, token id), so drafter and target draw the same on any device.

Models run by transformers' own code with `paged_attention`, or by a leaner decoder for models of the Llama kind. A
model that cannot be proved exact at load is refused. This package is independent of HTTP, text and the ledger, and
importing it imports no torch.
"""
