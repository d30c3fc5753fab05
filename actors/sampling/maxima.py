"""Largest value of each row with its column."""

import torch
from torch import Tensor

SEGMENT = 128  # columns; longer and shorter segments take longer
FEW_ROWS = 8  # fewer rows take as long either way


def row_maxima(values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each row's largest value and its first column: (rows, columns) -> twice (rows,). NaN is the largest.

    On a CPU, torch searches one element at a time for the column of a maximum, but compares whole vectors in float32
    for the maximum alone. There, this function finds the segment of the maximum first, which is up to eight times
    faster. The result has the type of `values`, or float32 for a type of fewer bits.
    """
    rows, columns = values.shape
    if values.device.type != "cpu" or rows < FEW_ROWS or columns % SEGMENT:
        return values.max(dim=-1)
    wide = values.float() if values.dtype.itemsize < torch.float32.itemsize else values
    segments = wide.view(rows, columns // SEGMENT, SEGMENT)
    largest, segment = segments.amax(dim=-1).max(dim=-1)
    found = segments[torch.arange(rows), segment]
    return largest, segment * SEGMENT + found.max(dim=-1).indices
