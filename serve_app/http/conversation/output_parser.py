"""What a model has said, told apart into content, reasoning and tool calls by transformers' own response parser.

The parser works on text as it grows, wherever it is cut: it holds back what may begin a marker, and knows a tool call
when its region closes. Pure: it starts no clock and asks nobody.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from serve_app.http.conversation.call_text import CallText, written_anew

REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})  # by which templates call it
CALLS_FIELD = "tool_calls"
UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)  # what the parser raises for a region not as announced


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON


Saying = Content | Reasoning | Call


class Parser(Protocol):
    """The part of `transformers.utils.chat_parsing.ResponseParser` that is used."""

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


class Pattern(Protocol):
    """The part of a compiled regular expression that is used."""

    def search(self, text: str, /) -> object | None: ...


class Reader(Protocol):
    """Takes an answer's text as it grows."""

    def push(self, text: str) -> list[Saying]:
        """What has become certain with this text."""
        ...

    def finish(self) -> list[Saying]:
        """What is left when no text follows."""
        ...


class PlainReader:
    """For models whose answers are content and nothing else."""

    def push(self, text: str) -> list[Saying]:
        return [Content(text)] if text else []

    def finish(self) -> list[Saying]:
        return []


class ResponseReader:
    """For models whose answers have parts.

    A region that does not hold what the template announces is content, as the model wrote it, and reading begins anew
    after it. So is a call where no tools are offered. Where calls are JSON, text is read by single characters from one
    that begins a call on: what follows is in a string, or it is not.
    """

    def __init__(
        self, start: Callable[[str], Parser], prompt: str, *, offers_tools: bool, json_opening: Pattern | None
    ) -> None:
        """`start` gives a parser for what follows a prompt; `json_opening` is what begins a call in JSON."""
        self._start = start
        self._parser = start(prompt)
        self._offers_tools = offers_tools
        self._json_opening = json_opening
        self._call: CallText | None = None  # the one that has begun
        self._unread = ""  # text since the last that was given out, markers included

    def push(self, text: str) -> list[Saying]:
        pieces = text if self._may_call(text) else [text]
        return [saying for piece in pieces for saying in self._feed(piece)]

    def finish(self) -> list[Saying]:
        return self._read("", lambda: self._parser.finalize()[1])

    def _may_call(self, text: str) -> bool:
        opening = self._json_opening
        return self._call is not None or (opening is not None and opening.search(self._unread + text) is not None)

    def _feed(self, text: str) -> list[Saying]:
        seen = text if self._call is None else self._call.take(text)
        return self._read(text, lambda: self._parser.feed(seen))

    def _read(self, text: str, step: Callable[[], list[dict[str, Any]]]) -> list[Saying]:
        self._unread += text
        had_begun = self._call is not None
        try:
            events = step()
        except UNREADABLE:
            self._parser = self._start("")
            self._call = None
            return self._as_written()
        return [saying for event in events for saying in self._said(event, had_begun)]

    def _said(self, event: dict[str, Any], had_begun: bool) -> list[Saying]:
        match event:
            case {"type": "region_chunk", "field": field, "text": text, "dirty": False}:
                self._unread = self._unread[self._unread.rfind(text) + len(text) :]  # what may begin a marker is left
                return [Reasoning(text) if field in REASONING_FIELDS else Content(text)]
            case {"type": "region_open", "field": field} if field == CALLS_FIELD and self._json_opening is not None:
                self._call = CallText()
            case {"type": "region_chunk", "field": field, "text": text} if self._call is not None and not had_begun:
                for char in text:
                    self._call.take(char)
            case {"type": "region_close", "field": field, "value": value} if field == CALLS_FIELD:
                return self._called(value)
        return []

    def _called(self, value: Any) -> list[Saying]:
        call = self._call
        self._call = None
        try:
            calls = [_call(one, call) for one in (value if isinstance(value, list) else [value])]
        except UNREADABLE:
            return self._as_written()
        if not self._offers_tools:
            return self._as_written()
        self._unread = ""
        return list(calls)

    def _as_written(self) -> list[Saying]:
        text = self._unread
        self._unread = ""
        return [Content(text)] if text else []


def read_whole(reader: Reader, texts: Iterable[str]) -> list[Saying]:
    """An answer that has come to its end."""
    return [*(saying for text in texts for saying in reader.push(text)), *reader.finish()]


def _call(value: Any, text: CallText | None) -> Call:
    function = value["function"]
    name = function["name"]
    arguments = function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError(f"a call of {name!r}, which is no function's name")
    if isinstance(arguments, str):
        return Call(name, arguments)
    return Call(name, written_anew(arguments) if text is None else text.arguments(arguments))
