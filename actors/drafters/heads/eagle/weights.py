"""Places the tensors of an EAGLE head's folder on the device, as the weights that its forward uses."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from actors.compute.linear import Product, Projection
from actors.drafters.heads.eagle.config import (
    EagleConfig,
    EagleKind,
    FeatureNorm,
    OutputNorm,
    WeightSource,
    check_all_used,
)
from actors.drafters.heads.files import EMBEDDING, HEAD, HeadFiles, target_tensor
from actors.drafters.heads.projection import RowProjection, unchanged
from actors.models.decoder import Layer, Norm, norm_of
from cluster.errors import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """Weights that `EagleDecoder` uses."""

    embedding: Tensor  # (vocabulary, hidden)
    embedding_norm: Norm
    row_projection: RowProjection | None  # EAGLE-3: projection of the target's states; None if fed unprojected
    fc: Projection | None  # over embedding and state of a step; None for EAGLE-3
    state_norm: Norm  # of the state fed to a step; the identity for EAGLE-1
    layers: tuple[Layer, ...]
    norm: Norm | None  # after the last layer
    lm_head: Projection
    token_ids: Tensor  # (columns,): token ids of the target
    mask: Tensor | None  # (1, width), P-EAGLE: replaces the target's states at a mask token


def borrowed_tensors(config: EagleConfig) -> list[tuple[str, ...]]:
    """Returns the tensors that the head takes from the target: groups of names, the first present one counts."""
    pairs = ((config.embedding, EMBEDDING), (config.lm_head, HEAD))
    return [names for source, names in pairs if source is WeightSource.TARGET]


@dataclass(eq=False)
class WeightReader:
    """Reads tensors from a head's files, and tracks which were not used."""

    files: HeadFiles
    target_folder: Path
    config: EagleConfig
    dtype: torch.dtype
    device: torch.device
    product: Product
    used: set[str] = field(default_factory=set)

    def weights(self, proposable: Collection[int] | None) -> EagleWeights:
        """Reads all weights.

        Raises ModelError if a tensor is missing, has another shape, or is not used by the forward.
        """
        config = self.config
        is_eagle3 = config.kind is EagleKind.EAGLE3
        embedding = self._embedding()
        columns, token_ids = self._columns(proposable)
        found = EagleWeights(
            embedding=embedding,
            embedding_norm=self._norm("layers.0.input_layernorm" if is_eagle3 else "embed_layernorm", not is_eagle3),
            row_projection=self.row_projection() if config.projects else None,
            fc=None if is_eagle3 else self._linear(["fc"], [config.hidden], 2 * config.hidden),
            state_norm=self._norm("layers.0.hidden_norm" if is_eagle3 else "state_layernorm", True),
            layers=tuple(self._layer(index) for index in range(config.layers)),
            norm=self._output_norm(is_eagle3),
            lm_head=self._lm_head(embedding, columns),
            token_ids=token_ids,
            mask=self._mask(),
        )
        check_all_used(self.files, self.used)
        return found

    def row_projection(self) -> RowProjection:
        """Reads the projection of a head that projects the target's states, and no other tensor."""
        assert self.config.projects, "this head is fed the target's states as they are"
        fc = self._linear(["fc"], [self.config.hidden], self.config.needs.width)
        return RowProjection(self._feature_norms(), fc)

    # ------------------------------------------------------------ tensors

    def _has(self, name: str) -> bool:
        return name in self.files.tensors

    def _tensor(self, name: str, *shape: int) -> Tensor:
        self.used.add(name)
        return self._placed(self.files.tensor(name, shape))

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device, self.dtype).contiguous()

    def _norm(self, name: str, is_optional: bool = False, size: int | None = None) -> Norm:
        if is_optional and not self._has(f"{name}.weight"):
            return unchanged
        return norm_of(self._tensor(f"{name}.weight", size or self.config.hidden), self.config.eps)

    def _linear(self, names: list[str], outputs: list[int], inputs: int) -> Projection:
        """Reads several layers over the same inputs as one product; a missing bias counts as zero."""
        pairs = list(zip(names, outputs, strict=True))
        weight = torch.cat([self._tensor(f"{name}.weight", size, inputs) for name, size in pairs])
        biased = [self._has(f"{name}.bias") for name in names]
        if not any(biased):
            return self.product(weight, None)
        biases = [
            self._tensor(f"{name}.bias", size) if has else weight.new_zeros(size)
            for (name, size), has in zip(pairs, biased, strict=True)
        ]
        return self.product(weight, torch.cat(biases))

    # ------------------------------------------------------------ parts of the head

    def _embedding(self) -> Tensor:
        config = self.config
        shape = (config.vocabulary, config.hidden)
        if config.embedding is WeightSource.HEAD:
            return self._tensor("embed_tokens.weight", *shape)
        return self._placed(self._borrowed(EMBEDDING, shape))

    def _lm_head(self, embedding: Tensor, columns: Tensor | None) -> Projection:
        config = self.config
        shape = (config.columns, config.hidden)
        if config.lm_head is WeightSource.HEAD:
            weight = self._tensor("lm_head.weight", *shape)
        elif config.lm_head is WeightSource.EMBEDDING:
            weight = embedding
        else:
            weight = self._placed(self._borrowed(HEAD, shape))
        return self.product(weight if columns is None else weight[columns], None)

    def _borrowed(self, names: tuple[str, ...], shape: tuple[int, ...]) -> Tensor:
        found = target_tensor(self.target_folder, names)
        if tuple(found.shape) != shape:
            raise ModelError(
                f"{self.files.folder} borrows {names[0]} of {self.target_folder}, which has shape"
                f" {tuple(found.shape)}, expected {shape}"
            )
        return found

    def _columns(self, proposable: Collection[int] | None) -> tuple[Tensor | None, Tensor]:
        """Returns the kept columns, None for all, and their ids in the target. `d2t` holds the offset to add."""
        config = self.config
        ids = torch.arange(config.columns)
        if self._has("d2t"):
            self.used.add("d2t")
            ids = ids + self.files.tensor("d2t", (config.columns,)).long()
            self._check_ids(ids.tolist())
        if proposable is None:
            return None, ids.to(self.device)
        kept = [column for column, token in enumerate(ids.tolist()) if token in proposable]
        columns = torch.tensor(kept, device=self.device)
        return columns, ids.to(self.device)[columns]

    def _check_ids(self, ids: list[int]) -> None:
        different = len(set(ids))
        if different < len(ids) or min(ids) < 0 or max(ids) >= self.config.vocabulary:
            raise ModelError(
                f"d2t in {self.files.folder} leads to ids from {min(ids)} to {max(ids)}, {different} of them different;"
                f" expected {len(ids)} different ones below {self.config.vocabulary}: it holds what to add to a draft"
                " id to get the target's"
            )

    def _feature_norms(self) -> tuple[Norm, ...]:
        config = self.config
        if config.feature_norm is FeatureNorm.ALL:
            return (self._norm("input_norm", size=config.needs.width),)
        if config.feature_norm is FeatureNorm.EACH:
            count = config.needs.width // config.target_hidden
            return tuple(self._norm(f"fc_norm.{part}", size=config.target_hidden) for part in range(count))
        return ()

    def _mask(self) -> Tensor | None:
        if self.config.mask_token is None:
            return None
        self.used.add("mask_hidden")
        found = self.files.tensor("mask_hidden")
        width = self.config.needs.width
        if found.numel() != width:
            raise ModelError(f"mask_hidden in {self.files.folder} has {found.numel()} elements, expected {width}")
        return self._placed(found.reshape(1, width))

    def _output_norm(self, is_eagle3: bool) -> Norm | None:
        name = "norm" if is_eagle3 else "lm_head_layernorm"
        if self.config.output_norm is OutputNorm.NOTHING:
            self.used.add(f"{name}.weight")
            return None
        return self._norm(name)

    def _layer(self, index: int) -> Layer:
        config = self.config
        is_wide = index == 0 and config.kind is EagleKind.EAGLE3
        layer = f"layers.{index}"
        attention = f"{layer}.self_attn"
        queries = config.heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        first = [f"{attention}.{name}_proj" for name in "qkv"]
        has_head_norms = self._has(f"{attention}.q_norm.weight")
        return Layer(
            attention_norm=unchanged if is_wide else self._norm(f"{layer}.input_layernorm", index == 0),
            qkv=self._linear(first, [queries, keys, keys], (2 if is_wide else 1) * config.hidden),
            query_norm=self._norm(f"{attention}.q_norm", size=config.head_dim) if has_head_norms else None,
            key_norm=self._norm(f"{attention}.k_norm", size=config.head_dim) if has_head_norms else None,
            attention_out=self._linear([f"{attention}.o_proj"], [config.hidden], queries),
            mlp_norm=self._norm(f"{layer}.post_attention_layernorm"),
            gate_up=self._linear(
                [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], [config.intermediate] * 2, config.hidden
            ),
            down=self._linear([f"{layer}.mlp.down_proj"], [config.hidden], config.intermediate),
            scaling=config.head_dim**-0.5,
            window=None,
        )
