"""Answers split into the same parts wherever their text is cut."""

import json
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api import tool_calls
from serve_app.api.tool_calls import (
    Call,
    Content,
    PlainReader,
    Reasoning,
    ResponseReaders,
    Segment,
    find_template,
    read_whole,
)
from tests.call_writers import special_writer, tagged_writer
from tests.talking_tokenizer import MODEL_TYPE, talking_tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
CALLED = Call("weather", '{"city": "Zürich"}')


@pytest.fixture(scope="module")
def readers() -> ResponseReaders:
    tokenizer = talking_tokenizer()
    return ResponseReaders(tokenizer, find_template("auto", tokenizer, MODEL_TYPE))


def joined(sayings: list[Segment]) -> tuple[str, str, list[Call]]:
    """Joins content, reasoning and calls of several deltas."""
    content = "".join(one.text for one in sayings if isinstance(one, Content))
    reasoning = "".join(one.text for one in sayings if isinstance(one, Reasoning))
    return content, reasoning, [one for one in sayings if isinstance(one, Call)]


def read(readers: ResponseReaders, text: str, *, prompt: str = "", tools: Any = TOOLS, size: int = 1) -> Any:
    tokens = talking_tokenizer()(prompt).input_ids
    pieces = [text[start : start + size] for start in range(0, len(text), size)]
    return joined(read_whole(readers.reader(tokens, tools), pieces))


ANSWERS = [
    ("Hello.<|im_end|>", ("Hello.", "", [])),
    ("<think>so</think>Hello.<|im_end|>", ("Hello.", "so", [])),
    (f"{CALL}<|im_end|>", ("", "", [CALLED])),
    (f"<think>so</think>\n\n{CALL}\n{CALL}<|im_end|>", ("", "so", [CALLED, CALLED])),
    (f"I look.\n{CALL}<|im_end|>", ("I look.", "", [CALLED])),
    ("1 < 2 and <tool", ("1 < 2 and <tool", "", [])),
]


@pytest.mark.parametrize(("text", "parts"), ANSWERS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_parts_do_not_depend_on_block_sizes(readers: ResponseReaders, text: str, parts: Any, size: int) -> None:
    assert read(readers, text, size=size) == parts


@given(cuts=st.lists(st.integers(0, 120), max_size=12))
def test_parts_do_not_depend_on_cuts(readers: ResponseReaders, cuts: list[int]) -> None:
    text, parts = ANSWERS[3]
    borders = [0, *sorted(cuts), len(text)]
    pieces = [text[start:end] for start, end in pairwise(borders)]
    assert joined(read_whole(readers.reader((), TOOLS), pieces)) == parts


def test_content_is_streamed(readers: ResponseReaders) -> None:
    reader = readers.reader((), TOOLS)
    assert reader.push("Hel") == [Content("Hel")]
    assert reader.push("lo") == [Content("lo")]


def test_reasoning_begun_by_the_prompt_continues(readers: ResponseReaders) -> None:
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert read(readers, "so</think>Hello.", prompt=prompt) == ("Hello.", "so", [])


NO_THOUGHTS = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
BROKEN = "<tool_call>{oh</tool_call>"


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
@pytest.mark.parametrize(
    ("prompt", "text", "parts"),
    [
        (NO_THOUGHTS, "Hello.<|im_end|>", ("Hello.", "", [])),
        (NO_THOUGHTS, "\n Hello.", ("\n Hello.", "", [])),
        (NO_THOUGHTS, "", ("", "", [])),
        (NO_THOUGHTS, "<|im_end|>", ("", "", [])),
        (NO_THOUGHTS, f"Hello. {CALL}", ("Hello.", "", [CALLED])),
        (NO_THOUGHTS, f"\n{CALL}", ("", "", [CALLED])),
        (NO_THOUGHTS, f"Hello. {BROKEN}", (f"Hello. {BROKEN}", "", [])),
        ("<|im_start|>assistant\n1 <", "2", ("2", "", [])),
        ("<|im_start|>assistant\n1 <", "tool", ("tool", "", [])),
        ("<|im_start|>assistant\n<tool", CALL.removeprefix("<tool"), ("", "", [CALLED])),
        ("<|im_start|>assistant\n<think>1 </", "2</think>Hello.", ("Hello.", "2", [])),
        ("<|im_start|>assistant\n<think>1 </", "think>Hello.", ("Hello.", "", [])),
    ],
)
def test_the_end_of_the_prompt_is_no_part_of_the_answer(
    readers: ResponseReaders, prompt: str, text: str, parts: Any, size: int
) -> None:
    """The parser holds it back, since a marker may begin there."""
    assert read(readers, text, prompt=prompt, size=size) == parts


def test_an_answer_that_continues_a_broken_call_is_read(readers: ResponseReaders) -> None:
    prompt = "<|im_start|>assistant\n<tool_call>{oh</tool_call>"
    assert read(readers, f"So:{CALL}", prompt=prompt) == ("So:", "", [CALLED])


def test_marks_in_user_text_have_no_effect(readers: ResponseReaders) -> None:
    assert read(readers, "Hello.", prompt="<think> without an anchor") == ("Hello.", "", [])


def test_a_call_that_is_not_json_is_content_and_parsing_continues(readers: ResponseReaders) -> None:
    broken = "<tool_call>{oh</tool_call>"
    assert read(readers, f"{broken}{CALL}") == (broken, "", [CALLED])


@pytest.mark.parametrize("text", ["<", "a <", "so</think>"])
@pytest.mark.parametrize("size", [1, 2, 1000])
def test_text_like_the_start_of_a_marker_is_kept_before_a_broken_call(
    readers: ResponseReaders, text: str, size: int
) -> None:
    broken = f"{text}<tool_call>{{oh</tool_call>"
    assert read(readers, broken, size=size) == (broken, "", [])


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(
    ("end", "rest"),
    [
        ("", "\n</function>\n</tool_call>"),
        ("\n<parameter=day>\nMon", "\n</parameter>\n</function>\n</tool_call>"),
        ("\n</function>\n", "</tool_call>"),
    ],
)
def test_an_unfinished_call_with_tagged_arguments_is_content(size: int, end: str, rest: str) -> None:
    begun = f"<tool_call>\n<function=weather>\n<parameter=city>\nBern\n</parameter>{end}"
    called = Call("weather", json.dumps({"city": "Bern"} | ({"day": "Mon"} if "day" in end else {})))
    parts = read(tagged_writer().readers, f"{begun}{rest}{begun}{rest}{begun}", size=size)
    assert parts == (begun, "", [called, called])


def test_an_unfinished_call_is_content(readers: ResponseReaders) -> None:
    assert read(readers, '<tool_call>{"name": "wea') == ('<tool_call>{"name": "wea', "", [])


@pytest.mark.parametrize("called", ['{"arguments": {}}', '{"name": 1, "arguments": {}}', '["weather"]', '{"name": ""}'])
def test_an_empty_call_is_content(readers: ResponseReaders, called: str) -> None:
    assert read(readers, f"<tool_call>{called}</tool_call>") == (f"<tool_call>{called}</tool_call>", "", [])


@pytest.mark.parametrize("called", ['{"name": "\\ud800"}', '{"name": "weather", "arguments": "\\ud800"}'])
def test_a_call_that_utf8_cannot_represent_is_content(readers: ResponseReaders, called: str) -> None:
    assert read(readers, f"<tool_call>{called}</tool_call>") == (f"<tool_call>{called}</tool_call>", "", [])


def test_a_call_without_arguments(readers: ResponseReaders) -> None:
    _, _, (call,) = read(readers, '<tool_call>{"name": "now"}</tool_call>')
    assert json.loads(call.arguments) == {}


WRITTEN = [
    pytest.param('{"n": 1e999, "m": [-1E400]}', id="beyond what Python reads"),
    pytest.param('{"n": 1.10, "m": 0.12345678901234567890123}', id="digits"),
    pytest.param('{"a" : "\\ud800",\n "b":"\\/"}', id="escapes and blanks"),
    pytest.param('{"a": {"b": {}}, "c": "{}"}', id="objects"),
    pytest.param('{"a": "</tool_call>"}', id="the mark that ends calls"),
    pytest.param('{"a": "x\\"</tool_call>\\\\", "b": "<tool_call>{}</tool_call>é🙂"}', id="marks beside escapes"),
]


@pytest.mark.parametrize("arguments", WRITTEN)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_arguments_are_returned_verbatim(readers: ResponseReaders, arguments: str, size: int) -> None:
    called = f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'
    content, _, calls = read(readers, f"So:\n{called}\n{called}<|im_end|>", size=size)
    assert calls == [Call("weather", arguments)] * 2
    assert content == "So:"


@pytest.mark.parametrize("arguments", WRITTEN)
def test_arguments_in_a_list_of_calls_are_returned_verbatim(arguments: str) -> None:
    by_list = special_writer().readers
    text = f'[CALLS][{{"name": "f", "arguments": {arguments}}}, {{"arguments": {arguments}, "name": "g"}}][/CALLS]'
    assert read(by_list, text)[2] == [Call("f", arguments), Call("g", arguments)]


def test_equal_arguments_in_a_list_keep_their_spelling() -> None:
    by_list = special_writer().readers
    one, other = '{"n": 1.0}', '{"n": 10e-1}'
    text = f'[CALLS][{{"name": "f", "arguments": {one}}}, {{"name": "g", "arguments": {other}}}][/CALLS]'
    assert read(by_list, text)[2] == [Call("f", one), Call("g", other)]


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_a_call_with_invalid_json_values_is_content(readers: ResponseReaders, number: str) -> None:
    called = f'<tool_call>{{"name": "weather", "arguments": {{"n": {number}}}}}</tool_call>'
    assert read(readers, f"{called}{CALL}") == (called, "", [CALLED])


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("city", ['"Bern\n', '"Bern\n"', '"Bern\r, "a": "b\r'])
def test_a_mark_after_an_unterminated_string_is_recognized(readers: ResponseReaders, city: str, size: int) -> None:
    broken = f'<tool_call>{{"name": "weather", "arguments": {{"city": {city}}}}}</tool_call>'
    assert read(readers, f"{broken}{CALL}", size=size) == (broken, "", [CALLED])


def test_a_broken_call_is_returned_with_its_mark(readers: ResponseReaders) -> None:
    pieces = ["I look. <tool", "_call>{oh</tool", "_call>"]
    assert joined(read_whole(readers.reader((), TOOLS), pieces))[0] == "I look. <tool_call>{oh</tool_call>"


def test_many_objects_in_arguments_are_parsed_in_linear_time(readers: ResponseReaders) -> None:
    arguments = json.dumps({"a": "7", "b": [{}] * 20_000})
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    reader = readers.reader((), tools)
    with patch.object(tool_calls, "_DECODER", wraps=tool_calls._DECODER) as decoder:
        read_whole(reader, [f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'])
    assert decoder.raw_decode.call_count == tool_calls.MAX_STARTS


def test_without_tools_a_call_is_content(readers: ResponseReaders) -> None:
    assert read(readers, CALL, tools=()) == (CALL, "", [])


def test_arguments_have_the_declared_types() -> None:
    tokenizer = talking_tokenizer()
    by_markup = ResponseReaders(tokenizer, find_template("auto", tokenizer, "qwen3_5"))
    properties = {"days": {"type": "integer"}, "city": {"type": "string"}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"properties": properties}}}]
    written = "<parameter=days>3</parameter><parameter=city>7</parameter>"
    text = f"<tool_call><function=weather>{written}</function></tool_call>"
    _, _, (call,) = read(by_markup, text, tools=tools)
    assert json.loads(call.arguments) == {"days": 3, "city": "7"}


def test_output_of_a_plain_model_is_content() -> None:
    assert read_whole(PlainReader(), ["a", "", CALL]) == [Content("a"), Content(CALL)]
