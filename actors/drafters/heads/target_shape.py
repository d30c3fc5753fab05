"""Sizes of the target that a draft head has to fit."""

from dataclasses import dataclass
from pathlib import Path

from actors.models.config_reader import read_config


@dataclass(frozen=True, slots=True)
class TargetShape:
    """Sizes read from a target's checkpoint."""

    hidden: int
    vocabulary: int  # rows of the embedding
    layers: int


def target_shape(folder: Path) -> TargetShape:
    """Reads the sizes from the configuration of the checkpoint in a folder."""
    config = read_config(folder).get_text_config()
    return TargetShape(int(config.hidden_size), int(config.vocab_size), int(config.num_hidden_layers))
