"""Reads a head's tensors under canonical names to a device; borrows the target's where the head stores none.

The reader records which tensors it reads, so that a head with unused tensors can be refused.
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
from actors.models.decoder import Norm, norm_of

TRAINING_PREFIXES = ("t2d", "verifier_")  # prefixes of tensors used only in training
DERIVED_SUFFIX = "rotary_emb.inv_freq"  # suffix of tensors that the configuration determines
BORROWABLE = {"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD}  # the target's names, by the head's name


class HeadSizes(Protocol):
    """Sizes that the configuration of every head family has."""

    @property
    def hidden(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def columns(self) -> int: ...

    @property
    def eps(self) -> float: ...


def borrowed_tensors(names: Collection[str]) -> list[tuple[str, ...]]:
    """Returns what a head that stores `names` borrows, as groups of names; the target has one name of each group."""
    return [group for name, group in BORROWABLE.items() if name not in names]


@dataclass(eq=False)
class WeightReader:
    """Reads tensors, and linear layers fused into one product; a subclass assembles a family's weights."""

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
        """Reads a tensor. Raises ModelError if it is missing or has another shape."""
        self.used.add(name)
        return self.placed(self.files.tensor(name, shape))

    def placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).contiguous()

    def norm(self, name: str, size: int | None = None) -> Norm:
        return norm_of(self.tensor(f"{name}.weight", size or self.config.hidden), self.config.eps)

    def linear(self, names: list[str], outputs: list[int], inputs: int) -> Projection:
        """Fuses linear layers with the same input into one product; a missing bias counts as zero."""
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
        """Reads a tensor of `BORROWABLE`, (rows, hidden), from the head or else from the target."""
        shape = (rows, self.config.hidden)
        if self.has(name):
            return self.tensor(name, *shape)
        return self.placed(self.files.borrowed(self.target_folder, BORROWABLE[name], shape))

    def draft_columns(self, proposable: Collection[int] | None) -> DraftColumns:
        """Selects the columns of `proposable` tokens; None: all. `d2t` holds the target's id minus the draft id."""
        ids = torch.arange(self.config.columns)
        if self.has("d2t"):
            self.used.add("d2t")
            ids = ids + self.files.tensor("d2t", (self.config.columns,)).long()
        if proposable is None:
            proposable = range(self.config.vocabulary)
        return draft_columns(self.files.folder, ids, self.config.vocabulary, proposable)

    def check_all_used(self, family: str) -> None:
        """Raises ModelError for tensors that were not read: they indicate another kind of head."""
        unused = [
            name
            for name in sorted(self.files.tensors)
            if name not in self.used and not name.startswith(TRAINING_PREFIXES) and not name.endswith(DERIVED_SUFFIX)
        ]
        if unused:
            self.files.refuse_unused(unused, family)
