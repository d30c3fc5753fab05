"""Selection of a head's matrix products from its quantization option."""

from typing import NamedTuple

import torch

from actors.compute.linear import EightBitProjection, Product, can_round, projection
from cluster.draft_options import HeadOptions
from cluster.errors import ModelError


class HeadProducts(NamedTuple):
    """Factory for a head's matrix products, and the dtype of everything else that the head computes."""

    product: Product
    dtype: torch.dtype


def head_products(options: HeadOptions, dtype: str, device: torch.device) -> HeadProducts:
    """Selects products for a model of type `dtype`.

    Quantized products round weights and rows to 8 bits, and the rest of the head is float32. Raises ModelError if the
    device has no such products.
    """
    if options.quantization == "none":
        return HeadProducts(projection, getattr(torch, dtype))
    if not can_round(device):
        raise ModelError(f"there are no products in 8 bits on {device}; leave the method's quantization out")
    return HeadProducts(EightBitProjection, torch.float32)
