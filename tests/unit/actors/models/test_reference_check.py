"""The reference check passes exact models, and refuses all others before serving."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from actors.attention.select_backend import attention_shape
from actors.compute.kv_cache import InputRow
from actors.engine.runner import ModelRunner
from actors.models.reference_check import check_class, check_model
from actors.models.small_config import small_config
from cluster.errors import ModelError
from tests.unit.actors.tiny_models import SIZES, jittered, tokens_of

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GPT = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
FALCON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
XGLM = {"vocab_size": 64, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4}
BLOOM = {"vocab_size": 64, "hidden_size": 24, "n_layer": 2, "n_head": 3}
MPT = {
    "vocab_size": 64,
    "d_model": 32,
    "n_layers": 2,
    "n_heads": 4,
    "max_seq_len": 64,
    "attn_config": {"clip_qkv": 0.5},
}
HALF = 4  # rotary frequencies of a head dimension of 8
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * HALF, "long_factor": [4.0] * HALF, "factor": 4.0}
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "fewer kv heads": ("llama", SIZES),
    "llama3 rotary positions": (
        "llama",
        SIZES
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "layers that do not pass arguments on": ("nemotron", SIZES),
    "latent attention, whose values are narrower than keys": ("deepseek_v3", SIZES | LATENT | EXPERTS),
    "one kv head": ("gpt_bigcode", GPT),
    "learned positions": ("gpt2", GPT),
    "layers that ask for the type of a weight": ("hunyuan_v1_moe", SIZES | {"num_experts": 4, "moe_topk": 2}),
    "bounded scores": ("gemma2", SIZES | {"attn_logit_softcapping": 0.5}),
    "a window that only the mask tells": ("phimoe", SIZES | {"sliding_window": 16, "num_local_experts": 4}),
    "sinks": ("gpt_oss", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "head sizes that differ by layer": ("gemma4_text", SIZES | {"global_head_dim": 16}),
    "layers that use keys of other layers": (
        "gemma4_text",
        SIZES
        | {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "attention in chunks and temperature": ("llama4_text", SIZES | {"num_local_experts": 4, "floor_scale": 16}),
    "linear attention": ("qwen3_next", SIZES | {"num_experts": 4}),
    "Mamba": ("mamba", {"vocab_size": 64, "hidden_size": 32}),
    "Mamba 2 beside attention": ("falcon_h1", SIZES | {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8}),
    "convolutions": ("lfm2", SIZES | {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
    "lightning attention": ("minimax", SIZES | {"num_local_experts": 4}),
    "attention of its own": ("falcon", FALCON),
    "attention of its own with biases by position": ("falcon", FALCON | {"alibi": True}),
    "keys repeated for query heads": ("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "a key for each query head": ("falcon", FALCON | {"multi_query": False}),
    "rotary positions of a part of each head": ("gptj", GPT | {"rotary_dim": 4}),
    "queries before values before keys": ("codegen", GPT | {"rotary_dim": 4}),
    "biases for a number of heads that is no power of two": ("bloom", BLOOM),
    "biases and clipped projections": ("mpt", MPT),
    "differential attention": ("diffllama", SIZES),
    "biases by key": ("doge", SIZES),
    "a window that no text reaches": ("phimoe", SIZES | {"sliding_window": 1024, "num_local_experts": 4}),
}
WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention of its own": ("xglm", XGLM, "attends 0 times"),
    "a recurrence of its own": (
        "recurrent_gemma",
        SIZES | {"lru_width": 32, "attention_window_size": 16},
        "logits differ",
    ),
    "time steps that only prompts limit": (
        "nemotron_h",
        SIZES | {"n_groups": 1, "mamba_num_heads": 8, "mamba_head_dim": 8, "layer_types": ["linear_attention", "mlp"]},
        "limits time steps",
    ),
    "keys that are dropped": ("doge", SIZES | {"keep_window_size": 16}, "logits differ"),
    "states in place of keys": ("rwkv", {"vocab_size": 64, "hidden_size": 32}, "no attention heads"),
}


def config_of(name: str, fields: dict[str, Any]) -> PretrainedConfig:
    return AutoConfig.for_model(name, **fields, bos_token_id=1, eos_token_id=2, pad_token_id=0)


def save(folder: Path, name: str, fields: dict[str, Any]) -> Path:
    config_of(name, fields).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", RIGHT)
def test_a_correctly_computed_class_is_accepted(case, tmp_path):
    check_model(save(tmp_path, *RIGHT[case]))


@pytest.mark.parametrize("case", WRONG)
def test_a_class_that_would_be_computed_wrongly_is_refused_in_one_line_with_the_reason(case, tmp_path):
    name, fields, reason = WRONG[case]
    with pytest.raises(ModelError, match=reason) as refused:
        check_model(save(tmp_path, name, fields))
    assert "\n" not in str(refused.value)


class TwiceLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, **arguments):
        return super().forward(super().forward(hidden_states, **arguments), **arguments)


class TwiceForCausalLM(LlamaForCausalLM):
    """Llama lookalike that runs each layer twice."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.__class__ = TwiceLayer


class MaskedLayer(LlamaDecoderLayer):
    def forward(self, hidden_states, **arguments):
        return super().forward(hidden_states, **arguments | {"attention_mask": torch.zeros(1, 1, 1, 1)})


class MaskedForCausalLM(LlamaForCausalLM):
    """Llama lookalike whose layers create masks."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.__class__ = MaskedLayer


def test_a_runner_refuses_a_mask_of_the_model_s_own():
    with pytest.raises(ModelError, match=r"MaskedForCausalLM.*a mask of its own"):
        ModelRunner(MaskedForCausalLM(LlamaConfig(**SIZES)), 8, 4)


def test_a_runner_refuses_a_layer_that_attends_twice():
    with pytest.raises(ModelError, match=r"TwiceForCausalLM.*attends 2 times a step"):
        ModelRunner(TwiceForCausalLM(LlamaConfig(**SIZES)), 8, 4)


def test_two_ranks_are_proved_too(tmp_path):
    check_model(save(tmp_path, "qwen3", SIZES), ranks=2)


def test_norms_over_heads_are_split_with_the_heads(tmp_path):
    check_model(save(tmp_path, "cohere", SIZES | {"use_qk_norm": True}), ranks=2)


def test_a_model_with_a_module_for_each_head_is_refused_for_two_ranks_alone(tmp_path):
    folder = save(tmp_path, "stablelm", SIZES | {"qk_layernorm": True})
    check_model(folder)
    with pytest.raises(ModelError, match="StableLm"):
        check_model(folder, ranks=2)


@pytest.mark.parametrize(("many", "kv_heads"), [(True, 1), (False, 4)])
def test_the_cache_of_a_multi_query_model_has_one_head(many, kv_heads):
    model = AutoModelForCausalLM.from_config(config_of("gpt_bigcode", GPT | {"multi_query": many}))
    assert attention_shape(model, 4).kv_heads == kv_heads


def test_the_cache_holds_falcons_keys_before_they_are_repeated():
    model = AutoModelForCausalLM.from_config(
        config_of("falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2})
    )
    assert attention_shape(model, 4).kv_heads == 2


def test_the_cache_of_latent_attention_has_whole_keys_of_every_head():
    shape = attention_shape(AutoModelForCausalLM.from_config(config_of("deepseek_v3", SIZES | LATENT | EXPERTS)), 4)
    assert (shape.kv_heads, shape.head_dim) == (4, 16)


def test_a_small_config_keeps_each_kind_of_layer_and_makes_windows_short():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    large = Qwen3Config(
        num_hidden_layers=30, layer_types=kinds * 5, use_sliding_window=True, sliding_window=4096, max_window_layers=0
    )
    small = small_config(large)
    assert small.layer_types == ["sliding_attention"] * 3 + ["full_attention"]
    assert small.sliding_window < 16
    assert small_config(large, context=2000).sliding_window > 100, "no text of such a length reaches the window"
    assert (small.num_attention_heads, small.num_key_value_heads) == (4, 4)
    assert large.num_hidden_layers == 30


def a_model(rope: dict[str, Any], positions: int) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = SIZES | {"max_position_embeddings": positions, "rope_parameters": rope | {"rope_theta": 1e4}}
    return jittered(LlamaForCausalLM(LlamaConfig(**sizes)))


def row(tokens: tuple[int, ...], start: int, page: int) -> InputRow:
    count = -(-(start + len(tokens)) // 4)
    return InputRow(tokens, start, len(tokens), tuple(range(page, page + count)))


@pytest.mark.parametrize(
    ("rope", "positions"),
    [(LONGROPE | {"original_max_position_embeddings": 64}, 256), ({"rope_type": "dynamic", "factor": 4.0}, 64)],
    ids=["longrope", "dynamic"],
)
def test_no_rows_logits_depend_on_its_neighbours_or_on_how_its_prompt_is_cut(rope, positions):
    runner = ModelRunner(a_model(rope, positions), 60, 4)
    text = tokens_of(1, 100)
    alone = runner.forward([row(text[:20], 0, 0)]).logits
    beside = runner.forward([row(text[:20], 0, 0), row(text, 0, 30)]).logits[:20]
    torch.testing.assert_close(beside, alone, atol=1e-4, rtol=1e-4)
    whole = runner.forward([row(text, 0, 0)]).logits
    parts = [runner.forward([row(text[at : at + 25], at, 0)]).logits for at in range(0, 100, 25)]
    torch.testing.assert_close(torch.cat(parts), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("context", [64, 256])
def test_longrope_takes_the_factors_of_the_longest_session(context):
    """transformers uses these factors for a text of that length."""
    model = a_model(LONGROPE | {"original_max_position_embeddings": 64}, 256)
    text = tokens_of(2, 60 if context == 64 else 100)
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([text]), use_cache=False).logits[0]
    runner = ModelRunner(model, 60, 4, context=context)
    parts = [runner.forward([row(text[at : at + 20], at, 0)]).logits for at in range(0, len(text), 20)]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=1e-4)


def test_dynamic_positions_beyond_the_models_own_are_refused_by_name():
    config = a_model({"rope_type": "dynamic", "factor": 4.0}, 64).config
    check_class(LlamaForCausalLM, config, context=64)
    with pytest.raises(ModelError, match=r"'dynamic'.*max_context to 64"):
        check_class(LlamaForCausalLM, config, context=65)


def test_a_check_leaves_torchs_generator_as_it_was():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    check_class(Qwen3ForCausalLM, Qwen3Config(**SIZES, attention_bias=True))
    assert torch.rand(1) == expected
