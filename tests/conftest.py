"""Shared setup: limits torch to one thread, which is faster for tiny operations on a busy machine."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
