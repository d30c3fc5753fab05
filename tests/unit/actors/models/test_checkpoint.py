"""Checkpoints: whether a pair fits together, how they are split, and what tells them apart."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from actors.models.checkpoint import (
    check_draft,
    check_same_vocabulary,
    check_tensor_parallel,
    checkpoint_fingerprint,
    end_ids,
    load,
    load_model,
    local_folder,
    surplus_tokens,
    vocabulary,
    vocabulary_fingerprint,
)
from cluster.errors import ModelError
from tests.unit.actors.groups import Planned

WORDS = ("<eos>", "a", "b", "c")
TARGET = dict(enumerate(WORDS))
CPU = torch.device("cpu")


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


def test_padding_on_either_side_is_harmless():
    padded = TARGET | {9: "<pad9>"}
    check_same_vocabulary(TARGET, padded)
    check_same_vocabulary(padded, TARGET)


@pytest.mark.parametrize("draft", [{0: "<eos>", 1: "b", 2: "a"}, {7: "x"}, {}], ids=["swapped", "disjoint", "empty"])
def test_a_draft_that_means_other_tokens_is_refused(draft):
    with pytest.raises(ModelError, match="do not share a vocabulary"):
        check_same_vocabulary(TARGET, draft)


def test_the_refusal_shows_what_differs():
    with pytest.raises(ModelError, match=r"2 ids mean different tokens.*1: 'a' / 'b'"):
        check_same_vocabulary(TARGET, {0: "<eos>", 1: "b", 2: "a"})


def test_the_vocabulary_is_the_tokenizers_without_padding_rows(tmp_path):
    folder = with_tokenizer(a_checkpoint(tmp_path, vocab_size=16))
    assert vocabulary(folder) == TARGET
    assert vocabulary_fingerprint(vocabulary(folder)) == vocabulary_fingerprint(TARGET)


def test_tokens_without_an_embedding_are_not_served_and_are_reported(tmp_path):
    folder = with_tokenizer(a_checkpoint(tmp_path, vocab_size=3))
    assert vocabulary(folder) == dict(enumerate(WORDS[:3]))
    assert "1 tokens that the model, with 3 rows, has no embedding for (c)" in surplus_tokens(folder)
    assert "every chat" not in surplus_tokens(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.chat_template = "c{{ messages }}"
    tokenizer.save_pretrained(folder)
    assert "every chat, because the chat template writes c, are refused" in surplus_tokens(folder)


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_that_pad_an_embedding_are_no_mismatch(tmp_path, rows):
    assert surplus_tokens(with_tokenizer(a_checkpoint(tmp_path, vocab_size=rows))) == ""


def test_an_end_that_the_model_cannot_produce_is_none(tmp_path):
    folder = a_checkpoint(tmp_path, vocab_size=4, eos_token_id=3)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert end_ids(folder) == (3,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert end_ids(folder) == (2,)


def test_fingerprints_of_vocabularies_differ_where_they_do():
    others = [{**TARGET, 4: "d"}, {0: "a", 1: "<eos>", 2: "b", 3: "c"}, {0: "<eos>", 1: "a", 2: "b", 4: "c"}, {}]
    assert len({vocabulary_fingerprint(tokens) for tokens in [TARGET, *others]}) == 5
    assert vocabulary_fingerprint(dict(reversed(TARGET.items()))) == vocabulary_fingerprint(TARGET)


def test_a_draft_with_its_own_tokenizer_is_compared_by_it(tmp_path):
    check_draft(TARGET, with_tokenizer(a_checkpoint(tmp_path / "same", vocab_size=8)))
    with pytest.raises(ModelError, match="do not share"):
        check_draft(TARGET, with_tokenizer(a_checkpoint(tmp_path / "other"), ("<eos>", "b", "a", "c")))


@pytest.mark.parametrize("tokenizer", [True, False])
def test_a_draft_without_a_row_for_each_of_the_targets_tokens_is_refused(tmp_path, tokenizer):
    """It is fed what the target decides: a token beyond its embedding would end the drafter in mid-stream."""
    folder = a_checkpoint(tmp_path, vocab_size=3)
    if tokenizer:
        with_tokenizer(folder, WORDS[:3])
    with pytest.raises(ModelError, match="3 vocabulary rows"):
        check_draft(TARGET, folder)


def test_a_draft_without_a_tokenizer_is_taken_for_the_targets(tmp_path):
    check_draft(TARGET, a_checkpoint(tmp_path))


# ---------------------------------------------------------------- weights


def test_a_fingerprint_tells_checkpoints_apart_and_survives_a_copy(tmp_path):
    first = a_checkpoint(tmp_path / "first")
    again = a_checkpoint(tmp_path / "again")
    tuned = a_checkpoint(tmp_path / "tuned", seed=1)
    wider = a_checkpoint(tmp_path / "wider", hidden_size=32)
    assert checkpoint_fingerprint(first) == checkpoint_fingerprint(again)
    assert len({checkpoint_fingerprint(folder) for folder in (first, tuned, wider)}) == 3
    scaled = json.loads((again / "config.json").read_text()) | {"rope_parameters": {"rope_theta": 7.0}}
    (again / "config.json").write_text(json.dumps(scaled))
    assert checkpoint_fingerprint(again) != checkpoint_fingerprint(first), "the same weights, used differently"
    newer = json.loads((first / "config.json").read_text()) | {"transformers_version": "99"}
    before = checkpoint_fingerprint(first)
    (first / "config.json").write_text(json.dumps(newer))
    assert checkpoint_fingerprint(first) == before


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


def test_loading_takes_the_dtype_and_names_what_cannot_be_loaded(tmp_path):
    assert load_model(a_checkpoint(tmp_path / "good"), "bfloat16", CPU).dtype == torch.bfloat16
    quantised = a_checkpoint(tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantised with 'awq'"):
        load_model(quantised, "float32", CPU)


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    mine, theirs = (dict([*model.named_parameters(), *model.named_buffers()]) for model in (one, other))
    return mine.keys() == theirs.keys() and all(
        mine[name].dtype == theirs[name].dtype and torch.equal(mine[name], theirs[name]) for name in mine
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", [LlamaConfig, Gemma2Config])  # Gemma computes one buffer more than rotary positions
def test_weights_read_directly_are_what_transformers_reads(tmp_path, kind, tied, dtype):
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
def test_of_tied_weights_either_may_be_the_one_that_is_stored(tmp_path, kept):
    expected = LlamaForCausalLM(a_config(tie_word_embeddings=True))
    expected.save_pretrained(tmp_path)
    tensors = {
        name: tensor for name, tensor in expected.state_dict().items() if "lm_head" not in name and "embed" not in name
    }
    save_file(tensors | {kept: expected.lm_head.weight}, tmp_path / "model.safetensors", {"format": "pt"})
    assert same_weights(load_model(tmp_path, "float32", CPU), expected)


def renamed(folder: Path, names: Mapping[str, str]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {names.get(name, name): tensor for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def test_renamed_weights_are_left_to_transformers_and_not_split(tmp_path):
    """GPT-NeoX's checkpoints call the head embed_out."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 4, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    expected = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, num_attention_heads=2))
    expected.save_pretrained(tmp_path)
    renamed(tmp_path, {"lm_head.weight": "embed_out.weight"})
    assert same_weights(load_model(tmp_path, "float32", CPU), expected)
    with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
        load(tmp_path, "float32", CPU, Planned(0, 2))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"vocab_size": 5}, "of another shape: .*embed_tokens"),
        ({"num_hidden_layers": 2}, r"missing: model.layers.1.*\(9\)"),
        ({"attention_bias": True}, "missing: .*q_proj.bias"),
        ({"tie_word_embeddings": True}, None),
    ],
    ids=["rows", "layers", "biases", "tied but stored twice"],
)
def test_a_split_checkpoint_must_hold_the_model_that_its_config_describes(tmp_path, changed, reason):
    config = json.loads((a_checkpoint(tmp_path) / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    if reason is None:
        load(tmp_path, "float32", CPU, Planned(1, 2))
    else:
        with pytest.raises(ModelError, match=reason):
            load(tmp_path, "float32", CPU, Planned(1, 2))


@pytest.mark.parametrize("module", ["mtp.fc", "model.mtp_layers.0.input_proj"])
def test_a_checkpoint_is_split_whose_module_of_multi_token_prediction_its_class_does_not_know(tmp_path, module):
    file = a_checkpoint(tmp_path) / "model.safetensors"
    save_file(load_file(file) | {f"{module}.weight": torch.zeros(4, 4)}, file, {"format": "pt"})
    loaded = load(tmp_path, "float32", CPU, Planned(1, 2)).model
    assert not any("mtp" in name for name in loaded.state_dict())


def test_a_file_that_is_cut_off_is_named(tmp_path):
    file = a_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        load_model(tmp_path, "float32", CPU)


def test_a_report_counts_what_a_rank_holds(tmp_path):
    """Tied, so that the head is a part of the embedding, which every rank holds whole."""
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


def test_a_folder_that_is_not_there_is_named(tmp_path):
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match=r"no model folder .*absent"):
        local_folder(str(tmp_path / "absent"))
