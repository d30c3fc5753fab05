"""Rotary position embedding of a draft head, and sizes of the target."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from actors.models.config_reader import read_config
from actors.models.decoder import fix_frequencies
from cluster.errors import ModelError

MAX_POSITIONS = 2048  # used if the configuration sets none
DEFAULT_BASE = 10000.0  # used if the configuration sets none; independent of the target's base
ORIGINAL = "original_max_position_embeddings"  # Phi-3 has it beside the section
SCALED_FROM_ORIGINAL = frozenset({"llama3", "yarn", "longrope"})
PLAIN = frozenset({"default", "mrope"})  # for text, mrope equals the default, since its sections have equal positions


@dataclass(frozen=True, slots=True)
class Rope:
    """Base, length and scaling of a rotary position embedding."""

    base: float
    kind: str  # transformers' rope_type
    max_positions: int  # of the head's configuration; some scalings depend on it
    scaling: tuple[tuple[str, Any], ...] = ()  # parameters of the scaling

    def __str__(self) -> str:
        scaling = "".join(f", {name} {value}" for name, value in self.scaling)
        return f"RoPE base {self.base:g}, {self.kind}{scaling}"


def rope_of(config: Mapping[str, Any]) -> Rope:
    """Reads a head's RoPE from the keys `rope_parameters`, `rope_scaling` and `rope_theta`.

    A base in `rope_parameters`, written by transformers 5, takes precedence over one at the top level. Raises
    ModelError for an unknown RoPE type, and for ambiguous or incomplete parameters.
    """
    section = _section(config)
    kind = _kind(section)
    if kind != "default" and kind not in ROPE_INIT_FUNCTIONS:
        supported = ", ".join(sorted([*PLAIN, *ROPE_INIT_FUNCTIONS]))
        raise ModelError(
            f"the head's rotary positions are of kind {kind!r}, expected one of {supported}; use another head"
        )
    if float(section.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)) != 1.0:
        raise ModelError("the head uses partial rotary positions, which are not supported; use another head")
    base = section.get("rope_theta") or config.get("rope_theta")
    if base is None and section:
        raise ModelError(
            "the head's config.json sets RoPE parameters without rope_theta; add the rope_theta of its training"
        )
    named = {"rope_theta", "rope_type", "type", "partial_rotary_factor", "mrope_section", "mrope_interleaved"}
    original = config.get(ORIGINAL)
    if kind in SCALED_FROM_ORIGINAL and original:  # as in transformers, precedes the section's own
        section[ORIGINAL] = original
    scaling = tuple((name, _frozen(value)) for name, value in section.items() if name not in named)
    return Rope(float(base or DEFAULT_BASE), kind, _max_positions(config), scaling)


def _max_positions(config: Mapping[str, Any]) -> int:
    positions = config.get("max_position_embeddings") or MAX_POSITIONS
    if not isinstance(positions, int) or positions < 1:
        raise ModelError(
            f"max_position_embeddings in the head's config.json is {positions!r}, expected a positive whole number;"
            " correct it"
        )
    return positions


def _section(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the RoPE parameters, empty if there are none. Raises ModelError for contradictory ones."""
    parameters, scaling = (_of_layers(config, config.get(key) or {}) for key in ("rope_parameters", "rope_scaling"))
    if parameters and scaling:
        pairs = {
            "rope_type": (_kind(parameters), _kind(scaling)),
            "factor": (parameters.get("factor"), scaling.get("factor")),
            "rope_theta": (parameters.get("rope_theta"), scaling.get("rope_theta", parameters.get("rope_theta"))),
        }
        for name, (one, other) in pairs.items():
            if one != other:
                raise ModelError(
                    f"the head's config.json has {name} {one!r} in rope_parameters, but {other!r} in rope_scaling;"
                    " remove the wrong section"
                )
    return scaling | parameters


def _of_layers(config: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the section of the head's layers if sections are given by layer type; otherwise the section itself."""
    by_type = {name: value for name, value in section.items() if isinstance(value, dict)}
    if not by_type:
        return dict(section)
    types = set(config.get("layer_types") or ["full_attention"])
    used = [by_type[name] for name in by_type if name in types] if types <= by_type.keys() else [*by_type.values()]
    if any(other != used[0] for other in used):
        raise ModelError(
            f"the head's config.json sets RoPE parameters by layer type ({', '.join(by_type)}), but its layers are"
            f" {', '.join(sorted(types))} and share one RoPE; use another head"
        )
    return used[0]


def _kind(section: Mapping[str, Any]) -> str:
    kind = section.get("rope_type", section.get("type", "default"))
    return "default" if kind in PLAIN else kind


def rotary_of(rope: Rope, head_dim: int) -> nn.Module:
    """Creates the transformers module that maps positions to cosines and sines."""
    parameters = {"rope_type": rope.kind, "rope_theta": rope.base} | {
        name: list(value) if isinstance(value, tuple) else value for name, value in rope.scaling
    }
    config = LlamaConfig(
        hidden_size=head_dim,
        num_attention_heads=1,
        head_dim=head_dim,
        max_position_embeddings=rope.max_positions,
        rope_parameters=parameters,
    )
    rotary: nn.Module = LlamaRotaryEmbedding(config)
    fix_frequencies(rotary)
    return rotary


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes read from a target's checkpoint."""

    hidden: int
    vocabulary: int  # rows of the embedding table, including padding
    layers: int


def target_shape(folder: Path) -> TargetShape:
    """Reads the sizes from a checkpoint's configuration."""
    config = read_config(folder).get_text_config()
    return TargetShape(int(config.hidden_size), int(config.vocab_size), int(config.num_hidden_layers))
