"""Parts shared by draft heads: the projection of hidden states, the logit columns, and the decoding of state rows.

A `RowProjection` is the `fc` of EAGLE-3 and DFlash with the norms around it. The target or the drafter applies it to
each row of the target's states before the head reads them.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.hidden_states import decode_rows
from actors.compute.linear import Projection
from actors.models.decoder import Norm
from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.errors import ModelError
from protos.messages import DraftRequest, Open, Shape, StatesFormat


def unchanged(x: Tensor) -> Tensor:
    """Returns its input; used in place of a missing norm."""
    return x


@dataclass(frozen=True, slots=True, eq=False)
class RowProjection:
    """Applies optional norms to equal parts of a row, then a linear layer, then a norm."""

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
    """The logit columns that a head computes, and their tokens."""

    kept: Tensor | None  # (columns,): indices of the published columns; None: all
    token_ids: Tensor  # (columns,): the target's token id for each logit column

    def of(self, weight: Tensor) -> Tensor:
        """Selects these columns' rows from an LM head's weight, (published columns, hidden)."""
        return weight if self.kept is None else weight[self.kept.to(weight.device)]


def draft_columns(folder: Path, ids: Tensor, vocabulary: int, proposable: Collection[int]) -> DraftColumns:
    """Selects the columns of proposable tokens, for a head whose column i stands for token `ids[i]`.

    Raises ModelError if the ids are not distinct ids of the target, or none of them is proposable.
    """
    named = ids.tolist()
    if len(set(named)) < len(named) or min(named) < 0 or max(named) >= vocabulary:
        raise ModelError(
            f"the draft vocabulary in {folder} has {len(named)} tokens, ids from {min(named)} to {max(named)},"
            f" {len(set(named))} of them different; expected different ids below {vocabulary}, the target's vocabulary"
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
    """A drafting method that takes rows of hidden states as tensors."""

    def begin(self, session: str, first: int) -> None:
        """Announces that an open session's states start at position `first`; the default is 0."""
        ...

    def states(self, session: str, first: int, rows: Tensor) -> None:
        """Takes true states, (n, width), for the positions from `first` on; ignores unknown sessions."""
        ...


class DecodedStates:
    """Makes a method that takes rows as tensors a `ReadsStates` method that takes encoded rows."""

    def __init__(self, method: TakesRows, layout: StatesFormat) -> None:
        self.states_format = layout
        self._method = method
        self._without: set[str] = set()  # open sessions for which no states have arrived

    @property
    def shapes(self) -> frozenset[Shape]:
        return self._method.shapes

    @property
    def tokens_per_forward(self) -> int:
        return self._method.tokens_per_forward

    def open(self, request: Open) -> None:
        self._method.open(request)
        self._without.add(request.session)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._method.committed(session, tokens)

    def states(self, session: str, first: int, rows: bytes) -> None:
        if session in self._without:
            self._without.remove(session)
            self._method.begin(session, first)
        self._method.states(session, first, decode_rows(rows, self.states_format))

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return self._method.draft(requests)

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        return self._method.draft_ahead(requests, interrupted, early)

    def close(self, sessions: Sequence[str]) -> None:
        self._method.close(sessions)
        self._without.difference_update(sessions)


def decoded(method: TakesRows, layout: StatesFormat | None) -> DecodedStates:
    """Wraps `method` to decode its rows in the format that the deployment's setup states."""
    assert layout is not None, "a deployment whose method reads states says how they travel"
    return DecodedStates(method, layout)
