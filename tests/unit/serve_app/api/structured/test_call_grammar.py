"""Tests grammars of tool calls: the accepted texts, and that every accepted text parses as calls."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from serve_app.api.fields import RequestBounds, parse
from serve_app.api.grammars import GrammarCheck, RequestedGrammar, call_grammar, content_grammar
from serve_app.api.request_schemas import ChatRequest
from serve_app.api.text import TextCodec
from serve_app.api.tool_calls import Call, Content, Reasoning, ReasoningInPrompt, read_whole
from tests.call_writers import GrammarSampler, json_writer, lined_writer, quoting_writer, special_writer, tagged_writer
from tests.unit.serve_app.api.sample_requests import refusal_of

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
PLAIN = {
    "type": "object",
    "properties": {
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "null"}]},
        "at": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["unit", "at"],
    "additionalProperties": False,
}
WRITERS = {"json": json_writer, "lined": lined_writer, "special": special_writer, "tagged": tagged_writer}


def tool(name: str, schema: Any = CITY, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def held(codec: TextCodec, reasoning: ReasoningInPrompt = "over", **fields: Any) -> RequestedGrammar | None:
    body = {"model": "toy", "messages": [{"role": "user", "content": "x"}], **fields}
    request = parse(ChatRequest, json.dumps(body).encode(), RequestBounds())
    asked = content_grammar(request.response_format, request.structured_outputs)
    return call_grammar(request, codec.answer_form, asked, lambda: reasoning)


def called(codec: TextCodec, text: str, tools: list[Any], prompt: str = "") -> list[Any]:
    return read_whole(codec.readers.reader(codec.encode(prompt), tools), [text])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("choice", ["required", named("time")])
def test_generated_calls_satisfy_their_schemas(writer: str, choice: Any) -> None:
    codec = WRITERS[writer]()
    schemas = {"weather": PLAIN if writer == "tagged" else CITY, "time": PLAIN}
    tools = [tool(name, schema) for name, schema in schemas.items()]
    grammar = held(codec, tools=tools, tool_choice=choice)
    assert grammar is not None
    form = codec.call_form
    end = form.closing.strip("}\n")
    sayings = GrammarSampler(codec)
    names = set()
    for seed in range(12):
        text = sayings.one(grammar.text, seed)
        if text is None or (form.tags and text.count(end) > text.count(form.opening)):
            continue  # an argument that contains the end tag of a call
        said = called(codec, text, tools)
        assert said
        for one in said:
            assert isinstance(one, Call), text
            Draft202012Validator(schemas[one.name]).validate(json.loads(one.arguments))
            names.add(one.name)
        assert choice == "required" or len(said) == 1
    assert names == (set(schemas) if choice == "required" else {"time"})


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        pytest.param(
            {"tool_choice": "required"},
            [call("weather", '{"city": "Bern"}'), call("weather", '{"city":"B"}') + call("time", "{}")],
            ["", "Bern", call("weather", "{}"), call("snow", '{"city": "Bern"}'), "x" + call("time", "{}")],
            id="required",
        ),
        pytest.param(
            {"tool_choice": "required", "parallel_tool_calls": False},
            [call("time", "{}")],
            [call("time", "{}") * 2, call("time", '{"a": 1}')],
            id="one of several",
        ),
        pytest.param(
            {"tool_choice": named("weather")},
            [call("weather", '{"city": "Bern", "days": 3}')],
            [call("time", "{}"), call("weather", '{"city": "Bern"}') * 2],
            id="named",
        ),
        pytest.param(
            {"parallel_tool_calls": False},
            ["", "It rains.\n", "See: " + call("weather", '{"any": 1}'), "a <tool b"],
            [call("time", "{}") + "and", call("snow", "{}"), "see <tool_call>it"],
            id="at most one",
        ),
        pytest.param(
            {"response_format": {"type": "json_object"}},
            ['{"a": 1}', call("time", "{}") * 2],
            ["It rains.", '{"a": 1}' + call("time", "{}")],
            id="content by a form, or calls",
        ),
        pytest.param(
            {"structured_outputs": {"choice": ["yes", "no"]}}, ["yes", call("time", "{}")], ["maybe"], id="vLLM's form"
        ),
        pytest.param(
            {"response_format": {"type": "json_object"}, "tool_choice": "required"},
            [call("time", "{}")],
            ['{"a": 1}'],
            id="calls have no content",
        ),
    ],
)
def test_accepted_and_rejected_answers(fields: Any, good: list[str], bad: list[str]) -> None:
    codec = json_writer()
    tools = [tool("weather"), {"type": "function", "function": {"name": "time"}}]
    grammar = held(codec, tools=tools, **fields)
    sayings = GrammarSampler(codec)
    assert [text for text in good if not sayings.takes(grammar.text, text)] == []
    assert [text for text in bad if sayings.takes(grammar.text, text)] == []


def test_tagged_text_may_not_contain_the_end_tag() -> None:
    codec = tagged_writer()
    schema = {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}, "required": ["a"]}
    grammar = held(codec, tools=[tool("f", schema)], tool_choice="required")
    sayings = GrammarSampler(codec)

    def written(text: str) -> str:
        return f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n</tool_call>"

    for text in ("", "7", 'if a < b:\n    "</p>"'):
        assert sayings.takes(grammar.text, written(text))
        assert called(codec, written(text), [tool("f", schema)]) == [Call("f", json.dumps({"a": text}))]
    assert not sayings.takes_spelt(grammar.text, written("a</tool_call>b"), "</tool_call>")


def test_strict_tools_follow_their_schemas_and_others_take_any_object() -> None:
    codec = json_writer()
    grammar = held(codec, tools=[tool("weather", strict=True), tool("time", strict=False)])
    sayings = GrammarSampler(codec)
    assert sayings.takes(grammar.text, "So: " + call("weather", '{"city": "Bern"}') + "and" + call("time", '{"a": 1}'))
    assert not sayings.takes(grammar.text, call("weather", '{"a": 1}'))
    assert not sayings.takes(grammar.text, call("time", "1"))


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tools": [tool("f")]}, {"tools": [tool("f")], "tool_choice": "none"}]
)
def test_no_grammar_if_nothing_is_required(fields: Any) -> None:
    assert held(json_writer(), **fields) is None


TAGS = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
LOOK_AROUND = {"type": "string", "pattern": "^(?!a)b$"}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (TAGS, '{"a": ["x", "x"]}', '{"a": 1}'),  # unsupported keywords are ignored
        (LOOK_AROUND, '{"a": 1}', "[]"),  # a schema that does not compile is replaced
    ],
)
async def test_a_forced_tool_that_is_not_strict_is_constrained_in_part(schema: Any, good: str, bad: str) -> None:
    codec = json_writer()
    grammar = held(codec, tools=[tool("f", {"properties": {"a": schema}})], tool_choice=named("f"))
    assert grammar is not None
    await GrammarCheck(codec.grammars()).check(grammar)
    sayings = GrammarSampler(codec)
    assert sayings.takes(grammar.text, call("f", good))
    assert not sayings.takes(grammar.text, call("f", bad))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool("f", CITY)], "tool_choice": named("f")},
        {"tools": [tool("f", {"properties": {"city": {"anyOf": 5}}})], "tool_choice": named("f")},
        {"tools": [tool("f", {"properties": {"days": LOOK_AROUND}})], "tool_choice": named("f")},
        {"tools": [tool("f", CITY)], "parallel_tool_calls": False},
    ],
)
def test_tagged_arguments_without_an_enforceable_schema_are_free(fields: Any) -> None:
    codec = tagged_writer()
    grammar = held(codec, **fields)
    assert grammar is not None
    text = "<tool_call>\n<function=f>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    assert GrammarSampler(codec).takes(grammar.text, f"{text}</function>\n</tool_call>")


async def test_tagged_json_ignores_unsupported_keywords() -> None:
    codec = tagged_writer()
    grammar = held(codec, tools=[tool("f", {"properties": {"a": TAGS}, "required": ["a"]})], tool_choice="required")
    assert grammar is not None
    text = "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
    sayings = GrammarSampler(codec)
    assert sayings.takes(grammar.text, text.format('["x", "x"]'))
    assert not sayings.takes(grammar.text, text.format("1"))


THOUGHT = "so <tool_call> it is</think>"


@pytest.mark.parametrize(
    ("reasoning", "good", "bad"),
    [
        ("none", ["", f"<think>{THOUGHT}", f"<think>{THOUGHT}\n\n"], [THOUGHT, "<think>so"]),
        ("begun", [THOUGHT, f"{THOUGHT}\n"], ["", f"<think>{THOUGHT}"[:-1]]),
        ("over", [""], [f"<think>{THOUGHT}", THOUGHT]),
    ],
)
def test_a_model_may_reason_first_unless_its_prompt_did(
    reasoning: ReasoningInPrompt, good: list[str], bad: list[str]
) -> None:
    codec = json_writer()
    grammar = held(codec, reasoning, tools=[tool("weather")], tool_choice="required")
    one = call("weather", '{"city": "Bern"}')
    sayings = GrammarSampler(codec)
    assert [text for text in good if not sayings.takes(grammar.text, text + one)] == []
    assert [text for text in bad if sayings.takes(grammar.text, text + one)] == []


@pytest.mark.parametrize("writer", [json_writer, quoting_writer])  # the format of the second's calls is unknown
@pytest.mark.parametrize("tools", [{}, {"tools": [tool("weather")], "tool_choice": "none"}])
@pytest.mark.parametrize(
    ("reasoning", "good", "bad"),
    [
        ("none", ["", f"<think>{THOUGHT}", f"<think>{THOUGHT}\n\n"], [THOUGHT, "<think>so"]),
        ("begun", [THOUGHT, f"{THOUGHT}\n"], ["", f"<think>{THOUGHT}"[:-1]]),
        ("over", [""], [f"<think>{THOUGHT}", THOUGHT]),
    ],
)
def test_only_the_content_after_reasoning_is_constrained(
    writer: Callable[[], TextCodec], tools: Any, reasoning: ReasoningInPrompt, good: list[str], bad: list[str]
) -> None:
    codec = writer()
    grammar = held(codec, reasoning, response_format={"type": "json_object"}, **tools)
    assert grammar is not None
    assert grammar.field == "response_format"
    sayings = GrammarSampler(codec)
    assert [text for text in good if not sayings.takes(grammar.text, text + '{"a": 1}')] == []
    assert [text for text in bad if sayings.takes(grammar.text, text + '{"a": 1}')] == []
    assert not sayings.takes(grammar.text, f"{good[0]}It rains.")


def test_content_of_a_model_without_reasoning_has_its_grammar_alone() -> None:
    form = {"response_format": {"type": "json_object"}}
    assert held(special_writer(), "none", **form) == held(json_writer(), "over", **form)


def test_calls_in_reasoning_are_unconstrained() -> None:
    codec = json_writer()
    grammar = held(codec, "begun", tools=[tool("weather", strict=True)])
    sayings = GrammarSampler(codec)
    text = f"{THOUGHT}Well. <think>{THOUGHT}{call('weather', json.dumps({'city': 'Bern'}))}"
    assert sayings.takes(grammar.text, text)
    assert sayings.takes(grammar.text, "still thinking")
    prompt = "<|im_start|>assistant\n<think>"
    kinds = [type(one) for one in called(codec, text, [tool("weather")], prompt)]
    assert list(dict.fromkeys(kinds)) == [Reasoning, Content, Call]


def test_a_mark_token_has_no_other_spelling() -> None:
    codec = json_writer()
    grammar = held(codec, "begun", tools=[tool("weather", strict=True)])
    sayings = GrammarSampler(codec)
    for text, mark in (("a</think>b", "</think>"), ("a</think><tool_call>b", "<tool_call>")):
        assert not sayings.takes_spelt(grammar.text, text, mark)
    assert sayings.takes_spelt(grammar.text, "a</think><table>b", "<table>")


@pytest.mark.parametrize(
    ("writer", "tools", "why"),
    [
        (json_writer, [tool('a"b')], "cannot be constrained"),
        (json_writer, [tool("f", {"type": "string"})], "'string', expected 'object'"),
        (json_writer, [tool("f", {"enum": ["x" * 100_000]})], "bytes as a grammar"),
        (tagged_writer, [tool("f", CITY, strict=True)], "'city'"),
        (tagged_writer, [tool("f", {"properties": {"a": {}}}, strict=True)], "'a'"),
        (tagged_writer, [tool("f", {"properties": {"a": {"$ref": "#/$defs/x"}}}, strict=True)], "'a'"),
        (tagged_writer, [tool("f", {"properties": {"a": {"type": ["string", "integer"]}}}, strict=True)], "'a'"),
        (tagged_writer, [tool("f", {"properties": {"a": {"type": "string", "enum": ["x "]}}}, strict=True)], "'a'"),
        (tagged_writer, [tool("f", {"required": ["a"]}, strict=True)], "'a'"),
        (tagged_writer, [tool("f", {"oneOf": [CITY]}, strict=True)], "'oneOf'"),
        (tagged_writer, [tool("f", {"required": None}, strict=True)], "not a valid JSON schema"),
        (tagged_writer, [tool("f", {"properties": None}, strict=True)], "not a valid JSON schema"),
        (tagged_writer, [tool("f", {"properties": {"a": {"anyOf": 5}}}, strict=True)], "not a valid JSON schema"),
        (
            tagged_writer,
            [tool("f", {"properties": {"a": {"type": "string", "enum": 5}}}, strict=True)],
            "not a valid JSON schema",
        ),
    ],
)
def test_requests_without_a_possible_grammar_are_refused(
    writer: Callable[[], TextCodec], tools: list[Any], why: str
) -> None:
    with refusal_of("tools", why):
        held(writer(), tools=tools, tool_choice="required")


async def test_an_unsupported_schema_is_refused() -> None:
    codec = json_writer()
    grammar = held(codec, tools=[tool("f", {"not": {}}, strict=True)], tool_choice="required")
    assert grammar is not None
    with refusal_of("tools", "not"):
        await GrammarCheck(codec.grammars()).check(grammar)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_contradictory_requests_are_refused(fields: Any, field: str) -> None:
    with refusal_of(field):
        held(json_writer(), tools=[tool("f")], **fields)
