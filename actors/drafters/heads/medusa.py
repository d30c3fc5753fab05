"""Medusa heads: each predicts one later token from the target's final state, independent of the tokens in between.

Medusa: Cai et al. 2024, arXiv 2401.10774. Head i, counted from 0, predicts the token i + 1 positions after the last
committed token. Tensor names determine the layout. FasterDecoding has two: `{i}.{j}.linear.weight`, and the same names
under `medusa_head.` in a merged model. vLLM's layout, `blocks.{i}.layers.{j}.weight`, may have a smaller vocabulary.
"""

import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.compute.linear import PlainProjection, Product, Projection, projection
from actors.drafters.heads.files import HEAD, META, QUANTIZATION, HeadFiles, head_folder, read_head, read_headers
from actors.drafters.heads.last_state import check_state_width, last_state_drafting, states_needed
from actors.drafters.heads.projection import DecodedStates, decoded, draft_columns
from actors.drafters.heads.rope import TargetShape, target_shape
from actors.drafters.heads.weight_reader import place
from actors.drafters.registry import DraftSetup
from actors.models.decoder import ForwardOutput
from cluster.config import DraftPool
from cluster.errors import ModelError
from protos.messages import StatesNeeded

__all__ = ["check_head", "create", "states_needed"]  # looked up by the registry

MERGED = "medusa_head."
PREFIXES = (MERGED, "medusa_heads.")
TOKEN_MAP = "token_map"  # the target's ids of a smaller vocabulary
SHARED_LM_HEAD = "original_lm_head"  # key in vLLM's configuration: heads use the target's LM head or a copy of it
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.weight")
log = logging.getLogger(__name__)
LAYER = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.weight")


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Shape of the heads, read from their tensors because published configurations contain wrong sizes."""

    layout: str
    heads: int
    blocks: int  # residual blocks per head
    hidden: int
    columns: int  # columns of the published logits
    vocabulary: int  # vocabulary size of the target
    needs: StatesNeeded

    @property
    def width(self) -> int:
        return self.heads

    @property
    def recurs(self) -> bool:
        return False

    def reach(self, depth: int) -> int:
        """Returns the number of remaining heads after `depth` tokens.

        Each position has one head, which reads only the target's state, so drafting ends after the last head.
        """
        return max(0, self.heads - depth)

    def describe(self) -> list[str]:
        """Describes the resolved configuration, one fact per line."""
        return [
            f"{self.heads} Medusa heads of {self.blocks} residual block(s), {self.layout} layout",
            f"reads the target's state {self.needs.layers[0]}, its final one, {self.needs.width} elements",
            f"proposes {self.columns} of {self.vocabulary} tokens",
        ]


@dataclass(frozen=True, slots=True)
class _Branch:
    """Weights of one Medusa head."""

    blocks: tuple[Projection, ...]
    lm_head: Projection


@dataclass(frozen=True, slots=True, eq=False)
class MedusaHeads:
    """A `LastStateHead` with one Medusa head per position."""

    config: MedusaConfig
    branches: Sequence[_Branch]
    token_ids: Tensor  # (columns,): the target's token id for each logit column

    def predict_next(self, states: Tensor, tokens: Sequence[int], depth: int) -> ForwardOutput:
        """Applies the head of this depth; `states`, (rows, hidden), are always the target's."""
        branch = self.branches[depth]
        hidden = states
        for block in branch.blocks:
            hidden = hidden + F.silu(block(hidden))
        return ForwardOutput(branch.lm_head(hidden), states)


def create(draft: DraftPool, setup: DraftSetup) -> DecodedStates:
    """Creates the method. Raises ModelError if the heads in `draft.model` do not match the target."""
    borrowed = borrowed_tensors_of(without_base_model(read_head(head_folder(draft))))
    return decoded(last_state_drafting(load_medusa, draft, setup, draft.medusa, borrowed), setup)


def check_head(draft: DraftPool, target: Path, tokens: Collection[int]) -> None:
    """Runs the heads' loader on headers alone. Raises ModelError if the heads do not match the target."""
    files = without_base_model(read_headers(head_folder(draft)))
    config = resolve_medusa(files, target_shape(target))
    medusa_of(files, config, target, torch.float32, META, tokens, PlainProjection)


def borrowed_tensors_of(files: HeadFiles) -> list[tuple[str, ...]]:
    """Returns the tensors to borrow from the target, as groups of names. Expects tensor names without prefix."""
    return [HEAD] if names_of(files).lm_head(0) is None else []


def load_medusa(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int],
    product: Product = projection,
) -> MedusaHeads:
    """Loads published heads. Raises ModelError if they do not match the target."""
    stored = read_head(folder)
    files = without_base_model(stored)
    if len(files.tensors) < len(stored.tensors) and folder.resolve() != target_folder.resolve():
        log.warning(
            "%s also holds a base model, trained with its Medusa heads, but the target is %s; set model.target to the"
            " head's folder unless their weights are the same",
            folder,
            target_folder,
        )
    config = resolve_medusa(files, target_shape(target_folder))
    return medusa_of(files, config, target_folder, dtype, device, proposable, product)


def medusa_of(
    files: HeadFiles,
    config: MedusaConfig,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int],
    product: Product,
) -> MedusaHeads:
    """Builds heads from unprefixed tensor names. Raises ModelError if a tensor is missing, misshapen or unused."""
    names = names_of(files)
    used = {TOKEN_MAP}
    ids = files.tensors.get(TOKEN_MAP, torch.arange(config.columns)).long()
    columns = draft_columns(files.folder, ids, config.vocabulary, proposable)

    def placed(name: str, tensor: Tensor) -> Tensor:
        used.add(name)
        return place(files.folder, name, tensor, dtype, device)

    def stored(name: str, *shape: int) -> Tensor:
        return placed(name, files.tensor(name, shape))

    def linear(name: str) -> Projection:
        has_bias = f"{name}.bias" in files.tensors
        bias = stored(f"{name}.bias", config.hidden) if has_bias else None
        weight = stored(f"{name}.weight", config.hidden, config.hidden)
        return product(weight, bias)

    @cache  # heads may share one
    def lm_head(name: str | None) -> Projection:
        shape = (config.columns, config.hidden)
        weight = files.tensor(name, shape) if name else files.borrowed(target_folder, HEAD, shape)
        return product(placed(name or HEAD[0], columns.of(weight)), None)

    branches = [
        _Branch(tuple(linear(names.block(head, block)) for block in range(config.blocks)), lm_head(names.lm_head(head)))
        for head in range(config.heads)
    ]
    copies = ("lm_head.", "lm_heads.") if files.config.get(SHARED_LM_HEAD) else ()
    if unused := [name for name in sorted(files.tensors) if name not in used and not name.startswith(copies)]:
        files.refuse_unused(unused, "Medusa")
    return MedusaHeads(config, branches, columns.token_ids.to(device))


def resolve_medusa(files: HeadFiles, target: TargetShape) -> MedusaConfig:
    """Resolves heads from tensor names without prefix. Raises ModelError if they do not match the target."""
    files.refuse_quantized()
    names = names_of(files)
    if not names.heads or names.heads != list(range(len(names.heads))):
        raise ModelError(
            f"{files.folder} contains Medusa heads {names.heads}, expected 0, 1, ... without a gap, with tensors"
            " such as 0.0.linear.weight or blocks.0.layers.0.weight"
        )
    hidden = int(files.tensor(f"{names.block(0, 0)}.weight").shape[-1]) if names.blocks else target.hidden
    check_state_width(files.folder, hidden, target)
    name = names.lm_head(0)
    columns = int(files.tensor(name).shape[0]) if name else target.vocabulary
    mapped = files.tensors.get(TOKEN_MAP)
    if mapped is not None and len(mapped) != columns:
        raise ModelError(f"token_map in {files.folder} has {len(mapped)} tokens, expected {columns}; fetch it again")
    needs = StatesNeeded((target.layers,), hidden)
    return MedusaConfig(names.layout, len(names.heads), names.blocks, hidden, columns, target.vocabulary, needs)


def without_base_model(files: HeadFiles) -> HeadFiles:
    """Drops the tensors and the quantization of a merged model, and the prefix of the heads' tensor names."""
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in files.tensors):
            mine = {name: tensor for name, tensor in files.tensors.items() if name.startswith(prefix)}
            is_merged = len(mine) < len(files.tensors)
            config = {key: value for key, value in files.config.items() if key != QUANTIZATION or not is_merged}
            return HeadFiles(files.folder, config, mine).renamed([(re.escape(prefix), "")])
    return files


class _OwnNames:
    """FasterDecoding's layout, with residual blocks and an LM head per head."""

    layout = "FasterDecoding's"

    def __init__(self, files: HeadFiles) -> None:
        self._tensors = files.tensors
        matches = [match for name in files.tensors if (match := re.fullmatch(r"(\d+)\.(\d+)\.weight", name))]
        self._last = {int(match[1]): int(match[2]) for match in matches}
        self.heads = sorted(self._last)
        self.blocks = max(self._last.values(), default=0)

    def block(self, head: int, block: int) -> str:
        """Returns a block's stored name. The blocks of a head may be one shared module, stored only once."""
        name = f"{head}.{block}.linear"
        return name if f"{name}.weight" in self._tensors else f"{head}.0.linear"

    def lm_head(self, head: int) -> str | None:
        return f"{head}.{self.blocks}.weight"


class _VllmNames:
    """vLLM's layout. Heads may share one LM head; without any, they use the target's."""

    layout = "vLLM's"

    def __init__(self, files: HeadFiles) -> None:
        self._tensors = files.tensors
        matches = [match for name in files.tensors if (match := LAYER.fullmatch(name))]
        self.heads = sorted({int(match[1]) for match in matches})
        self.blocks = max([int(match[2]) + 1 for match in matches], default=0)
        self._is_shared = bool(files.config.get(SHARED_LM_HEAD))

    def block(self, head: int, block: int) -> str:
        return f"blocks.{head}.layers.{block}"

    def lm_head(self, head: int) -> str | None:
        if not self._is_shared:
            return f"lm_heads.{head}.weight"
        stored = ("lm_head.weight", "lm_heads.0.weight")
        return next((name for name in stored if name in self._tensors), None)


MedusaNames = _OwnNames | _VllmNames


def names_of(files: HeadFiles) -> MedusaNames:
    """Returns the layout's tensor names. Expects tensor names without prefix."""
    return _OwnNames(files) if any(map(BLOCK.fullmatch, files.tensors)) else _VllmNames(files)
