"""Runs vLLM as a target's engine. Our scheduler plans the verification; vLLM manages pages, batch slots and forwards.

Start with `engine.py`, the engine of a target. `core.py` runs vLLM's EngineCore step by step, and `block_scheduler.py`
makes vLLM's scheduler follow our plan. `worker.py`, `noise_processor.py` and `coupled_sampler.py` make vLLM's workers
sample with our noise and store hidden states. `self_test.py` verifies blocks with known results at start.

Only this folder imports vLLM, and it is imported only if the configuration selects vLLM.
"""
