"""A checkpoint is loaded only if each weight is stored, in the right file and shape, finite, and nothing else is."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from actors.compute.collectives import Group, SingleRank
from actors.models.checkpoint import check_files, check_tensor_parallel, load, load_model
from cluster.errors import ModelError
from tests.unit.actors.groups import Planned

CPU = torch.device("cpu")
UP = "model.layers.1.mlp.up_proj.weight"
SIZES = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
EXPERTS = {"moe_intermediate_size": 8, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}

Tensors = dict[str, Tensor]


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    return folder


def a_llama(folder: Path) -> Path:
    torch.manual_seed(0)
    return saved(folder, LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)))


def an_moe(folder: Path) -> Path:
    """Saves a model whose tensors transformers stacks while loading."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2)
    return saved(folder, AutoModelForCausalLM.from_config(config))


def changed(folder: Path, change: Callable[[Tensors], Any]) -> Path:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, {"format": "pt"})
    return folder


def configured(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return folder


def sharded(folder: Path, shards: Mapping[str, Tensors], files: Mapping[str, str]) -> Path:
    """Puts shards and an index in place of the single file."""
    (folder / "model.safetensors").unlink()
    for name, tensors in shards.items():
        save_file(tensors, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def refusals(folder: Path, group: Group | None = None, *, at_files: bool = True) -> str:
    """Loads, and checks the files alone; both must refuse in one line."""
    with pytest.raises(ModelError) as loading:
        load(folder, "float32", CPU, group or SingleRank())
    if at_files:
        with pytest.raises(ModelError):
            check_files(folder, with_weights=True)
    message = str(loading.value)
    assert "\n" not in message
    assert str(folder) in message
    return message


# ---------------------------------------------------------------- missing, surplus, of another shape


@pytest.mark.parametrize(
    ("drop", "config", "missing"),
    [
        ("lm_head.weight", {}, r"missing: lm_head\.weight \(1\)"),
        (UP, {}, r"missing: model\.layers\.1\.mlp\.up_proj\.weight \(1\)"),
        ("model.norm.weight", {}, r"missing: model\.norm\.weight \(1\)"),
        (None, {"num_hidden_layers": 3}, r"missing: model\.layers\.2\..*\(9\)"),
        (None, {"attention_bias": True}, r"missing: .*k_proj\.bias.*\(8\)"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_missing_tensor_is_named(tmp_path, drop, config, missing, ranks):
    changed(configured(a_llama(tmp_path), **config), lambda tensors: tensors.pop(drop, None))
    with pytest.raises(ModelError, match=missing):
        load(tmp_path, "float32", CPU, Planned(0, ranks))
    with pytest.raises(ModelError, match=missing):
        check_files(tmp_path, with_weights=True)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (UP.replace("weight", "weight_scale_inv"), "restore the quantization_config"),
        (UP.replace("weight", "lora_A.weight"), "merge the adapter"),
        ("model.layers.2.mlp.up_proj.weight", "correct config.json"),
        ("vision_tower.weight", "correct config.json"),
    ],
)
def test_a_tensor_that_the_model_has_no_place_for_is_refused(tmp_path, name, remedy):
    changed(a_llama(tmp_path), lambda tensors: tensors.update({name: torch.zeros(4, 4)}))
    message = refusals(tmp_path)
    assert f"not part of the model: {name} (1)" in message
    assert remedy in message


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), {}),
        ("mtp.layers.0.mlp.up_proj.weight", (4, 4), {}),
        ("model.layers.2.mlp.up_proj.weight", (4, 4), {"num_nextn_predict_layers": 1}),
        ("model.layers.0.attn.bias", (1, 1, 4, 4), {}),
        ("model.layers.0.attn.masked_bias", (), {}),
    ],
)
def test_what_follows_from_the_config_or_drafts_alone_may_be_stored_too(tmp_path, name, shape, config):
    expected = load_model(a_llama(tmp_path), "float32", CPU).state_dict()
    changed(configured(tmp_path, **config), lambda tensors: tensors.update({name: torch.zeros(shape)}))
    check_files(tmp_path, with_weights=True)
    found = load_model(tmp_path, "float32", CPU).state_dict()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_sizes_are_compared(tmp_path):
    message = refusals(configured(a_llama(tmp_path), intermediate_size=24))
    assert "of another shape: model.layers.0.mlp.down_proj.weight is (16, 16), not (16, 24) (6)" in message
    assert "correct the sizes in config.json" in message


def test_masks_that_old_checkpoints_of_gpt2_store_are_left_out(tmp_path):
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config)
    saved(tmp_path, model)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e9)}

    def as_published(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors.update(masks)

    changed(tmp_path, as_published)
    check_files(tmp_path, with_weights=True)
    found = load_model(tmp_path, "float32", CPU).state_dict()
    assert all(torch.equal(found[key], tensor) for key, tensor in model.state_dict().items())


def test_experts_that_are_stacked_while_loading_must_all_be_there(tmp_path):
    check_files(an_moe(tmp_path), with_weights=True)
    load_model(tmp_path, "float32", CPU)
    dropped = [f"model.layers.0.mlp.experts.{expert}.down_proj.weight" for expert in range(2)]
    changed(tmp_path, lambda tensors: [tensors.pop(name) for name in dropped])
    assert "missing: model.layers.0.mlp.experts.down_proj" in refusals(tmp_path)


def test_one_expert_less_is_refused(tmp_path):
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    changed(an_moe(tmp_path), lambda tensors: tensors.pop(name))
    assert "experts.down_proj" in refusals(tmp_path, at_files=False)  # only the weights tell how many make the stack


# ---------------------------------------------------------------- files


def test_the_index_decides_which_file_holds_a_tensor(tmp_path):
    tensors = load_file(a_llama(tmp_path) / "model.safetensors")
    stale = tensors | {UP: torch.zeros_like(tensors[UP])}
    files = dict.fromkeys(tensors, "z.safetensors") | {UP: "a.safetensors"}
    sharded(tmp_path, {"a.safetensors": {UP: tensors[UP]}, "z.safetensors": stale}, files)
    check_files(tmp_path, with_weights=True)
    for group in (SingleRank(), Planned(0, 2)):
        found = load(tmp_path, "float32", CPU, group).model.get_parameter(UP)
        assert torch.equal(found, tensors[UP][: len(found)])


def test_a_copy_beside_the_indexed_tensor_is_refused_where_transformers_would_read_it(tmp_path):
    tensors = load_file(an_moe(tmp_path) / "model.safetensors")
    name = "model.norm.weight"
    files = dict.fromkeys(tensors, "z.safetensors") | {name: "a.safetensors"}
    sharded(tmp_path, {"a.safetensors": {name: tensors[name]}, "z.safetensors": tensors}, files)
    message = refusals(tmp_path, at_files=False)
    assert "z.safetensors also holds model.norm.weight (1)" in message


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (None, "has no weight_map"),
        ({UP: "gone.safetensors"}, r"gone\.safetensors is missing"),
        ({UP: "b.safetensors"}, rf"b\.safetensors lacks {UP}"),
    ],
    ids=["no weight_map", "no shard", "not in the shard"],
)
def test_a_broken_index_is_named(tmp_path, files, problem, ranks):
    tensors = load_file(a_llama(tmp_path) / "model.safetensors")
    norm = {"model.norm.weight": tensors.pop("model.norm.weight")}
    named = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(norm, "b.safetensors")
    sharded(tmp_path, {"a.safetensors": tensors, "b.safetensors": norm}, {} if files is None else named | files)
    with pytest.raises(ModelError, match=problem):
        load(tmp_path, "float32", CPU, Planned(0, ranks))
    with pytest.raises(ModelError, match=problem):
        check_files(tmp_path, with_weights=True)


def test_an_index_alone_tells_what_is_missing(tmp_path):
    """Fails before weights are downloaded."""
    tensors = load_file(a_llama(tmp_path) / "model.safetensors")
    sharded(tmp_path, {}, dict.fromkeys(tensors, "a.safetensors"))
    check_files(tmp_path, with_weights=False)
    with pytest.raises(ModelError, match=r"a\.safetensors is missing"):
        check_files(tmp_path, with_weights=True)
    with pytest.raises(ModelError, match=r"missing: model\.layers\.2"):
        check_files(configured(tmp_path, num_hidden_layers=3), with_weights=False)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kept", [-4, 100, 4, 0])
def test_a_file_that_is_cut_off_is_named(tmp_path, kept, ranks):
    file = a_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert str(file) in refusals(tmp_path, Planned(0, ranks))


@pytest.mark.parametrize(
    ("name", "problem", "remedy"),
    [
        ("pytorch_model.bin", "as PyTorch pickles only", "save_pretrained()"),
        ("model.gguf", "as GGUF files only", "save_pretrained()"),
        ("consolidated.safetensors", "only consolidated.safetensors", "fetch the whole checkpoint"),
        ("README.md", "holds no weights", "fetch the whole checkpoint"),
    ],
)
def test_weights_under_other_names_are_not_read(tmp_path, name, problem, remedy):
    (a_llama(tmp_path) / "model.safetensors").rename(tmp_path / name)
    message = refusals(tmp_path)
    assert problem in message
    assert remedy in message


# ---------------------------------------------------------------- quantised


@pytest.mark.parametrize(("method", "problem"), [("new", "does not know"), (None, "does not know")])
def test_an_unknown_quantisation_over_plain_weights_is_refused(tmp_path, method, problem):
    message = refusals(configured(a_llama(tmp_path), quantization_config={"quant_method": method, "bits": 4}))
    assert f"quantised with '{method}'" in message
    assert problem in message
    assert "remove quantization_config" in message


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_a_quantisation_whose_library_is_not_installed_is_refused(tmp_path, method):
    section = {"quant_method": method, "bits": 4, "group_size": 16}
    assert f"quantised with '{method}', which cannot be loaded here" in refusals(
        configured(a_llama(tmp_path), quantization_config=section)
    )


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("make", [a_llama, an_moe], ids=["read directly", "by transformers"])
def test_weights_that_are_not_finite_are_named(tmp_path, make, value):
    name = "model.layers.1.self_attn.o_proj.weight"
    changed(make(tmp_path), lambda tensors: tensors[name][3, 5].fill_(value))
    message = refusals(tmp_path, at_files=False)
    assert f"{name} (1)" in message
    assert "NaN or infinite" in message


def test_each_rank_checks_what_it_reads(tmp_path):
    changed(a_llama(tmp_path), lambda tensors: tensors[UP][-1].fill_(float("nan")))
    load(tmp_path, "float32", CPU, Planned(0, 2))
    with pytest.raises(ModelError, match=UP):
        load(tmp_path, "float32", CPU, Planned(1, 2))


def test_weights_beyond_a_type_are_refused_in_it(tmp_path):
    changed(a_llama(tmp_path), lambda tensors: tensors[UP][0, 0].fill_(1e6))
    load_model(tmp_path, "bfloat16", CPU)
    with pytest.raises(ModelError, match=r"read as float16.*choose model\.dtype bfloat16"):
        load_model(tmp_path, "float16", CPU)


# ---------------------------------------------------------------- tensor parallelism


def test_a_model_without_attention_heads_is_not_split(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    check_tensor_parallel(tmp_path, 1)
    with pytest.raises(ModelError, match=r"'mamba'\) has no attention heads to split; use target.tensor_parallel: 1"):
        check_tensor_parallel(tmp_path, 2)
