"""Trainable DFlash head: predicts a whole block at once, from the states before it and one mask token per position.

DFlash: z-lab/dflash, arXiv 2602.06036. Checkpoints use z-lab's layout.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.drafters.heads.dflash.config import OUTPUTS_KEY
from actors.learning.eagle_layer import HEAD_NORMS, EagleLayer, RootMeanSquare, Rotation
from actors.learning.eagle_network import tokens_after
from examples.train_head.heads.draft_module import DraftModule, PublishedHead
from examples.train_head.heads.layer_start import (
    last_norm,
    layers_config,
    rotary_like,
    start_from_last,
    states_projection,
)
from examples.train_head.heads.target_parts import HeadSizes, TargetParts
from examples.train_head.shards import StatesBatch


class DFlashLayer(EagleLayer):
    """Decoder layer whose blocks attend to all states up to their place, and bidirectionally within the block."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__(sizes, is_first=False)
        self._sizes = sizes

    def add_head_norms(self) -> None:
        """Adds missing query and key norms, which the layout requires."""
        for name in HEAD_NORMS:
            if not hasattr(self.self_attn, name.split(".")[1]):
                norm = RootMeanSquare(torch.ones(self._sizes.head_dim), self._sizes.eps)
                self.self_attn.add_module(name.split(".")[1], norm)

    def attend_blocks(self, blocks: Tensor, context: Tensor, of_blocks: Rotation, of_context: Rotation) -> Tensor:
        """Returns the output for blocks, (rows, places, size, hidden), given context rows, (rows, places, hidden)."""
        rows, places, size, _ = blocks.shape
        inputs = self.input_layernorm(blocks).flatten(1, 2)
        attention = self.self_attn
        query = attention.queries(inputs, of_blocks)
        own_key, own_value = attention.keys_and_values(inputs, of_blocks)
        key, value = attention.keys_and_values(context, of_context)
        in_blocks = (rows, self._sizes.heads, places, size, self._sizes.head_dim)
        after = torch.ones(places, places, dtype=torch.bool, device=blocks.device).triu(1)
        before = (query @ key.mT).masked_fill(after.repeat_interleave(size, 0), float("-inf"))
        within = (query.view(in_blocks) @ own_key.view(in_blocks).mT).flatten(2, 3)
        scores = torch.cat([before, within], dim=-1).float() * self._sizes.head_dim**-0.5
        shares = torch.softmax(scores, dim=-1).to(query.dtype)
        of_own = shares[..., places:].reshape(*in_blocks[:-1], size) @ own_value.view(in_blocks)
        attended = shares[..., :places] @ value + of_own.flatten(2, 3)
        residual = blocks.flatten(1, 2)
        hidden = residual + attention.o_proj(attended.transpose(1, 2).flatten(2))
        return self.with_mlp(hidden).view(blocks.shape)


class DFlashModule(DraftModule):
    """DFlash head, initialized from the target's last layers and final norm; shares the target's embedding.

    With a draft vocabulary, it trains a copy of the target's LM head rows; without one, it shares the LM head.
    """

    def __init__(
        self,
        target: TargetParts,
        reads: Sequence[int],
        token_ids: Tensor,
        layers: int,
        tokens: int,
        mask_token: int,
        seed: int,
    ) -> None:
        super().__init__()
        sizes = target.sizes
        generator = torch.Generator().manual_seed(seed)
        self._sizes = sizes
        self._reads = tuple(reads)
        self._tokens = tokens
        self._mask_token = mask_token
        self.fc = states_projection(sizes, len(reads), generator)
        self._stack = [DFlashLayer(sizes) for _ in range(layers)]
        self.layers = nn.ModuleList(self._stack)
        start_from_last(self._stack, target, generator)
        for layer in self._stack:
            layer.add_head_norms()
        self.hidden_norm = RootMeanSquare(self._stack[0].input_layernorm.weight.detach(), sizes.eps)
        self.norm = last_norm(target)
        lm_head = target.lm_head()[token_ids]
        if len(token_ids) < sizes.vocabulary:
            self.lm_head = nn.Parameter(lm_head)
        else:
            self.register_buffer("lm_head", lm_head, persistent=False)
        self.register_buffer("embedding", target.embedding(), persistent=False)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self._rotary = rotary_like(sizes)

    def steps(self, batch: StatesBatch, count: int) -> Iterator[Tensor]:
        places = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        within = torch.arange(self._tokens + 1, device=places.device)
        of_context = self._rotation(places)
        of_blocks = self._rotation((places[:, None] + 1 + within).flatten())
        context = self.hidden_norm(self.fc(batch.states.to(self.fc.weight.dtype)))
        blocks = self._embedded(tokens_after(batch.tokens, 1)).to(context.dtype)
        for layer in self._stack:
            blocks = layer.attend_blocks(blocks, context, of_blocks, of_context)
        normed = self.norm(blocks)
        for step in range(count):
            yield normed[:, :, 1 + step]

    def logits(self, outputs: Tensor, step: int) -> Tensor:
        return F.linear(outputs, self.lm_head)

    def _embedded(self, anchors: Tensor) -> Tensor:
        """Returns each place's block, (rows, longest, size, hidden): a committed token followed by mask tokens."""
        masks = torch.full_like(anchors, self._mask_token).unsqueeze(-1).expand(-1, -1, self._tokens)
        return F.embedding(torch.cat([anchors.unsqueeze(-1), masks], dim=-1), self.get_buffer("embedding"))

    def _rotation(self, positions: Tensor) -> Rotation:
        cos, sin = self._rotary(self.get_buffer("embedding"), position_ids=positions.unsqueeze(0))
        return cos[0], sin[0]

    def published(self) -> PublishedHead:
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters()}
        if "lm_head" in tensors:
            ids = self.token_ids.cpu()
            tensors |= {"lm_head.weight": tensors.pop("lm_head"), "d2t": ids - torch.arange(len(ids))}
        return PublishedHead(self._config(), tensors)

    def _config(self) -> dict[str, Any]:
        return layers_config(self._sizes, self._stack, len(self.token_ids)) | {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "block_size": self._tokens + 1,
            "dflash_config": {
                "mask_token_id": self._mask_token,
                OUTPUTS_KEY: [state - 1 for state in self._reads],  # indices of the layers read
            },
        }
