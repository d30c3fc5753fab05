"""Reads a DFlash head's tensors under canonical names, as the weights of its forward."""

import pickle
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.compute.linear import Projection
from actors.drafters.heads.dflash.config import MASK_FILE, DFlashConfig
from actors.drafters.heads.projection import RowProjection
from actors.drafters.heads.weight_reader import WeightReader
from actors.models.config_reader import one_line
from actors.models.decoder import Norm
from cluster.errors import ModelError

ALIASES = (
    (r"(?:model\.)?encoder\.fc\.", "fc."),
    (r"(?:model\.)?encoder\.output_norm_enc\.", "hidden_norm."),
    (r"(?:model\.)?midlayer\.", "layers.0."),
    (r"model\.", ""),
)


@dataclass(frozen=True, slots=True, eq=False)
class DFlashLayer:
    """Weights of one decoder layer."""

    attention_norm: Norm
    query: Projection
    key_value: Projection  # yields keys, then values
    query_norm: Norm
    key_norm: Norm
    attention_out: Projection
    mlp_norm: Norm
    gate_up: Projection  # yields the gate, then the up projection
    down: Projection


@dataclass(frozen=True, slots=True, eq=False)
class DFlashWeights:
    """Weights of `DFlashDecoder`."""

    embedding: Tensor  # (vocabulary, hidden)
    mask_embedding: Tensor  # (hidden,)
    row_projection: RowProjection  # projects the target's states
    layers: tuple[DFlashLayer, ...]
    norm: Norm
    lm_head: Projection
    token_ids: Tensor  # (columns,): the target's token id for each logit column


@dataclass(eq=False)
class DFlashReader(WeightReader):
    """Assembles the weights of a DFlash head."""

    config: DFlashConfig

    def weights(self, proposable: Collection[int]) -> DFlashWeights:
        """Reads all weights.

        Raises ModelError if a tensor is missing, misshapen or unused.
        """
        config = self.config
        embedding = self.own_or_borrowed("embed_tokens.weight", config.vocabulary)
        columns = self.draft_columns(proposable)
        lm_head = columns.of(self.own_or_borrowed("lm_head.weight", config.columns))
        weights = DFlashWeights(
            embedding=embedding,
            mask_embedding=self._mask_embedding(embedding),
            row_projection=self.row_projection(),
            layers=tuple(self._layer(index) for index in range(len(config.layers))),
            norm=self.norm("norm"),
            lm_head=self.product(lm_head.contiguous(), None),
            token_ids=columns.token_ids.to(self.device),
        )
        self.check_all_used("DFlash")
        return weights

    def row_projection(self) -> RowProjection:
        """Reads only the projection of the target's states."""
        config = self.config
        fc = self.linear(["fc"], [config.hidden], config.needs.width)
        return RowProjection((), fc, self.norm("hidden_norm"))

    def _mask_embedding(self, embedding: Tensor) -> Tensor:
        """Reads the mask's embedding from the embedding table; if the mask is an added token, from its own file."""
        path = self.files.folder / MASK_FILE
        if not path.is_file():
            return embedding[self.config.mask_token]
        try:
            stored = torch.load(path, map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError) as error:
            raise ModelError(f"{path} cannot be read as tensors alone: {one_line(error)}; fetch it again") from error
        vector = stored.get("embedding") if isinstance(stored, dict) else stored
        if not isinstance(vector, Tensor) or vector.numel() != self.config.hidden:
            raise ModelError(f"{path} holds no mask embedding of {self.config.hidden} elements; fetch it again")
        token = stored.get("mask_token_id") if isinstance(stored, dict) else None
        if token is not None and int(token) != self.config.mask_token:
            raise ModelError(
                f"{path} has the embedding of mask token {int(token)}, but the head's config.json has mask token"
                f" {self.config.mask_token}; fetch both again"
            )
        return self.placed(MASK_FILE, vector.flatten())

    def _layer(self, index: int) -> DFlashLayer:
        config = self.config
        layer = f"layers.{index}"
        attention = f"{layer}.self_attn"
        queries = config.heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        return DFlashLayer(
            attention_norm=self.norm(f"{layer}.input_layernorm"),
            query=self.linear([f"{attention}.q_proj"], [queries], config.hidden),
            key_value=self.linear([f"{attention}.k_proj", f"{attention}.v_proj"], [keys, keys], config.hidden),
            query_norm=self.norm(f"{attention}.q_norm", config.head_dim),
            key_norm=self.norm(f"{attention}.k_norm", config.head_dim),
            attention_out=self.linear([f"{attention}.o_proj"], [config.hidden], queries),
            mlp_norm=self.norm(f"{layer}.post_attention_layernorm"),
            gate_up=self.linear(
                [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], [config.intermediate] * 2, config.hidden
            ),
            down=self.linear([f"{layer}.mlp.down_proj"], [config.hidden], config.intermediate),
        )
