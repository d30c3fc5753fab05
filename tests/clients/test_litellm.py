"""Tests LiteLLM with the server as an OpenAI-compatible endpoint."""

import json

import litellm
import pytest

MODEL = "openai/toy"
ASKED = [{"role": "user", "content": "Use weather(7)."}]
SCHEMA = {"type": "object", "properties": {"day": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]


@pytest.fixture(autouse=True)
def _server(base_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litellm, "api_base", base_url)
    monkeypatch.setattr(litellm, "api_key", "none")


def test_an_answer() -> None:
    answer = litellm.completion(MODEL, [{"role": "user", "content": "Hello."}])
    assert answer.choices[0].message.content == "You said: Hello."
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream() -> None:
    chunks = list(litellm.completion(MODEL, [{"role": "user", "content": "Hello."}], stream=True))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == "You said: Hello."


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_and_its_reasoning(stream: bool) -> None:
    answer = litellm.completion(MODEL, ASKED, tools=TOOLS, stream=stream)
    message = (litellm.stream_chunk_builder(list(answer)) if stream else answer).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"day": 7}')
    assert message.reasoning_content == "A tool is asked for."


def test_a_call_that_must_be_made() -> None:
    answer = litellm.completion(MODEL, [{"role": "user", "content": "Hello."}], tools=TOOLS, tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert isinstance(json.loads(call.function.arguments), dict)


def test_an_answer_by_a_schema() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "day", "schema": SCHEMA | {"required": ["day"]}}}
    answer = litellm.completion(MODEL, [{"role": "user", "content": "Hello."}], response_format=form)
    assert isinstance(json.loads(answer.choices[0].message.content)["day"], int)


def test_a_refusal_has_its_kind() -> None:
    with pytest.raises(litellm.BadRequestError, match="context"):
        litellm.completion(MODEL, ASKED, max_tokens=1 << 20)
