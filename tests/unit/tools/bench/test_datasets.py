"""Tests data sets in their published layouts."""

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import ConfigError
from tools.bench.experiment import read_prompts

MESSAGES = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
    ]
}
SHARE_GPT = {"id": "x", "conversations": [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Hi"}]}


def written(folder: Path, *entries: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(map(json.dumps, entries)) + "\n")
    return path


def test_prompts_and_conversations_are_read(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "One?"}, {"kind": "code", "prompt": "Two?"}, MESSAGES, SHARE_GPT)
    one, two, messages, shared = read_prompts(path)
    assert (one.kind, one.prompt, one.earlier) == ("prompt", "One?", ())
    assert (two.kind, two.prompt) == ("code", "Two?")
    assert messages.prompt == "Why?", "the latest turn of the user"
    assert messages.earlier == (("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"))
    assert (shared.prompt, shared.earlier) == ("Hello", ()), "what the other model answered is not asked about"


def test_a_conversation_is_sent_whole(tmp_path: Path) -> None:
    question = read_prompts(written(tmp_path, MESSAGES, MESSAGES))[0].question(8, None)
    assert question.messages == MESSAGES["messages"][:4]


def test_only_a_newline_ends_an_entry(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "one\u2028two\u0085three"}\n' * 2, encoding="utf-8")
    assert [prompt.prompt for prompt in read_prompts(path)] == ["one\u2028two\u0085three"] * 2


def test_sharegpt_lists_are_read(tmp_path: Path) -> None:
    path = tmp_path / "shared.json"
    path.write_text(json.dumps([SHARE_GPT, SHARE_GPT], indent=1))
    assert [prompt.prompt for prompt in read_prompts(path)] == ["Hello", "Hello"]


@pytest.mark.parametrize(
    ("entry", "fault"),
    [
        ({"text": "x"}, 'line 2: expected {"prompt"'),
        ({"prompt": ""}, "line 2: expected"),
        ("words", "line 2: expected"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "line 2: no user message"),
        ({"messages": [{"role": "user", "content": 3}]}, "line 2: a message is"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "line 2: a message is"),
    ],
)
def test_invalid_prompts_are_refused_with_their_position(tmp_path: Path, entry: Any, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        read_prompts(written(tmp_path, {"prompt": "One?"}, entry))


def test_invalid_json_is_refused_with_its_position(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "One?"}\n{"prompt": \n')
    with pytest.raises(ConfigError, match="line 2: invalid JSON"):
        read_prompts(path)


def test_a_single_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains 1 prompts"):
        read_prompts(written(tmp_path, {"prompt": "One?"}))
    with pytest.raises(ConfigError, match=r"cannot read prompts .*none\.jsonl: .*No such file"):
        read_prompts(tmp_path / "none.jsonl")
