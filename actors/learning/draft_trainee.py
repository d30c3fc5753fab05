"""Trains a Llama-like draft model and, if it has one, its recurrent head.

The loss is the cross-entropy of the answers' tokens, plus that of the recurrent head's predictions after a sample of
positions.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from actors.learning.evaluation import score_loaded
from actors.learning.trainable import (
    Checkpoint,
    Pass,
    Row,
    RowLimits,
    TrainableDraft,
    VocabularyRows,
    Weights,
    collate,
    cross_entropy,
    grouped,
    load_trainable,
    write_draft,
)
from actors.learning.trainee import TrainingOptions, TrainingPass
from cluster.learning import Example, SessionScore


class DraftTrainee:
    """A draft model as a `Trainee`."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self._checkpoint = Checkpoint(folder)
        self.network = load_trainable(folder, device)

    def rows(self, examples: Iterable[Example], limits: RowLimits) -> list[list[Row]]:
        return self.network.rows(examples, limits)

    def passes(self, rows: Sequence[Row], options: TrainingOptions, rng: np.random.Generator) -> list[TrainingPass]:
        found = [
            _Pass(self.network, [rows[index] for index in group], options.head_positions, rng)
            for group in grouped(rows, options.pass_tokens)
        ]
        positions = max(1, sum(each.positions for each in found))
        further = max(1, sum(each.further for each in found))
        vocabulary = VocabularyRows(self.network, torch.cat([each.tokens for each in found]))

        def run(index: int) -> tuple[float, float]:
            own, head, right = found[index].losses(vocabulary)
            torch.autograd.backward(own / positions + options.head_weight * head / further)
            if index == len(found) - 1:
                vocabulary.backward()
            return float(own.detach()) / positions, right / positions

        return [partial(run, index) for index in range(len(found))]

    def score(
        self, examples: Sequence[Example], options: TrainingOptions, pause: Callable[[], None]
    ) -> list[SessionScore]:
        return score_loaded(
            self.network,
            examples,
            options.draft_tokens,
            limits=options.limits,
            pass_tokens=options.pass_tokens,
            pause=pause,
        )

    def rounded(self) -> Weights:
        return self._checkpoint.rounded(self.network)

    def restore(self, weights: Weights) -> None:
        self.network.model.load_state_dict(weights.model, strict=False)  # checkpoints omit tied weights
        if self.network.head is not None:
            self.network.head.load_state_dict(weights.head)

    def write(self, weights: Weights, out: Path) -> None:
        write_draft(self._checkpoint.folder, weights, out)


class _Pass:
    """Rows of one forward and backward, and the positions at which the recurrent head is trained."""

    def __init__(
        self, draft: TrainableDraft, rows: Sequence[Row], head_positions: int, rng: np.random.Generator
    ) -> None:
        self._draft = draft
        self._batch = collate(rows, draft.device)
        self._labels = draft.column_of[self._batch.labels]
        self._learned = (self._labels >= 0).nonzero()[:, 0]  # excludes tokens that are never proposed
        begins = _sampled(self._batch, head_positions, draft.width, rng)
        self._begins = torch.from_numpy(begins).to(draft.device)
        self.positions = len(self._learned)
        self.further = sum(len(self._targets(distance)[1]) for distance in range(1, draft.width))

    @property
    def tokens(self) -> Tensor:
        """All token ids fed to the draft or its head, (tokens,)."""
        return torch.cat((self._batch.tokens.flatten(), self._batch.labels))

    def losses(self, vocabulary: VocabularyRows) -> tuple[Tensor, Tensor, int]:
        """Returns the summed losses of the draft and of its recurrent head, and the number of correct first choices."""
        batch = self._batch
        states = self._draft.states(batch, vocabulary.embed)
        labels = self._labels[self._learned]
        own, agreed = cross_entropy(states[self._learned], vocabulary.lm_head, labels)
        begun = states[self._begins]
        further: list[Tensor] = []
        targets: list[Tensor] = []
        for distance in range(1, self._draft.width):
            begun = self._draft.following(begun, batch.labels[self._begins + distance - 1], vocabulary.embed)
            kept, wanted = self._targets(distance)
            further.append(begun[kept])
            targets.append(wanted)
        if not targets or not len(wanted := torch.cat(targets)):
            return own, own.new_zeros(()), int(agreed.sum())
        columns = vocabulary.lm_head[: self._draft.head_columns]
        head, _ = cross_entropy(torch.cat(further), columns, wanted)
        return own, head, int(agreed.sum())

    def _targets(self, distance: int) -> tuple[Tensor, Tensor]:
        """Returns which of `_begins` have a trainable prediction at this distance (indices), and their labels."""
        labels = self._labels[self._begins + distance]
        kept = ((labels >= 0) & (labels < self._draft.head_columns)).nonzero()[:, 0]
        return kept, labels[kept]


def _sampled(batch: Pass, count: int, width: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draws up to `count` positions per row among those with `width` - 1 later positions in the row."""
    found = []
    first = 0
    for size in batch.sizes:
        possible = max(0, size - width + 1)
        found.append(first + rng.permutation(possible)[:count])
        first += size
    return np.concatenate(found)
