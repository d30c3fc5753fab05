"""Tensors of a DFlash head under canonical names, and the weights that its forward uses."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.compute.linear import Product, Projection
from actors.drafters.heads.dflash.config import DFlashConfig
from actors.drafters.heads.files import EMBEDDING, HEAD, HeadFiles, target_tensor
from actors.drafters.heads.projection import DraftColumns, RowProjection, draft_columns
from actors.models.decoder import Norm, norm_of
from cluster.errors import ModelError

ALIASES = (
    (r"(?:model\.)?encoder\.fc\.", "fc."),
    (r"(?:model\.)?encoder\.output_norm_enc\.", "hidden_norm."),
    (r"(?:model\.)?midlayer\.", "layers.0."),
    (r"model\.", ""),
)
NOT_COMPUTED_WITH = ("t2d", "verifier_")  # used in training only
MASK_FILE = "mask_embedding.pt"


def borrowed_tensors_of(files: HeadFiles) -> list[tuple[str, ...]]:
    """Returns the tensors that the head takes from the target: groups of names, the first present one counts."""
    pairs = (("embed_tokens.weight", EMBEDDING), ("lm_head.weight", HEAD))
    return [names for name, names in pairs if name not in files.tensors]


@dataclass(frozen=True, slots=True, eq=False)
class DFlashLayer:
    """One layer's weights."""

    attention_norm: Norm
    query: Projection
    key_value: Projection  # keys, then values
    query_norm: Norm
    key_norm: Norm
    attention_out: Projection
    mlp_norm: Norm
    gate_up: Projection  # gate, then up
    down: Projection


@dataclass(frozen=True, slots=True, eq=False)
class DFlashWeights:
    """Weights that `DFlashDecoder` uses."""

    embedding: Tensor  # (vocabulary, hidden)
    mask_embedding: Tensor  # (hidden,)
    row_projection: RowProjection  # of the target's states
    layers: tuple[DFlashLayer, ...]
    norm: Norm
    lm_head: Projection
    token_ids: Tensor  # (columns,): token ids of the target


class DFlashReader:
    """Reads weights from the files of a head and its target, and tracks which tensors were not used."""

    def __init__(
        self,
        files: HeadFiles,
        target_folder: Path,
        config: DFlashConfig,
        dtype: torch.dtype,
        device: torch.device,
        product: Product,
    ) -> None:
        self._files = files
        self._target_folder = target_folder
        self._config = config
        self._dtype = dtype
        self._device = device
        self._product = product
        self._left = {name for name in files.tensors if not name.startswith(NOT_COMPUTED_WITH)}

    def weights(self, proposable: Collection[int]) -> DFlashWeights:
        """Reads all weights.

        Raises ModelError if a tensor is missing, has another shape, or is not used by the forward.
        """
        config = self._config
        embedding = self._own_or_borrowed("embed_tokens.weight", EMBEDDING, config.vocabulary)
        columns = self._columns(proposable)
        lm_head = columns.of(self._own_or_borrowed("lm_head.weight", HEAD, config.columns))
        found = DFlashWeights(
            embedding=embedding,
            mask_embedding=self._mask_embedding(embedding),
            row_projection=self.row_projection(),
            layers=tuple(self._layer(index) for index in range(len(config.layers))),
            norm=self._norm("norm", config.hidden),
            lm_head=self._product(lm_head.contiguous(), None),
            token_ids=columns.token_ids.to(self._device),
        )
        if self._left:
            raise ModelError(
                f"{self._files.folder} holds tensors that no DFlash head known here computes with:"
                f" {', '.join(sorted(self._left))}"
            )
        return found

    def row_projection(self) -> RowProjection:
        """Reads the projection of the target's states, and no other tensor."""
        config = self._config
        fc = self._linear(["fc"], [config.hidden], config.needs.width)
        return RowProjection((), fc, self._norm("hidden_norm", config.hidden))

    def _tensor(self, name: str, *shape: int) -> Tensor:
        self._left.discard(name)
        return self._placed(self._files.tensor(name, shape))

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._dtype).contiguous()

    def _norm(self, name: str, size: int) -> Norm:
        return norm_of(self._tensor(f"{name}.weight", size), self._config.eps)

    def _linear(self, names: list[str], outputs: list[int], inputs: int) -> Projection:
        """Reads several layers over the same inputs as one product. All have a bias or none has."""
        pairs = list(zip(names, outputs, strict=True))
        weight = torch.cat([self._tensor(f"{name}.weight", size, inputs) for name, size in pairs])
        if f"{names[0]}.bias" not in self._files.tensors:
            return self._product(weight, None)
        return self._product(weight, torch.cat([self._tensor(f"{name}.bias", size) for name, size in pairs]))

    def _own_or_borrowed(self, name: str, names: tuple[str, ...], rows: int) -> Tensor:
        shape = (rows, self._config.hidden)
        if name in self._files.tensors:
            return self._tensor(name, *shape)
        found = target_tensor(self._target_folder, names)
        if tuple(found.shape) != shape:
            raise ModelError(
                f"{self._files.folder} borrows {names[0]} of {self._target_folder}, which has shape"
                f" {tuple(found.shape)}, expected {shape}"
            )
        return self._placed(found)

    def _columns(self, proposable: Collection[int]) -> DraftColumns:
        """Selects the proposable columns. `d2t` holds the offset from a draft id to the target's id."""
        ids = torch.arange(self._config.columns)
        if "d2t" in self._files.tensors:
            self._left.discard("d2t")
            ids = ids + self._files.tensor("d2t", (self._config.columns,)).long()
        return draft_columns(self._files.folder, ids, self._config.vocabulary, proposable)

    def _mask_embedding(self, embedding: Tensor) -> Tensor:
        """Reads the mask's embedding from its own file, if the mask was added to the tokenizer, else as any token's."""
        path = self._files.folder / MASK_FILE
        if not path.is_file():
            return embedding[self._config.mask_token]
        found = torch.load(path, map_location="cpu", weights_only=True)
        vector = found["embedding"] if isinstance(found, dict) else found
        if not isinstance(vector, Tensor) or vector.numel() != self._config.hidden:
            raise ModelError(f"{path} holds no tensor of {self._config.hidden} elements, the mask's embedding")
        return self._placed(vector.flatten())

    def _layer(self, index: int) -> DFlashLayer:
        config = self._config
        layer = f"layers.{index}"
        attention = f"{layer}.self_attn"
        queries = config.heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        return DFlashLayer(
            attention_norm=self._norm(f"{layer}.input_layernorm", config.hidden),
            query=self._linear([f"{attention}.q_proj"], [queries], config.hidden),
            key_value=self._linear([f"{attention}.k_proj", f"{attention}.v_proj"], [keys, keys], config.hidden),
            query_norm=self._norm(f"{attention}.q_norm", config.head_dim),
            key_norm=self._norm(f"{attention}.k_norm", config.head_dim),
            attention_out=self._linear([f"{attention}.o_proj"], [config.hidden], queries),
            mlp_norm=self._norm(f"{layer}.post_attention_layernorm", config.hidden),
            gate_up=self._linear(
                [f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"], [config.intermediate] * 2, config.hidden
            ),
            down=self._linear([f"{layer}.mlp.down_proj"], [config.hidden], config.intermediate),
        )
