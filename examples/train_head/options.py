"""What a training is told: the options of `train.py`, as one frozen value."""

from dataclasses import dataclass
from enum import Enum
from math import cos, pi


class HeadKind(Enum):
    """Which head is trained; the values are names of drafting methods where a deployment has them."""

    EAGLE = "eagle"
    MEDUSA = "medusa"
    MLP_SPECULATOR = "mlp_speculator"
    DFLASH = "dflash"


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """What the head is."""

    kind: HeadKind = HeadKind.EAGLE
    unroll: int = 3  # tokens that are drafted in training; of Medusa and MLPSpeculator, heads; of DFlash, a block's
    layers: int = 1  # of an EAGLE or DFlash head
    draft_vocabulary: int | None = None  # most frequent tokens that are proposed; None: all
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast."""

    steps: int = 2000  # of the whole training, by which the learning rate falls
    batch: int = 8  # sequences
    learning_rate: float = 1e-3  # at its highest
    lm_head_rate: float = 0.2  # share of it for embeddings and LM heads, which start as the target's
    warmup: int = 50  # steps
    weight_decay: float = 0.01
    scored_share: float = 1.0  # of the places that a step learns from, drawn at random

    def rate(self, step: int) -> float:
        """Share of the learning rate: a linear rise, then half a cosine to 0."""
        risen = min(1.0, (step + 1) / self.warmup)
        return risen * 0.5 * (1 + cos(pi * min(1.0, step / self.steps)))


@dataclass(frozen=True, slots=True)
class Running:
    """Where and until when: what may change from one run of a training to the next."""

    minutes: float = float("inf")  # of this run; it saves and stops then, and the next one goes on
    save_every: int = 100  # steps, after which the held-out agreement is measured too
    held_out: int = 32  # sequences at most
    dtype: str = "bfloat16"  # of the products in training, and of the head that is written
    device: str = "cpu"
