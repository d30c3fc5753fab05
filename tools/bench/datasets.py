"""Reader of prompts in common data set layouts: JSON lines of prompts or messages, and ShareGPT conversations."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.errors import ConfigError
from serve_app.endpoint_client import Turn
from tools.bench.experiment import Prompt

EXPECTED = (
    'expected {"prompt": ...}, {"messages": [{"role", "content"}, ...]} or {"conversations": [{"from", "value"}, ...]}'
)
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def read_dataset(path: Path) -> tuple[Prompt, ...]:
    """Reads the prompts of a file. Raises ConfigError, naming the entry that is invalid.

    Of messages, all up to the user's last one form the prompt. Of ShareGPT conversations, which people had with another
    model, all up to the user's first one.
    """
    prompts = tuple(_prompt(entry, f"{path}, {where}") for where, entry in _entries(path))
    if len(prompts) < 2:
        raise ConfigError(f"{path} holds {len(prompts)} prompts; an interval needs at least 2")
    return prompts


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the entries of one JSON list, as ShareGPT is published, or of JSON lines, with their locations."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the data set {path}: {error}") from error
    if text.lstrip().startswith("["):
        yield from ((f"entry {number}", entry) for number, entry in enumerate(_parsed(text, str(path)), 1))
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            yield f"line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: no JSON: {error}; {EXPECTED}") from error


def _prompt(entry: Any, where: str) -> Prompt:
    match entry:
        case {"prompt": str(text)} if text:
            return Prompt(kind=str(entry.get("kind", "prompt")), prompt=text)
        case {"messages": [*messages]}:
            turns = [_turn(message, "role", "content", where) for message in messages]
            ends = max((at for at, (role, _) in enumerate(turns) if role == "user"), default=None)
        case {"conversations": [*messages]}:
            turns = [_turn(message, "from", "value", where) for message in messages]
            ends = next((at for at, (role, _) in enumerate(turns) if role == "user"), None)
        case _:
            raise ConfigError(f"{where}: {EXPECTED}")
    if ends is None:
        raise ConfigError(f"{where}: no message of a user; {EXPECTED}")
    return Prompt(kind=str(entry.get("kind", "conversation")), prompt=turns[ends][1], earlier=tuple(turns[:ends]))


def _turn(message: Any, speaker: str, said: str, where: str) -> Turn:
    if isinstance(message, Mapping) and isinstance(message.get(said), str) and message.get(speaker) in SPEAKERS:
        return SPEAKERS[message[speaker]], message[said]
    raise ConfigError(f"{where}: a message is {json.dumps(message)[:80]}; {EXPECTED}")
