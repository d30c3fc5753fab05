"""Reader of a checkpoint's folder without its weights: tensors with names, shapes and dtypes, but no memory.

These and the configuration determine what a head is, so functions that resolve a loaded head work on them too.
"""

import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from actors.drafters.heads.files import PICKLES, HeadFiles, read_config
from actors.models.weights import read_tensors, stored_tensors
from cluster.errors import ModelError

ID_TABLES = ("d2t", "token_map")  # tables of the tokens that a head proposes: small, and needed to describe it
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)


@dataclass(frozen=True, slots=True)
class StoredSize:
    """Size of all tensors of a checkpoint."""

    parameters: int  # floating-point elements
    bytes: int


def read_headers(folder: Path) -> HeadFiles:
    """Reads a folder like `read_head`, but on the device `meta`; only the tables of draft ids are loaded.

    Pickles are read as tensors only, so none of their code runs. Raises ModelError if the folder holds no checkpoint.
    """
    config = read_config(folder / "config.json")
    paths = sorted({entry.path for entry in stored_tensors(folder).values()}) or sorted(folder.glob("*.safetensors"))
    tensors = {name: tensor for path in paths for name, tensor in _safetensors_header(path).items()}
    if not tensors:
        pickles = sorted({path for pattern in PICKLES for path in folder.glob(pattern)})
        tensors = {name: tensor for path in pickles for name, tensor in _pickle_header(path).items()}
    if not tensors:
        raise ModelError(f"{folder} holds no tensors; expected *.safetensors or {', '.join(PICKLES)}")
    return HeadFiles(folder, config, tensors)


def stored_size(tensors: Mapping[str, Tensor]) -> StoredSize:
    """Returns the size; tables of ids and masks count as bytes, not as parameters."""
    numbers = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    return StoredSize(
        parameters=sum(tensor.numel() for tensor in numbers),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
    )


def _safetensors_header(path: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt") as shard:
            for name in list(shard.keys()):
                found[name] = _without_memory(path, name, shard.get_slice(name))
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{path} is no safetensors file: {error}") from error
    return found | read_tensors(path, [name for name in found if _is_id_table(name)])


def _without_memory(path: Path, name: str, part: Any) -> Tensor:
    dtype = DTYPES.get(part.get_dtype())
    if dtype is None:
        raise ModelError(f"{name} in {path} is of type {part.get_dtype()}, expected one of {', '.join(DTYPES)}")
    return torch.empty(tuple(part.get_shape()), dtype=dtype, device="meta")


def _pickle_header(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a pickle. Files of torch before 1.6 are one stream, so they are read whole."""
    is_mapped = zipfile.is_zipfile(path)
    try:
        found = torch.load(path, map_location="meta", mmap=is_mapped, weights_only=True)
        tables = torch.load(path, map_location="cpu", mmap=is_mapped, weights_only=True) if _has_tables(found) else {}
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ModelError(f"{path} cannot be read as tensors alone: {error}; convert it to safetensors") from error
    if not isinstance(found, Mapping) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ModelError(f"{path} holds something else than tensors by name; convert it to safetensors")
    return {str(name): tables[name].clone() if _is_id_table(name) else tensor for name, tensor in found.items()}


def _has_tables(found: Any) -> bool:
    return isinstance(found, Mapping) and any(map(_is_id_table, found))


def _is_id_table(name: str) -> bool:
    return name.rpartition(".")[2] in ID_TABLES
