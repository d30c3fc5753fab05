"""Trains a draft head on the target's hidden states, which drafters recorded (`examples.StateRecorder`).

The head is unrolled as it drafts: from a state of the target it predicts one token, then further ones. EAGLE-3 and
MLPSpeculator predict those from their own states (training-time test, arXiv 2503.01840). The loss is the cross-entropy
of the answer's tokens; that of each further token counts `DECAY` times the one before.

The projection of the target's states is not trained. The target may therefore compute it; the store then holds
projected states. States of open sessions stay valid when drafters exchange the weights.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from actors.compute.hidden_states import decode_rows
from actors.drafters.heads.files import HeadFiles
from actors.drafters.heads.projection import unchanged
from actors.learning.evaluation import by_row, score_rows
from actors.learning.trainable import (
    Pass,
    Row,
    RowLimits,
    Weights,
    check_tokens,
    collate,
    cross_entropy,
    first_choices,
    grouped,
    write_draft,
)
from actors.learning.trainee import Load, TrainingOptions, TrainingPass
from cluster.learning import Example, SessionScore
from protos.messages import StatesFormat

DECAY = 0.8  # weight of a token's loss relative to the token before (EAGLE-3, Medusa)
UNROLL = 3  # tokens predicted in training after each state by a head that repeats the same weights


class HeadNetwork(nn.Module, ABC):
    """The trained part of a head."""

    @abstractmethod
    def unroll(self, tokens: Tensor, states: Tensor, count: int) -> Iterable[Tensor]:
        """Yields the inputs of the LM heads of `count` steps, (rows, longest, hidden), or of fewer.

        At place p, step k predicts token p + 2 + k from `states`, (rows, longest, width), up to p, and from `tokens`,
        (rows, longest), up to p + 1 + k.
        """

    @abstractmethod
    def lm_head_of(self, step: int) -> Tensor:
        """Returns the LM head's weight, (columns, hidden)."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedHead:
    """A head's network with the head's other data."""

    network: HeadNetwork
    files: HeadFiles
    names: Mapping[str, str]  # stored name of each trained parameter, by its name in the network
    token_ids: Tensor  # (columns,): the target's token id for each logit column
    vocabulary: int
    steps: int | None = None  # most tokens predicted after each state, with weights of their own; None: any number
    max_positions: int | None = None  # longest text that the head can read; None: any
    project: Callable[[Tensor], Tensor] = unchanged  # maps kept rows, (n, width), to the network's states, (n, width)


class StatesFile:
    """Hidden states of a training's examples, by session, in an unnamed file that ends with the process.

    The store may drop states while a training runs, and the states may not fit into memory, so a file holds them.
    """

    def __init__(self, folder: Path, layout: StatesFormat) -> None:
        self._file = TemporaryFile(dir=folder)  # noqa: SIM115  # closed in `__exit__`
        self._layout = layout
        self._found: dict[str, tuple[int, int, int]] = {}  # offset in the file, position of the first row, rows
        self._end = 0

    def add(self, session: str, first: int, rows: bytes) -> None:
        """Adds a session's encoded states at positions `first`, `first` + 1, ..."""
        self._file.write(rows)
        self._found[session] = (self._end, first, len(rows) // self._layout.row_bytes)
        self._end += len(rows)

    def span(self, session: str) -> tuple[int, int]:
        """Returns the first position with states and the position after the last, which are equal if there are none."""
        _, first, count = self._found.get(session, (0, 0, 0))
        return first, first + count

    def rows(self, row: Row) -> Tensor:
        """Returns the states of all but a row's last two tokens, (tokens - 2, width), in float32."""
        offset, first, _ = self._found[row.session]
        self._file.seek(offset + (row.first - first) * self._layout.row_bytes)
        return decode_rows(self._file.read((len(row.tokens) - 2) * self._layout.row_bytes), self._layout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class HeadLearning:
    """A deployment's head as a draft that learns."""

    kind: str  # kind of states in the store, see `examples.KeptStates`
    layout: StatesFormat
    load: Callable[[Path], LoadedHead]

    def trainee(self, states: StatesFile) -> Load:
        """Returns the loader of drafts that are trained on these states."""
        return lambda folder, device: HeadTrainee(self.load(folder), states, device)


def rows_with_states(example: Example, first: int, end: int, limits: RowLimits) -> list[Row]:
    """Cuts an example with states at positions `first` to `end` into rows; their last two tokens need no state."""
    text = (*example.prompt, *example.answer)
    stop = min(len(text), end + 2)
    found = []
    for begin in range(max(len(example.prompt), first + 2), stop, limits.answer_tokens):
        until = min(begin + limits.answer_tokens, stop)
        start = max(first, min(begin - limits.prompt_tokens, begin - 2))
        found.append(Row(text[start:until], until - begin, example.session, start))
    return found


class HeadTrainee:
    """A head as a `Trainee`. Examples without states have no rows."""

    def __init__(self, head: LoadedHead, states: StatesFile, device: torch.device) -> None:
        self.network = head.network.to(device)
        self._head = head
        self._states = states
        self._device = device
        self._column_of = torch.full((head.vocabulary,), -1, device=device)
        self._column_of[head.token_ids.to(device)] = torch.arange(len(head.token_ids), device=device)

    def rows(self, examples: Iterable[Example], limits: RowLimits) -> list[list[Row]]:
        limits = limits.within(self._head.max_positions)
        found = []
        for example in examples:
            check_tokens(example, self._head.vocabulary)
            found.append(rows_with_states(example, *self._states.span(example.session), limits))
        return found

    def passes(self, rows: Sequence[Row], options: TrainingOptions, rng: np.random.Generator) -> list[TrainingPass]:
        groups = [[rows[index] for index in group] for group in grouped(rows, options.pass_tokens)]
        labels = [torch.tensor([token for row in group for token in row.tokens[-row.predicted :]]) for group in groups]
        known = [int((self._column_of[each.to(self._device)] >= 0).sum()) for each in labels]
        return [partial(self._learn, group, options, max(1, sum(known))) for group in groups]

    def score(
        self, examples: Sequence[Example], options: TrainingOptions, pause: Callable[[], None]
    ) -> list[SessionScore]:
        cut = self.rows(examples, options.limits)
        lengths = [sum(row.predicted for row in own) for own in cut]
        count = min(options.draft_tokens, self._head.steps or options.draft_tokens)
        return score_rows(cut, lengths, partial(self._matches, count=count), count, options.pass_tokens, pause)

    def rounded(self) -> Weights:
        held = dict(self.network.named_parameters())
        types = {stored: tensor.dtype for stored, tensor in self._head.files.tensors.items()}
        return Weights(
            {stored: held[name].detach().to("cpu", types[stored], copy=True) for name, stored in self._names()}, {}
        )

    def restore(self, weights: Weights) -> None:
        held = dict(self.network.named_parameters())
        with torch.no_grad():
            for name, stored in self._names():
                held[name].copy_(weights.model[stored])

    def write(self, weights: Weights, out: Path) -> None:
        tensors = {name: tensor.contiguous().clone() for name, tensor in self._head.files.tensors.items()}
        write_draft(self._head.files.folder, Weights(tensors | weights.model, {}), out)

    # ------------------------------------------------------------ helpers

    def _names(self) -> Iterable[tuple[str, str]]:
        """Returns the trained parameters' names in the network and in the checkpoint."""
        trained = {name for name, each in self.network.named_parameters() if each.requires_grad}
        return [(name, stored) for name, stored in self._head.names.items() if name in trained]

    def _collate(self, rows: Sequence[Row]) -> tuple[Pass, Tensor]:
        """Returns a pass, whose columns are the places of the states read last, and states, (rows, longest, width)."""
        batch = collate(rows, self._device)
        kept = [self._head.project(self._states.rows(row)) for row in rows]
        states = torch.zeros(*batch.tokens.shape, kept[0].shape[-1], device=self._device)
        for index, each in enumerate(kept):
            states[index, : len(each)] = each
        return batch, states

    def _learn(self, rows: Sequence[Row], options: TrainingOptions, positions: int) -> tuple[float, float]:
        """Runs one pass of a step with `positions` positions in all."""
        batch, states = self._collate(rows)
        columns = self._column_of[batch.labels]
        count = min(options.draft_tokens, self._head.steps or UNROLL)
        loss = states.new_zeros(())
        first = agreed = 0.0
        weights = [DECAY**step for step in range(count)]
        for step, outputs in enumerate(self.network.unroll(batch.tokens, states, count)):
            begins = (batch.remaining >= step).nonzero()[:, 0]
            labels = columns[begins + step]
            begins, labels = begins[labels >= 0], labels[labels >= 0]
            found = outputs[batch.rows[begins], batch.columns[begins] - 1]
            own, right = cross_entropy(found, self.network.lm_head_of(step), labels)
            loss = loss + own * (weights[step] / sum(weights) / positions)
            if not step:
                first, agreed = float(own.detach()), float(right.sum())
        torch.autograd.backward(loss)
        return first / positions, agreed / positions

    @torch.no_grad()
    def _matches(self, rows: Sequence[Row], count: int) -> list[list[list[bool]]]:
        batch, states = self._collate(rows)
        columns = self._column_of[batch.labels]
        begins = torch.arange(len(columns), device=self._device)
        found = []
        for step, outputs in enumerate(self.network.unroll(batch.tokens, states, count)):
            begins = begins[batch.remaining[begins] >= step]
            choices = first_choices(
                outputs[batch.rows[begins], batch.columns[begins] - 1], self.network.lm_head_of(step)
            )
            begins = begins[choices == columns[begins + step]]
            matched = torch.zeros(len(columns), dtype=torch.bool, device=self._device)
            matched[begins] = True
            found.append(matched)
        return by_row(found, batch.sizes)
