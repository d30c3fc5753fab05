"""Training loss: cross-entropy with the target's distribution at each unrolled step, and top-1 agreement."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_head.heads.draft_module import DraftModule
from examples.train_head.shards import StatesBatch

DECAY = 0.8  # ratio of a step's loss weight to the previous step's (EAGLE-3)


@dataclass(frozen=True, slots=True, eq=False)
class Learned:
    """Loss and agreement of one batch."""

    loss: Tensor  # weighted mean of the steps' cross-entropies
    agreement: Tensor  # (steps,): share of places where the top token is the target's choice


@dataclass(frozen=True, slots=True, eq=False)
class Teacher:
    """The target's distribution over the draft vocabulary."""

    lm_head: Tensor  # (columns, hidden)
    opening: int  # length of the sequences' common prefix, which is not scored

    def scored(self, batch: StatesBatch, step: int) -> Tensor:
        """Returns a mask, (rows, longest), of the places p whose prediction of token p + 2 + step is scored."""
        last_read = torch.arange(batch.tokens.shape[1], device=batch.tokens.device) + step + 1
        return (last_read < batch.lengths[:, None]) & (last_read >= self.opening - 1)

    def log_chances(self, final: Tensor) -> Tensor:
        """Returns log probabilities, (n, columns), for final states, (n, hidden)."""
        return torch.log_softmax(F.linear(final.to(self.lm_head.dtype), self.lm_head).float(), dim=-1)


def steps_learned(
    module: DraftModule, batch: StatesBatch, teacher: Teacher, steps: int, share: float = 1.0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields each step's cross-entropy and agreement over a random `share` of the scored places."""
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
    """Computes a batch's loss and agreement; every step must have a scored place."""
    found = list(steps_learned(module, batch, teacher, steps, share))
    weights = [DECAY**step for step in range(steps)]
    loss = torch.stack([weight * loss for weight, (loss, _) in zip(weights, found, strict=True)]).sum() / sum(weights)
    return Learned(loss, torch.stack([agreement for _, agreement in found]))
