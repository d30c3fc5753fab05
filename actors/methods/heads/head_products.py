"""How a head's matrix products are computed, as its options say."""

from typing import NamedTuple

import torch

from actors.compute.linear import EightBitProjection, Product, can_round, projection
from cluster.draft_options import HeadOptions
from cluster.errors import ModelError


class HeadProducts(NamedTuple):
    """What makes them of weights, and the type of all else that a head computes with."""

    product: Product
    dtype: torch.dtype


def head_products(options: HeadOptions, dtype: str, device: torch.device) -> HeadProducts:
    """Of models of type `dtype`. Quantised, they are of weights and rows rounded to 8 bits, and float32 beside them.

    Raises ModelError where there are none.
    """
    if options.quantization == "none":
        return HeadProducts(projection, getattr(torch, dtype))
    if not can_round(device):
        raise ModelError(f"there are no products in 8 bits on {device}; leave the method's quantization out")
    return HeadProducts(EightBitProjection, torch.float32)
