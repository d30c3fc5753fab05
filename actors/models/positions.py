"""Context length of a model: the positions that its configuration gives it, RoPE scaling included."""

from dataclasses import fields
from typing import Any

from transformers import PretrainedConfig


def context_length(config: PretrainedConfig) -> int | None:
    """Returns the most tokens that the model can read, or None where its configuration sets no limit."""
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions <= 0:
        return None
    if not uses_rope(config):
        return positions
    return min(_scaled(positions, section) for section in _rope_sections(text))


def uses_rope(config: PretrainedConfig) -> bool:
    """Returns whether positions are rotations, which have no table that a longer text would overrun.

    A configuration file may carry RoPE keys that its model never reads, so only the class's own fields count.
    """
    return "rope_parameters" in {field.name for field in fields(config.get_text_config())}


def _rope_sections(text: PretrainedConfig) -> list[dict[str, Any]]:
    """Returns one section per kind of layer, or a single one for all layers."""
    parameters = getattr(text, "rope_parameters", None) or {}
    nested = [section for section in parameters.values() if isinstance(section, dict)]
    return nested or [parameters]


def _scaled(positions: int, section: dict[str, Any]) -> int:
    """Returns the context with one section's scaling.

    Linear scaling and YaRN name the factor by which they extend the positions the model was trained on: YaRN those in
    `original_max_position_embeddings`, as in Qwen's recipe, where `max_position_embeddings` is either length. The other
    kinds (llama3, longrope, dynamic) have the extended length in `max_position_embeddings` already.
    """
    kind = section.get("rope_type", section.get("type"))
    factor = section.get("factor")
    if kind not in ("linear", "yarn") or not isinstance(factor, int | float):
        return positions
    original = section.get("original_max_position_embeddings") or positions
    return max(positions, int((original if kind == "yarn" else positions) * factor))
