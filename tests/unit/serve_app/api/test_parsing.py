"""Expensive bodies are refused early, with a short error."""

import json
from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import RequestError
from serve_app.api.failures import failure_of
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.request_schemas import ChatRequest, CompletionRequest

BOUNDS = RequestBounds(
    prompts=8, prompt_tokens=64, messages=16, parts=4, stops=4, labels=4, containers=100, token_ids=4
)
MANY = 20_000
LONG = "k" * 1_000_000
MAX_ANSWER_BYTES = 5000


def refusal(fields: dict[str, Any]) -> RequestError:
    schema = ChatRequest if "messages" in fields else CompletionRequest
    with pytest.raises(RequestError) as caught:
        parse(schema, json.dumps({"model": "toy"} | fields).encode(), BOUNDS)
    assert len(failure_of(caught.value).body) < MAX_ANSWER_BYTES
    return caught.value


def user(content: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": [[-1] * MANY]}, "prompt[0]"),
        ({"prompt": [-1] * MANY}, "prompt[0]"),
        ({"prompt": ["a"] * MANY}, "prompt"),
        ({"prompt": [""] * MANY}, "prompt"),
        ({"prompt": "a", "stop": [1] * MANY}, "stop"),
        ({"prompt": "a"} | {f"f{number}": 1 for number in range(MANY)}, "f0"),
        ({"prompt": "a", LONG: 1}, f"{'k' * 64}..."),
        ({"prompt": "a", "model": LONG}, "model"),
        ({"prompt": "a", "seed": LONG}, "seed"),
        ({"prompt": "a", "speculation": {"acceptance": LONG}}, "speculation.acceptance"),
        ({"prompt": "a", "stop": LONG}, "stop[0]"),
        ({"prompt": "a", "logit_bias": dict.fromkeys(["x", *map(str, range(MANY))], 1)}, "logit_bias"),
        ({"messages": [1] * MANY}, "messages"),
        ({"messages": [{"role": LONG, "content": "a"}]}, "messages[0].role"),
        (user([1] * MANY), "messages[0].content"),
        (user([{"type": LONG}]), "messages[0].content[0].type"),
        (user("a") | {"metadata": {str(number): number for number in range(MANY)}}, "metadata"),
    ],
)
def test_errors_for_large_bodies_are_short_and_name_the_field(fields: dict[str, Any], field: str) -> None:
    assert refusal(fields).field == field


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({"prompt": [["a"] * 64]}, "prompt[0][0]"),
        ({"prompt": [""] * 8}, "prompt[0]"),
        ({"messages": [{"role": "robot", "content": "a"}] * 16}, "messages[0].role"),
        (user([{"type": "image"}] * 4), "messages[0].content[0]"),
    ],
)
def test_a_list_is_validated_up_to_its_first_error(fields: dict[str, Any], counted: str) -> None:
    error = refusal(fields)
    assert (error.field or "").startswith(counted)
    assert "[1]" not in str(error)


def test_ten_errors_are_listed_and_the_rest_counted() -> None:
    wrong = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "seed", "n", "stream", "max_tokens"), "x")
    message = str(refusal({"prompt": "a"} | wrong | dict.fromkeys(("echo", "best_of", "suffix", "prompt_embeds"), 5)))
    assert message.count(": ") == 10
    assert message.endswith("; and 2 more")


def test_only_a_few_unknown_fields_are_validated() -> None:
    message = str(refusal({"prompt": "a"} | {f"f{number}": 1 for number in range(MANY)}))
    assert message.count("unknown field; leave it out") == 10
    assert "more" not in message


HELLO = user("a")


@pytest.mark.parametrize(
    ("fields", "message", "code"),
    [
        (HELLO | {"foo": 1}, "foo: unknown field; leave it out", "unknown_parameter"),
        (HELLO | {"max_token": 1}, "max_token: unknown field; did you mean max_tokens?", "unknown_parameter"),
        (
            HELLO | {"speculation": {"draft_token": 1}},
            "speculation.draft_token: unknown field; did you mean draft_tokens?",
            "unknown_parameter",
        ),
        ({}, "prompt: missing field; add it", "missing_required_parameter"),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content: missing field; add it",
            "missing_required_parameter",
        ),
        (HELLO | {"temperature": "x"}, "temperature: expected a number", "invalid_type"),
        (HELLO | {"n": 0}, "n: expected at least 1", "invalid_value"),
        ({"messages": [5]}, "messages[0]: expected an object", "invalid_type"),
        (
            HELLO | {"response_format": {"type": "x"}},
            "response_format.type: expected 'text', 'json_object' or 'json_schema'",
            "invalid_value",
        ),
    ],
)
def test_messages_are_short_with_openais_codes(fields: dict[str, Any], message: str, code: str) -> None:
    error = refusal(fields)
    assert (str(error), error.field, error.code) == (message, message.split(":")[0], code)


@pytest.mark.parametrize("piece", ["[]", "{}", "[[]]"])
def test_deeply_nested_json_is_not_parsed(piece: str) -> None:
    with pytest.raises(RequestError, match="lists and objects"):
        parse(CompletionRequest, f'{{"prompt": [{",".join([piece] * 100)}]}}'.encode(), BOUNDS)


def test_json_with_too_many_fields_is_not_parsed() -> None:
    fields = ",".join(f'"f{number}":1' for number in range(100))
    with pytest.raises(RequestError, match="more than 99 fields"):
        parse(CompletionRequest, f"{{{fields}}}".encode(), replace(BOUNDS, members=99))


@pytest.mark.parametrize("text", [":", "["])
def test_json_with_too_many_strings_is_not_parsed(text: str) -> None:
    body = json.dumps({"model": "toy", "prompt": [text] * 200}).encode()
    with pytest.raises(RequestError, match="more than 200 strings"):
        parse(CompletionRequest, body, replace(BOUNDS, members=99, strings=200))


def test_token_ids_are_counted_before_they_are_parsed() -> None:
    message = str(refusal({"prompt": "a", "logit_bias": dict.fromkeys(["x", *map(str, range(MANY))], 1)}))
    assert message == f"logit_bias: this has {MANY + 1} items, expected 0 to 4"


@pytest.mark.parametrize("text", [":" * 1000, "[" * 1000, '\\"[' * 1000, "{}\\\\" * 1000, "\n[" * 1000, "é[" * 1000])
def test_brackets_in_strings_do_not_count(text: str) -> None:
    body = json.dumps({"model": "toy", "prompt": text, "user": "["}).encode()
    assert parse(CompletionRequest, body, replace(BOUNDS, members=99)).prompt == (text,)


@pytest.mark.parametrize("body", [b'{"a": "' + b'[\\"' * MANY, b'"[' * MANY, b"[" * MANY + b"\\"])
def test_an_unterminated_string_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="body"):
        parse(CompletionRequest, body, BOUNDS)
