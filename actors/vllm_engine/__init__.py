"""vLLM as a target's engine: our scheduler decides what is verified, vLLM has pages, seats, prompts and forwards.

Nothing outside of this folder imports vLLM, and this folder only where a configuration asks for it.
"""
