"""Which of a head's logits are computed, and which of the target's tokens each of them is for."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cluster.errors import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class DraftColumns:
    """The columns that are kept."""

    kept: Tensor | None  # (columns,) of those that the head was published with; None: all
    token_ids: Tensor  # (columns,) of the target

    def of(self, weight: Tensor) -> Tensor:
        """What is kept of an LM head's weight, (published columns, hidden)."""
        return weight if self.kept is None else weight[self.kept.to(weight.device)]


def draft_columns(folder: Path, ids: Tensor, vocabulary: int, proposable: Collection[int]) -> DraftColumns:
    """Of a head whose column i is for token `ids[i]`, those for proposable tokens.

    Raises ModelError where ids are not different ones of the target's, or none of them is proposable.
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
