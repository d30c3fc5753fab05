"""Tests the choice of a model's response template."""

import pytest

from cluster.errors import ConfigError
from serve_app.api.tool_calls import Content, ResponseReaders, find_template, read_whole
from tests.talking_tokenizer import MODEL_TYPE, talking_tokenizer

SHOUTED = {"start_anchor": "assistant\n", "fields": {"content": {"open": "[", "close": "]"}}}


def test_a_known_architecture_needs_no_template() -> None:
    assert find_template("auto", talking_tokenizer(), MODEL_TYPE) is not None
    assert find_template("auto", talking_tokenizer(), "llama") is None


def test_the_checkpoints_template_precedes_the_architectures() -> None:
    tokenizer = talking_tokenizer()
    tokenizer.response_template = SHOUTED
    readers = ResponseReaders(tokenizer, find_template("auto", tokenizer, MODEL_TYPE))
    assert read_whole(readers.reader((), ()), ["a[b]c"]) == [Content("b")]


def test_the_configured_template_precedes_all_others() -> None:
    assert find_template("none", talking_tokenizer(), MODEL_TYPE) is None
    readers = ResponseReaders(talking_tokenizer(), find_template(SHOUTED, talking_tokenizer(), MODEL_TYPE))
    assert read_whole(readers.reader((), ()), ["a[b]c"]) == [Content("b")]


def test_an_invalid_template_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"server\.response_template.*fields"):
        find_template({"start_anchor": "x"}, talking_tokenizer(), MODEL_TYPE)
