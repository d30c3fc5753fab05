"""Runs vLLM as a target's engine. Our scheduler plans the verification; vLLM runs pages, batch slots and forwards.

`engine.py` is the engine that a target uses; start there. `core.py` runs vLLM's EngineCore step by step, and
`block_scheduler.py` makes vLLM's scheduler follow our plan. `worker.py`, `noise_processor.py` and `coupled_sampler.py`
make vLLM's workers sample with our noise and keep hidden states, and `self_test.py` checks all of it at start.

Nothing outside this folder imports vLLM, and the folder is imported only if the configuration selects vLLM.
"""
