"""Loads selected layers of a checkpoint as a model, with its embedding, final norm and LM head. Also computes a model's
context length.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.models.checkpoint import empty_model
from actors.models.config_reader import quantization_method, read_config
from actors.models.weights import Sources, Stored, fill, mismatch, stored_tensors
from cluster.errors import ModelError


def check_layers(folder: Path, layers: Sequence[int]) -> None:
    """Raises ModelError if the checkpoint lacks any of these layers, or its weights are quantized."""
    config = read_config(folder)
    if method := quantization_method(folder, config):
        raise ModelError(
            f"{folder} is quantized with '{method}', and draft.method layer_skip reads only unquantized layers; use"
            " another draft.method"
        )
    count = int(config.get_text_config().num_hidden_layers)
    missing = [layer for layer in layers if not 0 <= layer < count]
    if missing or not layers:
        raise ModelError(
            f"{folder} has the layers 0 to {count - 1}, but layers {', '.join(map(str, missing)) or 'none'} are asked"
            " for; change draft.layer_skip.layers"
        )


def load_layers(folder: Path, layers: Sequence[int], dtype: str, device: torch.device) -> PreTrainedModel:
    """Loads only these layers of a checkpoint, renumbered from 0, as a causal language model.

    Raises ModelError if the checkpoint lacks any of them or its tensor names differ from the model's.
    """
    check_layers(folder, layers)
    model = empty_model(folder, _config_of(read_config(folder), layers), dtype)
    stored = _renumbered(stored_tensors(folder, partial=True), _name_of_layers(model), layers)
    if reason := mismatch(model, stored):
        raise ModelError(
            f"single layers of {folder} cannot be read: {reason}; use another draft.method, or save the checkpoint with"
            " transformers' save_pretrained first"
        )
    fill(model, Sources.of(model, stored), stored, {}, device, show=True)
    return model


def _config_of(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """Restricts the config, including per-layer lists, to these layers and returns it."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    for name, value in text.to_dict().items():
        if "layer" in name and isinstance(value, list) and len(value) == count:
            setattr(text, name, [value[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    return config


def _name_of_layers(model: PreTrainedModel) -> str:
    """Returns the prefix of the layers' tensor names before the layer number."""
    names: list[str] = [name for name, _ in model.named_parameters() if ".layers.0." in name]
    if not names:
        raise ModelError(f"a {type(model).__name__} does not name its layers; use another draft.method")
    return names[0].partition(".layers.0.")[0] + ".layers."


def _renumbered(stored: Mapping[str, Stored], prefix: str, layers: Sequence[int]) -> dict[str, Stored]:
    """Maps names in the new model to the tensors of these layers and the tensors outside layers."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.(.*)")
    new_index = {layer: place for place, layer in enumerate(layers)}
    renumbered = {}
    for key, tensor in stored.items():
        match = pattern.fullmatch(key)
        if match is None:
            renumbered[key] = tensor
        elif int(match[1]) in new_index:
            renumbered[f"{prefix}{new_index[int(match[1])]}.{match[2]}"] = tensor
    return renumbered


def context_length(config: PretrainedConfig) -> int | None:
    """Returns the maximum number of tokens that the model can read; None if its configuration sets no limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    if not uses_rope(config):
        return positions
    return min(_scaled(positions, section) for section in _rope_sections(text))


def uses_rope(config: PretrainedConfig) -> bool:
    """Returns whether positions are rotary, so that no position table limits the text's length.

    A configuration file may contain RoPE keys that the model does not use, so only the class's own fields count.
    """
    return "rope_parameters" in {field.name for field in fields(config.get_text_config())}


def _rope_sections(text: PretrainedConfig) -> list[dict[str, Any]]:
    """Returns one section per layer type, or a single section for all layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [section for section in parameters.values() if isinstance(section, dict)]
    return nested or [parameters]


def _scaled(positions: int, section: dict[str, Any]) -> int:
    """Returns the context length under one section's scaling.

    Linear scaling and YaRN specify a factor for the number of positions in training. With YaRN, that number is
    `original_max_position_embeddings`, as in Qwen's instructions, and `max_position_embeddings` may be either length.
    With llama3, longrope and dynamic scaling, `max_position_embeddings` is the extended length.
    """
    kind = section.get("rope_type", section.get("type"))
    factor = section.get("factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float):
        return positions
    original = section.get("original_max_position_embeddings") or positions
    return max(positions, int((original if kind == "yarn" else positions) * factor))
