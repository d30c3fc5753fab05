"""Hidden states as bytes and back: bfloat16, or 8 bits with a scale for each token.

One scale a token, amax / 448 with at least 1e-12, over all of its layers: as vLLM's and speculators' stores of hidden
states have it, where acceptance with 8 bits was that with 16.
"""

import torch
from torch import Tensor

from protos.states import SCALE_BYTES, StateDtype, StatesFormat

LARGEST = 448.0  # of e4m3
LEAST_SCALE = 1e-12


def encode_rows(rows: Tensor, dtype: StateDtype) -> Tensor:
    """Of shape (n, width), as bytes, (n, row bytes), on the same device."""
    if dtype is StateDtype.BFLOAT16:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
    rows = rows.float()
    scales = (rows.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_min_(LEAST_SCALE)
    scaled = (rows / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.cat([scaled.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def decode_rows(data: bytes, layout: StatesFormat) -> Tensor:
    """What such bytes stand for, (n, width) in float32; what is no finite number is 0, for it came from elsewhere."""
    if not data:
        return torch.zeros(0, layout.width)
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, layout.row_bytes)
    if layout.dtype is StateDtype.BFLOAT16:
        rows = encoded.view(torch.bfloat16).float()
    else:
        elements = encoded[:, :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn)
        rows = elements.float() * encoded[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return torch.nan_to_num_(rows, nan=0.0, posinf=0.0, neginf=0.0)
