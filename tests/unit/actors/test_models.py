"""Checkpoints: whether a pair fits together, how they are split, and what tells them apart."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from actors.models import (
    check_draft,
    check_same_vocabulary,
    check_tensor_parallel,
    checkpoint_fingerprint,
    load_model,
    local_folder,
    stop_ids,
    vocabulary,
    vocabulary_fingerprint,
)
from cluster.errors import ModelError

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


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([0, 2], 1, (0, 2)), (3, 1, (3,)), (None, 1, (1,)), (None, None, ())],
    ids=["several", "one", "from the model", "none"],
)
def test_stop_ids(tmp_path, generation, config, expected):
    a_config(eos_token_id=config).save_pretrained(tmp_path)
    if generation is not None:
        GenerationConfig(eos_token_id=generation).save_pretrained(tmp_path)
    assert stop_ids(tmp_path) == expected


# ---------------------------------------------------------------- weights


def test_a_fingerprint_tells_checkpoints_apart_and_survives_a_copy(tmp_path):
    first, again = a_checkpoint(tmp_path / "first"), a_checkpoint(tmp_path / "again")
    tuned, wider = a_checkpoint(tmp_path / "tuned", seed=1), a_checkpoint(tmp_path / "wider", hidden_size=32)
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


@pytest.mark.parametrize(("heads", "kv_heads", "possible"), [(4, 2, {1, 2}), (9, 3, {1, 3}), (8, 8, {1, 2, 4, 8})])
def test_ranks_must_divide_both_kinds_of_heads(tmp_path, heads, kv_heads, possible):
    config = a_config(num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=8 * heads)
    config.save_pretrained(tmp_path)
    for ranks in range(1, 10):
        if ranks in possible:
            check_tensor_parallel(tmp_path, ranks)
        else:
            with pytest.raises(ModelError, match=", ".join(map(str, sorted(possible)))):
                check_tensor_parallel(tmp_path, ranks)


def test_loading_takes_the_dtype_and_names_what_cannot_be_loaded(tmp_path):
    assert load_model(a_checkpoint(tmp_path / "good"), "bfloat16", CPU).dtype == torch.bfloat16
    quantised = a_checkpoint(tmp_path / "quantised")
    config = json.loads((quantised / "config.json").read_text()) | {"quantization_config": {"quant_method": "awq"}}
    (quantised / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quantised with 'awq'"):
        load_model(quantised, "float32", CPU)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    assert local_folder(str(tmp_path)) == tmp_path
    with pytest.raises(ModelError, match=r"no model folder .*absent"):
        local_folder(str(tmp_path / "absent"))
