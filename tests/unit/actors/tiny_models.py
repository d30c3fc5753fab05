"""Tiny random models of several architectures."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 64
WINDOW = 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "qwen2": lambda: Qwen2ForCausalLM(  # biases only for queries, keys and values
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=WINDOW, layer_types=LAYERS)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),  # norms on queries and keys
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(  # bounds scores
        Gemma2Config(
            **SIZES,
            sliding_window=WINDOW,
            layer_types=LAYERS,
            attn_logit_softcapping=0.5,
            final_logit_softcapping=None,
        )
    ),
    "gemma3": lambda: Gemma3ForCausalLM(  # alternates windows and full attention; custom scale
        Gemma3TextConfig(**SIZES, sliding_window=WINDOW, layer_types=LAYERS, query_pre_attn_scalar=16)
    ),
}


def tokens_of(seed: int, count: int) -> tuple[int, ...]:
    drawn = torch.randint(VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed))
    return tuple(drawn.tolist())


def jittered(model: PreTrainedModel) -> PreTrainedModel:
    """Randomizes weights; initial weights hide attention, norms start at 1 and biases at 0."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
        else:
            parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


def twins(make: Callable[[], PreTrainedModel], seed: int) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Returns two models with equal weights, one for transformers and one for our runner."""
    torch.manual_seed(seed)
    model = jittered(make())
    twin = make()
    twin.load_state_dict(model.state_dict())
    return model, twin.eval()
