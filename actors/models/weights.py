"""Loads this rank's weights from safetensors shards into an empty model; casts them while reading.

A checkpoint must store each parameter once, or a parameter tied to it, and nothing else.
"""

import json
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from logging import getLogger
from pathlib import Path
from typing import Any, Self

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
from actors.models.merged_weights import merged_names, split_rows
from actors.models.sharding import Cut
from cluster.errors import ModelError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHOWN_AFTER_S = 2.0  # seconds before a progress bar appears
LOG_PERIOD_S = 10.0  # seconds between log lines where there is no bar
GB = 10**9
READERS = 8  # threads; more than cores, since uncached files keep a reader waiting
SAMPLE_BYTES = 4096  # bytes hashed per tensor for a fingerprint
RUN_BYTES = 8 << 20  # of neighboring tensors that a reader maps together, since each mapping reads the file's header
UNREAD_TENSORS = (
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$",  # in old checkpoints; determined by the config
    r"(^|\.)position_ids$",
    r"(^|\.)(attn|attention)\.masked_bias$",
    r"^mtp\.",  # multi-token prediction modules, which drafters read
    r"^model\.mtp_layers\.",
    r"^medusa_head\.",  # heads merged with their target (Medusa-2), which drafters read
)
CAUSAL_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")  # shape (1, 1, positions, positions)
SCALES = re.compile(r"scale|qweight|qzeros|absmax|packed")
SHOWN_NAMES = 3

log = getLogger(__name__)
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """Location of a tensor in a checkpoint."""

    path: Path
    shape: Shape
    key: str  # tensor name in the file


@dataclass(frozen=True, slots=True)
class Blocks:
    """Stored keys of the tensors that form one parameter, by block.

    A stacked block has one tensor per expert, and blocks are joined along dimension 1. Any other block is a single
    tensor, and blocks are joined along dimension 0.
    """

    keys: tuple[tuple[str, ...], ...]
    are_stacked: bool


@dataclass(frozen=True, slots=True)
class Sources:
    """Stored keys of every parameter and buffer."""

    single: Mapping[str, str]  # parameters stored in one tensor
    blocks: Mapping[str, Blocks]  # parameters stored in several tensors, such as one per expert

    @classmethod
    def of(cls, model: PreTrainedModel, stored: Mapping[str, Stored]) -> "Sources":
        """Finds the sources after transformers' renaming.

        Raises ValueError if the weights are quantized or need any conversion other than stacking and joining.
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
        blocks = {name: _blocks(name, found, converters) for name, found in parts.items()}
        return cls(_with_ties(model, single), blocks)


def _blocks(name: str, parts: Mapping[str, Sequence[str]], converters: Sequence[WeightConverter]) -> Blocks:
    converter = next(one for one in converters if not parts.keys().isdisjoint(one.source_patterns))
    steps = [(type(step), step.dim) for step in converter.operations if isinstance(step, MergeModulelist | Concatenate)]
    joined = [(Concatenate, 0)]
    stacked = [(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]
    if steps not in (joined, *stacked) or len(steps) != len(converter.operations) or len(converter.target_patterns) > 1:
        raise ValueError(f"{name} is converted while loading")
    keys = tuple(tuple(sorted(parts[pattern], key=dot_natural_key)) for pattern in converter.source_patterns)
    return Blocks(keys, are_stacked=steps != joined)


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
        indexed = set(names)
        tensors |= {key: tensor for key, tensor in header.items() if key in indexed}
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
    for key, shape in sorted(shapes.items(), key=lambda item: item[0] not in expected):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = rename_source_key(key, [], [], prefix, expected)
        if name not in expected or (pattern is None and name in stored_shapes):  # unknown, or a second name
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


@torch.inference_mode(False)  # tensors created in inference mode cannot be written on other threads
def fill(
    model: PreTrainedModel,
    sources: Sources,
    stored: Mapping[str, Stored],
    cuts: Mapping[str, Cut],
    device: torch.device,
    show: bool,
) -> None:
    """Loads an empty model's weights, cut by `cuts`; with `show`, reports the progress of a long load.

    Weights are read into their final place, and weights that a decoder merges share a tensor from the start. Several
    threads read runs of neighboring tensors, and only the cut parts. A run stays mapped only while it is read, so
    mapped files add little to the memory in use. Raises ModelError for NaN or infinite weights.
    """
    plan = _Plan(model, sources, stored, cuts, device)
    progress = LoadProgress(sum(map(_byte_count, plan.parts)), show)
    with progress, ThreadPoolExecutor(READERS) as pool:
        runs = pool.map(_read_run, _runs(plan.parts))
        for path, done in groupby(runs, key=lambda run: run[0].path):
            broken: list[str] = []
            for run in done:
                broken += [part.name for part in run if part.is_weight and not is_finite(part.into)]
                progress.update(sum(map(_byte_count, run)))
            if broken:
                raise not_finite(path, sorted(set(broken)), model.dtype)
    model.load_state_dict(plan.filled, assign=True)
    model.to(device)  # moves buffers that are not stored
    model.requires_grad_(False)


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a stored tensor to read, and the place of its values."""

    path: Path
    key: str  # tensor name in the file
    name: str  # name shown in errors
    cut: Cut | None
    into: Tensor
    is_weight: bool  # unlike buffers, such as masks, which hold -inf


class _Plan:
    """Parts to read in the order of files and offsets, and the tensors that they fill, by parameter."""

    def __init__(
        self,
        model: PreTrainedModel,
        sources: Sources,
        stored: Mapping[str, Stored],
        cuts: Mapping[str, Cut],
        device: torch.device,
    ) -> None:
        self._wide = tuple(model._get_dtype_plan(model.dtype))  # names of parameters that stay in float32
        self._empty = model.state_dict()  # shapes of this rank
        self._device = device
        self._weights = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._stored = stored
        names_by_key: dict[str, list[str]] = defaultdict(list)
        for name, key in sources.single.items():
            names_by_key[key].append(name)
        alone = {names[0] for names in names_by_key.values() if len(names) == 1}
        self._places = self._merged_places(model, alone)
        self.filled: dict[str, Tensor] = {}
        parts = [self._part(key, names, cuts) for key, names in names_by_key.items()]
        for name, blocks in sources.blocks.items():
            parts += self._block_parts(name, blocks, cuts.get(name))
        order = {(tensor.path, tensor.key): at for at, tensor in enumerate(stored.values())}
        self.parts = sorted(parts, key=lambda part: order[part.path, part.key])

    def _dtype(self, name: str) -> torch.dtype:
        return torch.float32 if any(part in name for part in self._wide) else self._empty[name].dtype

    def _merged_places(self, model: nn.Module, alone: Set[str]) -> dict[str, Tensor]:
        """Creates the tensors of merged weights; returns the rows of each weight."""
        places: dict[str, Tensor] = {}
        for names in merged_names(model):
            if len({self._dtype(name) for name in names}) == 1 and alone >= set(names):
                rows = [len(self._empty[name]) for name in names]
                columns = self._empty[names[0]].shape[1]
                views = split_rows(rows, columns, self._dtype(names[0]), self._device)
                places |= dict(zip(names, views, strict=True))
        return places

    def _place(self, name: str, shape: Shape) -> Tensor:
        place = self._places.get(name)
        return torch.empty(shape, dtype=self._dtype(name), device=self._device) if place is None else place

    def _part(self, key: str, names: Sequence[str], cuts: Mapping[str, Cut]) -> _Part:
        """Plans a tensor for its parameters; distinct parts of it are views of the whole tensor."""
        cut_by_name = {name: cuts.get(name) for name in names}
        distinct = set(cut_by_name.values())
        common = distinct.pop() if len(distinct) == 1 else None
        tensor = self._stored[key]
        into = self._place(names[0], tensor.shape if common is None else self._empty[names[0]].shape)
        whole = nn.Parameter(into, requires_grad=False)
        for name, cut in cut_by_name.items():
            part = whole if cut is None or cut == common else nn.Parameter(cut.of(whole), requires_grad=False)
            self.filled[name] = part
        return _Part(tensor.path, tensor.key, tensor.key, common, into, not self._weights.isdisjoint(names))

    def _block_parts(self, name: str, blocks: Blocks, cut: Cut | None) -> list[_Part]:
        """Plans how to read a parameter stored in several tensors."""
        place = self._place(name, tuple(self._empty[name].shape))
        self.filled[name] = nn.Parameter(place, requires_grad=False)
        if not blocks.are_stacked:
            if cut is not None:
                raise ValueError(f"{name} is stored in parts that ranks cannot split; set target.tensor_parallel to 1")
            place = place.unsqueeze(0)  # a stack of one
        parts = []
        begin = 0
        for at, keys in enumerate(blocks.keys):
            if len(keys) != len(place):
                raise ValueError(
                    f"part {at + 1} of {name} is stored in {len(keys)} tensors, expected {len(place)}; fetch or convert"
                    " the checkpoint again"
                )
            shape = self._stored[keys[0]].shape
            part = None if cut is None else _block_cut(cut, at, shape)
            end = begin + (part.length * len(part.begins) if part is not None and part.dim == 0 else shape[0])
            for expert, key in enumerate(keys):
                tensor = self._stored[key]
                parts.append(
                    _Part(tensor.path, tensor.key, name, part, place[expert, begin:end], name in self._weights)
                )
            begin = end
        if begin != place.shape[1]:
            raise ValueError(
                f"the tensors of {name} have {begin} rows, expected {place.shape[1]}; fetch the checkpoint again"
            )
        return parts


def _byte_count(part: _Part) -> int:
    return part.into.numel() * part.into.itemsize


def _runs(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    """Groups parts of the same file into runs of at most RUN_BYTES, or of one part."""
    run: list[_Part] = []
    size = 0
    for part in parts:
        count = _byte_count(part)
        if run and (part.path != run[0].path or size + count > RUN_BYTES):
            yield run
            run, size = [], 0
        run.append(part)
        size += count
    if run:
        yield run


def _read_run(run: list[_Part]) -> list[_Part]:
    with _opened(run[0].path) as shard:
        for part in run:
            values = shard.get_tensor(part.key) if part.cut is None else part.cut.of(shard.get_slice(part.key))
            if values.shape != part.into.shape:
                raise ValueError(f"{part.key} is {tuple(values.shape)}, expected {tuple(part.into.shape)}")
            part.into.copy_(values)
    return run


class LoadProgress:
    """Reports the progress of a long load: a bar on a terminal, otherwise a log line at intervals."""

    def __init__(self, total: int, show: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._is_logged = show and not sys.stderr.isatty()
        self._bar = logging.tqdm(
            total=total,
            desc="Loading weights",
            unit="B",
            unit_scale=True,
            delay=SHOWN_AFTER_S,
            disable=not show or self._is_logged,
        )
        self._total = total
        self._read = 0
        self._clock = clock
        self._logged_at = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def update(self, count: int) -> None:
        """Adds `count` bytes."""
        self._bar.update(count)
        self._read += count
        if self._is_logged and self._clock() - self._logged_at >= LOG_PERIOD_S:
            self._logged_at = self._clock()
            log.info("loaded %.1f of %.1f GB of weights", self._read / GB, self._total / GB)


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


@torch.inference_mode()
def warn_of_untied(model: PreTrainedModel, folder: Path, cuts: Mapping[str, Cut]) -> None:
    """Logs tied weights of a loaded model that the checkpoint stores with different values; `cuts` are this rank's."""
    weights: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name, source in model.all_tied_weights_keys.items():
        if name not in weights or source not in weights:
            continue  # quantized
        weight = weights[name]
        other = weights[source]
        if name in cuts and source not in cuts:
            other = cuts[name].of(other)
        if weight.shape == other.shape and weight.data_ptr() != other.data_ptr() and not torch.equal(weight, other):
            log.warning(
                "%s stores %s and %s with different values, though its %s ties them; both are used as stored, as in"
                " transformers; set tie_word_embeddings to false, or remove the wrong tensor",
                folder,
                name,
                source,
                CONFIG,
            )


def _block_cut(cut: Cut, block: int, shape: Shape) -> Cut:
    """Returns the cut of one block's tensors, which lack the stacked dimension."""
    dim = cut.dim - 1
    if len(cut.begins) == 1:
        return Cut(dim, cut.begins, cut.length)
    return Cut(dim, (cut.begins[block] - block * shape[dim],), cut.length)


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
        raise not_finite(folder, broken, model.dtype)


def not_finite(where: Path, names: Sequence[str], dtype: torch.dtype) -> ModelError:
    """Returns the error for NaN or infinite weights after their conversion to `dtype`."""
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
    """Returns the tensors in a file's header, in the file's order."""
    with _opened(path) as shard:
        return {key: Stored(path, tuple(shard.get_slice(key).get_shape()), key) for key in list(shard.offset_keys())}


def samples(path: Path) -> Iterator[bytes]:
    """Yields a file's header, then the first bytes of each tensor."""
    with _opened(path), path.open("rb") as file:  # the first checks the header
        header = file.read(int.from_bytes(file.read(8), "little"))
        yield header
        data = file.tell()
        for name, tensor in json.loads(header).items():
            if name != "__metadata__":
                start, end = tensor["data_offsets"]
                file.seek(data + start)
                yield file.read(min(SAMPLE_BYTES, end - start))


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {one_line(error)}; fetch or convert the checkpoint again") from error
