"""Split models compute the same logits as whole models; unsplittable models are refused by name."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from actors.models.checkpoint import check_tensor_parallel, load
from actors.models.sharding import RowParallelLinear, VocabularyParallelHead, shard
from cluster.errors import ModelError
from tests.unit.actors.groups import Planned, at_once, threads

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 48,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
HEADS = {"num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4, "pad_token_id": 0}
KINDS = ("llama", "qwen2", "qwen3", "gemma2", "mistral", "starcoder2", "olmo2", "phi3", "glm4", "cohere", "stablelm")


def a_model(kind: str, **changes: Any) -> PreTrainedModel:
    """Returns a model with random weights, including biases and norms."""
    config = AutoConfig.for_model(kind, **{**SIZES, **HEADS, "sliding_window": 4, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
def logits(model: PreTrainedModel, tokens: Tensor, **options: Any) -> Tensor:
    return model(input_ids=tokens, use_cache=False, **options).logits


def check_split(folder: Path, model: PreTrainedModel, ranks: int) -> None:
    """Asserts that every rank computes the whole model's logits."""
    model.save_pretrained(folder)
    tokens = torch.randint(0, model.config.vocab_size, (2, 9))
    shares = [load(folder, "float32", CPU, group).model for group in threads(ranks)]
    for found in at_once([partial(logits, share, tokens) for share in shares]):
        torch.testing.assert_close(found, logits(model, tokens), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_split_models_give_the_logits_of_whole_ones(tmp_path, kind, ranks):
    """32 vocabulary rows are not divisible by 3; windows of 4 are shorter than the rows."""
    check_split(tmp_path, a_model(kind), ranks)


EXPERTS = {
    "intermediate_size": 48,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 12,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "num_key_value_heads": 12,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
LINEAR_AND_FULL = ["linear_attention", "full_attention"]
EXPERT_KINDS = (
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "olmoe",
    "granitemoe",
    "phimoe",
    "ernie4_5_moe",
    "dots1",
)


def with_experts(kind: str, **changes: Any) -> PreTrainedModel:
    """Returns a mixture of experts whose experts differ, and are all used."""
    config = AutoConfig.for_model(kind)
    known = {name: value for name, value in EXPERTS.items() if hasattr(config, name)}
    model = a_model(kind, **{**known, **changes})
    for parameter in model.parameters():
        if parameter.dim() == 3:
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    return model


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", EXPERT_KINDS)
def test_ranks_hold_parts_of_every_expert(tmp_path, kind, ranks):
    """Checkpoints store one tensor per expert and projection, which loading stacks."""
    check_split(tmp_path, with_experts(kind), ranks)


def test_ranks_split_the_heads_of_latent_attention(tmp_path):
    """Every rank computes the whole latent, and expands it for its own heads."""
    check_split(tmp_path, with_experts("deepseek_v2", **LATENT), 3)


@pytest.mark.parametrize("ranks", [2, 3])
def test_attention_sinks_are_split_with_the_heads(tmp_path, ranks):
    check_split(tmp_path, a_model("granite_swa", layer_types=["sliding_attention", "full_attention"]), ranks)


@pytest.mark.parametrize("ranks", [2, 3])
def test_experts_stored_with_inputs_before_outputs_are_split(tmp_path, ranks):
    layers = {"layer_types": ["full_attention"] * 2, "no_rope_layers": [1, 0], "attn_temperature_tuning": False}
    check_split(tmp_path, with_experts("llama4_text", **layers), ranks)


def test_recurrent_layers_beside_split_attention_are_whole(tmp_path):
    linear = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "layer_types": LINEAR_AND_FULL}
    check_split(tmp_path, with_experts("qwen3_next", **linear), 2)


STORED_APART = {
    "olmo_hybrid": {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "layer_types": LINEAR_AND_FULL},
    "kimi_linear": LATENT | {"linear_num_heads": 4, "linear_head_dim": 8, "layer_types": LINEAR_AND_FULL},
}


@pytest.mark.parametrize("kind", STORED_APART)
def test_convolutions_of_recurrent_layers_may_be_stored_apart(tmp_path, kind):
    check_split(tmp_path, with_experts(kind, **STORED_APART[kind]), 2)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("convolution", ["q_conv1d", "k_conv1d"])
def test_a_missing_convolution_is_refused(tmp_path, convolution, ranks):
    with_experts("olmo_hybrid", **STORED_APART["olmo_hybrid"]).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in tensors.items() if convolution not in name},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(ModelError, match="is stored in 0 tensors, expected 1"):
        load(tmp_path, "float32", CPU, Planned(0, ranks))


def test_experts_may_be_stored_in_several_files(tmp_path):
    model = with_experts("qwen3_moe")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    shares = [load(tmp_path, "float32", CPU, Planned(rank, 2)).model for rank in (0, 1)]
    experts = [share.model.layers[1].mlp.experts.down_proj for share in shares]
    assert torch.equal(torch.cat(experts, -1), model.model.layers[1].mlp.experts.down_proj)


def test_a_weight_that_is_not_finite_is_found_in_the_rank_s_part_of_an_expert(tmp_path):
    model = with_experts("mixtral")
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj[3, 0, -1] = torch.nan
    model.save_pretrained(tmp_path)
    load(tmp_path, "float32", CPU, Planned(0, 2))
    with pytest.raises(ModelError, match=r"NaN or infinite.*layers\.1\.mlp\.experts\.down_proj"):
        load(tmp_path, "float32", CPU, Planned(1, 2))


def test_parameters_that_stay_in_float32_do_so_on_several_ranks(tmp_path):
    with_experts("glm4_moe", moe_intermediate_size=32).save_pretrained(tmp_path)
    whole, share = (load(tmp_path, "bfloat16", CPU, Planned(0, ranks)).model for ranks in (1, 2))
    dtypes = {name: tensor.dtype for name, tensor in whole.state_dict().items()}
    assert {torch.float32, torch.bfloat16} == set(dtypes.values())
    assert dtypes == {name: tensor.dtype for name, tensor in share.state_dict().items()}


def test_a_rank_reads_its_part_of_the_experts_alone(tmp_path):
    with_experts("mixtral").save_pretrained(tmp_path)
    share = load(tmp_path, "bfloat16", CPU, Planned(1, 3)).model
    experts = share.model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (4, 2 * 16, 48)
    assert experts.down_proj.shape == (4, 48, 16)
    assert {parameter.dtype for parameter in share.parameters()} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("vocabulary", "ranks"), [(32, 2), (32, 3), (4, 3), (1, 3)])
def test_a_vocabulary_need_not_divide(tmp_path, vocabulary, ranks, tied):
    """The last of 3 ranks has no rows of 4."""
    check_split(tmp_path, a_model("llama", vocab_size=vocabulary, tie_word_embeddings=tied), ranks)


def test_norms_over_heads_are_split_with_the_heads(tmp_path):
    check_split(tmp_path, a_model("cohere", use_qk_norm=True), 3)


def test_biases_are_added_once(tmp_path):
    check_split(tmp_path, a_model("llama", attention_bias=True, mlp_bias=True), 3)


def test_a_rank_holds_plain_tensors_of_its_share(tmp_path):
    a_model("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    share = load(tmp_path, "bfloat16", CPU, Planned(1, 3)).model
    layer = share.model.layers[0]
    assert {type(parameter) for parameter in share.parameters()} == {nn.Parameter}
    assert type(layer.self_attn.q_proj) is nn.Linear
    assert layer.self_attn.q_proj.weight.shape == (16, 48)
    assert (layer.self_attn.q_proj.in_features, layer.self_attn.q_proj.out_features) == (48, 16)
    assert layer.self_attn.k_proj.weight.shape == (8, 48)
    assert type(layer.self_attn.o_proj) is RowParallelLinear
    assert layer.self_attn.o_proj.weight.shape == (48, 16)
    assert layer.mlp.down_proj.weight.shape == (48, 12)
    assert type(share.lm_head) is VocabularyParallelHead
    assert share.lm_head.weight.shape == (11, 48)
    assert share.lm_head.weight.data_ptr() == share.model.embed_tokens.weight[11].data_ptr(), (
        "tied: no memory of its own"
    )
    assert {parameter.dtype for parameter in share.parameters()} == {torch.bfloat16}


def test_a_step_communicates_twice_a_layer_and_once_for_the_logits(tmp_path):
    model = a_model("llama")
    groups = threads(2)
    sums = []
    gathers = []
    groups[0].all_reduce = sums.append
    groups[0].all_gather = lambda tensor: gathers.append(tensor) or tensor.expand(2, *tensor.shape)
    shard(model, groups[0])
    logits(model, torch.tensor([[1, 2, 3]]), logits_to_keep=1)
    assert [tuple(tensor.shape) for tensor in sums] == [(1, 3, 48)] * 4
    assert [tuple(tensor.shape) for tensor in gathers] == [(1, 1, 16)]


def test_unsplittable_models_are_refused_by_name_at_startup(tmp_path):
    """The config alone reveals this before a rank starts."""
    AutoConfig.for_model("gpt2", **{**SIZES, **HEADS}).save_pretrained(tmp_path)
    check_tensor_parallel(tmp_path, 1)
    with pytest.raises(ModelError, match="GPT2LMHeadModel has no tensor-parallel plan"):
        check_tensor_parallel(tmp_path, 2)


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "compressed-tensors", "mxfp4"])
def test_quantized_weights_on_several_ranks_are_left_to_vllm(tmp_path, method):
    config = AutoConfig.for_model("llama", **SIZES, **HEADS, quantization_config={"quant_method": method})
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"quantized with '{method}'.*target.engine: vllm"):
        check_tensor_parallel(tmp_path, 2)


def test_experts_whose_parts_cannot_be_multiplied_are_refused(tmp_path):
    """Rows of 6 bfloat16 numbers have no multiple of 16 bytes."""
    with_experts("mixtral", intermediate_size=12).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="multiple of 16 bytes; use fewer ranks"):
        load(tmp_path, "bfloat16", CPU, Planned(0, 2))


def test_a_size_that_does_not_divide_is_never_cut_unevenly():
    with pytest.raises(ModelError, match="48"):
        shard(a_model("llama"), Planned(0, 5))
