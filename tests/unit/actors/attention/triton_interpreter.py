"""Creates the Triton backend for the CPU, or skips a test where Triton's interpreter is not available."""

import os

import pytest
import torch

from actors.attention.paged import Paged, paged_for

CPU = torch.device("cpu")


def interpreted_paged() -> Paged:
    pytest.importorskip("triton", reason="needs Triton: make test-triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs Triton's interpreter: make test-triton")
    return paged_for(CPU)
