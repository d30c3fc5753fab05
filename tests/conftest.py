"""Shared setup: one torch thread, so that tiny operations cost what they should on a busy machine."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    torch.set_num_threads(1)
