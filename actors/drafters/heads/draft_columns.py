"""Selection of a head's logit columns, and the target token that each column stands for."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.errors import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class DraftColumns:
    """The kept columns."""

    kept: Tensor | None  # (columns,): indices of published columns; None: all
    token_ids: Tensor  # (columns,): token ids of the target

    def of(self, weight: Tensor) -> Tensor:
        """Returns the kept rows of an LM head's weight, (published columns, hidden)."""
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
    kept = [column for column, token in enumerate(named) if token in allowed]
    if not kept:
        raise ModelError(f"{folder} predicts none of the target's tokens; use a head made for this target")
    if len(kept) == len(named):
        return DraftColumns(None, ids)
    columns = torch.tensor(kept)
    return DraftColumns(columns, ids[columns])
