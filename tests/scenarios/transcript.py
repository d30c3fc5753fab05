"""Transcripts of events, each with its answers after `->` or on indented lines. `# ` begins a comment."""

from collections.abc import Callable, Mapping
from textwrap import dedent
from typing import Any

Tokens = tuple[int, ...]


def read_tokens(text: str) -> Tokens:
    return tuple(int(token) for token in text.split(",") if token)


def written(tokens: Tokens) -> str:
    return ",".join(map(str, tokens))


def read_event(event: str, readers: Mapping[str, Callable[[str], Any]]) -> tuple[list[str], dict[str, Any]]:
    """Splits an event into words and `name=value` fields, and parses each field with its reader."""
    words = event.split()
    fields = {name: readers[name](text) for name, is_field, text in (w.partition("=") for w in words) if is_field}
    return [word for word in words if "=" not in word], fields


def check(transcript: str, do: Callable[[str], list[str]]) -> None:
    """Runs every event with `do` and compares the answers with the transcript."""
    lines = [line.rstrip() for line in dedent(transcript).splitlines() if line.strip()]
    expected = [line for line in lines if not line.startswith("# ")]
    actual: list[str] = []
    for line in expected:
        if line.startswith(" "):
            continue
        event = line.split(" -> ")[0]
        match do(event):
            case [answer] if " -> " in line:
                actual.append(f"{event} -> {answer}")
            case answers:
                actual += [event, *(f"    {answer}" for answer in answers)]
    assert actual == expected
