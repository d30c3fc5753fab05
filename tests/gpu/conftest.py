"""Skips all GPU tests without a CUDA device."""

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch sees none")
    return torch.device("cuda", 0)
