"""Matrix products of a draft model or head, selected by the method's `quantization` option."""

from typing import NamedTuple

import torch

from actors.compute.linear import EightBitProjection, Product, can_round, projection
from cluster.errors import ModelError


class Products(NamedTuple):
    """Factory of matrix products, and the dtype of all other operations."""

    product: Product
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_products(quantization: str, dtype: str, device: torch.device) -> Products:
    """Selects the products of a model with dtype `dtype`.

    Quantized products round weights and rows to 8 bits; all other operations use float32. Raises ModelError if the
    device does not support them.
    """
    if quantization == "none":
        return Products(projection, getattr(torch, dtype))
    if not can_round(device):
        raise ModelError(f"8-bit products are not supported on {device}; remove the drafting method's quantization")
    return Products(EightBitProjection, torch.float32)
