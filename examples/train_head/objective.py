"""Training loss: cross-entropy with the target's distribution at each step of the unroll, and top-1 agreement."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_head.heads.draft_module import DraftModule
from examples.train_head.shards import StatesBatch

DECAY = 0.8  # of a step's weight relative to the step before (EAGLE-3)


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Result of one batch."""

    loss: Tensor  # the steps' cross-entropies, weighted
    agreement: Tensor  # (steps,): share of places at which the likeliest token is the target's choice


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """The target's distribution over the draft vocabulary."""

    lm_head: Tensor  # (columns, hidden)
    opening: int  # tokens that all sequences begin with: predicting them teaches nothing

    def scored(self, batch: StatesBatch, step: int) -> Tensor:
        """Returns a mask, (rows, longest), of places p whose step k is scored: it predicts token p + 2 + k."""
        last_read = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) + step + 1
        return (last_read < batch.lengths[:, None]) & (last_read >= self.opening - 1)

    def log_chances(self, final: Tensor) -> Tensor:
        """Returns log probabilities, (n, columns), for final states, (n, hidden)."""
        return torch.log_softmax(F.linear(final.to(self.lm_head.dtype), self.lm_head).float(), dim=-1)


def steps_learned(
    module: DraftModule, batch: StatesBatch, teacher: Teacher, steps: int, share: float = 1.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each step's cross-entropy and agreement, over a random share of the places."""
    for step, outputs in enumerate(module.steps(batch, steps)):
        scored = teacher.scored(batch, step)
        if share < 1:
            scored = scored & (torch.rand(scored.shape, device=scored.device) < share)
        rows, places = scored.nonzero(as_tuple=True)
        logits = module.logits(outputs[rows, places], step)
        with torch.no_grad():
            chances = teacher.log_chances(batch.final[rows, places + step + 1]).exp()
            choices = batch.choices[rows, places + step + 1]
            agreement = (module.token_ids[logits.argmax(dim=-1)] == choices).float().mean()
        yield -(chances * torch.log_softmax(logits.float(), dim=-1)).sum(dim=-1).mean(), agreement


def learned(module: DraftModule, batch: StatesBatch, teacher: Teacher, steps: int, share: float = 1.0) -> Learned:
    """Computes loss and agreement of a batch, which must have a scored place for every step."""
    found = list(steps_learned(module, batch, teacher, steps, share))
    weights = [DECAY**step for step in range(steps)]
    loss = torch.stack([weight * loss for weight, (loss, _) in zip(weights, found, strict=True)]).sum() / sum(weights)
    return Learned(loss, torch.stack([agreement for _, agreement in found]))
