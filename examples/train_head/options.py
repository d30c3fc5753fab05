"""Options of `train.py` as frozen dataclasses."""

from dataclasses import dataclass
from enum import Enum
from math import cos, pi


class HeadKind(Enum):
    """Kinds of heads; values are names of drafting methods."""

    EAGLE = "eagle"
    MEDUSA = "medusa"
    MLP_SPECULATOR = "mlp_speculator"
    DFLASH = "dflash"


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Architecture of the head."""

    kind: HeadKind = HeadKind.EAGLE
    unroll: int = 3  # tokens drafted in training: Medusa heads, MLPSpeculator steps, a DFlash block
    layers: int = 1  # for EAGLE and DFlash heads
    draft_vocabulary: int | None = None  # number of most frequent tokens to propose; None: all
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and learning rates of a training."""

    steps: int = 2000  # total steps; the learning rate reaches 0 at the end
    batch: int = 8  # sequences per step
    learning_rate: float = 1e-3  # peak
    lm_head_rate: float = 0.2  # relative learning rate of embeddings and LM heads
    warmup: int = 50  # steps
    weight_decay: float = 0.01
    scored_share: float = 1.0  # random share of places in the loss

    def rate(self, step: int) -> float:
        """Returns the learning-rate factor at a step: linear warm-up, times a cosine decay to 0."""
        risen = min(1.0, (step + 1) / self.warmup)
        return risen * 0.5 * (1 + cos(pi * min(1.0, step / self.steps)))


@dataclass(frozen=True, slots=True)
class Running:
    """Options that may change when training resumes."""

    minutes: float = float("inf")  # time limit of this run
    save_every: int = 100  # steps between checkpoints and held-out measurements
    held_out: int = 32  # maximum held-out sequences
    dtype: str = "bfloat16"  # of matrix products in training, and of the written head
    device: str = "cpu"
