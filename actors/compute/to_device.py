"""Numbers from the host to the device: all that a step needs of one kind in one copy.

Each copy costs a launch, and one from pageable memory makes the host wait.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    parts: Sequence[Sequence[float]], device: torch.device, dtype: torch.dtype = torch.int64
) -> tuple[Tensor, ...]:
    """The parts as tensors of one dimension on a device: views of one tensor, copied at once.

    To a GPU they go from pinned memory and without waiting; torch keeps that memory until the copy is done.
    """
    numbers = [number for part in parts for number in part]
    host = torch.tensor(numbers, dtype=dtype, pin_memory=device.type == "cuda")
    return torch.split(host.to(device, non_blocking=True), [len(part) for part in parts])
