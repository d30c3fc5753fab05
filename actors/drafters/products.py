"""Matrix products of a draft model or head, selected by the method's `quantization` option."""

from typing import NamedTuple

import torch

from actors.compute.linear import EightBitProjection, Product, can_round, float_eight, four_bit, projection
from cluster.errors import ModelError

FP8_CAPABILITY = (8, 9)  # minimum compute capability: L4 and later GPUs
INT4_CAPABILITY = (8, 0)  # A100 and later


class Products(NamedTuple):
    """Factory of matrix products, and the dtype of all other operations."""

    product: Product
    dtype: torch.dtype

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def choose_products(quantization: str, dtype: str, device: torch.device) -> Products:
    """Selects the products of a model with dtype `dtype`.

    All other operations use float32 with int8, and bfloat16 with fp8 and int4. Raises ModelError if the device does not
    support the quantization.
    """
    if quantization == "none":
        return Products(projection, getattr(torch, dtype))
    choice, is_supported = {
        "int8": (Products(EightBitProjection, torch.float32), can_round(device)),
        "fp8": (Products(float_eight, torch.bfloat16), _is_gpu_of(device, FP8_CAPABILITY)),
        "int4": (Products(four_bit, torch.bfloat16), _is_gpu_of(device, INT4_CAPABILITY)),
    }[quantization]
    if not is_supported:
        raise ModelError(f"{quantization} is not supported on {device}; remove the drafting method's quantization")
    return choice


def _is_gpu_of(device: torch.device, capability: tuple[int, int]) -> bool:
    """Returns whether the device is a GPU of at least this compute capability."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability
