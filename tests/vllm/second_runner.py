"""vLLM's second model runner on a CPU: its kernels in Triton's interpreter, with their meaning and not their speed."""

import os
from importlib.util import find_spec


def interpret_kernels() -> None:
    """Before vLLM is imported: it takes the second runner where it finds a Triton for its device."""
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton.backends import backends

    # Nobody asks it for anything: the interpreter compiles nothing.
    backends.setdefault("cpu", next(iter(backends.values())))


def is_there() -> bool:
    """Whether there is a Triton to interpret them with."""
    return find_spec("triton") is not None
