"""Runs vLLM's second model runner on a CPU, with its kernels in Triton's slow but exact interpreter.

`TRITON_INTERPRET=1 pytest tests/vllm/test_core.py` requires Triton. Triton reads the variable on its first import, so
set it before Python starts.
"""

import os

IS_ASKED_FOR = os.environ.get("TRITON_INTERPRET") == "1"


def interpret_kernels() -> None:
    """Enables the interpreter; call it before importing vLLM, which selects its second runner if it finds Triton."""
    from triton.backends import backends

    # A stub suffices, because the interpreter compiles nothing.
    backends.setdefault("cpu", next(iter(backends.values())))
