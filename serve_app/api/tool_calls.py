"""How the served model writes its calls: its chat template writes some, and its response parser reads them back.

The text of a call in JSON: as the response parser is to see it, and its arguments as the model wrote them; pure.

The parser ends a call at the first mark that ends calls, in a string as well. So what stands in a string reaches it in
an escaped form, which JSON reads as the same.

What a model has said, told apart into content, reasoning and tool calls by transformers' own response parser.

The parser works on text as it grows, wherever it is cut: it holds back what may begin a marker, and knows a tool call
when its region closes. Pure: it starts no clock and asks nobody.

How the served model's answers are written: which response template holds, and readers of answers by it.

A response template is transformers' own format: which markers begin and end reasoning, content and tool calls.
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

from transformers.utils.chat_parsing.response_templates import (
    ResponseTemplate,
    ResponseTemplateField,
    load_response_template,
)

from cluster.errors import ConfigError, RequestError
from serve_app.api.chat_template import ChatTemplate, Message, TemplateOptions

MOST_PLACES = 16  # that are tried for where arguments begin: a call may hold very many braces
LINE_ENDS = frozenset("\n\r")  # no string of JSON holds one: the string was never closed
LAST_IN_ONE_ESCAPE = "\uffff"

_BRACE = re.compile(r"\{")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


class CallText:
    """One call, or several in one list, as it grows by characters."""

    def __init__(self) -> None:
        self._chars: list[str] = []
        self._in_string = False
        self._is_escaped = False
        self._is_broken = False
        self._told = 0  # characters up to the end of the last arguments

    def take(self, char: str) -> str:
        """The character as the parser is to see it."""
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
        """The next arguments as they are written, where the parser has `read` them from an object there.

        Others are written anew. Raises ValueError for what JSON cannot hold.
        """
        text = "".join(self._chars)
        for brace in islice(_BRACE.finditer(text, self._told), MOST_PLACES):
            try:
                found, end = _DECODER.raw_decode(text, brace.start())
            except ValueError:
                continue
            if found == read:
                self._told = end
                return text[brace.start() : end]
        return written_anew(read)


def written_anew(arguments: Any) -> str:
    """As JSON. Raises ValueError for a number that JSON has not, and for text that UTF-8 has not."""
    written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    written.encode()
    return written


def _escaped(char: str) -> str:
    """What may be part of a mark, as JSON may have it instead."""
    is_plain = char.isalnum() or char.isspace() or char > LAST_IN_ONE_ESCAPE
    return char if is_plain else f"\\u{ord(char):04x}"


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


Segment = Content | Reasoning | Call


class Parser(Protocol):
    """The part of `transformers.utils.chat_parsing.ResponseParser` that is used."""

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


class Pattern(Protocol):
    """The part of a compiled regular expression that is used."""

    def search(self, text: str, /) -> object | None: ...


class Reader(Protocol):
    """Takes an answer's text as it grows."""

    def push(self, text: str) -> list[Segment]:
        """What has become certain with this text."""
        ...

    def finish(self) -> list[Segment]:
        """What is left when no text follows."""
        ...


class PlainReader:
    """For models whose answers are content and nothing else."""

    def push(self, text: str) -> list[Segment]:
        return [Content(text)] if text else []

    def finish(self) -> list[Segment]:
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

    def push(self, text: str) -> list[Segment]:
        pieces = text if self._may_call(text) else [text]
        return [saying for piece in pieces for saying in self._feed(piece)]

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
        had_begun = self._call is not None
        try:
            events = step()
        except UNREADABLE:
            self._parser = self._start("")
            self._call = None
            return self._as_written()
        return [saying for event in events for saying in self._said(event, had_begun)]

    def _said(self, event: dict[str, Any], had_begun: bool) -> list[Segment]:
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

    def _called(self, value: Any) -> list[Segment]:
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

    def _as_written(self) -> list[Segment]:
        text = self._unread
        self._unread = ""
        return [Content(text)] if text else []


def read_whole(reader: Reader, texts: Iterable[str]) -> list[Segment]:
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


Configured = Literal["auto", "none"] | Mapping[str, Any]
ReasoningInPrompt = Literal["none", "begun", "over"]


class ResponseReaders:
    """Makes a reader for each answer."""

    def __init__(self, tokenizer: Any, template: ResponseTemplate | None) -> None:
        self.template = template
        self._tokenizer = tokenizer

    @property
    def tells_parts(self) -> bool:
        """Whether answers are more than content."""
        return self.template is not None

    def reader(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Reader:
        """A reader of what follows the prompt, where these tools are offered."""
        if self.template is None:
            return PlainReader()
        start = partial(self._parser, tools=tools)
        text = self._tokenizer.decode(list(prompt))
        return ResponseReader(start, text, offers_tools=bool(tools), json_opening=self._json_opening)

    def reasoning_in(self, prompt: str) -> ReasoningInPrompt:
        """What a prompt has of the answer's reasoning."""
        if self.template is None:
            return "none"
        events = self._parser(prompt).initial_events
        kinds = [event["type"] for event in events if event["field"] in REASONING_FIELDS]
        if not kinds:
            return "none"
        return "over" if kinds[-1] == "region_close" else "begun"

    @property
    def _json_opening(self) -> Any:
        """What begins a call, where calls are JSON as it is written everywhere."""
        assert self.template is not None, "there is a template to parse by"
        calls = self.template.fields.get(CALLS_FIELD)
        return calls.open_re if calls is not None and calls.content == "json" and not calls.content_args else None

    def _parser(self, text: str, tools: Sequence[Mapping[str, Any]] = ()) -> Any:
        """A parser of what follows this text."""
        assert self.template is not None, "there is a template to parse by"
        anchored = text if self.template.start_anchor_re.search(text) else ""  # else all of it were read as an answer
        return self._tokenizer.get_response_parser(self.template, prefix=anchored, tools=list(tools) or None)


def find_template(configured: Configured, tokenizer: Any, model_type: str) -> ResponseTemplate | None:
    """The template that the configuration gives or leaves to be found: the checkpoint's, or one for its architecture.

    Raises ConfigError for one that is none.
    """
    if configured == "none":
        return None
    given = _known_template(tokenizer, model_type) if isinstance(configured, str) else configured
    try:
        return None if given is None else load_response_template(dict(given))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"server.response_template is no response template of transformers: {error}") from error


def _known_template(tokenizer: Any, model_type: str) -> Mapping[str, Any] | None:
    # Of `transformers serve`, and loaded with it: it knows the templates of checkpoints that bring none.
    from transformers.cli.serving.utils import get_response_template

    found: Mapping[str, Any] | None = get_response_template(
        tokenizer, SimpleNamespace(config=SimpleNamespace(model_type=model_type))
    )
    return found


_logger = logging.getLogger(__name__)

NAMES = ("probe_one", "probe_two")
ARGUMENTS = {"probe_key": "probe value", "probe_other": "other value"}


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """Arguments that stand between marks, texts as they are and all else as JSON."""

    before_key: str
    before_value: str
    after_value: str


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text of calls, but for their names and arguments."""

    opening: str  # up to the first call's name
    middle: str  # from a name to its arguments
    between: str  # from one call's arguments to the next one's name
    closing: str  # after the last one's arguments
    trigger: str  # the beginning of `opening` by which a call is told from content
    tags: TaggedArguments | None  # None: arguments are a JSON object
    thinking: tuple[str, str] | None  # what reasoning stands between, for a model that has some
    special_ids: Mapping[str, int]  # tokens that no string of a grammar spells, by their text; none that ends an answer


@dataclass(frozen=True, slots=True)
class _Written:
    """Where a call is in the text that the chat template made: its name, then its arguments."""

    name_at: int
    begin: int
    end: int


def find_call_form(template: ChatTemplate, readers: ResponseReaders, special_ids: Mapping[str, int]) -> CallForm | None:
    """None where calls cannot be told, or are written in a way that is not known here; the log says why."""
    response = readers.template
    if response is None or CALLS_FIELD not in response.fields or not template.takes("tools", with_tools=True):
        return None
    try:
        form = _form(_turn(template, response), response, special_ids)
    except (RequestError, ValueError) as error:
        _logger.info("no call can be required of this model: %s", error)
        return None
    expected = [Call(name, json.dumps(ARGUMENTS)) for name in NAMES]
    if read_whole(readers.reader((), _tools()), [_example(form)]) != expected:
        _logger.info("no call can be required of this model: calls by its chat template are not read back")
        return None
    return form


def _turn(template: ChatTemplate, response: ResponseTemplate) -> str:
    """An assistant's turn with two calls."""
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
        raise ValueError("its response template finds no beginning of an answer in what its chat template writes")
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
        raise ValueError("its response template does not see where its chat template begins a call")
    middle = turn[first.name_at + len(NAMES[0]) : first.begin]
    if middle != turn[second.name_at + len(NAMES[1]) : second.begin]:
        raise ValueError("its chat template writes one call in another way than the next")
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


def _find_call(turn: str, name: str, start: int, tags: TaggedArguments | None) -> _Written:
    name_at = turn.find(name, start)
    if name_at < 0:
        raise ValueError("its chat template does not write the names of calls")
    begin, end = (_json_at if tags is None else _tags_at)(turn, name_at + len(name), tags)
    return _Written(name_at, begin, end)


def _json_at(turn: str, start: int, tags: TaggedArguments | None) -> tuple[int, int]:
    """Where the arguments stand as a JSON object."""
    del tags
    for brace in re.finditer(r"\{", turn[start:]):
        begin = start + brace.start()
        try:
            value, end = json.JSONDecoder().raw_decode(turn, begin)
        except ValueError:
            continue
        if value == ARGUMENTS:
            return begin, end
    raise ValueError("its chat template writes the arguments of a call in another way than as a JSON object")


def _tags_at(turn: str, start: int, tags: TaggedArguments | None) -> tuple[int, int]:
    assert tags is not None, "there are tags"
    written = "".join(f"{tags.before_key}{k}{tags.before_value}{v}{tags.after_value}" for k, v in ARGUMENTS.items())
    begin = turn.find(written, start)
    if begin < 0:
        raise ValueError("its chat template writes one argument in another way than the next")
    return begin, begin + len(written)


def _tags(turn: str, field: ResponseTemplateField) -> TaggedArguments | None:
    """The marks around arguments, for a response template that looks for such."""
    if field.content != "xml-inline":
        return None
    if field.content_args.keys() - {"tag_pattern"}:
        raise ValueError("its response template reads arguments in a way of its own")
    (key, value), (next_key, next_value) = ARGUMENTS.items()
    pieces = re.search(
        f"{NAMES[0]}(.*?){key}(.*?){value}(.*?){next_key}(.*?){next_value}(.*?){NAMES[1]}", turn, re.DOTALL
    )
    if pieces is None or pieces[2] != pieces[4]:
        raise ValueError("its chat template does not write one argument after the other")
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(pieces[3], pieces[5], strict=False))
    after_value = _whole_marks("".join(char for char, _ in shared))
    return TaggedArguments(pieces[3].removeprefix(after_value), pieces[2], after_value)


def _whole_marks(text: str) -> str:
    """Up to where a mark or whitespace ends."""
    return text[: max((found.end() for found in re.finditer(r"[>\]\s]", text)), default=0)]


def _end(turn: str, start: int, field: ResponseTemplateField) -> int:
    if field.close_re is None:
        raise ValueError("its response template does not say what ends a call")
    closed = field.close_re.search(turn, start)
    if closed is None:
        raise ValueError("its response template does not see where its chat template ends a call")
    return int(closed.end())


def _thinking(response: ResponseTemplate) -> tuple[str, str] | None:
    for name in sorted(REASONING_FIELDS & response.fields.keys()):
        field = response.fields[name]
        if not field.open_literals or not field.close_literals:
            raise ValueError("its response template does not name what reasoning stands between")
        return field.open_literals[0], field.close_literals[0]
    return None


def _example(form: CallForm) -> str:
    one = json.dumps(ARGUMENTS)
    if (tags := form.tags) is not None:
        one = "".join(f"{tags.before_key}{k}{tags.before_value}{v}{tags.after_value}" for k, v in ARGUMENTS.items())
    first, second = (f"{name}{form.middle}{one}" for name in NAMES)
    return f"{form.opening}{first}{form.between}{second}{form.closing}"
