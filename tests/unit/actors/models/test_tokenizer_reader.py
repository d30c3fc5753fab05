"""Tests loading and one-line refusals of tokenizers, and the ids that end a text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from actors.grammars import load_grammar_vocabulary
from actors.models.tokenizer_reader import EndOfText, end_ids, end_of_text, load_tokenizer
from cluster.errors import ModelError

WORDS = {"a": 0, "b": 1, "<eos>": 2}


def a_tokenizer(folder: Path, decoder: decoders.Decoder | None) -> Path:
    LlamaConfig().save_pretrained(folder)
    built = Tokenizer(models.BPE(WORDS, []))
    if decoder is not None:
        built.decoder = decoder
    PreTrainedTokenizerFast(tokenizer_object=built).save_pretrained(folder)
    return folder


def no_files(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def cut_off(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text()[:-20])


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def unknown_model(folder: Path) -> None:
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"model": {"type": "New"}}))


def no_decoder(folder: Path) -> None:
    a_tokenizer(folder, None)


def slow_only(folder: Path) -> None:
    no_files(folder)
    (folder / "vocab.json").write_text(json.dumps({"a": 0, "<unk>": 1}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))


def code_of_its_own(folder: Path) -> None:
    config = {"tokenizer_class": "NewTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_new.NewTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "new"}))


@pytest.mark.parametrize(
    ("change", "problem", "remedy"),
    [
        (no_files, "has no tokenizer", "copy the tokenizer's files"),
        (cut_off, "cannot be loaded", "fetch its files again"),
        (no_tokenizer, "cannot be loaded", "fetch its files again"),
        (unknown_model, "cannot be loaded", "fetch its files again"),
        (no_decoder, "has no decoder", "add the decoder"),
        (slow_only, "CTRLTokenizer, which has no fast version", "tokenizer.json"),
        (code_of_its_own, "needs Python code of its own", "save_pretrained"),
    ],
)
def test_a_tokenizer_that_cannot_be_served_is_refused(
    tmp_path: Path, change: Callable[[Path], None], problem: str, remedy: str
) -> None:
    change(a_tokenizer(tmp_path, decoders.Fuse()))
    with pytest.raises(ModelError, match=problem) as refused:
        load_tokenizer(tmp_path)
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 600
    assert str(tmp_path) in message
    assert remedy in message
    assert "trust_remote_code" not in message


def test_a_tokenizer_is_loaded(tmp_path):
    tokenizer = load_tokenizer(a_tokenizer(tmp_path, decoders.Fuse()))
    assert tokenizer("abba").input_ids == [0, 1, 1, 0]
    assert tokenizer.decode([0, 1]) == "ab"


# ---------------------------------------------------------------- end-of-text ids


ABSENT = object()
GENERATION = "generation_config.json"
CONFIG = "config.json"


def a_folder(folder: Path, generation: Any, config: Any, *, tokenizer: str | None = None) -> Path:
    """Writes eos_token_id to each file, except for ABSENT."""
    for name, ends in ((GENERATION, generation), (CONFIG, config)):
        content = {} if ends is ABSENT else {"eos_token_id": ends}
        (folder / name).write_text(json.dumps({"model_type": "llama", "vocab_size": 8} | content))
    if tokenizer is not None:
        built = Tokenizer(models.BPE({word: i for i, word in enumerate(("a", "b", "<eos>"))}, []))
        built.decoder = decoders.ByteLevel()
        PreTrainedTokenizerFast(tokenizer_object=built, eos_token=tokenizer or None).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("generation", "config", "tokenizer", "expected"),
    [
        (3, 1, "<eos>", EndOfText((3,), GENERATION)),
        ([0, 2], 1, "<eos>", EndOfText((0, 2), GENERATION)),
        ([2, 0, 2], 1, None, EndOfText((2, 0), GENERATION)),
        ("2", 1, None, EndOfText((2,), GENERATION)),
        (["2", 0], 1, None, EndOfText((2, 0), GENERATION)),
        (0, 1, None, EndOfText((0,), GENERATION)),
        (ABSENT, 1, "<eos>", EndOfText((1,), CONFIG)),
        (None, [1, 0], "<eos>", EndOfText((1, 0), CONFIG)),
        ([], "1", "<eos>", EndOfText((1,), CONFIG)),
        (ABSENT, None, "<eos>", EndOfText((2,), "tokenizer")),
        ([], [], "<eos>", EndOfText((2,), "tokenizer")),
        (ABSENT, ABSENT, "", EndOfText((), "")),
        (ABSENT, ABSENT, None, EndOfText((), "")),
    ],
)
def test_the_first_file_that_names_an_end_decides(tmp_path, generation, config, tokenizer, expected):
    assert end_of_text(a_folder(tmp_path, generation, config, tokenizer=tokenizer)) == expected


def test_the_text_config_is_read_after_the_top_level_config(tmp_path):
    (tmp_path / CONFIG).write_text(json.dumps({"text_config": {"eos_token_id": 5}}))
    assert end_ids(tmp_path) == (5,)
    (tmp_path / CONFIG).write_text(json.dumps({"eos_token_id": [1, 6], "text_config": {"eos_token_id": 5}}))
    assert end_ids(tmp_path) == (1, 6)


@pytest.mark.parametrize("name", [GENERATION, CONFIG])
@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "end"}', '{"eos_token_id": -1}'])
def test_a_broken_file_is_named(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=name):
        end_ids(tmp_path)


def test_grammars_end_as_sampling_does(tmp_path):
    a_folder(tmp_path, [], [2, 1], tokenizer="")
    assert sorted(load_grammar_vocabulary(tmp_path).eos_tokens) == [1, 2]


def test_the_acceptance_source_is_reported(tmp_path):
    LlamaConfig(eos_token_id=2).save_pretrained(tmp_path)
    assert str(end_of_text(tmp_path)) == "text ends with token 2 (config.json)"
    assert "no token ends a text" in str(EndOfText((), ""))
