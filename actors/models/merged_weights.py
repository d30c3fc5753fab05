"""Linear layers that a decoder merges into one product: they share a tensor from the start, so merging copies nothing.

Queries, keys and values have the same input, as do gate and up projections. Weights are loaded directly into rows of
the merged tensor, and each layer's own weight is a view of its rows.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

MERGED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def merged_names(model: nn.Module) -> list[tuple[str, ...]]:
    """Returns the names of weights that belong into one tensor, in the order of its rows."""
    groups = []
    for parent, module in model.named_modules():
        children = dict(module.named_children())
        for names in MERGED:
            linears = [children.get(name) for name in names]
            shapes = [linear.weight.shape[1:] for linear in linears if type(linear) is nn.Linear]
            if len(shapes) == len(names) and len(set(shapes)) == 1:
                groups.append(tuple(f"{parent}.{name}.weight".removeprefix(".") for name in names))
    return groups


def split_rows(rows: Sequence[int], columns: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Creates an uninitialized tensor of the sum of `rows`; returns views of its parts, (rows, columns) each."""
    return list(torch.split(torch.empty(sum(rows), columns, dtype=dtype, device=device), list(rows)))


def join_rows(parts: Sequence[Tensor]) -> Tensor:
    """Returns tensors one below the other: the tensor of which they are consecutive rows, or a copy."""
    first = parts[0]
    are_adjacent = all(
        one.is_contiguous()
        and other.is_contiguous()
        and one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        and other.storage_offset() == one.storage_offset() + one.numel()
        for one, other in pairwise(parts)
    )
    if not are_adjacent:
        return torch.cat(list(parts))
    return first.as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def release(linear: nn.Linear) -> None:
    """Removes a layer's weight, so that it is freed once nothing else holds it; the layer cannot compute afterwards."""
    linear.register_parameter("weight", None)
