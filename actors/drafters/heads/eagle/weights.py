"""Reads an EAGLE head's tensors to the device, as the weights of its forward."""

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from actors.attention import ScoreOptions
from actors.compute.linear import Projection
from actors.drafters.heads.eagle.config import (
    EagleConfig,
    EagleKind,
    FeatureNorm,
    OutputNorm,
    WeightSource,
)
from actors.drafters.heads.projection import DraftColumns, RowProjection, unchanged
from actors.drafters.heads.weight_reader import WeightReader
from actors.models.decoder import Layer, Norm
from cluster.errors import ModelError


@dataclass(frozen=True, slots=True, eq=False)
class EagleWeights:
    """Weights of `EagleDecoder`."""

    embedding: Tensor  # (vocabulary, hidden)
    embedding_norm: Norm
    row_projection: RowProjection | None  # EAGLE-3: projects the target's states; None: unprojected
    fc: Projection | None  # projects embedding and state to one input; None for EAGLE-3
    state_norm: Norm  # norms the input state; identity for EAGLE-1
    layers: tuple[Layer, ...]
    norm: Norm | None  # after the last layer
    lm_head: Projection
    token_ids: Tensor  # (columns,): the target's token id for each logit column
    mask: Tensor | None  # (1, width): P-EAGLE's state for mask tokens


@dataclass(eq=False)
class EagleReader(WeightReader):
    """Assembles the weights of an EAGLE head."""

    config: EagleConfig

    def weights(self, proposable: Collection[int] | None) -> EagleWeights:
        """Reads all weights.

        Raises ModelError if a tensor is missing, misshapen or unused.
        """
        config = self.config
        is_eagle3 = config.kind is EagleKind.EAGLE3
        embedding = self.own_or_borrowed("embed_tokens.weight", config.vocabulary)
        columns = self.draft_columns(proposable)
        weights = EagleWeights(
            embedding=embedding,
            embedding_norm=(
                self.norm("layers.0.input_layernorm") if is_eagle3 else self._optional_norm("embed_layernorm")
            ),
            row_projection=self.row_projection() if config.projects else None,
            fc=None if is_eagle3 else self.linear(["fc"], [config.hidden], 2 * config.hidden),
            state_norm=self._state_norm(is_eagle3),
            layers=tuple(self._layer(index) for index in range(config.layers)),
            norm=self._output_norm(is_eagle3),
            lm_head=self._lm_head(embedding, columns),
            token_ids=columns.token_ids.to(self.device),
            mask=self._mask(),
        )
        self.check_all_used("EAGLE")
        return weights

    def row_projection(self) -> RowProjection:
        """Reads only the projection of the target's states. Requires a head with a projection."""
        assert self.config.projects, "this head has no projection"
        fc = self.linear(["fc"], [self.config.hidden], self.config.needs.width)
        return RowProjection(self._feature_norms(), fc)

    def _state_norm(self, is_eagle3: bool) -> Norm:
        if self.config.projects:
            return self.norm("layers.0.hidden_norm")
        return self._optional_norm("layers.0.hidden_norm" if is_eagle3 else "state_layernorm")

    def _optional_norm(self, name: str) -> Norm:
        return self.norm(name) if self.has(f"{name}.weight") else unchanged

    def _lm_head(self, embedding: Tensor, columns: DraftColumns) -> Projection:
        is_tied = self.config.lm_head is WeightSource.EMBEDDING
        weight = embedding if is_tied else self.own_or_borrowed("lm_head.weight", self.config.columns)
        return self.product(columns.of(weight), None)

    def _feature_norms(self) -> tuple[Norm, ...]:
        config = self.config
        if config.feature_norm is FeatureNorm.ALL:
            return (self.norm("input_norm", size=config.needs.width),)
        if config.feature_norm is FeatureNorm.EACH:
            count = config.needs.width // config.target_hidden
            return tuple(self.norm(f"fc_norm.{part}", size=config.target_hidden) for part in range(count))
        return ()

    def _mask(self) -> Tensor | None:
        if self.config.mask_token is None:
            return None
        self.used.add("mask_hidden")
        state = self.files.tensor("mask_hidden")
        width = self.config.needs.width
        if state.numel() != width:
            raise ModelError(f"mask_hidden in {self.files.folder} has {state.numel()} elements, expected {width}")
        return self.placed("mask_hidden", state.reshape(1, width))

    def _output_norm(self, is_eagle3: bool) -> Norm | None:
        name = "norm" if is_eagle3 else "lm_head_layernorm"
        if self.config.output_norm is OutputNorm.NOTHING:
            self.used.add(f"{name}.weight")
            return None
        return self.norm(name)

    def _layer(self, index: int) -> Layer:
        config = self.config
        is_wide = index == 0 and config.kind is EagleKind.EAGLE3
        layer = f"layers.{index}"
        attention = f"{layer}.self_attn"
        queries = config.heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        first = [f"{attention}.{name}_proj" for name in "qkv"]
        # In EAGLE-3 this tensor norms the embedding. EAGLE-1 heads may lack it.
        norm = f"{layer}.input_layernorm"
        attention_norm = unchanged if is_wide else self._optional_norm(norm) if index == 0 else self.norm(norm)
        has_head_norms = self.has(f"{attention}.q_norm.weight")
        return Layer(
            attention_norm=attention_norm,
            qkv=self.linear(first, [queries, keys, keys], (2 if is_wide else 1) * config.hidden),
            query_norm=self.norm(f"{attention}.q_norm", size=config.head_dim) if has_head_norms else None,
            key_norm=self.norm(f"{attention}.k_norm", size=config.head_dim) if has_head_norms else None,
            attention_out=self.linear([f"{attention}.o_proj"], [config.hidden], queries),
            mlp_norm=self.norm(f"{layer}.post_attention_layernorm"),
            gate_up=self.linear(
                [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], [config.intermediate] * 2, config.hidden
            ),
            down=self.linear([f"{layer}.mlp.down_proj"], [config.hidden], config.intermediate),
            scores=ScoreOptions(config.head_dim**-0.5),
        )
