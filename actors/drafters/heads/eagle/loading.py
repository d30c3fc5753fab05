"""Loads an EAGLE head: its files, the tensors borrowed from the target, and the resolved configuration."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.compute.linear import Product, projection
from actors.drafters.heads.eagle.config import EagleConfig, EagleOverrides
from actors.drafters.heads.eagle.decoder import EagleDecoder
from actors.drafters.heads.eagle.names import canonical
from actors.drafters.heads.eagle.resolution import resolve
from actors.drafters.heads.eagle.weights import WeightReader
from actors.drafters.heads.files import HeadFiles, read_head
from actors.drafters.heads.rope import rotary_of
from actors.drafters.heads.row_projection import RowProjection
from actors.drafters.heads.target_shape import target_shape

AS_CONFIGURED = EagleOverrides()


@dataclass(frozen=True, slots=True, eq=False)
class EagleHead:
    """A loaded head."""

    config: EagleConfig
    decoder: EagleDecoder
    token_ids: Tensor  # (columns,) of the target, by column of the logits
    dtype: torch.dtype
    device: torch.device

    def page_bytes(self, page_size: int) -> int:
        """Returns the bytes of one page of keys and values in all layers."""
        config = self.config
        return 2 * config.layers * config.kv_heads * config.head_dim * page_size * self.dtype.itemsize


def read_eagle_config(folder: Path, target_folder: Path, overrides: EagleOverrides = AS_CONFIGURED) -> EagleConfig:
    """Resolves a published head for a target. Raises ModelError if it does not fit or its kind is unknown."""
    return resolve(canonical(read_head(folder)), target_shape(target_folder), overrides)


def load_row_projection(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    overrides: EagleOverrides = AS_CONFIGURED,
    product: Product = projection,
) -> RowProjection:
    """Loads the projection of a published head that has one, and no other tensor.

    Raises ModelError as `load_eagle` does.
    """
    files = canonical(read_head(folder))
    config = resolve(files, target_shape(target_folder), overrides)
    return WeightReader(files, target_folder, config, dtype, device, product).row_projection()


def load_eagle(
    folder: Path,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    overrides: EagleOverrides = AS_CONFIGURED,
    proposable: Collection[int] | None = None,
    product: Product = projection,
) -> EagleHead:
    """Loads a published head for a target, leaving out tokens that are not `proposable`.

    Raises ModelError if the head does not fit the target or its kind is unknown.
    """
    files = canonical(read_head(folder))
    config = resolve(files, target_shape(target_folder), overrides)
    return head_of(files, config, target_folder, dtype, device, proposable, product)


def head_of(
    files: HeadFiles,
    config: EagleConfig,
    target_folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    proposable: Collection[int] | None,
    product: Product,
) -> EagleHead:
    """Builds a head from tensors in the names of `names`."""
    reader = WeightReader(files, target_folder, config, dtype, device, product)
    weights = reader.weights(proposable)
    rotary = rotary_of(config.rope, config.head_dim, config.max_positions).to(device)
    return EagleHead(config, EagleDecoder(config, weights, rotary), weights.token_ids, dtype, device)
