"""The interface of trainable drafts, `Trainee`, and the options of a training."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import nn

from actors.learning.evaluation import LIMITS
from actors.learning.trainable import Row, RowLimits, Weights
from cluster.learning import Example, SessionScore


@dataclass(frozen=True, slots=True)
class TrainingOptions:
    """Hyperparameters and limits of a training."""

    epochs: float = 2.0  # passes over the recent examples
    learning_rate: float = 1.5e-4  # AdamW's rate for all weights; without replay, 2e-4 learns faster
    batch: int = 8  # rows per step: recent answers, or parts of long ones
    replay_share: float = 0.5  # share of a step's rows taken from the replay examples; 0 to below 1
    limits: RowLimits = LIMITS
    draft_tokens: int = 4  # block length for scoring the held-out examples
    evaluations: int = 2  # evaluations per epoch
    patience: int = 3  # evaluations without improvement before training ends
    warmup_steps: int = 8
    head_weight: float = 0.5  # weight of the recurrent head's mean loss; the draft's own has weight 1
    head_positions: int = 16  # positions per row on which the recurrent head is trained
    clip: float = 1.0  # largest norm of a step's gradient
    pass_tokens: int = 512  # most tokens per forward and backward, padding included; more are 3 % faster
    save_every_s: float = 30.0
    seed: int = 0
    states_kind: str = ""  # kind of the hidden states that a head learns from

    @property
    def replay_rows(self) -> int:
        """Number of replay rows per step."""
        return round(self.batch * self.replay_share / (1 - self.replay_share))


TrainingPass = Callable[[], tuple[float, float]]
"""Adds a pass's gradients; returns its shares of the step's loss per token and agreement."""


class Trainee(Protocol):
    """A draft that can be trained. Its methods raise ModelError for examples or weights that do not fit."""

    @property
    def network(self) -> nn.Module:
        """Holds the weights; those that require gradients are trained."""
        ...

    def rows(self, examples: Iterable[Example], limits: RowLimits) -> list[list[Row]]:
        """Cuts each example into rows to train on."""
        ...

    def passes(self, rows: Sequence[Row], options: TrainingOptions, rng: np.random.Generator) -> list[TrainingPass]:
        """Returns the passes of one step over these rows, to be called in order."""
        ...

    def score(
        self, examples: Sequence[Example], options: TrainingOptions, pause: Callable[[], None]
    ) -> list[SessionScore]:
        """Scores examples as `evaluation` describes; calls `pause` between forwards."""
        ...

    def rounded(self) -> Weights:
        """Returns copies of the weights in their stored dtypes."""
        ...

    def restore(self, weights: Weights) -> None:
        """Sets the weights to those of `rounded`."""
        ...

    def write(self, weights: Weights, out: Path) -> None:
        """Writes a complete draft with these weights to the folder `out`; see `trainable.write_draft`."""
        ...


Load = Callable[[Path, torch.device], Trainee]
"""Loads a draft for training. Raises ModelError if it cannot be loaded, or its kind cannot be trained."""
