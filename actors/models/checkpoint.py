"""Checkpoints in a folder or on the Hugging Face Hub: location, vocabulary, fingerprint and loading."""

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from actors.compute.collectives import Group, SingleRank
from actors.models.config_reader import (
    CONFIG,
    check_quantization,
    embedding_rows,
    one_line,
    quantization_method,
    read_json,
)
from actors.models.config_reader import read_config as read_config
from actors.models.sharding import check_plan, shard
from actors.models.tokenizer_reader import GENERATION_CONFIG, end_of_text, has_tokenizer, id_limit
from actors.models.tokenizer_reader import end_ids as end_ids
from actors.models.tokenizer_reader import load_tokenizer as load_tokenizer
from actors.models.weights import (
    INDEX,
    SINGLE,
    LoadReport,
    Shape,
    Sources,
    Stored,
    check_finite,
    check_has_weights,
    check_no_strays,
    check_tensors,
    check_tensors_match,
    fill,
    indexed_files,
    mismatch,
    report,
    samples,
    stored_tensors,
    warn_of_untied,
)
from cluster.errors import ModelError

COMMIT = re.compile("[0-9a-f]{40}")  # name of a snapshot's folder in the Hugging Face cache
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
ORIGINAL = "original/*"  # weights in Meta's own format; the download job skips them
DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")  # config, tokenizer, chat template


def local_folder(name: str, with_weights: bool = True, more: Sequence[str] = ()) -> Path:
    """Returns a checkpoint's folder: `name` itself, or its Hugging Face snapshot; downloads missing files.

    With weights, also downloads files that match the patterns `more`.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise ModelError(f"there is no model folder {folder}; expected a folder or a Hugging Face id")
    return fetched(name, [*DESCRIPTION, *((*WEIGHTS, *more) if with_weights else WEIGHTS[1:])])


def fetched(name: str, patterns: Sequence[str]) -> Path:
    """Downloads the files of a Hugging Face id that match these patterns; returns the snapshot folder."""
    try:
        # Offline, the library refuses a snapshot that lacks a matching file, and `*.json` also matches in folders.
        return Path(snapshot_download(name, allow_patterns=list(patterns), ignore_patterns=ORIGINAL))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(
            f"model '{name}' is not a folder and cannot be fetched from Hugging Face; correct it: {error}"
        ) from error


# ---------------------------------------------------------------- vocabulary


def vocabulary(folder: Path) -> dict[int, str]:
    """Returns the tokenizer's tokens that have an embedding, by id.

    Excludes padding rows of the embedding, and tokens that were added to the tokenizer without resizing the embedding.
    """
    rows = embedding_rows(folder)
    ids: Mapping[str, int] = load_tokenizer(folder).get_vocab()
    tokens = {token_id: token for token, token_id in ids.items() if rows is None or token_id < rows}
    if not tokens:
        raise ModelError(f"the model in {folder} has no embeddings for its tokenizer's tokens; fetch both again")
    return tokens


def extra_tokens(folder: Path) -> str:
    """Returns a warning about tokens without an embedding; empty if there are none."""
    rows = embedding_rows(folder)
    tokenizer = load_tokenizer(folder)
    if rows is None or id_limit(tokenizer) <= rows:
        return ""
    ids: Mapping[str, int] = tokenizer.get_vocab()
    tokens = sorted((token for token, token_id in ids.items() if token_id >= rows), key=ids.__getitem__)
    needed = [token for token in tokens if token in str(tokenizer.chat_template or "")]
    chats = f", and every chat, because the chat template writes {needed[0]}," if needed else ""
    return (
        f"the tokenizer has {len(tokens)} tokens that the model, with {rows} rows, has no embedding for"
        f" ({', '.join(tokens[:3])}): prompts that contain them{chats} are refused; resize the model's embedding to"
        " serve them"
    )


def vocabulary_fingerprint(tokens: Mapping[int, str]) -> str:
    """Returns a fingerprint of a vocabulary; peers compare fingerprints before they exchange token ids."""
    digest = hashlib.blake2b(digest_size=16)
    for token_id in sorted(tokens):
        digest.update(f"{token_id}\0{tokens[token_id]}\0".encode())
    return digest.hexdigest()


def different_ids(one: Mapping[int, str], other: Mapping[int, str]) -> list[int]:
    """Returns the ids that stand for different tokens in two vocabularies; an id may be missing in either."""
    return [token for token in sorted(one.keys() & other.keys()) if one[token] != other[token]]


stop_ids = end_ids  # public alias for scripts outside the project


# ---------------------------------------------------------------- weights


def is_snapshot(folder: Path) -> bool:
    """Returns True for a folder of the Hugging Face cache, which is named by its commit and never changes."""
    return folder.parent.name == "snapshots" and COMMIT.fullmatch(folder.name) is not None


def checkpoint_fingerprint(folder: Path) -> str:
    """Hashes the commit of a Hugging Face snapshot; otherwise config, safetensors headers and each tensor's start.

    Fine-tunes often change only some tensors, so every tensor counts. For a snapshot, weights need not exist.
    """
    digest = hashlib.blake2b(digest_size=16)
    if is_snapshot(folder):
        digest.update(folder.name.encode())
        return digest.hexdigest()
    config = read_json(folder / CONFIG)
    config.pop("transformers_version", None)
    digest.update(json.dumps(config, sort_keys=True).encode())
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        check_has_weights(folder)
    for path in files:
        for part in samples(path):
            digest.update(part)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model or one rank's share of it, with the load report."""

    model: PreTrainedModel
    report: LoadReport


def check_tensor_parallel(folder: Path, ranks: int) -> None:
    """Raises ModelError, naming the supported sizes, if a model cannot be split over `ranks`."""
    if ranks == 1:
        return
    config = read_config(folder)
    if method := quantization_method(folder, config):
        raise ModelError(
            f"target.tensor_parallel is {ranks}, but {folder} is quantized with '{method}', and only vLLM splits"
            " quantized weights; set target.engine: vllm, or target.tensor_parallel: 1"
        )
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ModelError(
            f"target.tensor_parallel is {ranks}, but {folder} (model_type '{config.model_type}') has no attention heads"
            " to split; use target.tensor_parallel: 1"
        )
    kv_heads = sorted({int(getattr(layer, "num_key_value_heads", None) or heads) for layer in text.per_layer_config})
    widths = _mlp_widths(text)
    possible = [n for n in range(1, kv_heads[0] + 1) if all(size % n == 0 for size in (heads, *kv_heads, *widths))]
    if ranks not in possible:
        raise ModelError(
            f"target.tensor_parallel is {ranks}, but {heads} heads with {', '.join(map(str, kv_heads))}"
            " key-value heads and an"
            f" intermediate size of {', '.join(map(str, sorted(widths)))}"
            f" can only be split by {', '.join(map(str, possible))}; set target.tensor_parallel to one of these"
        )
    check_plan(empty_model(folder, config, "float32"))


def check_files(folder: Path, with_weights: bool) -> None:
    """Raises ModelError for any error that can be found without reading the weights.

    Without `with_weights`, weight files and the tokenizer may be missing; a draft needs no tokenizer.
    """
    config = read_config(folder)
    end_of_text(folder)
    if has_tokenizer(folder):
        load_tokenizer(folder)
    check_quantization(folder, config)
    if with_weights:
        check_has_weights(folder)
    shapes: dict[str, Shape | None] = {}
    if with_weights or (folder / SINGLE).is_file():
        shapes |= {key: stored.shape for key, stored in stored_tensors(folder).items()}
    elif (folder / INDEX).is_file():
        shapes |= dict.fromkeys(indexed_files(folder))
    if shapes and not quantization_method(folder, config):
        check_tensors(empty_model(folder, config, "float32"), shapes, folder)


def load_model(folder: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    """Loads a whole causal language model."""
    return load(folder, dtype, device, SingleRank()).model


def load(folder: Path, dtype: str, device: torch.device, group: Group) -> Loaded:
    """Loads this rank's share of a causal language model; reports duration and memory.

    Raises ModelError unless the stored weights are finite and match the model one to one.
    """
    started = time.perf_counter()
    config = read_config(folder)
    method = quantization_method(folder, config)
    check_has_weights(folder)
    stored = stored_tensors(folder)
    try:
        if method and group.size == 1:
            model = _converted(folder, stored, dtype, device)
            if method == "compressed-tensors":
                # The first forward expands the weights. It must run before memory is planned.
                with torch.no_grad():
                    model(torch.zeros((1, 1), dtype=torch.long, device=device))
        else:
            model = _read(folder, config, stored, dtype, device, group)
    except (ImportError, ValueError, RuntimeError, OSError) as error:
        what = f"is quantized with '{method}', which cannot be loaded here" if method else "cannot be loaded"
        raise ModelError(f"{folder} {what}: {one_line(error)}") from error
    return Loaded(model, report(model, started))


def _read(
    folder: Path,
    config: PretrainedConfig,
    stored: Mapping[str, Stored],
    dtype: str,
    device: torch.device,
    group: Group,
) -> PreTrainedModel:
    """Reads safetensors directly; renames, stacks and joins tensors. On one rank, transformers makes other
    conversions.
    """
    model = empty_model(folder, config, dtype)
    if mismatch(model, stored):
        check_tensors(model, {key: tensor.shape for key, tensor in stored.items()}, folder)
        if group.size == 1:
            check_no_strays(folder, stored)
    try:
        sources = Sources.of(model, stored)
        if missing := model.state_dict().keys() - sources.single.keys() - sources.blocks.keys():
            raise ValueError(f"{min(missing)} is not stored under its own name")
    except ValueError as error:
        if group.size == 1:
            return _converted(folder, stored, dtype, device)
        raise ModelError(
            f"{folder} cannot be split over {group.size} ranks while loading: {error}; use"
            " target.tensor_parallel: 1, or save the checkpoint with transformers' save_pretrained first"
        ) from error
    cuts = shard(model, group) if group.size > 1 else {}
    fill(model, sources, stored, cuts, device, show=group.rank == 0)
    if group.rank == 0:
        warn_of_untied(model, folder, cuts)
    return model


def _converted(folder: Path, stored: Mapping[str, Stored], dtype: str, device: torch.device) -> PreTrainedModel:
    """Loads quantized, renamed or fused weights through transformers."""
    check_no_strays(folder, stored)
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        device_map=device,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported in `loading`, and refused below
    )
    misshapen = {name: (tuple(shape), tuple(expected)) for name, shape, expected in loading["mismatched_keys"]}
    shapes = {key: tensor.shape for key, tensor in stored.items()}
    check_tensors_match(model, folder, loading["missing_keys"], loading["unexpected_keys"], misshapen, shapes)
    check_finite(model, folder)
    warn_of_untied(model, folder, {})
    return model


def empty_model(folder: Path, config: PretrainedConfig, dtype: str) -> PreTrainedModel:
    """Returns a model with parameters on the meta device and real buffers, which the config determines."""
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), trust_remote_code=False)
        if (folder / GENERATION_CONFIG).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder)
    except Exception as error:  # models validate their configs in different ways
        raise ModelError(
            f"{folder} describes a model that cannot be built: {one_line(error)}; correct its {CONFIG}, or fetch it"
            " again"
        ) from error
    return model.eval()


MLP_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def _mlp_widths(config: Any) -> set[int]:
    """Returns the distinct inner sizes of the layers' MLPs and experts."""
    found = [getattr(config, name, None) or [] for name in MLP_WIDTHS]
    return {width for one in found for width in (one if isinstance(one, list | tuple) else [one])}


LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

NameFilter = Callable[[Collection[str]], Collection[str]]
"""Selects names from a checkpoint's tensor names."""


def folder_with(name: str, wanted: NameFilter) -> Path:
    """Returns a checkpoint's folder, which contains at least the wanted tensors. Does not change a local folder.

    Downloads a single-file checkpoint in full. Raises ModelError under the same conditions as `local_folder`.
    """
    folder = local_folder(name, with_weights=False)
    if Path(name).expanduser().is_dir():
        return folder
    if not (folder / INDEX).is_file():
        return local_folder(name)
    files = indexed_files(folder)
    return fetched(name, sorted({files[tensor] for tensor in wanted(files.keys())}))


def layer_names(layers: Collection[int]) -> NameFilter:
    """Selects the tensors of these layers and all tensors outside layers."""

    def wanted(names: Collection[str]) -> list[str]:
        numbers = {name: LAYER.search(name) for name in names}
        return [name for name, number in numbers.items() if number is None or int(number[1]) in layers]

    return wanted


def first_existing(groups: Sequence[Sequence[str]]) -> NameFilter:
    """Selects from each group the first tensor in the checkpoint."""

    def wanted(names: Collection[str]) -> list[str]:
        firsts = [next((name for name in group if name in names), None) for group in groups]
        return [name for name in firsts if name is not None]

    return wanted
