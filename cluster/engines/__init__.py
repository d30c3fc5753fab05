"""Engine differences that schedulers and configuration must know: where cache pages are kept, and vLLM's arguments.

`session_memory.py` is the interface of cache pages to the verification scheduler, with the scheduler's own pages and an
engine's pages as implementations. `vllm_options.py` checks the arguments of `target.vllm`. The engines themselves are
in `actors`. Start with `session_memory.py`.
"""
