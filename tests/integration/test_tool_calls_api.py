"""Calls that must be made and answers by schemas, through OpenAI's client: API, router, target and drafter.

The models are random over single bytes, so nothing but the grammar makes calls of what they say.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Literal

import httpx
import openai
import pytest
import torch
from jsonschema import validate
from openai.lib.streaming.chat import ChatCompletionStreamState
from pydantic import BaseModel, Field

from actors.grammars import GrammarCompiler, grammar_vocabulary
from actors.models.decoder import ToyRunner
from cluster.config import validated
from serve_app.api.app import create_api
from serve_app.api.metrics import Metrics
from serve_app.api.replies import HealthReport
from tests.call_writers import special_writer
from tests.integration import harness

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
CONTEXT = 1024  # what tools are takes many single bytes to tell


@asynccontextmanager
async def client(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[openai.AsyncOpenAI]:
    monkeypatch.setattr(harness, "VOCABULARY", VOCABULARY)
    monkeypatch.setattr(harness, "CONTEXT", CONTEXT)
    grammars = GrammarCompiler(grammar_vocabulary(CODEC.tokenizer, CODEC.eos_ids))
    made: Any = {"target_runner": lambda _: ToyRunner(LOGITS), "draft_logits": LOGITS, "grammars": grammars}
    async with harness.cluster(**made, lock_step=True) as c:
        c.hurry()
        config = validated(
            {"model": {"target": "models/toy", "max_context": CONTEXT}, "draft": {"model": "models/draft"}}
        )

        async def ready() -> HealthReport:
            return HealthReport(status="ok", audit="ok")

        api = create_api(c.router, CODEC, config, Metrics(), ready)
        transport = httpx.ASGITransport(api)
        async with (
            httpx.AsyncClient(transport=transport) as behind,
            openai.AsyncOpenAI(base_url="http://toy/v1", api_key="none", max_retries=0, http_client=behind) as found,
        ):
            yield found


def plainly(fields: dict[str, Any]) -> dict[str, Any]:
    return fields | {"extra_body": {"speculation": {"draft_tokens": 0}}}


def told(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


@pytest.mark.parametrize(
    ("fields", "names", "most", "end"),
    [
        ({"tool_choice": "required"}, {"f", "g"}, None, "tool_calls"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"f", "g"}, 1, "tool_calls"),
        ({"tool_choice": NAMED}, {"g"}, 1, "stop"),
    ],
)
async def test_chats_call_whole_streamed_and_without_speculation(monkeypatch, fields, names, most, end):
    async with client(monkeypatch) as front:
        accepted = 0
        for seed in range(40):  # two, unless a busy machine kept the drafter from answering in time
            if seed >= 2 and accepted:
                break
            asked = {"model": "toy", "messages": USER, "tools": TOOLS, "seed": seed, **fields}
            whole = await front.chat.completions.create(**asked)
            (choice,) = whole.choices
            calls = told(choice.message)
            assert calls
            assert most is None or len(calls) == most
            for name, arguments in calls:
                assert name in names
                validate(json.loads(arguments), SCHEMA)
            assert (choice.finish_reason, choice.message.content) == (end, None)
            accepted += whole.usage.completion_tokens_details.accepted_prediction_tokens
            plain = await front.chat.completions.create(**plainly(asked))
            assert told(plain.choices[0].message) == calls
            assert plain.usage.completion_tokens == whole.usage.completion_tokens
            state = ChatCompletionStreamState()
            async for chunk in await front.chat.completions.create(**asked, stream=True):
                state.handle_chunk(chunk)
            streamed = state.get_final_completion().choices[0]
            assert (told(streamed.message), streamed.finish_reason) == (calls, end)
        assert accepted > 0


async def test_a_strict_tool_that_may_be_called_is_called_by_its_schema(monkeypatch):
    tools = [{"type": "function", "function": TOOLS[0]["function"] | {"strict": True}}]
    async with client(monkeypatch) as front:
        found = []
        for seed in range(3):
            asked = {"model": "toy", "messages": USER, "tools": tools, "seed": seed, "max_tokens": 200}
            whole = await front.chat.completions.create(**asked)
            plain = await front.chat.completions.create(**plainly(asked))
            assert plain.choices[0].message == whole.choices[0].message.model_copy(
                update={"tool_calls": plain.choices[0].message.tool_calls}
            )
            assert told(plain.choices[0].message) == told(whole.choices[0].message)
            found += told(whole.choices[0].message)
        assert found
        for name, arguments in found:
            assert name == "f"
            validate(json.loads(arguments), SCHEMA)


class Point(BaseModel):
    x: Literal[1, 2]
    name: Annotated[str, Field(max_length=6)]


async def test_an_answer_by_a_schema_is_read_by_the_clients_own_model(monkeypatch):
    async with client(monkeypatch) as front:
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


async def test_responses_call_whole_and_streamed(monkeypatch):
    flat: Any = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]
    for choice in ("required", {"type": "function", "name": "g"}):
        async with client(monkeypatch) as front:
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
