"""Reads a draft head's configuration and tensors, in the layout of any publisher, and tensors borrowed from the target.

Each method's loader recognizes the kind of head by configuration keys and tensor names.
"""

import pickle
import re
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actors.models.checkpoint import first_existing, folder_with, local_folder
from actors.models.config_reader import CONFIG, one_line, read_config, read_json
from actors.models.weights import read_tensors, stored_tensors
from cluster.config import DraftPool
from cluster.errors import ModelError

PICKLES = ("*.bin", "*.pt", "*.pth")
TRAINER_PICKLES = ("training_args.bin", "optimizer.*", "scheduler.*", "rng_state*")  # of transformers' Trainer
EMBEDDING = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
    "gpt_neox.embed_in.weight",
)
HEAD = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "embed_out.weight",
    *EMBEDDING,
)  # a tied head is stored as the embedding
ID_TABLES = ("d2t", "t2d", "token_map")  # small tables of token ids, needed to describe a head
BORROWED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # others need scales
QUANTIZATION = "quantization_config"
META = torch.device("meta")  # holds tensors without values
TIED = "tie_word_embeddings"

Aliases = Sequence[tuple[str, str]]
"""Pairs of a regular expression for the start of a tensor name and its replacement."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadFiles:
    """Configuration and tensors in a head's folder."""

    folder: Path
    config: dict[str, Any]
    tensors: Mapping[str, Tensor]  # on the CPU, in their stored dtypes

    def renamed(self, aliases: Aliases) -> "HeadFiles":
        """Returns the files with canonical tensor names; the first matching alias applies.

        Raises ModelError if two tensors get the same name.
        """
        tensors: dict[str, Tensor] = {}
        for stored, tensor in self.tensors.items():
            name = _renamed(stored, aliases)
            if name in tensors:
                raise ModelError(f"{self.folder} holds the tensor {name} under two names; remove {stored}")
            tensors[name] = tensor
        return replace(self, tensors=tensors)

    def size(self, options: Mapping[str, Any], key: str, default: int | None = None) -> int:
        """Reads a size from configuration options. Raises ModelError unless it is a positive integer."""
        found = options.get(key)
        if found is None and default is not None:
            return default
        if not isinstance(found, int) or found < 1:
            raise ModelError(
                f"{key} in the {CONFIG} of {self.folder} is {found!r}, expected a positive whole number; correct it, or"
                " fetch the head again"
            )
        return found

    def tensor(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """Returns a tensor. Raises ModelError if it is missing or has the wrong shape."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(
                f"{self.folder} holds no tensor {name}, only {_listed(self.tensors)}; fetch or convert the head again"
            )
        if shape is not None and tuple(tensor.shape) != shape:
            raise ModelError(
                f"{name} in {self.folder} has shape {tuple(tensor.shape)}, expected {shape}; correct the sizes in"
                f" {CONFIG}, or use a head made for this target"
            )
        return tensor

    def borrowed(self, target_folder: Path, names: Sequence[str], shape: tuple[int, ...]) -> Tensor:
        """Reads a tensor of the target like `target_tensor`. Also raises ModelError if it has the wrong shape."""
        found = target_tensor(target_folder, names)
        if tuple(found.shape) != shape:
            raise ModelError(
                f"{self.folder} borrows {names[0]} of {target_folder}, which has shape {tuple(found.shape)}, expected"
                f" {shape}; use a head made for this target"
            )
        return found

    def refuse_quantized(self) -> None:
        """Raises ModelError if the configuration describes quantized weights."""
        if self.config.get(QUANTIZATION):
            raise ModelError(
                f"{self.folder} is a quantized draft head, which is not supported; use the unquantized head"
            )

    def refuse_unused(self, names: Sequence[str], family: str) -> None:
        """Raises ModelError for tensors that no supported head of the family uses."""
        raise ModelError(
            f"{self.folder} holds tensors that no supported {family} head uses: {', '.join(names)}; use another head"
        )


def read_head(folder: Path) -> HeadFiles:
    """Reads `config.json` and the tensors of a folder; safetensors take precedence over pickles.

    Files are memory-mapped and read when a tensor is placed, except pickles in the format before torch 1.6.

    Loads only tensors from pickles, so code in a pickle never runs. Raises ModelError if the folder contains no head.
    """
    config = read_json(folder / CONFIG)
    tensors = _read_safetensors(folder) or _read_pickles(folder)
    if not tensors:
        raise ModelError(
            f"{folder} holds no tensors, expected *.safetensors or {', '.join(PICKLES)}; fetch the head again"
        )
    return HeadFiles(folder, config, tensors)


def read_headers(folder: Path) -> HeadFiles:
    """Reads names, shapes and dtypes of a head's tensors; only tables of token ids have values.

    Raises ModelError if the folder contains no checkpoint.
    """
    files = read_head(folder)  # maps files into memory without reading weights
    tensors = {
        name: tensor if name.rpartition(".")[2] in ID_TABLES else tensor.to(META)
        for name, tensor in files.tensors.items()
    }
    return replace(files, tensors=tensors)


def head_folder(draft: DraftPool) -> Path:
    """Returns the folder of the head in `draft.model`; downloads it if needed."""
    assert draft.model is not None, "a draft head requires draft.model"
    return local_folder(draft.model, more=PICKLES)


def target_tensor(target_folder: Path, names: Sequence[str]) -> Tensor:
    """Reads the first of these tensors, such as `EMBEDDING` or `HEAD`, in the target's checkpoint.

    Raises ModelError if the checkpoint contains none, or only a quantized one. The embedding serves as `HEAD` only if
    the target ties both.
    """
    stored = stored_tensors(target_folder, partial=True)
    name = next((name for name in names if name in stored), None)
    if name is None:
        raise ModelError(
            f"the head borrows a tensor of the target, but {target_folder} holds none of {', '.join(names)};"
            " use a head with its own"
        )
    if names == HEAD and name in EMBEDDING and not _ties_head(target_folder):
        raise ModelError(
            f"the head borrows the target's LM head, but {target_folder} holds neither {HEAD[0]} nor a tied embedding;"
            " use a target whose LM head is not quantized, or a head with its own"
        )
    tensor = read_tensors(stored[name].path, [name])[name]
    if tensor.dtype not in BORROWED_DTYPES:
        raise ModelError(
            f"the head borrows {name}, which {target_folder} stores as {str(tensor.dtype).removeprefix('torch.')};"
            " use a target that stores it as float32, float16 or bfloat16, or a head with its own"
        )
    return tensor


def folder_to_borrow_from(target: str, groups: Sequence[Sequence[str]]) -> Path:
    """Returns the target's folder; downloads only the first tensor of each group, such as `EMBEDDING`.

    `target` is a folder or a Hugging Face id.
    """
    if not groups:
        return local_folder(target, with_weights=False)
    return folder_with(target, first_existing(groups))


def _ties_head(target_folder: Path) -> bool:
    config = read_config(target_folder)
    return bool(getattr(config.get_text_config(), TIED, getattr(config, TIED, False)))


def _read_safetensors(folder: Path) -> dict[str, Tensor]:
    """Reads the shards in the index; without an index, all files."""
    paths = sorted({entry.path for entry in stored_tensors(folder).values()}) or sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in paths for name, tensor in read_tensors(path).items()}


def _read_pickles(folder: Path) -> dict[str, Tensor]:
    """Reads all pickles except those of a training's state."""
    found = {path for pattern in PICKLES for path in folder.glob(pattern)}
    paths = sorted(path for path in found if not any(path.match(pattern) for pattern in TRAINER_PICKLES))
    return {name: tensor for path in paths for name, tensor in _read_pickle(path).items()}


def _read_pickle(path: Path) -> dict[str, Tensor]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
        raise ModelError(
            f"{path} cannot be read as tensors alone: {one_line(error)}; convert it to safetensors"
        ) from error
    if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ModelError(f"{path} does not map names to tensors; convert it to safetensors")
    return {str(name): tensor for name, tensor in tensors.items()}


def _renamed(name: str, aliases: Aliases) -> str:
    for pattern, replacement in aliases:
        renamed, count = re.subn(f"^(?:{pattern})", replacement, name)
        if count:
            return renamed
    return name


def _listed(tensors: Mapping[str, Tensor]) -> str:
    names = sorted(tensors)
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
