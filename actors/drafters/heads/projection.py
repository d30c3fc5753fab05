"""Shared parts of draft heads: projection of hidden states, selection of logit columns, and decoding of state rows.

A `RowProjection` is the `fc` layer of EAGLE-3 and DFlash with its norms. The target or the drafter applies it to each
row of the target's states before the head reads them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.hidden_states import decode_rows
from actors.compute.linear import Projection
from actors.drafters.registry import DraftSetup
from actors.models.decoder import Norm
from cluster.drafting.method import DraftingMethod, Early, ExchangesWeights, RecordsStates, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.errors import ModelError
from protos.messages import DraftRequest, Open, Shape, StatesFormat


def unchanged(x: Tensor) -> Tensor:
    """Returns its input; replaces a missing norm."""
    return x


@dataclass(frozen=True, slots=True, eq=False)
class RowProjection:
    """Norms equal parts of a row (optional), applies a linear layer, then a norm."""

    part_norms: tuple[Norm, ...]
    fc: Projection
    norm: Norm = unchanged

    def __call__(self, rows: Tensor) -> Tensor:
        """Maps the target's rows, (n, layers x target hidden size), to (n, hidden)."""
        if self.part_norms:
            parts = rows.chunk(len(self.part_norms), dim=-1)
            rows = torch.cat([norm(part) for norm, part in zip(self.part_norms, parts, strict=True)], dim=-1)
        return self.norm(self.fc(rows))


@dataclass(frozen=True, slots=True, eq=False)
class DraftColumns:
    """Logit columns that a head computes, and their tokens."""

    kept: Tensor | None  # (columns,): indices of the published columns; None: all
    token_ids: Tensor  # (columns,): the target's token id for each logit column

    def of(self, weight: Tensor) -> Tensor:
        """Selects the columns from the weight of an LM head, (published columns, hidden)."""
        return weight if self.kept is None else weight[self.kept.to(weight.device)]


def draft_columns(folder: Path, ids: Tensor, vocabulary: int, proposable: Collection[int]) -> DraftColumns:
    """Selects the columns of proposable tokens; column i of the head scores token `ids[i]`.

    Raises ModelError unless the ids are distinct ids of the target and at least one is proposable.
    """
    named = ids.tolist()
    if len(set(named)) < len(named) or min(named) < 0 or max(named) >= vocabulary:
        raise ModelError(
            f"the draft vocabulary in {folder} has {len(named)} tokens, ids from {min(named)} to {max(named)},"
            f" {len(set(named))} of them distinct; expected distinct ids below {vocabulary}, the target's vocabulary"
        )
    allowed = frozenset(proposable)
    kept_columns = [column for column, token in enumerate(named) if token in allowed]
    if not kept_columns:
        raise ModelError(f"{folder} predicts none of the target's tokens; use a head made for this target")
    if len(kept_columns) == len(named):
        return DraftColumns(None, ids)
    columns = torch.tensor(kept_columns)
    return DraftColumns(columns, ids[columns])


class TakesRows(DraftingMethod, Protocol):
    """Drafting method that receives rows of hidden states as tensors."""

    def begin(self, session: str, first: int) -> None:
        """Sets the first position of an open session's states; 0 by default."""
        ...

    def states(self, session: str, first: int, rows: Tensor) -> None:
        """Receives true states, (n, width), at positions `first` and up. Ignores unknown sessions."""
        ...


class DecodedStates:
    """Decodes received hidden states for a `TakesRows` method, which thereby implements `ReadsStates`.

    `recorder` also receives the encoded states. `max_states` is as in `LimitsStates`.
    """

    def __init__(
        self,
        method: TakesRows,
        layout: StatesFormat,
        recorder: RecordsStates | None = None,
        max_states: int | None = None,
    ) -> None:
        self.states_format = layout
        self.max_states = max_states
        self._method = method
        self._recorder = recorder
        self._without: set[str] = set()  # open sessions without states so far

    @property
    def shapes(self) -> frozenset[Shape]:
        return self._method.shapes

    @property
    def tokens_per_forward(self) -> int:
        return self._method.tokens_per_forward

    def open(self, request: Open) -> None:
        self._method.open(request)
        self._without.add(request.session)
        if self._recorder is not None:
            self._recorder.open(request)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._method.committed(session, tokens)

    def states(self, session: str, first: int, rows: bytes) -> None:
        if session in self._without:
            self._without.remove(session)
            self._method.begin(session, first)
        self._method.states(session, first, decode_rows(rows, self.states_format))
        if self._recorder is not None:
            self._recorder.states(session, first, rows)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return self._method.draft(requests)

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        return self._method.draft_ahead(requests, interrupted, early)

    def close(self, sessions: Sequence[str]) -> None:
        self._method.close(sessions)
        self._without.difference_update(sessions)
        if self._recorder is not None:
            self._recorder.close(sessions)

    def prepare_weights(self, folder: Path) -> Callable[[], object]:
        """Implements `ExchangesWeights`."""
        if not isinstance(self._method, ExchangesWeights):
            raise ModelError(f"{folder} cannot replace the weights in use: this method's weights cannot be exchanged")
        return self._method.prepare_weights(folder)


def decoded(method: TakesRows, setup: DraftSetup, max_states: int | None = None) -> DecodedStates:
    """Wraps `method` to decode rows in the format of the deployment; `max_states` is as in `LimitsStates`."""
    assert setup.states is not None, "setup.states is required for a method that reads states"
    return DecodedStates(method, setup.states, setup.recorder, max_states)
