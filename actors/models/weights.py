"""Loads this rank's weights from safetensors shards into an empty model; casts them while reading.

A checkpoint must store each parameter once, or a parameter tied to it, and nothing else.
"""

import re
import resource
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import logging

from actors.models.config_reader import CONFIG, one_line, read_json
from actors.models.sharding import Cut
from cluster.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN_AFTER_S = 2.0  # seconds before a progress bar appears
UNREAD_TENSORS = (
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",  # in old checkpoints; determined by the config
    r"(^|\.)position_ids$",
    r"(^|\.)(attn|attention)\.masked_bias$",
    r"^mtp\.",  # multi-token prediction modules, which drafters read
    r"^model\.mtp_layers\.",
)
CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")  # shape (1, 1, positions, positions)
SCALES = re.compile(r"scale|qweight|qzeros|absmax|packed")
SHOWN_NAMES = 3

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Location of a tensor in a checkpoint."""

    path: Path
    shape: Shape
    key: str  # tensor name in the file


Blocks = tuple[tuple[str, ...], ...]
"""Stored keys of the tensors that are stacked into a parameter, by block; blocks are joined along dimension 1."""


@dataclass(frozen=True, slots=True)
class Sources:
    """Stored keys of every parameter and buffer."""

    single: Mapping[str, str]  # of those stored in one tensor
    stacked: Mapping[str, Blocks]  # of those stored in one tensor per expert

    @classmethod
    def of(cls, model: PreTrainedModel, stored: Mapping[str, Stored]) -> "Sources":
        """Finds the sources after transformers' renaming.

        Raises ValueError if the weights are quantized, or converted in another way than by stacking.
        """
        if getattr(model.config, "quantization_config", None):
            raise ValueError("its weights are quantized")
        expected = model.state_dict()
        transforms = get_model_conversion_mapping(model, add_legacy=False)
        renamings = [step for step in transforms if isinstance(step, WeightRenaming)]
        converters = [step for step in transforms if isinstance(step, WeightConverter)]
        single = {key: key for key in stored if key in expected}
        parts: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # by parameter and pattern
        for key in stored.keys() - single.keys():
            name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, expected)
            if name in expected and pattern is None:
                single.setdefault(name, key)
            elif name in expected:
                parts[name][pattern].append(key)
        stacked = {name: _blocks(name, found, converters) for name, found in parts.items()}
        return cls(_with_ties(model, single), stacked)


def _blocks(name: str, parts: Mapping[str, Sequence[str]], converters: Sequence[WeightConverter]) -> Blocks:
    converter = next(one for one in converters if not parts.keys().isdisjoint(one.source_patterns))
    steps = [(type(step), step.dim) for step in converter.operations if isinstance(step, MergeModulelist | Concatenate)]
    stacks = [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]
    if steps not in stacks or len(steps) != len(converter.operations) or len(converter.target_patterns) > 1:
        raise ValueError(f"{name} is converted while loading")
    return tuple(tuple(sorted(parts[pattern], key=dot_natural_key)) for pattern in converter.source_patterns)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Duration and memory of a load on one rank."""

    seconds: float
    peak_bytes: int  # peak memory of the process; on a GPU, of torch's allocator
    parameters: int  # tied parameters count once


def indexed_files(folder: Path) -> dict[str, str]:
    """Reads a checkpoint's index; returns the file name of each tensor. Raises ModelError for a broken index."""
    path = folder / INDEX
    files = read_json(path).get("weight_map")
    if not isinstance(files, dict) or not files or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(f"{path} has no weight_map from tensors to files; fetch the checkpoint again")
    return files


def stored_tensors(folder: Path, *, partial: bool = False) -> dict[str, Stored]:
    """Returns a folder's tensors by key; empty if it has no safetensors files with standard names.

    The index maps tensors to files. With `partial`, skips missing files; otherwise, raises ModelError for a missing
    file.
    """
    single = folder / SINGLE
    if single.is_file():
        return _header(single)
    if not (folder / INDEX).is_file():
        return {}
    keys: dict[str, list[str]] = defaultdict(list)
    for key, name in indexed_files(folder).items():
        keys[name].append(key)
    tensors: dict[str, Stored] = {}
    for name, names in sorted(keys.items()):
        path = folder / name
        if not path.is_file():
            if partial:
                continue
            raise ModelError(f"{path} is missing, and {INDEX} says it holds {_listed(names)}; fetch the file")
        header = _header(path)
        if absent := [key for key in names if key not in header]:
            raise ModelError(f"{path} lacks {_listed(absent)}, though {INDEX} says it holds them; fetch both again")
        tensors |= {key: header[key] for key in names}
    return tensors


def check_has_weights(folder: Path) -> None:
    """Raises ModelError if a folder has no weights with the expected file names; the error names other weights."""
    if (folder / SINGLE).is_file() or (folder / INDEX).is_file():
        return
    for pattern, kind in (("*.bin", "PyTorch pickles"), ("*.pt", "PyTorch pickles"), ("*.gguf", "GGUF files")):
        if matches := sorted(folder.glob(pattern)):
            raise ModelError(
                f"{folder} holds its weights as {kind} only ({matches[0].name}), which are not read; load them with"
                " transformers and write safetensors with save_pretrained()"
            )
    others = sorted(folder.glob("*.safetensors"))
    contents = f"only {others[0].name}, but neither" if others else "no weights: neither"
    raise ModelError(f"{folder} holds {contents} {SINGLE} nor {INDEX}; fetch the whole checkpoint")


def check_no_strays(folder: Path, stored: Mapping[str, Stored]) -> None:
    """Raises ModelError if a shard contains tensors that the index does not map to it; transformers would read them."""
    for path in sorted({tensor.path for tensor in stored.values()}):
        own = {tensor.key for tensor in stored.values() if tensor.path == path}
        if strays := [key for key in _header(path) if key not in own]:
            raise ModelError(
                f"{path} also holds {_listed(strays)}, which {INDEX} does not map to this file; write the"
                " checkpoint again with save_pretrained()"
            )


def read_tensors(path: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Reads tensors of one file to the CPU; `names` None: all tensors."""
    with _opened(path) as shard:
        return {name: shard.get_tensor(name) for name in (list(shard.keys()) if names is None else names)}


def check_tensors(model: PreTrainedModel, shapes: Mapping[str, Shape | None], folder: Path) -> None:
    """Raises ModelError unless the stored tensors match the model's one to one; also compares known shapes.

    Compares names after transformers' renaming. Tied weights may be stored once.
    """
    expected: dict[str, Tensor] = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [step for step in transforms if isinstance(step, WeightRenaming)]
    converters = [step for step in transforms if isinstance(step, WeightConverter)]
    targets = {pattern: step.target_patterns for step in converters for pattern in step.source_patterns}
    prefix = model.base_model_prefix
    stored_shapes: dict[str, Shape | None] = {}
    surplus = []
    for key, shape in shapes.items():
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected:
            surplus.append(key)
        elif pattern is None:
            stored_shapes[name] = shape
        else:  # one of several tensors of a merged parameter
            stored_shapes |= {name.replace(targets[pattern][0], target): None for target in targets[pattern]}
    for pair in model.all_tied_weights_keys.items():
        if not stored_shapes.keys().isdisjoint(pair):
            stored_shapes |= {name: None for name in pair if name not in stored_shapes}
    allowed = "|".join(model._keys_to_ignore_on_load_missing)
    missing = [name for name in expected if name not in stored_shapes and not (allowed and re.search(allowed, name))]
    misshapen = {
        name: (shape, tuple(expected[name].shape))
        for name, shape in stored_shapes.items()
        if shape is not None and shape != expected[name].shape
    }
    check_tensors_match(model, folder, missing, surplus, misshapen, shapes)


def check_tensors_match(
    model: PreTrainedModel,
    folder: Path,
    missing: Iterable[str],
    surplus: Iterable[str],
    misshapen: Mapping[str, tuple[Shape, Shape]],
    shapes: Mapping[str, Shape | None],
) -> None:
    """Raises ModelError for missing, misshapen, or harmful surplus tensors."""
    missing = sorted(missing)
    surplus = sorted(name for name in surplus if not _is_harmless(model, name, shapes.get(name)))
    if not (missing or surplus or misshapen):
        return
    problems = []
    fixes = []
    if missing:
        problems.append(f"missing: {_listed(missing)}")
        fixes.append("fetch or convert the checkpoint again")
    if misshapen:
        name, (stored, expected) = min(misshapen.items())
        problems.append(f"of another shape: {name} is {stored}, not {expected} ({len(misshapen)})")
        fixes.append(f"correct the sizes in {CONFIG}")
    if surplus:
        problems.append(f"not part of the model: {_listed(surplus)}")
        if any("lora_" in name for name in surplus):
            fixes.append("merge the adapter with peft's merge_and_unload()")
        elif any(SCALES.search(name) for name in surplus):
            fixes.append(f"restore the quantization_config in {CONFIG} that these scales belong to")
        else:
            fixes.append(f"correct {CONFIG}, or save the checkpoint without them")
    fix = fixes[0] if len(fixes) == 1 else f"correct {CONFIG}, or fetch the checkpoint that belongs to it"
    raise ModelError(
        f"{folder} does not hold the {type(model).__name__} that its {CONFIG} describes: {'; '.join(problems)}; {fix}"
    )


def mismatch(model: PreTrainedModel, stored: Mapping[str, Stored]) -> str:
    """Returns the reason why tensors cannot be read directly into this model's parameters; empty if they can."""
    if getattr(model.config, "quantization_config", None):
        return "its weights are quantized"
    if any(isinstance(step, WeightConverter) for step in get_model_conversion_mapping(model, add_legacy=False)):
        return f"the tensors of a {type(model).__name__} are converted while loading"
    if dtype_plan := model._get_dtype_plan(model.dtype):
        return f"{', '.join(sorted(dtype_plan))} must stay in float32"
    expected = model.state_dict()
    origins = _with_ties(model, {name: name for name in expected if name in stored})
    problems = {
        "missing": [name for name in expected if name not in origins],
        "not of the model": [
            key for key, tensor in stored.items() if key not in expected and not _is_harmless(model, key, tensor.shape)
        ],
        "of another shape": [name for name, key in origins.items() if stored[key].shape != expected[name].shape],
    }
    return "; ".join(f"{what}: {_listed(names)}" for what, names in problems.items() if names)


def fill(
    model: PreTrainedModel,
    sources: Sources,
    stored: Mapping[str, Stored],
    cuts: Mapping[str, Cut],
    device: torch.device,
    show: bool,
) -> None:
    """Loads an empty model's weights, cut by `cuts`. With `show`, a long load shows a progress bar on stderr.

    Raises ModelError for NaN or infinite weights.
    """
    wide = tuple(model._get_dtype_plan(model.dtype))  # names of parameters that stay in float32
    dtype_of = {
        name: torch.float32 if any(part in name for part in wide) else tensor.dtype
        for name, tensor in model.state_dict().items()
    }
    weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}  # not buffers: masks hold -inf
    parts: dict[str, dict[str, Cut | None]] = defaultdict(dict)  # by key, then by parameter
    for name, key in sources.single.items():
        parts[key][name] = cuts.get(name)
    dtypes = {key: dtype_of[next(iter(names))] for key, names in parts.items()}
    filled: dict[str, Tensor] = {}
    progress = logging.tqdm(
        total=len(parts) + len(sources.stacked), desc="Loading weights", delay=SHOWN_AFTER_S, disable=not show
    )
    with progress, ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for path in sorted({stored[key].path for key in parts}):
            keys = [key for key in parts if stored[key].path == path]
            tensors = ((stored[key].key, parts[key], dtypes[key]) for key in keys)
            broken: list[str] = []
            with _opened(path) as shard:
                for read in pool.map(_read, repeat(shard), *zip(*tensors, strict=True), repeat(device)):
                    if not weights.isdisjoint(read.held) and not is_finite(read.whole):
                        broken.append(read.key)
                    filled |= read.held
                    progress.update()
            if broken:  # raised after all threads have finished reading
                raise _not_finite(path, broken, model.dtype)
        for name, blocks in sources.stacked.items():
            whole = _read_stacked(blocks, stored, cuts.get(name), dtype_of[name], device)
            if not is_finite(whole):
                raise _not_finite(stored[blocks[0][0]].path.parent, [name], model.dtype)
            filled[name] = nn.Parameter(whole, requires_grad=False)
            progress.update()
    model.load_state_dict(filled, assign=True)
    model.to(device)  # moves buffers that are not stored
    model.requires_grad_(False)


def report(model: PreTrainedModel, started: float) -> LoadReport:
    """Returns the report of a load that began at `started`, on the clock time.perf_counter()."""
    if model.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(model.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tied = model.all_tied_weights_keys
    parameters = sum(weight.numel() for name, weight in model.named_parameters() if name not in tied)
    return LoadReport(time.perf_counter() - started, peak, parameters)


def _with_ties(model: PreTrainedModel, origins: Mapping[str, str]) -> dict[str, str]:
    """Adds tied parameters to the stored keys by parameter; of each pair, a checkpoint may store one or both."""
    tied = dict(origins)
    for target, source in model.all_tied_weights_keys.items():
        for name, other in ((target, source), (source, target)):
            if name not in origins and other in origins:
                tied[name] = origins[other]
    return tied


def _read_stacked(
    blocks: Blocks, stored: Mapping[str, Stored], cut: Cut | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Reads a parameter that is stored in one tensor per expert and block; reads only the cut parts."""
    joined: list[Tensor] = []
    with ExitStack() as stack:
        shards = {
            path: stack.enter_context(_opened(path)) for path in {stored[key].path for keys in blocks for key in keys}
        }
        for at, keys in enumerate(blocks):
            part = None if cut is None else _block_cut(cut, at, stored[keys[0]].shape)
            slices = [shards[stored[key].path].get_slice(stored[key].key) for key in keys]
            joined.append(torch.stack([(one[:] if part is None else part.of(one)).to(device, dtype) for one in slices]))
    return joined[0] if len(joined) == 1 else torch.cat(joined, 1)


def _block_cut(cut: Cut, block: int, shape: Shape) -> Cut:
    """Returns the cut of one block's tensors, which lack the stacked dimension."""
    dim = cut.dim - 1
    if len(cut.begins) == 1:
        return Cut(dim, cut.begins, cut.length)
    return Cut(dim, (cut.begins[block] - block * shape[dim],), cut.length)


@dataclass(frozen=True, slots=True)
class _Read:
    key: str
    whole: Tensor  # this rank's part of the tensor
    held: Mapping[str, Tensor]  # by parameter


def _read(shard: Any, key: str, parts: Mapping[str, Cut | None], dtype: torch.dtype, device: torch.device) -> _Read:
    """Reads the parts of a tensor for its parameters. Distinct parts are views of the whole tensor.

    On a CPU, a part stays memory-mapped unless it is cast or cut by columns.
    """
    cuts = set(parts.values())
    common = cuts.pop() if len(cuts) == 1 else None
    view = shard.get_tensor(key) if common is None else common.of(shard.get_slice(key))
    whole = nn.Parameter(view.to(device, dtype).contiguous(), requires_grad=False)
    mapped = {
        name: whole if cut is None or cut == common else nn.Parameter(cut.of(whole), requires_grad=False)
        for name, cut in parts.items()
    }
    return _Read(key, whole, mapped)


def is_finite(tensor: Tensor) -> bool:
    """Returns whether all values are finite, in one pass over memory (`isfinite` takes ten times as long)."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.bfloat16)  # 8-bit floats cannot be compared
    least, most = torch.aminmax(tensor.detach())  # both propagate NaN
    return bool(torch.isfinite(least) & torch.isfinite(most))


def check_finite(model: PreTrainedModel, folder: Path) -> None:
    """Raises ModelError, naming the tensors, if weights of a loaded model are NaN or infinite."""
    if broken := [name for name, weight in model.named_parameters() if not is_finite(weight)]:
        raise _not_finite(folder, broken, model.dtype)


def _not_finite(where: Path, names: Sequence[str], dtype: torch.dtype) -> ModelError:
    kind = str(dtype).removeprefix("torch.")
    narrow = ", or choose model.dtype bfloat16 if they are only too large for float16" if dtype is torch.float16 else ""
    return ModelError(
        f"{where} holds NaN or infinite weights, read as {kind}: {_listed(names)}; fetch the checkpoint again{narrow}"
    )


def _is_harmless(model: PreTrainedModel, name: str, shape: Shape | None) -> bool:
    """Returns whether a stored tensor that is not part of the model can be ignored without changing its output."""
    text = model.config.get_text_config()
    first = int(getattr(text, "num_hidden_layers", 0))  # multi-token prediction modules may follow the last layer
    extra = range(first, first + int(getattr(text, "num_nextn_predict_layers", None) or 0))
    patterns = (*UNREAD_TENSORS, *(rf"^model\.layers\.{layer}\." for layer in extra))
    if re.search("|".join((*patterns, *sorted(model._keys_to_ignore_on_load_unexpected))), name):
        return True
    return CAUSAL_MASK.search(name) is not None and (shape is None or (len(shape) == 4 and shape[:2] == (1, 1)))


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:SHOWN_NAMES])} ({len(names)})"


def _header(path: Path) -> dict[str, Stored]:
    """Returns the tensors in a file's header."""
    with _opened(path) as shard:
        return {key: Stored(path, tuple(shard.get_slice(key).get_shape()), key) for key in list(shard.keys())}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {one_line(error)}; fetch or convert the checkpoint again") from error
