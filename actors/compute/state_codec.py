"""Encoding of hidden states as bytes: bfloat16, or 8 bits with one scale per token.

The scale is amax / 448 and at least 1e-12, over all layers of a token, as in vLLM's and speculators' stores of hidden
states. There, acceptance with 8 bits equalled that with 16.
"""

import torch
from torch import Tensor

from protos.states import SCALE_BYTES, StateDtype, StatesFormat

LARGEST = 448.0  # largest finite e4m3 value
LEAST_SCALE = 1e-12


def encode_rows(rows: Tensor, dtype: StateDtype) -> Tensor:
    """Encodes rows, (n, width), as bytes, (n, row bytes), on the same device."""
    if dtype is StateDtype.BFLOAT16:
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
    rows = rows.float()
    scales = (rows.abs().amax(dim=-1, keepdim=True) / LARGEST).clamp_min_(LEAST_SCALE)
    scaled = (rows / scales).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return torch.cat([scaled.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def decode_rows(data: bytes, layout: StatesFormat) -> Tensor:
    """Decodes rows to float32, (n, width). NaN and infinity become 0, because the bytes come from a peer."""
    if not data:
        return torch.zeros(0, layout.width)
    encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, layout.row_bytes)
    if layout.dtype is StateDtype.BFLOAT16:
        rows = encoded.view(torch.bfloat16).float()
    else:
        elements = encoded[:, :-SCALE_BYTES].contiguous().view(torch.float8_e4m3fn)
        rows = elements.float() * encoded[:, -SCALE_BYTES:].contiguous().view(torch.float32)
    return torch.nan_to_num_(rows, nan=0.0, posinf=0.0, neginf=0.0)
