"""Reads examples from recorded conversations, and lets the target write its own answers.

A file holds one JSON list or JSON lines. An entry is one of

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}, ...]}
    {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}, ...]}   (ShareGPT)
    {"prompt": [token ids], "answer": [token ids]}

Each turn of the assistant is an answer, and everything before it is its prompt. A draft learns to predict its target,
so answers written by the target itself are the most useful; answers by people or other models teach another style.
`answered` replaces answers by the target's own.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from cluster.errors import ConfigError
from cluster.learning import Example

EXPECTED = (
    'expected {"messages": [{"role", "content"}, ...]}, {"conversations": [{"from", "value"}, ...]} or'
    ' {"prompt": [ids], "answer": [ids]}'
)
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Message = dict[str, str]


def read_examples(path: Path, tokenizer: Any, ends: Sequence[int], limit: int | None = None) -> list[Example]:
    """Reads the examples of a file, at most `limit`, with the chat template of the target's tokenizer.

    Reads all .json and .jsonl files of a folder, in the order of their names.

    An answer ends with the first of the target's end-of-text ids `ends`. Answers without text are skipped. Raises
    ConfigError, naming the entry, for a file that cannot be read or that the template refuses.
    """
    found: list[Example] = []
    files = sorted((*path.glob("*.json"), *path.glob("*.jsonl"))) if path.is_dir() else [path]
    for file in files:
        for where, entry in _entries(file):
            if limit is not None and len(found) >= limit:
                break
            found += _examples(entry, f"{file}, {where}", tokenizer, ends)
    if not found:
        raise ConfigError(f"{path} holds no answer of an assistant; {EXPECTED}")
    return found if limit is None else found[:limit]


def chat_prompt(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """Returns the token ids of a conversation, up to the first token of the assistant's answer."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read examples {path}: {error}") from error
    if text.lstrip().startswith("["):
        yield from ((f"entry {number}", entry) for number, entry in enumerate(_parsed(text, str(path)), 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also splits at U+2028 inside a text
        if line.strip():
            yield f"line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}; {EXPECTED}") from error


def _examples(entry: Any, where: str, tokenizer: Any, ends: Sequence[int]) -> Iterator[Example]:
    match entry:
        case {"prompt": [*prompt], "answer": [*answer]} if all(type(token) is int for token in (*prompt, *answer)):
            if answer:
                yield Example(tuple(prompt), tuple(answer))
        case {"messages": [*messages]}:
            yield from _of_messages(
                [_message(each, "role", "content", where) for each in messages], where, tokenizer, ends
            )
        case {"conversations": [*messages]}:
            yield from _of_messages(
                [_message(each, "from", "value", where) for each in messages], where, tokenizer, ends
            )
        case _:
            raise ConfigError(f"{where}: {EXPECTED}")


def _message(message: Any, speaker: str, content: str, where: str) -> Message:
    if isinstance(message, Mapping) and isinstance(message.get(content), str) and message.get(speaker) in SPEAKERS:
        return {"role": SPEAKERS[message[speaker]], "content": message[content]}
    raise ConfigError(f"{where}: a message is {json.dumps(message)[:80]}; {EXPECTED}")


def _of_messages(messages: list[Message], where: str, tokenizer: Any, ends: Sequence[int]) -> Iterator[Example]:
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or not index or not message["content"]:
            continue
        try:
            prompt = chat_prompt(tokenizer, messages[:index])
            answer = _answer(tokenizer, messages[:index], message, ends)
        except Exception as error:  # a template is a program and may raise anything
            raise ConfigError(f"{where}: the target's chat template refuses it: {error}") from error
        yield Example(prompt, answer)


def _answer(tokenizer: Any, before: list[Message], message: Message, ends: Sequence[int]) -> tuple[int, ...]:
    """Returns the token ids of an answer as the template writes it, up to and including the first end-of-text id."""
    opened = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*before, message], tokenize=False)
    # A template may rewrite earlier turns, or omit reasoning; the message's own text is then used as the answer.
    text = whole.removeprefix(opened) if whole.startswith(opened) else message["content"]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return _to_end(ids, ends)


def _to_end(ids: Sequence[int], ends: Sequence[int]) -> tuple[int, ...]:
    end = next((place + 1 for place, token in enumerate(ids) if token in ends), len(ids))
    return tuple(ids[:end])


# ---------------------------------------------------------------- answers of the target


@torch.inference_mode()
def answered(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    ends: Sequence[int],
    max_tokens: int,
    *,
    batch: int = 32,
    advance: Callable[[int], None] = lambda _: None,
) -> list[Example]:
    """Decodes the target's greedy answers in batches of similar length; returns examples in the order of the prompts.

    Answers end with an end-of-text id or after `max_tokens` tokens. `advance` is called with the number of prompts
    after each batch. The target computes in its own dtype: in bfloat16, near-ties may be decided differently than in
    float32.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    found: dict[int, Example] = {}
    for first in range(0, len(order), batch):
        group = order[first : first + batch]
        longest = max(len(prompts[index]) for index in group)
        padding = [longest - len(prompts[index]) for index in group]
        ids = torch.tensor([[0] * pad + list(prompts[index]) for pad, index in zip(padding, group, strict=True)])
        mask = torch.arange(longest) >= torch.tensor(padding)[:, None]
        output = target.generate(
            input_ids=ids.to(target.device),
            attention_mask=mask.long().to(target.device),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(ends) or None,
            pad_token_id=ends[0] if ends else 0,
        )
        for index, row in zip(group, output[:, longest:].tolist(), strict=True):
            found[index] = Example(tuple(prompts[index]), _to_end(row, ends))
        advance(len(group))
    return [found[index] for index in range(len(prompts))]


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    """Writes examples as JSON lines of token ids, usable only with a target of the same vocabulary."""
    lines = (json.dumps({"prompt": each.prompt, "answer": each.answer}, separators=(",", ":")) for each in examples)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
