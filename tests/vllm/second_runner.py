"""vLLM's second model runner on a CPU: its kernels in Triton's interpreter, with their meaning and not their speed.

`TRITON_INTERPRET=1 pytest tests/vllm/test_core.py`, with a Triton to be found. Triton reads the variable when it is
first imported, so it is to be set before Python begins.
"""

import os

IS_ASKED_FOR = os.environ.get("TRITON_INTERPRET") == "1"


def interpret_kernels() -> None:
    """Runs before vLLM is imported, which chooses the second runner if it finds a Triton for its device."""
    from triton.backends import backends

    # Nobody asks it for anything: the interpreter compiles nothing.
    backends.setdefault("cpu", next(iter(backends.values())))
