"""Loads weights from safetensors shards into an empty model: only what this rank holds, cast on the way.

Knows nothing of architectures or of how a model is split: it is told which part of which parameter is wanted.
"""

import json
import re
import resource
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.utils import logging

from actors.models.sharding import Cut
from cluster.errors import ModelError

SHOWN_AFTER_S = 2.0  # a load that takes longer shows a progress bar
NOT_READ = (
    r"rotary_emb\.inv_freq$",  # old checkpoints carry what is computed from the config
    r"^mtp\.",  # modules of multi-token prediction, which drafters read
    r"^model\.mtp_layers\.",
)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor of a checkpoint is."""

    path: Path
    shape: tuple[int, ...]
    key: str  # in that file


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What loading took on one rank."""

    seconds: float
    peak_bytes: int  # the most that was held so far: by the process with what it reads, on a GPU by torch
    parameters: int  # tied ones once


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """A folder's tensors by key; none where it has no safetensors under the names that transformers reads."""
    index = folder / "model.safetensors.index.json"
    paths = [folder / "model.safetensors"]
    if index.is_file() and not paths[0].is_file():
        paths = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    found: dict[str, Stored] = {}
    for path in filter(Path.is_file, paths):
        with _opened(path) as shard:
            found |= {key: Stored(path, tuple(shard.get_slice(key).get_shape()), key) for key in list(shard.keys())}
    return found


def read_tensors(path: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Tensors of one file, on the CPU: those of these names, or all."""
    with _opened(path) as shard:
        return {name: shard.get_tensor(name) for name in (list(shard.keys()) if names is None else names)}


def misfit(model: PreTrainedModel, stored: Mapping[str, Stored]) -> str:
    """Why a checkpoint is not simply this whole model's tensors under the model's names; empty if it is."""
    if getattr(model.config, "quantization_config", None):
        return "its weights are quantised"
    if any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(model, add_legacy=False)):
        return f"the tensors of a {type(model).__name__} are converted while loading"
    if kept := model._get_dtype_plan(model.dtype):
        return f"{', '.join(sorted(kept))} must stay in float32"
    origins = _origins(model, stored)
    wanted = model.state_dict()
    ignored = re.compile("|".join((*NOT_READ, *sorted(model._keys_to_ignore_on_load_unexpected))))
    problems = {
        "missing": [name for name in wanted if name not in origins],
        "not of the model": [key for key in stored if key not in wanted and not ignored.search(key)],
        "of another shape": [name for name, key in origins.items() if stored[key].shape != wanted[name].shape],
    }
    return "; ".join(f"{what}: {', '.join(names[:3])} ({len(names)})" for what, names in problems.items() if names)


def fill(
    model: PreTrainedModel, stored: Mapping[str, Stored], cuts: Mapping[str, Cut], device: torch.device, show: bool
) -> None:
    """Gives an empty model its weights, those in `cuts` cut; a long load shows a progress bar on stderr if asked to."""
    empty: dict[str, Tensor] = model.state_dict()
    parts: dict[str, dict[str, Cut | None]] = defaultdict(dict)  # by key, then by parameter
    for name, key in _origins(model, stored).items():
        parts[key][name] = cuts.get(name)
    dtypes = {key: empty[next(iter(names))].dtype for key, names in parts.items()}
    filled: dict[str, Tensor] = {}
    progress = logging.tqdm(total=len(parts), desc="Loading weights", delay=SHOWN_AFTER_S, disable=not show)
    with progress, ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for path in sorted({stored[key].path for key in parts}):
            keys = [key for key in parts if stored[key].path == path]
            wanted = ((stored[key].key, parts[key], dtypes[key]) for key in keys)
            with _opened(path) as shard:
                for read in pool.map(_read, repeat(shard), *zip(*wanted, strict=True), repeat(device)):
                    filled |= read
                    progress.update()
    model.load_state_dict(filled, assign=True)
    model.to(device)  # the buffers, which no checkpoint holds
    model.requires_grad_(False)


def report(model: PreTrainedModel, started: float) -> LoadReport:
    """Of a load that began at `started`, by time.perf_counter()."""
    if model.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(model.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tied = model.all_tied_weights_keys
    parameters = sum(weight.numel() for name, weight in model.named_parameters() if name not in tied)
    return LoadReport(time.perf_counter() - started, peak, parameters)


def _origins(model: PreTrainedModel, stored: Mapping[str, Stored]) -> dict[str, str]:
    """The key of every parameter and buffer that can be read; of tied ones a checkpoint may hold either or both."""
    origins = {name: name for name in model.state_dict() if name in stored}
    for target, source in model.all_tied_weights_keys.items():
        for name, other in ((target, source), (source, target)):
            if name not in stored and other in stored:
                origins[name] = other
    return origins


def _read(
    shard: Any, key: str, parts: Mapping[str, Cut | None], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """What each parameter holds of a tensor; where they do not all hold the same, views of the whole.

    On a CPU, what is neither cast nor cut by columns stays in the file: its pages are read when they are used.
    """
    cuts = set(parts.values())
    common = cuts.pop() if len(cuts) == 1 else None
    view = shard.get_tensor(key) if common is None else shard.get_slice(key)[common.index]
    held = nn.Parameter(view.to(device, dtype).contiguous(), requires_grad=False)
    return {
        name: held if cut is None or cut == common else nn.Parameter(held[cut.index], requires_grad=False)
        for name, cut in parts.items()
    }


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}; fetch or convert the checkpoint again") from error
