"""Tokenizers that cannot be served are refused in one line, with the remedy."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from actors.models.tokenizer_reader import load_tokenizer
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
    said = {"tokenizer_class": "NewTokenizer", "auto_map": {"AutoTokenizer": ["tokenization_new.NewTokenizer", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
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
