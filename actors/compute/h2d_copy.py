"""Copies of numbers from the host to the device: all numbers of one kind that a step needs go in one copy.

Each copy costs a launch, and a copy from pageable memory makes the host wait.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    parts: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ...]:
    """Returns the parts as one-dimensional tensors on a device: views of one tensor, copied at once.

    Copies to a GPU use pinned memory and do not wait; torch keeps that memory until the copy is done.
    """
    numbers = [number for part in parts for number in part]
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return torch.split(host.to(device, non_blocking=True), [len(part) for part in parts])
