"""Options of `train.py` as frozen values."""

from dataclasses import dataclass
from enum import Enum
from math import cos, pi


class HeadKind(Enum):
    """Kinds of heads; the values are names of drafting methods."""

    EAGLE = "eagle"
    MEDUSA = "medusa"
    MLP_SPECULATOR = "mlp_speculator"
    DFLASH = "dflash"


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """Options of the head."""

    kind: HeadKind = HeadKind.EAGLE
    unroll: int = 3  # tokens drafted in training: Medusa heads, MLPSpeculator steps, a DFlash block
    layers: int = 1  # of an EAGLE or DFlash head
    draft_vocabulary: int | None = None  # most frequent tokens that are proposed; None: all
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and learning rates of a training."""

    steps: int = 2000  # of the whole training, by which the learning rate falls
    batch: int = 8  # sequences
    learning_rate: float = 1e-3  # peak
    lm_head_rate: float = 0.2  # share of the learning rate for embeddings and LM heads, which start as the target's
    warmup: int = 50  # steps
    weight_decay: float = 0.01
    scored_share: float = 1.0  # random share of the places that a step learns from

    def rate(self, step: int) -> float:
        """Returns the share of the learning rate at a step: a linear rise, then half a cosine to 0."""
        risen = min(1.0, (step + 1) / self.warmup)
        return risen * 0.5 * (1 + cos(pi * min(1.0, step / self.steps)))


@dataclass(frozen=True, slots=True)
class Running:
    """Options that may change between runs of one training."""

    minutes: float = float("inf")  # of this run, which then saves and stops; the next run continues
    save_every: int = 100  # steps, after which the held-out agreement is measured too
    held_out: int = 32  # sequences at most
    dtype: str = "bfloat16"  # of the products in training, and of the head that is written
    device: str = "cpu"
