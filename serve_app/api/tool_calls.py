"""Splits answers into content, reasoning and tool calls, and derives the served model's call format.

Transformers' response parser splits the answer by a response template, which names the start and end markers of each
part. The parser accepts growing text in any pieces. It holds back text that may begin a marker, and recognizes a call
at its end marker, even inside a string. JSON strings therefore reach the parser with equivalent escapes; clients
receive the original arguments.
"""

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from types import SimpleNamespace
from typing import Any, Literal, Protocol

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from cluster.errors import ConfigError, RequestError
from serve_app.api.chat_template import ChatTemplate, Message, TemplateOptions

MAX_STARTS = 16  # maximum start positions tried for a call's arguments; its text may contain many braces
LINE_ENDS = frozenset("\n\r")  # forbidden in JSON strings, so they reveal an unclosed string
LAST_IN_ONE_ESCAPE = "\uffff"

_BRACE = re.compile(r"\{")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class CallText:
    """Text of one call, or of a list of calls, fed character by character."""

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self._is_broken = False
        self._read_chars = 0  # end of the last arguments, in characters

    def take(self, char: str) -> str:
        """Adds a character and returns its escaped form for the parser."""
        self._chars.append(char)
        if self._is_broken:
            return char
        if not self._in_string:
            self._in_string = char == '"'
            return char
        if self._is_escaped:
            self._is_escaped = False
            return char
        self._is_broken = char in LINE_ENDS
        self._is_escaped = char == "\\"
        self._in_string = char != '"'
        return _escaped(char) if self._in_string and not self._is_escaped else char

    def arguments(self, read: Any) -> str:
        """Returns the next call's arguments verbatim if the parser `read` them from a JSON object.

        Serializes other arguments. Raises ValueError for values that JSON cannot hold.
        """
        text = "".join(self._chars)
        for brace in islice(_BRACE.finditer(text, self._read_chars), MAX_STARTS):
            try:
                arguments, end = _DECODER.raw_decode(text, brace.start())
            except ValueError:
                continue
            if arguments == read:
                self._read_chars = end
                return text[brace.start() : end]
        return serialized(read)


def serialized(arguments: Any) -> str:
    """Serializes arguments to JSON. Raises ValueError for values that JSON or UTF-8 cannot represent."""
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()
    return written


def _escaped(char: str) -> str:
    """Escapes a character for JSON if it may be part of a marker."""
    is_plain = char.isalnum() or char.isspace() or char > LAST_IN_ONE_ESCAPE
    return char if is_plain else f"\\u{ord(char):04x}"


REASONING_FIELDS = frozenset({"reasoning_content", "reasoning", "thinking"})  # field names that response templates use
CALLS_FIELD = "tool_calls"
UNREADABLE = (ValueError, KeyError, TypeError, RecursionError)  # raised by the parser for unexpected content


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: str  # JSON object as text
    id: str = ""  # set when the call is sent
    index: int = 0  # index among the answer's calls


Segment = Content | Reasoning | Call


class Reader(Protocol):
    """Splits an answer's text as it grows."""

    def push(self, text: str) -> list[Segment]:
        """Returns the segments that `text` completes."""
        ...

    def finish(self) -> list[Segment]:
        """Returns the remaining segments."""
        ...


class PlainReader:
    """Parser for model outputs without reasoning or tool calls."""

    def push(self, text: str) -> list[Segment]:
        return [Content(text)] if text else []

    def finish(self) -> list[Segment]:
        return []


class ResponseReader:
    """Parser for model outputs with reasoning or tool calls.

    A region with unexpected content is returned verbatim as content, and parsing restarts after it. Calls without
    offered tools are returned likewise. JSON calls are read character by character to track strings.
    """

    def __init__(
        self,
        start: Callable[[str], ResponseParser],
        prompt: str,
        template: ResponseTemplate,
        *,
        offers_tools: bool,
    ) -> None:
        """`start` returns a parser for the text after a prompt, by `template`."""
        self._start = start
        try:
            self._parser = start(prompt)
        except UNREADABLE:  # the message to continue has a broken call
            self._parser = start("")
        # Length of the prompt's end that the parser holds back, since it may begin a marker.
        self._prompt_chars = len(self._parser._buffer) - self._parser._pos
        self._offers_tools = offers_tools
        self._implicit = template.implicit  # field of text without markers
        calls = template.fields.get(CALLS_FIELD)
        is_json = calls is not None and calls.content == "json" and not calls.content_args
        self._json_opening = calls.open_re if is_json else None  # start of a call, if calls are plain JSON
        # End of a call, unless calls are JSON, which shows by itself whether a call is whole.
        self._closing = None if calls is None or calls.content == "json" else calls.close_re
        self._call: CallText | None = None  # call whose region is open
        self._unread = ""  # text since the last segment, markers included
        self._follows_marker = False  # whether `_unread` begins with a marker

    def push(self, text: str) -> list[Segment]:
        pieces = text if self._may_call(text) else [text]
        return [segment for piece in pieces for segment in self._feed(piece)]

    def finish(self) -> list[Segment]:
        return self._read("", lambda: self._parser.finalize()[1])

    def _may_call(self, text: str) -> bool:
        opening = self._json_opening
        return self._call is not None or (opening is not None and opening.search(self._unread + text) is not None)

    def _feed(self, text: str) -> list[Segment]:
        seen = text if self._call is None else self._call.take(text)
        return self._read(text, lambda: self._parser.feed(seen))

    def _read(self, text: str, step: Callable[[], list[dict[str, Any]]]) -> list[Segment]:
        self._unread += text
        had_call = self._call is not None
        try:
            events = step()
        except UNREADABLE:
            self._parser = self._start("")
            self._prompt_chars = 0
            self._call = None
            return self._flush_as_content()
        return [segment for event in events for segment in self._segments(event, had_call)]

    def _segments(self, event: dict[str, Any], had_call: bool) -> list[Segment]:
        if event["type"] == "region_close" or (event["type"] == "region_open" and event["field"] != self._implicit):
            self._follows_marker = True
            self._prompt_chars = 0
        if event["type"] == "region_chunk" and self._prompt_chars:
            event = {**event, "text": self._without_prompt(event["text"])}
        match event:
            case {"type": "region_chunk", "text": ""}:
                return []
            case {"type": "region_chunk", "field": field, "text": text, "dirty": False}:
                begins = not self._follows_marker and self._unread.startswith(text)
                start = 0 if begins else self._unread.rfind(text)
                self._unread = self._unread[start + len(text) :]  # keep text that may begin a marker
                self._follows_marker = False
                return [Reasoning(text) if field in REASONING_FIELDS else Content(text)]
            case {"type": "region_open", "field": field} if field == CALLS_FIELD and self._json_opening is not None:
                self._call = CallText()
            case {"type": "region_chunk", "field": field, "text": text} if self._call is not None and not had_call:
                for char in text:
                    self._call.take(char)
            case {"type": "region_close", "field": field, "value": value} if field == CALLS_FIELD:
                return self._finished_calls(value)
        return []

    def _without_prompt(self, text: str) -> str:
        """Drops the end of the prompt from the parser's text."""
        held = min(self._prompt_chars, len(text))
        self._prompt_chars -= held
        return text[held:]

    def _finished_calls(self, value: Any) -> list[Segment]:
        call = self._call
        self._call = None
        closed = None if self._closing is None else self._closing.search(self._unread)
        if self._closing is not None and closed is None:  # the answer ended within the call
            return self._flush_as_content()
        try:
            calls = [_call(one, call) for one in (value if isinstance(value, list) else [value])]
        except UNREADABLE:
            return self._flush_as_content()
        if not self._offers_tools:
            return self._flush_as_content()
        text = self._take_unread()
        self._unread = "" if closed is None else text[closed.end() :]
        return list(calls)

    def _flush_as_content(self) -> list[Segment]:
        text = self._take_unread()
        return [Content(text)] if text else []

    def _take_unread(self) -> str:
        text = self._unread
        self._unread = ""
        self._follows_marker = False
        return text


def read_whole(reader: Reader, texts: Iterable[str]) -> list[Segment]:
    """Reads a complete answer."""
    return [*(segment for text in texts for segment in reader.push(text)), *reader.finish()]


def _call(value: Any, text: CallText | None) -> Call:
    function = value["function"]
    name = function["name"]
    arguments = function.get("arguments", {})
    if not isinstance(name, str) or not name:
        raise ValueError(f"{name!r} is not a function name")
    if not isinstance(arguments, str):
        arguments = serialized(arguments) if text is None else text.arguments(arguments)
    (name + arguments).encode()  # raises ValueError for half a surrogate pair, which JSON can spell
    return Call(name, arguments)


Configured = Literal["auto", "none"] | Mapping[str, Any]
ReasoningInPrompt = Literal["none", "begun", "over"]


class ResponseReaders:
    """Creates the reader of each answer."""

    def __init__(self, tokenizer: Any, template: ResponseTemplate | None) -> None:
        self.template = template
        self._tokenizer = tokenizer

    @property
    def have_template(self) -> bool:
        """Returns whether a response template splits answers into segments."""
        return self.template is not None

    def reader(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Reader:
        """Returns a reader for the answer to `prompt`, with the offered tools."""
        if self.template is None:
            return PlainReader()
        start = partial(self._parser, tools=tools)
        text = self._tokenizer.decode(list(prompt))
        return ResponseReader(start, text, self.template, offers_tools=bool(tools))

    def reasoning_in(self, prompt: str) -> ReasoningInPrompt:
        """Returns whether the prompt begins or ends the answer's reasoning."""
        if self.template is None:
            return "none"
        events = self._parser(prompt).initial_events
        kinds = [event["type"] for event in events if event["field"] in REASONING_FIELDS]
        if not kinds:
            return "none"
        return "over" if kinds[-1] == "region_close" else "begun"

    def _parser(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Any:
        """Returns a parser for the text that follows `text`."""
        assert self.template is not None, "a response template exists"
        anchored = text if self.template.start_anchor_re.search(text) else ""  # else it would parse the prompt
        return self._tokenizer.get_response_parser(self.template, prefix=anchored, tools=list(tools) or None)


def find_template(configured: Configured, tokenizer: Any, model_type: str) -> ResponseTemplate | None:
    """Returns the first available response template: configured, from the checkpoint, or for its architecture.

    Raises ConfigError if the template is invalid.
    """
    if configured == "none":
        return None
    given = _known_template(tokenizer, model_type) if isinstance(configured, str) else configured
    try:
        return None if given is None else load_response_template(dict(given))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"server.response_template is invalid: {error}") from error


def _known_template(tokenizer: Any, model_type: str) -> Mapping[str, Any] | None:
    # Templates of `transformers serve`, for checkpoints without one.
    from transformers.cli.serving.utils import get_response_template

    template: Mapping[str, Any] | None = get_response_template(
        tokenizer, SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    )
    return template


_logger = logging.getLogger(__name__)

NAMES = ("probe_one", "probe_two")
ARGUMENTS = {"probe_key": "probe value", "probe_other": "other value"}


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Format of tagged arguments; strings are written verbatim, other values as JSON."""

    before_key: str
    before_value: str
    after_value: str

    def written(self, arguments: Mapping[str, str]) -> str:
        return "".join(f"{self.before_key}{k}{self.before_value}{v}{self.after_value}" for k, v in arguments.items())


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Markers that separate the parts of an answer."""

    thinking: tuple[str, str] | None  # markers around reasoning; None if there is none
    special_ids: Mapping[str, int]  # ids of special tokens by text, except those that end answers


@dataclass(frozen=True, slots=True)
class CallForm(AnswerForm):
    """Fixed text of a call, around its name and arguments."""

    opening: str  # text from the call's start to its name
    middle: str  # text between a name and its arguments
    between: str  # text between a call's arguments and the next name
    closing: str  # text after the last arguments
    trigger: str  # start of `opening`, which distinguishes a call from content
    tags: TaggedArguments | None  # None if arguments are a JSON object


@dataclass(frozen=True, slots=True)
class _CallPositions:
    """Positions of one call's name and arguments in text from the chat template."""

    name_at: int
    begin: int
    end: int


def find_answer_form(template: ChatTemplate, readers: ResponseReaders, special_ids: Mapping[str, int]) -> AnswerForm:
    """Returns the markers of the model's answers: a CallForm if the format of its calls is known."""
    form = find_call_form(template, readers, special_ids)
    if form is not None or readers.template is None:
        return form or AnswerForm(None, special_ids)
    try:
        thinking = _thinking(readers.template)
    except ValueError as error:
        _logger.info("content after reasoning cannot be constrained: %s", error)
        thinking = None
    return AnswerForm(thinking, special_ids)


def find_call_form(template: ChatTemplate, readers: ResponseReaders, special_ids: Mapping[str, int]) -> CallForm | None:
    """Returns the model's call format. If it is unknown or unsupported, logs the reason and returns None."""
    response = readers.template
    if response is None or CALLS_FIELD not in response.fields or not template.takes("tools", with_tools=True):
        return None
    try:
        form = _form(_example_turn(template, response), response, special_ids)
    except (RequestError, ValueError) as error:
        _logger.info("tool calls cannot be constrained: %s", error)
        return None
    expected = [Call(name, json.dumps(ARGUMENTS)) for name in NAMES]
    if read_whole(readers.reader((), _tools()), [_example(form)]) != expected:
        _logger.info("tool calls cannot be constrained: the response template does not parse the chat template's calls")
        return None
    return form


def _example_turn(template: ChatTemplate, response: ResponseTemplate) -> str:
    """Returns the text of an assistant message with two calls."""
    calls = [
        {"id": f"probe000{n}", "type": "function", "function": {"name": name, "arguments": ARGUMENTS}}
        for n, name in enumerate(NAMES)
    ]
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    text = template.written(messages, TemplateOptions(tools=_tools(), begins_answer=False))
    if response.start_anchor_re.search(text) is None:
        raise ValueError("the response template finds no start of an answer in the chat template's text")
    return str(response.truncate_past_last_anchor(text))


def _tools() -> list[Mapping[str, Any]]:
    properties = {key: {"type": "string"} for key in ARGUMENTS}
    schema = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": name, "description": "", "parameters": schema}} for name in NAMES]


def _form(turn: str, response: ResponseTemplate, special_ids: Mapping[str, int]) -> CallForm:
    field = response.fields[CALLS_FIELD]
    tags = _tags(turn, field)
    first = _find_call(turn, NAMES[0], 0, tags)
    second = _find_call(turn, NAMES[1], first.end, tags)
    opened = None if field.open_re is None else field.open_re.search(turn)
    if opened is None or opened.start() > first.name_at:
        raise ValueError("the response template does not find the start of the chat template's call")
    middle = turn[first.name_at + len(NAMES[0]) : first.begin]
    if middle != turn[second.name_at + len(NAMES[1]) : second.begin]:
        raise ValueError("the chat template formats two calls differently")
    return CallForm(
        opening=turn[opened.start() : first.name_at].lstrip(),
        middle=middle,
        between=turn[first.end : second.name_at],
        closing=turn[second.end : _end(turn, second.end, field)],
        trigger=turn[opened.start() : min(opened.end(), first.name_at)].split()[0],
        tags=tags,
        thinking=_thinking(response),
        special_ids=special_ids,
    )


def _find_call(turn: str, name: str, start: int, tags: TaggedArguments | None) -> _CallPositions:
    name_at = turn.find(name, start)
    if name_at < 0:
        raise ValueError("the chat template omits the names of calls")
    after = name_at + len(name)
    begin, end = _json_at(turn, after) if tags is None else _tags_at(turn, after, tags)
    return _CallPositions(name_at, begin, end)


def _json_at(turn: str, start: int) -> tuple[int, int]:
    """Returns the start and end positions of JSON arguments."""
    for brace in _BRACE.finditer(turn, start):
        try:
            value, end = json.JSONDecoder().raw_decode(turn, brace.start())
        except ValueError:
            continue
        if value == ARGUMENTS:
            return brace.start(), end
    raise ValueError("the chat template does not write arguments as a JSON object")


def _tags_at(turn: str, start: int, tags: TaggedArguments) -> tuple[int, int]:
    written = tags.written(ARGUMENTS)
    begin = turn.find(written, start)
    if begin < 0:
        raise ValueError("the chat template formats two arguments differently")
    return begin, begin + len(written)


def _tags(turn: str, field: ResponseTemplateField) -> TaggedArguments | None:
    """Returns the tags around arguments, if the response template uses tags."""
    if field.content != "xml-inline":
        return None
    if field.content_args.keys() - {"tag_pattern"}:
        raise ValueError("the response template has unsupported options for arguments")
    (key, value), (next_key, next_value) = ARGUMENTS.items()
    pieces = re.search(
        f"{NAMES[0]}(.*?){key}(.*?){value}(.*?){next_key}(.*?){next_value}(.*?){NAMES[1]}", turn, re.DOTALL
    )
    if pieces is None or pieces[2] != pieces[4]:
        raise ValueError("the chat template does not write the arguments in sequence")
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(pieces[3], pieces[5], strict=False))
    after_value = _whole_marks("".join(char for char, _ in shared))
    return TaggedArguments(pieces[3].removeprefix(after_value), pieces[2], after_value)


def _whole_marks(text: str) -> str:
    """Cuts text after its last complete marker or whitespace."""
    return text[: max((match.end() for match in re.finditer(r"[>\]\s]", text)), default=0)]


def _end(turn: str, start: int, field: ResponseTemplateField) -> int:
    if field.close_re is None:
        raise ValueError("the response template has no end marker for calls")
    closed = field.close_re.search(turn, start)
    if closed is None:
        raise ValueError("the response template does not find the end of the chat template's call")
    return int(closed.end())


def _thinking(response: ResponseTemplate) -> tuple[str, str] | None:
    for name in sorted(REASONING_FIELDS & response.fields.keys()):
        field = response.fields[name]
        if not field.open_literals or not field.close_literals:
            raise ValueError("the response template has no literal markers around reasoning")
        return field.open_literals[0], field.close_literals[0]
    return None


def _example(form: CallForm) -> str:
    one = json.dumps(ARGUMENTS) if form.tags is None else form.tags.written(ARGUMENTS)
    first, second = (f"{name}{form.middle}{one}" for name in NAMES)
    return f"{form.opening}{first}{form.between}{second}{form.closing}"
