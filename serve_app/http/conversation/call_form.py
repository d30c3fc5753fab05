"""How the served model writes its calls: its chat template writes some, and its response parser reads them back."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from transformers.utils.chat_parsing.response_templates import ResponseTemplate, ResponseTemplateField

from cluster.errors import RequestError
from serve_app.http.conversation.chat_template import ChatTemplate, Message, TemplateOptions
from serve_app.http.conversation.output_parser import CALLS_FIELD, REASONING_FIELDS, Call, read_whole
from serve_app.http.conversation.response_templates import ResponseReaders

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
