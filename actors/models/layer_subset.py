"""Some layers of a checkpoint as a model of their own, with its embedding, final norm and LM head."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from actors.models.checkpoint import empty_model
from actors.models.config_reader import read_config
from actors.models.weights import Stored, fill, misfit, stored_tensors
from cluster.errors import ModelError


def check_layers(folder: Path, layers: Sequence[int]) -> None:
    """Raises ModelError when the checkpoint lacks some of these layers."""
    count = int(read_config(folder).get_text_config().num_hidden_layers)
    missing = [layer for layer in layers if not 0 <= layer < count]
    if missing or not layers:
        raise ModelError(
            f"{folder} has the layers 0 to {count - 1}, but layers {', '.join(map(str, missing)) or 'none'} are asked"
            " for; change draft.layer_skip.layers"
        )


def load_layers(folder: Path, layers: Sequence[int], dtype: str, device: torch.device) -> PreTrainedModel:
    """A causal language model of these layers, ids from 0; nothing else of the checkpoint is read.

    Raises ModelError when the checkpoint lacks some of them, or is not simply tensors under the model's names.
    """
    check_layers(folder, layers)
    model = empty_model(folder, _config_of(read_config(folder), layers), dtype)
    stored = _renumbered(stored_tensors(folder, partial=True), _name_of_layers(model), layers)
    if reason := misfit(model, stored):
        raise ModelError(
            f"single layers of {folder} cannot be read: {reason}; use another draft.method, or save the checkpoint with"
            " transformers' save_pretrained first"
        )
    fill(model, stored, {}, device, show=True)
    return model


def _config_of(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """The same for a model of these layers; what it says of each layer is said of those that stay."""
    text = config.get_text_config()
    count = text.num_hidden_layers
    for name, said in text.to_dict().items():
        if "layer" in name and isinstance(said, list) and len(said) == count:
            setattr(text, name, [said[layer] for layer in layers])
    text.num_hidden_layers = len(layers)
    return config


def _name_of_layers(model: PreTrainedModel) -> str:
    """As its tensors' names begin, up to the layer's number."""
    names: list[str] = [name for name, _ in model.named_parameters() if ".layers.0." in name]
    if not names:
        raise ModelError(f"a {type(model).__name__} does not name its layers; use another draft.method")
    return names[0].partition(".layers.0.")[0] + ".layers."


def _renumbered(stored: Mapping[str, Stored], prefix: str, layers: Sequence[int]) -> dict[str, Stored]:
    """The checkpoint's tensors under the names that they have in the model of these layers alone."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)\.(.*)")
    places = {layer: place for place, layer in enumerate(layers)}
    found = {}
    for key, tensor in stored.items():
        match = pattern.fullmatch(key)
        if match is None:
            found[key] = tensor
        elif int(match[1]) in places:
            found[f"{prefix}{places[int(match[1])]}.{match[2]}"] = tensor
    return found
