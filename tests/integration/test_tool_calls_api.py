"""Tests required tool calls and structured output with OpenAI's client, over API, router, target and drafter.

The models are random over single bytes, so only the grammar makes their output valid calls.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import openai
import pytest
import torch
from jsonschema import validate
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel, Field

from actors.grammars import GrammarCompiler, grammar_vocabulary
from tests.asgi_front import config_of, openai_client, toy_api
from tests.call_writers import special_writer
from tests.integration.harness import cluster

CODEC = special_writer()
VOCABULARY = len(CODEC.tokenizer)
LOGITS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(6))
SCHEMA = {
    "type": "object",
    "properties": {"c": {"type": "string", "maxLength": 6}, "n": {"enum": [1, 2, 3]}},
    "required": ["c", "n"],
    "additionalProperties": False,
}
USER: Any = [{"role": "user", "content": "x"}]
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("f", "g")]
NAMED: Any = {"type": "function", "function": {"name": "g"}}
SEEDS = range(2)
CONTEXT = 1024  # one token per byte makes tool definitions a long prompt


@asynccontextmanager
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    grammars = GrammarCompiler(grammar_vocabulary(CODEC.tokenizer, CODEC.eos_ids))
    async with cluster(logits=LOGITS, context=CONTEXT, grammars=grammars, lock_step=True) as c:
        c.hurry()
        async with openai_client(toy_api(c.router, CODEC, config_of({}, CONTEXT))) as found:
            yield found


def plainly(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"extra_body": {"speculation": {"draft_tokens": 0}}}


def summary_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


@pytest.mark.parametrize(
    ("fields", "names", "most", "end"),
    [
        ({"tool_choice": "required"}, {"f", "g"}, None, "tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"f", "g"}, 1, "tool_calls"),
        ({"tool_choice": NAMED}, {"g"}, 1, "stop"),
    ],
)
async def test_calls_are_equal_streamed_and_without_speculation(fields, names, most, end):
    async with client() as front:
        accepted = 0
        for seed in SEEDS:
            asked = {"model": "toy", "messages": USER, "tools": TOOLS, "seed": seed, **fields}
            whole = await front.chat.completions.create(**asked)
            (choice,) = whole.choices
            calls = summary_of(choice.message)
            assert calls
            assert most is None or len(calls) == most
            for name, arguments in calls:
                assert name in names
                validate(json.loads(arguments), SCHEMA)
            assert (choice.finish_reason, choice.message.content) == (end, None)
            accepted += whole.usage.completion_tokens_details.accepted_prediction_tokens
            plain = await front.chat.completions.create(**plainly(asked))
            assert summary_of(plain.choices[0].message) == calls
            assert plain.usage.completion_tokens == whole.usage.completion_tokens
            state = ChatCompletionStreamState()
            async for chunk in await front.chat.completions.create(**asked, stream=True):
                state.handle_chunk(chunk)
            streamed = state.get_final_completion().choices[0]
            assert (summary_of(streamed.message), streamed.finish_reason) == (calls, end)
        assert accepted > 0


async def test_optional_strict_calls_follow_their_schema():
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    async with client() as front:
        found = []
        for seed in range(3):
            asked = {"model": "toy", "messages": USER, "tools": tools, "seed": seed, "max_tokens": 200}
            whole = await front.chat.completions.create(**asked)
            plain = await front.chat.completions.create(**plainly(asked))
            assert plain.choices[0].message == whole.choices[0].message.model_copy(
                update={"tool_calls": plain.choices[0].message.tool_calls}
            )
            assert summary_of(plain.choices[0].message) == summary_of(whole.choices[0].message)
            found += summary_of(whole.choices[0].message)
        assert found
        for name, arguments in found:
            assert name == "f"
            validate(json.loads(arguments), SCHEMA)


class Point(BaseModel):
    x: Literal[1, 2]
    name: Annotated[str, Field(max_length=6)]


async def test_an_answer_parses_into_the_clients_model():
    async with client() as front:
        for seed in SEEDS:
            asked: Any = {"model": "toy", "messages": USER, "seed": seed, "response_format": Point}
            whole = (await front.chat.completions.parse(**asked)).choices[0].message
            assert isinstance(whole.parsed, Point)
            plain = await front.chat.completions.parse(**plainly(asked))
            assert plain.choices[0].message.content == whole.content
            async with front.chat.completions.stream(**asked) as stream:
                assert (await stream.get_final_completion()).choices[0].message.parsed == whole.parsed
            response = await front.responses.parse(model="toy", input="x", text_format=Point, extra_body={"seed": seed})
            assert response.output_parsed == whole.parsed


async def test_responses_calls_are_equal_when_streamed():
    flat: Any = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    for choice in ("required", {"type": "function", "name": "g"}):
        async with client() as front:
            asked: Any = {"model": "toy", "input": "x", "tools": flat, "tool_choice": choice}
            asked |= {"extra_body": {"seed": 4}, "parallel_tool_calls": False}
            whole = await front.responses.create(**asked)
            (item,) = whole.output
            assert (whole.status, item.type) == ("completed", "function_call")
            assert choice == "required" or item.name == "g"
            validate(json.loads(item.arguments), SCHEMA)
            stream = await front.responses.create(**asked, stream=True)
            events = [event async for event in stream]
            (done,) = events[-1].response.output
            assert (done.name, done.arguments) == (item.name, item.arguments)
            deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
            assert "".join(deltas) == item.arguments
