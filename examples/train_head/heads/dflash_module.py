"""A DFlash head in training: the whole block at once, from the states before it and one mask for each token of it.

(DFlash: z-lab/dflash, arXiv 2602.06036.) The layout of what it writes is z-lab's.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from actors.methods.heads.dflash.dflash_config import OUTPUTS_KEY
from actors.methods.heads.head_rope import rope_of, rotary_of
from examples.train_head.heads.draft_module import DraftModule, PublishedHead, tokens_after
from examples.train_head.heads.eagle_layer import HEAD_NORMS, EagleLayer, RootMeanSquare, rotated
from examples.train_head.heads.target_parts import HeadSizes, TargetParts, normal
from examples.train_head.shards import StatesBatch

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, (positions, head dim)."""


class DFlashLayer(EagleLayer):
    """A decoder layer whose blocks see the states up to their place and all of themselves."""

    def __init__(self, sizes: HeadSizes) -> None:
        super().__init__(sizes, is_first=False)
        self._sizes = sizes

    def add_head_norms(self) -> None:
        """Of queries and keys, which the layout always has and the target's layer may not have."""
        for name in HEAD_NORMS:
            if not hasattr(self.self_attn, name.split(".")[1]):
                norm = RootMeanSquare(torch.ones(self._sizes.head_dim), self._sizes.eps)
                self.self_attn.add_module(name.split(".")[1], norm)

    def attend_blocks(self, blocks: Tensor, context: Tensor, of_blocks: Rotation, of_context: Rotation) -> Tensor:
        """(rows, places, size, hidden), of blocks in that shape and of the context's rows, (rows, places, hidden)."""
        rows, places, size, _ = blocks.shape
        inputs = self.input_layernorm(blocks).flatten(1, 2)
        attention = self.self_attn
        query = rotated(attention.heads(attention.q_proj(inputs), self._sizes.heads, "q_norm"), of_blocks)
        own_key, own_value = self._keys_and_values(inputs, of_blocks)
        key, value = self._keys_and_values(context, of_context)
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

    def _keys_and_values(self, inputs: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """A head of them for each of the queries, (rows, heads, longest, head dim)."""
        sizes = self._sizes
        attention = self.self_attn
        key = rotated(attention.heads(attention.k_proj(inputs), sizes.kv_heads, "k_norm"), rotation)
        value = attention.heads(attention.v_proj(inputs), sizes.kv_heads)
        groups = sizes.heads // sizes.kv_heads
        return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


class DFlashModule(DraftModule):
    """Starts from the target's last layers and final norm, and borrows its embedding.

    With a draft vocabulary it has an LM head of its own, which starts as the target's; else it borrows that too.
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
        self.fc = nn.Linear(len(reads) * sizes.hidden, sizes.hidden, bias=False)
        # The last of the states is nearest to what the last layers expect of their residual stream.
        earlier = 0.1 * normal(generator, sizes.hidden, (len(reads) - 1) * sizes.hidden)
        self.fc.weight = nn.Parameter(torch.cat([earlier, torch.eye(sizes.hidden)], dim=-1))
        self.hidden_norm = RootMeanSquare(torch.ones(sizes.hidden), sizes.eps)
        self._stack = [DFlashLayer(sizes) for _ in range(layers)]
        self.layers = nn.ModuleList(self._stack)
        for index, layer in enumerate(self._stack):
            start = target.layer(target.layers - layers + index)
            if start is not None:
                layer.start_from(start, sizes, generator)
            layer.add_head_norms()
        self.hidden_norm.weight = nn.Parameter(self._stack[0].input_layernorm.weight.detach().clone())
        final_norm = target.final_norm()
        self.norm = RootMeanSquare(torch.ones(sizes.hidden) if final_norm is None else final_norm, sizes.eps)
        lm_head = target.lm_head()[token_ids].clone()
        self._has_lm_head = len(token_ids) < sizes.vocabulary
        self.lm_head = nn.Parameter(lm_head, requires_grad=self._has_lm_head)
        self.register_buffer("embedding", target.embedding(), persistent=False)
        self.register_buffer("token_ids", token_ids, persistent=False)
        self._rotary = rotary_of(rope_of({"rope_parameters": sizes.rope}), sizes.head_dim, sizes.max_positions)

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
        """A block for each place, (rows, longest, size, hidden): its first token is decided, the others are masks."""
        masks = torch.full_like(anchors, self._mask_token).unsqueeze(-1).expand(-1, -1, self._tokens)
        return F.embedding(torch.cat([anchors.unsqueeze(-1), masks], dim=-1), self.get_buffer("embedding"))

    def _rotation(self, positions: Tensor) -> Rotation:
        cos, sin = self._rotary(self.get_buffer("embedding"), position_ids=positions.unsqueeze(0))
        return cos[0], sin[0]

    def published(self) -> PublishedHead:
        tensors = {name: parameter.detach() for name, parameter in self.named_parameters() if name != "lm_head"}
        if self._has_lm_head:
            ids = self.token_ids.cpu()
            tensors |= {"lm_head.weight": self.lm_head.detach(), "d2t": ids - torch.arange(len(ids))}
        return PublishedHead(self._config(), tensors)

    def _config(self) -> dict[str, Any]:
        sizes = self._sizes
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "hidden_size": sizes.hidden,
            "intermediate_size": sizes.intermediate,
            "num_hidden_layers": len(self._stack),
            "num_attention_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "head_dim": sizes.head_dim,
            "attention_bias": self._stack[0].self_attn.q_proj.bias is not None,
            "rms_norm_eps": sizes.eps,
            "vocab_size": sizes.vocabulary,
            "draft_vocab_size": len(self.token_ids),
            "max_position_embeddings": sizes.max_positions,
            "rope_theta": sizes.rope.get("rope_theta"),
            "rope_parameters": sizes.rope,
            "block_size": self._tokens + 1,
            "dflash_config": {
                "mask_token_id": self._mask_token,
                OUTPUTS_KEY: [state - 1 for state in self._reads],  # layers, of which the outputs are read
            },
        }
