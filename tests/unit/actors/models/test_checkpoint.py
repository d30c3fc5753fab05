"""Tests checkpoints: loading, refusals, sharding and file downloads."""

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

from actors.compute.collectives import SingleRank
from actors.drafters.registry import DraftSetup, create_method, states_format
from actors.models import checkpoint as checkpoints
from actors.models.checkpoint import (
    INDEX,
    check_files,
    check_tensor_parallel,
    checkpoint_fingerprint,
    different_ids,
    end_ids,
    extra_tokens,
    first_existing,
    folder_with,
    layer_names,
    load,
    load_model,
    local_folder,
    vocabulary,
    vocabulary_fingerprint,
)
from actors.models.layer_subset import load_layers
from cluster.config import DraftPool
from cluster.errors import ModelError
from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET, altered, checkpoint
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
    """Saves an MoE model, whose expert tensors transformers stacks while loading."""
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
    """Replaces the single file by shards and an index."""
    (folder / "model.safetensors").unlink()
    for name, tensors in shards.items():
        save_file(tensors, folder / name, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def refused(
    folder: Path, *parts: str, rank: int = 0, ranks: int = 1, dtype: str = "float32", at_files: bool = True
) -> None:
    """Asserts that loading fails with a one-line error containing all parts, and so does the check of files."""
    with pytest.raises(ModelError) as loading:
        load(folder, dtype, CPU, Planned(rank, ranks))
    message = str(loading.value)
    assert "\n" not in message
    for part in (re.escape(str(folder)), *parts):
        assert re.search(part, message), message
    if at_files:
        with pytest.raises(ModelError, match=parts[0]):
            check_files(folder, with_weights=True)


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    mine, theirs = (dict([*model.named_parameters(), *model.named_buffers()]) for model in (one, other))
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine
    )


# ---------------------------------------------------------------- missing, surplus and misshapen tensors


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("drop", "config", "named"),
    [
        ("lm_head.weight", {}, r"missing: lm_head\.weight \(1\)"),
        (UP, {}, r"missing: model\.layers\.1\.mlp\.up_proj\.weight \(1\)"),
        ("model.norm.weight", {}, r"missing: model\.norm\.weight \(1\)"),
        (None, {"num_hidden_layers": 3}, r"missing: model\.layers\.2\..*\(9\)"),
        (None, {"attention_bias": True}, r"missing: .*k_proj\.bias.*\(8\)"),
    ],
)
def test_a_missing_tensor_is_named(tmp_path, drop, config, named, ranks):
    changed(configured(a_llama(tmp_path), **config), lambda tensors: tensors.pop(drop, None))
    refused(tmp_path, named, ranks=ranks)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"vocab_size": 9}, r"lm_head\.weight is \(8, 16\), not \(9, 16\) \(2\)"),
        (
            {"intermediate_size": 24},
            r"model\.layers\.0\.mlp\.down_proj\.weight is \(16, 16\), not \(16, 24\) \(6\)",
        ),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_sizes_are_compared(tmp_path, config, named, ranks):
    configured(a_llama(tmp_path), **config)
    refused(tmp_path, f"of another shape: {named}", "correct the sizes in config.json", ranks=ranks)


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
    refused(tmp_path, re.escape(f"not part of the model: {name} (1)"), re.escape(remedy))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", ["norm.weight", UP.removeprefix("model.")])
def test_a_weight_under_two_names_is_refused(tmp_path, name, ranks):
    """Neither name takes precedence. A checkpoint without the prefix in any name loads."""
    changed(a_llama(tmp_path), lambda tensors: tensors.update({name: tensors[f"model.{name}"] + 1}))
    refused(tmp_path, re.escape(f"not part of the model: {name} (1)"), ranks=ranks)


@pytest.mark.parametrize(
    ("name", "shape", "config"),
    [
        ("model.layers.0.self_attn.rotary_emb.inv_freq", (4,), {}),
        ("mtp.layers.0.mlp.up_proj.weight", (4, 4), {}),
        ("mtp.fc.weight", (4, 4), {}),
        ("model.mtp_layers.0.input_proj.weight", (4, 4), {}),
        ("medusa_head.0.0.linear.weight", (4, 4), {}),
        ("model.layers.2.mlp.up_proj.weight", (4, 4), {"num_nextn_predict_layers": 1}),
        ("model.layers.0.attn.bias", (1, 1, 4, 4), {}),
        ("model.layers.0.attn.masked_bias", (), {}),
    ],
)
def test_derivable_and_draft_only_tensors_may_be_stored(tmp_path, name, shape, config):
    """Such tensors are not loaded, on one rank or several."""
    expected = load_model(a_llama(tmp_path), "float32", CPU)
    changed(configured(tmp_path, **config), lambda tensors: tensors.update({name: torch.zeros(shape)}))
    check_files(tmp_path, with_weights=True)
    assert same_weights(load_model(tmp_path, "float32", CPU), expected)
    assert load(tmp_path, "float32", CPU, Planned(1, 2)).model.state_dict().keys() == expected.state_dict().keys()


def test_masks_that_old_checkpoints_of_gpt2_store_are_left_out(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))
    saved(tmp_path, model)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.0.attn.masked_bias": torch.tensor(-1e9)}

    def as_published(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors.update(masks)

    changed(tmp_path, as_published)
    check_files(tmp_path, with_weights=True)
    assert same_weights(load_model(tmp_path, "float32", CPU), model)


def test_experts_without_any_gate_are_refused(tmp_path):
    an_moe(tmp_path)
    changed(
        tmp_path,
        lambda tensors: [
            tensors.pop(name)
            for name in list(tensors)
            if "experts.0.gate_proj" in name or "experts.1.gate_proj" in name
        ],
    )
    refused(tmp_path, r"gate_up_proj is stored in 0 tensors, expected 2", at_files=False)


def test_experts_stacked_while_loading_must_be_complete(tmp_path):
    """Only the weights show the number of experts in the stack."""
    check_files(an_moe(tmp_path), with_weights=True)
    load_model(tmp_path, "float32", CPU)
    for expert, named in ((1, "experts.down_proj"), (0, r"missing: model\.layers\.0\.mlp\.experts\.down_proj")):
        changed(
            tmp_path,
            lambda tensors, expert=expert: tensors.pop(f"model.layers.0.mlp.experts.{expert}.down_proj.weight"),
        )
        refused(tmp_path, named, at_files=expert == 0)


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
    refused(tmp_path, r"z\.safetensors also holds model\.norm\.weight \(1\)", at_files=False)


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
    refused(tmp_path, problem, ranks=ranks)


def test_an_index_alone_shows_missing_tensors(tmp_path):
    """The error precedes any download of weights."""
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
    refused(tmp_path, re.escape(str(file)), ranks=ranks)


@pytest.mark.parametrize(
    ("name", "problem", "remedy"),
    [
        ("pytorch_model.bin", "as PyTorch pickles only", r"save_pretrained\(\)"),
        ("model.gguf", "as GGUF files only", r"save_pretrained\(\)"),
        ("consolidated.safetensors", "only consolidated.safetensors", "fetch the whole checkpoint"),
        ("README.md", "holds no weights", "fetch the whole checkpoint"),
    ],
)
def test_weights_under_other_names_are_not_read(tmp_path, name, problem, remedy):
    (a_llama(tmp_path) / "model.safetensors").rename(tmp_path / name)
    refused(tmp_path, problem, remedy)


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        *(
            (method, (f"quantized with '{method}'", "does not know", "remove quantization_config"))
            for method in ("new", None)
        ),
        *((method, (f"quantized with '{method}', which cannot be loaded here",)) for method in ("awq", "gptq")),
    ],
)
def test_a_quantization_that_is_unknown_or_not_installed_is_refused(tmp_path, method, parts):
    section = {"quant_method": method, "bits": 4, "group_size": 16}
    refused(configured(a_llama(tmp_path), quantization_config=section), *parts)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("make", [a_llama, an_moe], ids=["read directly", "by transformers"])
def test_weights_that_are_not_finite_are_named(tmp_path, make, value):
    name = "model.layers.1.self_attn.o_proj.weight"
    changed(make(tmp_path), lambda tensors: tensors[name][3, 5].fill_(value))
    refused(tmp_path, re.escape(f"{name} (1)"), "NaN or infinite", at_files=False)


def test_each_rank_checks_what_it_reads(tmp_path):
    changed(a_llama(tmp_path), lambda tensors: tensors[UP][-1].fill_(float("nan")))
    load(tmp_path, "float32", CPU, Planned(0, 2))
    refused(tmp_path, UP, rank=1, ranks=2, at_files=False)


def test_weights_beyond_a_type_are_refused_in_it(tmp_path):
    changed(a_llama(tmp_path), lambda tensors: tensors[UP][0, 0].fill_(1e6))
    assert load_model(tmp_path, "bfloat16", CPU).dtype == torch.bfloat16
    refused(tmp_path, r"read as float16.*choose model\.dtype bfloat16", dtype="float16", at_files=False)


# ---------------------------------------------------------------- tensor parallelism


def test_a_model_without_attention_heads_is_not_split(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    check_tensor_parallel(tmp_path, 1)
    with pytest.raises(ModelError, match=r"'mamba'\) has no attention heads to split; use target.tensor_parallel: 1"):
        check_tensor_parallel(tmp_path, 2)


# ---------------------------------------------------------------- pairs of models, fingerprints, splits


WORDS = ("<eos>", "a", "b", "c")
TOKENS = dict(enumerate(WORDS))


def a_config(**changes: int) -> LlamaConfig:
    sizes = {"vocab_size": len(WORDS), "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaConfig(**{**sizes, **heads, "eos_token_id": 0, **changes})


def a_checkpoint(folder: Path, seed: int = 0, **changes: int) -> Path:
    torch.manual_seed(seed)
    LlamaForCausalLM(a_config(**changes)).save_pretrained(folder)
    return folder


def with_tokenizer(folder: Path, words: tuple[str, ...] = WORDS) -> Path:
    built = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=built).save_pretrained(folder)
    return folder


# ---------------------------------------------------------------- vocabulary


@pytest.mark.parametrize(
    ("other", "different"), [({**TOKENS, 9: "<pad9>"}, []), ({0: "<eos>", 1: "b", 2: "a"}, [1, 2]), ({7: "x"}, [])]
)
def test_ids_with_different_tokens_are_found_in_either_direction(other: dict[int, str], different: list[int]) -> None:
    assert different_ids(TOKENS, other) == different_ids(other, TOKENS) == different


def test_the_vocabulary_is_the_tokenizers_without_padding_rows(tmp_path):
    folder = with_tokenizer(a_checkpoint(tmp_path, vocab_size=16))
    assert vocabulary(folder) == TOKENS
    assert vocabulary_fingerprint(vocabulary(folder)) == vocabulary_fingerprint(TOKENS)


def test_tokens_without_an_embedding_are_not_served_and_are_reported(tmp_path):
    folder = with_tokenizer(a_checkpoint(tmp_path, vocab_size=3))
    assert vocabulary(folder) == dict(enumerate(WORDS[:3]))
    assert "1 tokens that the model, with 3 rows, has no embedding for (c)" in extra_tokens(folder)
    assert "every chat" not in extra_tokens(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = "c{{ messages }}"
    tokenizer.save_pretrained(folder)
    assert "every chat, because the chat template writes c, are refused" in extra_tokens(folder)


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_that_pad_an_embedding_are_no_mismatch(tmp_path, rows):
    assert extra_tokens(with_tokenizer(a_checkpoint(tmp_path, vocab_size=rows))) == ""


def test_an_end_that_the_model_cannot_produce_is_none(tmp_path):
    folder = a_checkpoint(tmp_path, vocab_size=4, eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert end_ids(folder) == (3,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert end_ids(folder) == (2,)


def test_fingerprints_of_vocabularies_differ_where_they_do():
    others = [{**TOKENS, 4: "d"}, {0: "a", 1: "<eos>", 2: "b", 3: "c"}, {0: "<eos>", 1: "a", 2: "b", 4: "c"}, {}]
    assert len({vocabulary_fingerprint(tokens) for tokens in [TOKENS, *others]}) == 5
    assert vocabulary_fingerprint(dict(reversed(TOKENS.items()))) == vocabulary_fingerprint(TOKENS)


# ---------------------------------------------------------------- weights


def test_a_fingerprint_distinguishes_checkpoints_and_survives_a_copy(tmp_path):
    first = a_checkpoint(tmp_path / "first")
    again = a_checkpoint(tmp_path / "again")
    tuned = a_checkpoint(tmp_path / "tuned", seed=1)
    wider = a_checkpoint(tmp_path / "wider", hidden_size=32)
    assert checkpoint_fingerprint(first) == checkpoint_fingerprint(again)
    assert len({checkpoint_fingerprint(folder) for folder in (first, tuned, wider)}) == 3
    before = checkpoint_fingerprint(first)
    configured(again, rope_parameters={"rope_theta": 7.0})
    assert checkpoint_fingerprint(again) != before, "the same weights, used differently"
    assert checkpoint_fingerprint(configured(first, transformers_version="99")) == before


def test_a_fingerprint_changes_with_each_tensor(tmp_path):
    """A merged LoRA adapter leaves embeddings and norms unchanged."""
    folder = a_checkpoint(tmp_path, hidden_size=64)
    tensors = load_file(folder / "model.safetensors")
    found = {checkpoint_fingerprint(folder)}
    for name in tensors:
        save_file(tensors | {name: tensors[name] + 1}, folder / "model.safetensors", {"format": "pt"})
        found.add(checkpoint_fingerprint(folder))
    assert len(found) == 1 + len(tensors)


def test_a_checkpoint_without_safetensors_is_refused(tmp_path):
    a_config().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="safetensors"):
        checkpoint_fingerprint(tmp_path)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "possible"),
    [(4, 2, 16, {1, 2}), (9, 3, 18, {1, 3}), (8, 8, 16, {1, 2, 4, 8}), (8, 8, 12, {1, 2, 4}), (9, 3, 16, {1})],
)
def test_ranks_must_divide_both_kinds_of_heads_and_the_mlp(tmp_path, heads, kv_heads, width, possible):
    sizes = {"hidden_size": 8 * heads, "intermediate_size": width}
    a_config(num_attention_heads=heads, num_key_value_heads=kv_heads, **sizes).save_pretrained(tmp_path)
    for ranks in range(1, 10):
        if ranks in possible:
            check_tensor_parallel(tmp_path, ranks)
        else:
            with pytest.raises(ModelError, match=f"only be split by {', '.join(map(str, sorted(possible)))}; set"):
                check_tensor_parallel(tmp_path, ranks)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config])  # Gemma has one more buffer than rotary positions
def test_directly_read_weights_equal_those_of_transformers(tmp_path, kind, tied, dtype):
    model = AutoModelForCausalLM.from_config(
        kind(**a_config(tie_word_embeddings=tied).to_diff_dict() | {"head_dim": 4})
    )
    model.generation_config.max_length = 77
    model.save_pretrained(tmp_path, max_shard_size="2KB")
    assert (tmp_path / "model.safetensors.index.json").is_file(), "several shards are wanted here"
    read = load_model(tmp_path, dtype, CPU)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert type(read) is type(expected)
    assert same_weights(read, expected)
    assert (read.lm_head.weight is read.model.embed_tokens.weight) == tied
    assert read.generation_config.max_length == 77
    assert not read.training


@pytest.mark.parametrize("kept", ["lm_head.weight", "model.embed_tokens.weight"])
def test_either_of_two_tied_weights_may_be_stored(tmp_path, kept):
    expected = LlamaForCausalLM(a_config(tie_word_embeddings=True))
    expected.save_pretrained(tmp_path)
    tensors = {
        name: tensor for name, tensor in expected.state_dict().items() if "lm_head" not in name and "embed" not in name
    }
    save_file(tensors | {kept: expected.lm_head.weight}, tmp_path / "model.safetensors", {"format": "pt"})
    assert same_weights(load_model(tmp_path, "float32", CPU), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tied_weights_that_are_stored_with_different_values_are_logged(tmp_path, caplog, ranks):
    configured(a_llama(tmp_path), tie_word_embeddings=True)
    own = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    found = load(tmp_path, "float32", CPU, Planned(0, ranks)).model
    assert torch.equal(found.lm_head.weight, own[: len(found.lm_head.weight)]), "as in transformers"
    assert "set tie_word_embeddings to false, or remove the wrong tensor" in caplog.text
    caplog.clear()
    changed(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    load(tmp_path, "float32", CPU, Planned(0, ranks))
    assert "tie_word_embeddings" not in caplog.text


def test_renamed_weights_are_read_on_one_rank_and_on_two(tmp_path):
    """GPT-NeoX checkpoints name the LM head embed_out."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 4, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    expected = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2))
    expected.save_pretrained(tmp_path)
    changed(tmp_path, lambda tensors: tensors.setdefault("embed_out.weight", tensors.pop("lm_head.weight", None)))
    assert same_weights(load_model(tmp_path, "float32", CPU), expected)
    shares = [load(tmp_path, "float32", CPU, Planned(rank, 2)).model for rank in (0, 1)]
    assert torch.equal(torch.cat([share.lm_head.weight for share in shares]), expected.lm_head.weight)


def test_a_tied_checkpoint_that_stores_its_weights_twice_is_split(tmp_path):
    load(configured(a_checkpoint(tmp_path), tie_word_embeddings=True), "float32", CPU, Planned(1, 2))


def test_a_report_counts_what_a_rank_holds(tmp_path):
    """With tied weights, the LM head is part of the embedding, which every rank stores whole."""
    a_checkpoint(tmp_path, tie_word_embeddings=True)
    whole, half = (load(tmp_path, "float32", CPU, Planned(0, ranks)).report for ranks in (1, 2))
    embedding = 4 * 16
    norms = 3 * 16
    attention = 2 * (16 * 16) + 2 * (16 * 8)
    mlp = 3 * 16 * 16
    assert whole.parameters == embedding + norms + attention + mlp
    assert half.parameters == embedding + norms + (attention + mlp) // 2
    assert half.peak_bytes > 4 * half.parameters
    assert half.seconds > 0


def test_an_absent_model_folder_is_named(tmp_path):
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match=r"no model folder .*absent"):
        local_folder(str(tmp_path / "absent"))


# ---------------------------------------------------------------- files on a hub


ID = "org/target"
SHARDS = {"embedding": "embed_tokens", "head": "lm_head", "norm": "model.norm"}


class FakeHub:
    """Fake hub with the fixtures' target, one file per layer and per other tensor; records downloads."""

    def __init__(self, origin: Path, cache: Path) -> None:
        self.origin = origin
        self.cache = cache
        self.fetched: set[str] = set()

    def snapshot_download(self, name: str, allow_patterns: Sequence[str], ignore_patterns: str) -> str:
        assert name == ID
        for path in self.origin.iterdir():
            if any(fnmatch(path.name, pattern) for pattern in allow_patterns):
                shutil.copy(path, self.cache / path.name)
                if path.suffix == ".safetensors":
                    self.fetched.add(path.stem)
        return str(self.cache)


def shard_of(tensor: str) -> str:
    if ".layers." in tensor:
        return f"layer{tensor.split('.layers.')[1].split('.')[0]}"
    return next(shard for shard, part in SHARDS.items() if part in tensor)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    origin = tmp_path / "origin"
    cache = tmp_path / "cache"
    origin.mkdir()
    cache.mkdir()
    shutil.copy(TARGET / "config.json", origin)
    tensors = load_file(TARGET / "model.safetensors")
    places = {name: shard_of(name) for name in tensors}
    for shard in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == shard}, origin / f"{shard}.safetensors")
    files = {name: f"{shard}.safetensors" for name, shard in places.items()}
    (origin / INDEX).write_text(json.dumps({"weight_map": files}))
    found = FakeHub(origin, cache)
    monkeypatch.setattr(checkpoints, "snapshot_download", found.snapshot_download)
    return found


def created(method: Any, model: Path | None, **options: Any) -> None:
    draft = DraftPool(method=method, model=None if model is None else str(model), **options)
    tokens = {token: str(token) for token in range(96)}
    create_method(draft, DraftSetup("float32", 64, 4, tokens, ID, states_format(draft, TARGET)))


def with_borrowed_lm_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Medusa heads in vLLM's layout, which share the target's LM head."""
    blocks = {name: tensor for name, tensor in tensors.items() if ".linear." in name}
    return {"blocks." + name.replace("0.linear", "layers.0"): tensor for name, tensor in blocks.items()}


@pytest.mark.parametrize(
    ("method", "fixture", "fetched"),
    [
        ("eagle", "eagle3", {"embedding"}),
        ("dflash", "dflash", {"embedding", "head"}),
        ("eagle", "eagle3_speculators", set()),
        ("medusa", "medusa", set()),
        ("mlp_speculator", "mlp_speculator", set()),
    ],
)
def test_a_head_fetches_only_what_it_borrows_of_the_target(
    hub: FakeHub, method: str, fixture: str, fetched: set[str]
) -> None:
    created(method, checkpoint(fixture))
    assert hub.fetched == fetched


def test_medusa_heads_without_an_lm_head_fetch_it_alone(hub: FakeHub, tmp_path: Path) -> None:
    created("medusa", altered(tmp_path, "medusa", with_borrowed_lm_head, original_lm_head=True))
    assert hub.fetched == {"head"}


def test_layers_of_the_target_are_fetched_without_the_others(hub: FakeHub) -> None:
    created("layer_skip", None, layer_skip={"layers": [0, 3]})
    assert hub.fetched == {"layer0", "layer3", "embedding", "head", "norm"}


def test_partially_fetched_layers_equal_those_of_the_whole_checkpoint(hub: FakeHub) -> None:
    layers = (1, 2)
    found = load_layers(folder_with(ID, layer_names(layers)), layers, "float32", torch.device("cpu"))
    whole = load_layers(TARGET, layers, "float32", torch.device("cpu"))
    for name, tensor in whole.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)


def test_a_snapshot_without_the_weights_in_meta_s_format_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The download job skips these files, but huggingface_hub knows that the repository contains them."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit = "a" * 40
    repository = tmp_path / "models--org--target"
    files = {name: {"size": 2, "blob_id": commit} for name in ("config.json", "original/params.json")}
    for path, text in {
        "refs/main": commit,
        f"trees/{commit}.json": json.dumps({"format_version": 1, "files": files}),
        f"snapshots/{commit}/config.json": "{}",
    }.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    assert local_folder(ID) == repository / "snapshots" / commit
    (repository / "snapshots" / commit / "config.json").unlink()
    with pytest.raises(ModelError, match=r"1 file\(s\) are missing \(config.json\)"):
        local_folder(ID)


def test_a_checkpoint_in_one_file_is_fetched_whole(hub: FakeHub) -> None:
    (hub.origin / INDEX).unlink()
    for path in hub.origin.glob("*.safetensors"):
        path.unlink()
    shutil.copy(TARGET / "model.safetensors", hub.origin)
    folder_with(ID, first_existing([("model.embed_tokens.weight",)]))
    assert hub.fetched == {"model"}


def test_a_local_folder_is_as_it_is(hub: FakeHub) -> None:
    assert folder_with(str(TARGET), layer_names([0])) == TARGET
    assert hub.fetched == set()


def test_names_are_chosen_by_layer_and_by_preference() -> None:
    names = ["model.layers.1.a", "model.layers.10.a", "layers.2.a", "model.norm", "embed"]
    assert layer_names([1, 2])(names) == ["model.layers.1.a", "layers.2.a", "model.norm", "embed"]
    assert first_existing([("lm_head", "embed"), ("embed",), ("absent",)])(names) == ["embed", "embed"]
