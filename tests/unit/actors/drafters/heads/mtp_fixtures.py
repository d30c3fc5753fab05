"""Targets with a multi-token prediction module in every supported layout, with seeded random tensors."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HIDDEN = 32
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
WIDE = 40
VOCABULARY = 96
LAYERS = 3  # of the target
EPS = 1e-5
BASE = 10000.0
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": EPS,
    "rope_theta": BASE,
    "tie_word_embeddings": False,
}

Tensors = dict[str, Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed)) * shape[-1] ** -0.5


def norm_weight(seed: int, size: int = HIDDEN) -> Tensor:
    return torch.rand(size, generator=torch.Generator().manual_seed(seed)) + 0.5


def module() -> Tensors:
    """Returns a module's tensors under the report's symbols: M, three norms, and TRM's own names."""
    layer = {
        "input_layernorm": norm_weight(4),
        "self_attn.q_proj": drawn(HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": drawn(KV_HEADS * HEAD_DIM, HIDDEN, seed=1),
        "self_attn.v_proj": drawn(KV_HEADS * HEAD_DIM, HIDDEN, seed=2),
        "self_attn.o_proj": drawn(HIDDEN, HEADS * HEAD_DIM, seed=3),
        "self_attn.q_norm": norm_weight(5, HEAD_DIM),
        "self_attn.k_norm": norm_weight(6, HEAD_DIM),
        "post_attention_layernorm": norm_weight(7),
        "mlp.gate_proj": drawn(WIDE, HIDDEN),
        "mlp.up_proj": drawn(WIDE, HIDDEN, seed=1),
        "mlp.down_proj": drawn(HIDDEN, WIDE),
    }
    return layer | {
        "M": drawn(HIDDEN, 2 * HIDDEN),
        "norm of h": norm_weight(1),
        "norm of Emb": norm_weight(2),
        "last norm": norm_weight(3),
    }


EMB = 3 * drawn(VOCABULARY, HIDDEN)
OUT_HEAD = 5 * drawn(VOCABULARY, HIDDEN, seed=1)
SHARED = {"model.embed_tokens.weight": EMB, "lm_head.weight": OUT_HEAD}


def swapped(weight: Tensor) -> Tensor:
    """Swaps the halves of M: most checkpoints put the embedding first, the report puts the state first."""
    state, embedding = weight.chunk(2, dim=-1)
    return torch.cat((embedding, state), dim=-1)


def deepseek() -> Tensors:
    names = {"norm of h": "hnorm", "norm of Emb": "enorm", "last norm": "shared_head.norm", "M": "eh_proj"}
    found = module() | {"M": swapped(module()["M"])}
    stored = {f"model.layers.{LAYERS}.{names.get(name, name)}.weight": tensor for name, tensor in found.items()}
    copies = {"embed_tokens.weight": EMB, "shared_head.head.weight": OUT_HEAD}
    return stored | {f"model.layers.{LAYERS}.{name}": tensor.clone() for name, tensor in copies.items()}


def without_copies() -> Tensors:
    """Removes the copies of the target's embedding and LM head."""
    return {name: t for name, t in deepseek().items() if "embed_tokens" not in name and "shared_head.head" not in name}


def mimo() -> Tensors:
    names = {
        "norm of h": "hidden_layernorm",
        "norm of Emb": "token_layernorm",
        "last norm": "final_layernorm",
        "M": "input_proj",
    }
    return {f"model.mtp_layers.0.{names.get(name, name)}.weight": tensor for name, tensor in module().items()}


def qwen() -> Tensors:
    names = {"norm of h": "pre_fc_norm_hidden", "norm of Emb": "pre_fc_norm_embedding", "last norm": "norm", "M": "fc"}
    found = module() | {"M": swapped(module()["M"])}
    return {f"mtp.{names.get(name, f'layers.0.{name}')}.weight": tensor for name, tensor in found.items()}


LAYOUTS = {"deepseek": deepseek, "without copies": without_copies, "mimo": mimo, "qwen": qwen}


def target_with(folder: Path, tensors: Tensors, **config: Any) -> Path:
    """Returns a target with the tensors a module shares, and one more tensor."""
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    of_target = SHARED | {"model.layers.0.mlp.up_proj.weight": torch.zeros(WIDE, HIDDEN)}
    kept = {name: tensor.clone().contiguous() for name, tensor in (of_target | tensors).items()}
    save_file(kept, folder / "model.safetensors")
    return folder
