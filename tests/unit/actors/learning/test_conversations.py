"""Recorded conversations as examples, and answers that the target writes itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from actors.learning.conversations import answered, chat_prompt, read_examples, write_examples
from actors.models.checkpoint import load_model
from cluster.errors import ConfigError
from cluster.learning import Example
from tests.byte_tokenizer import byte_tokenizer
from tests.unit.actors.learning.drafts import CPU, write_draft

TOKENIZER = byte_tokenizer()
ENDING = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
    {"role": "assistant", "content": "ciao"},
]


def read(tmp_path: Path, *entries: Any, tokenizer: Any = TOKENIZER, ends: tuple[int, ...] = ()) -> list[Example]:
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))
    return read_examples(path, tokenizer, ends)


def texts(examples: list[Example], tokenizer: Any = TOKENIZER) -> list[tuple[str, str]]:
    return [(tokenizer.decode(each.prompt), tokenizer.decode(each.answer)) for each in examples]


def test_each_turn_of_the_assistant_is_an_answer(tmp_path: Path) -> None:
    expected = [
        ("system:be brief;user:hi;assistant:", "hello;"),
        ("system:be brief;user:hi;assistant:hello;user:bye;assistant:", "ciao;"),
    ]
    assert texts(read(tmp_path, {"messages": CHAT})) == expected
    shared = [
        {"from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]), "value": m["content"]} for m in CHAT
    ]
    assert texts(read(tmp_path, {"conversations": shared})) == expected


def test_an_answer_ends_with_the_end_of_text(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = ENDING
    end = tokenizer.eos_token_id
    (first, _) = read(tmp_path, {"messages": CHAT}, tokenizer=tokenizer, ends=(end,))
    assert tokenizer.decode(first.answer) == "hello<eos>"
    assert first.prompt == chat_prompt(tokenizer, CHAT[:2])


def test_token_ids_are_read_as_they_were_written(tmp_path: Path) -> None:
    examples = [Example((1, 2), (3,)), Example((), (4, 5))]
    write_examples(tmp_path / "ids.jsonl", examples)
    assert read_examples(tmp_path / "ids.jsonl", TOKENIZER, ()) == examples


def test_a_json_list_and_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "examples.json"
    path.write_text(json.dumps([{"messages": CHAT}] * 3))
    assert len(read_examples(path, TOKENIZER, ())) == 6
    assert len(read_examples(path, TOKENIZER, (), limit=3)) == 3


def test_a_folder_of_files(tmp_path: Path) -> None:
    write_examples(tmp_path / "b.jsonl", [Example((1,), (2,))])
    (tmp_path / "a.json").write_text(json.dumps([{"messages": CHAT}]))
    (tmp_path / "notes.txt").write_text("not examples")
    found = read_examples(tmp_path, TOKENIZER, ())
    assert len(found) == 3
    assert found[2] == Example((1,), (2,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no answer"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "holds no answer"),
        ("{", "line 1: not JSON"),
        ('{"prompt": "text"}', "line 1: expected"),
        ('{"prompt": [1], "answer": [true]}', "line 1: expected"),
        ('\n{"messages": [{"role": "robot", "content": "hi"}]}', "line 2: a message is"),
        (
            json.dumps({"messages": [CHAT[1], CHAT[0], CHAT[2]]}),
            "line 1: the target's chat template refuses it: system comes first",
        ),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_examples(path, TOKENIZER, ())
    with pytest.raises(ConfigError, match="cannot read examples"):
        read_examples(tmp_path / "missing.jsonl", TOKENIZER, ())


def test_the_target_answers_as_if_each_prompt_were_alone(tmp_path: Path) -> None:
    folder = write_draft(tmp_path)
    prompts = [(1, 2, 3), (4,), (5, 6, 7, 8), (9, 3)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def alone(prompt: tuple[int, ...]) -> tuple[int, ...]:
        text = list(prompt)
        for _ in range(7):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        return tuple(text[len(prompt) :])

    target = load_model(folder, "float32", CPU)
    advanced: list[int] = []
    found = answered(target, prompts, (), 7, batch=3, advance=advanced.append)
    assert found == [Example(prompt, alone(prompt)) for prompt in prompts]
    assert advanced == [3, 1]
    end = alone(prompts[0])[3]
    cut = answered(target, prompts, (end,), 7)
    for example, whole in zip(cut, found, strict=True):
        stop = whole.answer.index(end) + 1 if end in whole.answer else 7
        assert example.answer == whole.answer[:stop]
