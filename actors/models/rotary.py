"""Rotary frequencies that depend on how long a text is, fixed once for all rows.

transformers chooses them by the longest sequence of a forward. Here texts of all lengths share a forward, and cached
keys keep the frequencies that they were rotated with: one choice must hold for a model's whole life.
"""

from typing import Any

from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cluster.errors import ModelError

LONGROPE = "longrope"
DYNAMIC = "dynamic"
STATIC = "default"  # a type that transformers' modules leave as it is


def check_positions(config: PretrainedConfig, context: int | None) -> None:
    """Raises ModelError where frequencies would have to grow with a text of up to `context` tokens."""
    text = config.get_text_config()
    parameters = getattr(text, "rope_parameters", None) or {}
    by_layer = [part for part in parameters.values() if isinstance(part, dict)] or [parameters]
    if context is None or not any(DYNAMIC in str(part.get("rope_type")) for part in by_layer):
        return
    if context > text.max_position_embeddings:
        raise ModelError(
            f"RoPE scaling 'dynamic' changes with the length of a text beyond {text.max_position_embeddings} tokens,"
            f" but sessions may have {context}; set model.max_context to {text.max_position_embeddings} or less"
        )


def fix_frequencies(model: nn.Module, context: int | None = None) -> None:
    """Makes every rotary module of a model static, for texts of up to `context` tokens.

    With `longrope`, a context beyond the original length takes the long factors, for short texts too; without a
    context the short ones hold. `dynamic` frequencies stay as they are within the model's own positions
    (`check_positions`). A model that is static already stays as it is.
    """
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed(module, kinds, None, context)
        elif isinstance(kinds, dict):
            module.rope_type = {layer: _fixed(module, kind, layer, context) for layer, kind in kinds.items()}


def _fixed(module: Any, kind: str, layer_type: str | None, context: int | None) -> str:
    """Sets the frequencies of one kind of layer; returns the type that the module has from now on."""
    if DYNAMIC in kind:
        return STATIC
    if kind != LONGROPE:
        return kind
    config = module.config
    parameters = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    original = int(parameters["original_max_position_embeddings"])
    if context is not None and context > original:
        frequencies = getattr(module, "inv_freq" if layer_type is None else f"{layer_type}_inv_freq")
        long, _ = ROPE_INIT_FUNCTIONS[kind](config, frequencies.device, seq_len=original + 1, layer_type=layer_type)
        frequencies.copy_(long)
    return STATIC
