"""Attention over the paged cache for models whose layers do not call transformers' attention interface once.

Falcon, GPT-J, CodeGen, Bloom and MPT compute attention in their own code, DiffLlama calls the interface twice with the
same keys, and Doge passes biases as a mask. `replace_attention` gives each layer a function that uses the layer's own
projections and rotary code, then `paged_attention`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.codegen.modeling_codegen import CodeGenAttention
from transformers.models.diffllama import modeling_diffllama as diffllama
from transformers.models.doge import modeling_doge as doge
from transformers.models.falcon import modeling_falcon as falcon
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.mpt.modeling_mpt import MptAttention, MptModel, build_mpt_alibi_tensor

from actors.attention import Alibi
from actors.attention.hugging_face import ATTENTION_NAME, Visibility, paged_attention

Attended = tuple[Tensor, None]  # output and attention weights, as returned by layers


def replace_attention(model: PreTrainedModel) -> bool:
    """Makes the layers of these models attend through the paged cache; idempotent. Returns whether it is such a model.

    Sets the name of the attention in the config, which transformers' own method refuses for most of these models.
    """
    replaced = False
    for module in model.modules():
        if (replace := REPLACEMENTS.get(type(module))) is not None:
            replace(module)
            replaced = True
    if replaced:
        model.config._attn_implementation = ATTENTION_NAME
    return replaced


def _replace_inner(module: Any) -> None:
    module._attn = partial(_attend_scaled, module)


def _replace_falcon(module: Any) -> None:
    module.forward = partial(_falcon, module, _falcon_slopes(module, module.dense.weight.device))


def _replace_bloom(module: Any) -> None:
    mask = torch.ones(1, 2, device=module.dense.weight.device)
    module.forward = partial(_bloom, module, bloom_alibi(mask, module.num_heads, torch.float32)[:, 0, 1])


def _replace_mpt(module: Any) -> None:
    slopes = -build_mpt_alibi_tensor(module.n_heads, 2, device=module.out_proj.weight.device)[:, 0, 0]
    module.forward = partial(_mpt, module, Alibi(slopes, torch.float32))


def _replace_mpt_model(module: Any) -> None:
    if not isinstance(module.forward, partial):
        module.forward = partial(_masked, module.forward)
        module.build_mpt_alibi_tensor = _no_biases


def _replace_diffllama(module: Any) -> None:
    module.forward = partial(_diffllama, module)


def _replace_doge(module: Any) -> None:
    module.forward = partial(_doge, module)


REPLACEMENTS: dict[type, Callable[[Any], None]] = {
    GPTJAttention: _replace_inner,
    CodeGenAttention: _replace_inner,
    falcon.FalconAttention: _replace_falcon,
    BloomAttention: _replace_bloom,
    MptAttention: _replace_mpt,
    MptModel: _replace_mpt_model,
    diffllama.DiffLlamaAttention: _replace_diffllama,
    doge.DogeAttention: _replace_doge,
}


def _attend_scaled(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Attended:
    """Attends for GPT-J and CodeGen: (1, heads, total, head dim) -> the same shape."""
    query, key = query.to(value.dtype), key.to(value.dtype)  # CodeGen rotates in float32
    attended = paged_attention(module, query, key, value, None, scaling=1 / module.scale_attn)[0]
    return attended.transpose(1, 2), None


def _falcon_slopes(module: Any, device: torch.device) -> Tensor | None:
    """Returns the slopes of Falcon's biases, which transformers computes in bfloat16; None with rotary positions."""
    if not module.config.alibi:
        return None
    mask = torch.ones(1, 2, dtype=torch.int64, device=device)
    slopes: Tensor = falcon.build_alibi_tensor(mask, module.num_heads, torch.bfloat16)[:, 0, 1]
    return slopes


def _falcon(
    module: Any,
    slopes: Tensor | None,
    hidden: Tensor,
    *_: Any,
    position_embeddings: tuple[Tensor, Tensor],
    **__: Any,
) -> Attended:
    query, key, value = module._split_heads(module.query_key_value(hidden))
    if module.new_decoder_architecture:  # keys are repeated for all query heads
        repeat = module.num_heads // module.num_kv_heads
        key, value = key[:, :, ::repeat], value[:, :, ::repeat]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    scaling = module.inv_norm_factor
    if slopes is None:
        query, key = falcon.apply_rotary_pos_emb(query, key, *position_embeddings)
    alibi = None if slopes is None else Alibi(slopes, hidden.dtype, scaling)
    attended = paged_attention(module, query, key, value, None, scaling=scaling, alibi=alibi)[0]
    return module.dense(attended.flatten(2)), None


def _bloom(module: Any, slopes: Tensor, hidden: Tensor, residual: Tensor, **_: Any) -> Attended:
    query, key, value = module._reshape(module.query_key_value(hidden))
    alibi = Alibi(slopes, hidden.dtype)
    attended = paged_attention(module, query, key, value, None, scaling=module.inv_norm_factor, alibi=alibi)[0]
    return module.dense(attended.flatten(2)) + residual, None


def _mpt(module: Any, alibi: Alibi, hidden: Tensor, **_: Any) -> Attended:
    qkv = module.Wqkv(hidden)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    query, key, value = (part.unflatten(2, (-1, module.head_dim)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    attended = paged_attention(module, query, key, value, None, scaling=module.softmax_scale, alibi=alibi)[0]
    return module.out_proj(attended.flatten(2)), None


def _masked(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls MPT's forward, which requires a mask, with one that its layers ignore.

    Transformers passes masks of four dimensions on unchanged.
    """
    return forward(*args, **kwargs | {"attention_mask": torch.ones(1, 1, 1, 1)})


def _no_biases(*_: Any, **__: Any) -> None:
    """Replaces the computation of MPT's biases for its maximum length in every forward."""


def _diffllama(
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *_: Any, **__: Any
) -> Attended:
    """Computes differential attention (arXiv 2410.05258) with one call: padded keys, and both values side by side."""
    query, key, value = (
        project(hidden_states).unflatten(2, (-1, module.head_dim)).transpose(1, 2)
        for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    query, key = diffllama.apply_rotary_pos_emb(query, key, *position_embeddings)
    query, key = (F.pad(part, (0, module.head_dim)) for part in (query, key))
    values = torch.cat([half.repeat(1, 2, 1, 1) for half in value.chunk(2, dim=1)], dim=-1)
    attended = paged_attention(module, query, key, values, None, scaling=module.scaling)[0]
    first, second = attended.chunk(2, dim=2)  # of the heads
    factor = (
        _exp_product(module.lambda_q1, module.lambda_k1)
        - _exp_product(module.lambda_q2, module.lambda_k2)
        + module.lambda_init
    )
    normed = (1 - module.lambda_init) * module.groupnorm(first - factor * second)
    return module.o_proj(normed.flatten(2)), None


def _doge(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Visibility | None = None,
    **_: Any,
) -> Attended:
    """Computes Doge's attention in texts up to its `keep_window_size`; longer ones would drop keys.

    Every key has a bias, computed from its value. It is cached as a further dimension of the key.
    """
    projections = (module.q_proj, module.k_proj, module.v_proj)
    query, key, value = (project(hidden_states).unflatten(2, (-1, module.head_dim)) for project in projections)
    query, key = module.q_norm(query).transpose(1, 2), module.k_norm(key).transpose(1, 2)
    query, key = doge.apply_rotary_pos_emb(query, key, *position_embeddings)
    biases = torch.exp(module.A * F.softplus(module.dt_proj(value.flatten(2))))  # (1, total, kv heads)
    key = torch.cat([key, biases.transpose(1, 2).unsqueeze(-1) / module.scaling], dim=-1)
    query = F.pad(query, (0, 1), value=1.0)
    attended = paged_attention(module, query, key, value.transpose(1, 2), attention_mask, scaling=module.scaling)[0]
    return module.o_proj(attended.flatten(2)), None


def _exp_product(left: Tensor, right: Tensor) -> Tensor:
    return torch.exp(torch.sum(left * right, dim=-1, dtype=torch.float32)).to(left.dtype)
