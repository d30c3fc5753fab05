"""One function finds the end of a text: from the generation config, else the model's, else the tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from actors.grammars import load_grammar_vocabulary
from actors.models.tokenizer_reader import EndOfText, end_ids, end_of_text
from cluster.errors import ModelError

ABSENT = object()
GENERATION = "generation_config.json"
CONFIG = "config.json"


def a_folder(folder: Path, generation: Any, config: Any, *, tokenizer: str | None = None) -> Path:
    """Writes what each file says of eos_token_id; ABSENT: nothing."""
    for name, said in ((GENERATION, generation), (CONFIG, config)):
        content = {} if said is ABSENT else {"eos_token_id": said}
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


def test_the_text_config_is_asked_after_the_whole_one(tmp_path):
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


def test_the_source_is_reported(tmp_path):
    LlamaConfig(eos_token_id=2).save_pretrained(tmp_path)
    assert str(end_of_text(tmp_path)) == "text ends with token 2 (config.json)"
    assert "no token ends a text" in str(EndOfText((), ""))
