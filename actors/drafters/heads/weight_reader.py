"""Reads a head's tensors to a device under canonical names, and borrows missing tensors from the target.

The reader records each read, so that a head with unused tensors can be refused.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.linear import Product, Projection
from actors.drafters.heads.files import EMBEDDING, HEAD, HeadFiles
from actors.drafters.heads.projection import DraftColumns, draft_columns
from actors.models.decoder import WeightedNorm, norm_of
from actors.models.weights import is_finite, not_finite
from cluster.errors import ModelError

TRAINING_PREFIXES = ("t2d", "verifier_")  # prefixes of tensors used only in training
DERIVED_SUFFIX = "rotary_emb.inv_freq"  # determined by the configuration
BORROWABLE = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}  # names in the target, by name in the head


class HeadSizes(Protocol):
    """Sizes in the configuration of every head family."""

    @property
    def hidden(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def eps(self) -> float: ...


def borrowed_tensors(names: Collection[str]) -> list[tuple[str, ...]]:
    """Returns the tensors that a head with tensors `names` borrows, as groups of alternative names in the target."""
    return [group for name, group in BORROWABLE.items() if name not in names]


def place(folder: Path, name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Converts a tensor of the head in `folder`. Raises ModelError for NaN or infinite values."""
    placed = tensor.to(device, dtype).contiguous()
    if not placed.is_meta and not is_finite(placed):
        raise not_finite(folder, [name], dtype)
    return placed


@dataclass(eq=False)
class WeightReader:
    """Reads tensors and fused linear layers; a subclass assembles a family's weights."""

    files: HeadFiles
    target_folder: Path
    config: HeadSizes
    dtype: torch.dtype
    device: torch.device
    product: Product
    used: set[str] = field(default_factory=set)

    def has(self, name: str) -> bool:
        return name in self.files.tensors

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Reads a tensor. Raises ModelError if it is missing, has the wrong shape or is not finite."""
        self.used.add(name)
        return self.placed(name, self.files.tensor(name, shape))

    def placed(self, name: str, tensor: Tensor) -> Tensor:
        return place(self.files.folder, name, tensor, self.dtype, self.device)

    def norm(self, name: str, size: int | None = None) -> WeightedNorm:
        return norm_of(self.tensor(f"{name}.weight", size or self.config.hidden), self.config.eps)

    def linear(self, names: list[str], outputs: list[int], inputs: int) -> Projection:
        """Fuses linear layers with the same input into one product. A missing bias is zero."""
        pairs = list(zip(names, outputs, strict=True))
        weight = torch.cat([self.tensor(f"{name}.weight", size, inputs) for name, size in pairs])
        if not any(self.has(f"{name}.bias") for name in names):
            return self.product(weight, None)
        biases = [
            self.tensor(f"{name}.bias", size) if self.has(f"{name}.bias") else weight.new_zeros(size)
            for name, size in pairs
        ]
        return self.product(weight, torch.cat(biases))

    def own_or_borrowed(self, name: str, rows: int) -> Tensor:
        """Reads a tensor of `BORROWABLE`, (rows, hidden), from the head; if missing, from the target."""
        shape = (rows, self.config.hidden)
        if self.has(name):
            return self.tensor(name, *shape)
        return self.placed(name, self.files.borrowed(self.target_folder, BORROWABLE[name], shape))

    def draft_columns(self, proposable: Collection[int] | None) -> DraftColumns:
        """Selects the columns of `proposable` tokens; None: all. `d2t` contains target id minus draft id."""
        ids = torch.arange(self.config.columns)
        if self.has("d2t"):
            self.used.add("d2t")
            ids = ids + self.files.tensor("d2t", (self.config.columns,)).long()
        if proposable is None:
            proposable = range(self.config.vocabulary)
        columns = draft_columns(self.files.folder, ids, self.config.vocabulary, proposable)
        if self.has("d2t") and self.config.columns < self.config.vocabulary:  # else both may be unset buffers
            self._check_kept(ids)
        return columns

    def _check_kept(self, ids: Tensor) -> None:
        """Raises ModelError if `t2d`, the mask of the target's tokens in the draft vocabulary, contradicts `ids`."""
        kept = self.files.tensors.get("t2d")
        if kept is None or kept.dtype is not torch.bool or kept.shape != (self.config.vocabulary,):
            return
        if not torch.equal(ids.sort().values, kept.nonzero().flatten()):
            raise ModelError(
                f"d2t and t2d in {self.files.folder} select different tokens; fetch or convert the head again"
            )

    def check_all_used(self, family: str) -> None:
        """Raises ModelError for unread tensors, which indicate another kind of head."""
        unused = [
            name
            for name in sorted(self.files.tensors)
            if name not in self.used and not name.startswith(TRAINING_PREFIXES) and not name.endswith(DERIVED_SUFFIX)
        ]
        if unused:
            self.files.refuse_unused(unused, family)
