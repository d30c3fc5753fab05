"""Tests structured output over HTTP: API, router, target and drafter over real streams.

The models are random over single bytes, so only the grammar makes their output valid JSON.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import torch
from jsonschema import validate

from actors.grammars import GrammarCompiler, grammar_vocabulary
from tests.asgi_front import codec_of, config_of, http_client, stream_events, toy_api
from tests.byte_tokenizer import byte_tokenizer
from tests.integration.harness import CONTEXT, cluster

TOKENIZER = byte_tokenizer()
VOCABULARY = len(TOKENIZER)
LOGITS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(6))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "moods": {"type": "array", "items": {"enum": ["good", "bad"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "moods"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
USER = [{"role": "user", "content": "x"}]
# A thousand optional properties, the most expensive grammar that the server tries to compile.
BOMB = {"type": "object", "properties": {f"k{i}": {"type": "string", "pattern": "^[a-z]{1,30}$"} for i in range(1000)}}


@asynccontextmanager
async def front() -> AsyncIterator[httpx.AsyncClient]:
    grammars = GrammarCompiler(grammar_vocabulary(TOKENIZER, [TOKENIZER.eos_token_id]))
    async with cluster(logits=LOGITS, grammars=grammars, lock_step=True) as c:
        c.hurry()
        async with http_client(toy_api(c.router, codec_of(TOKENIZER), config_of({}, CONTEXT))) as client:
            yield client


async def chat(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    body = {"model": "toy", "messages": USER, "max_tokens": 400, "temperature": 1.0, **fields}
    return await client.post("/v1/chat/completions", json=body)


async def test_answers_satisfy_their_schema_and_are_equal_streamed_and_without_speculation():
    async with front() as client:
        accepted = 0
        for seed in range(3):
            asked = {"response_format": FORMAT, "seed": seed}
            answer = (await chat(client, **asked)).json()
            text = answer["choices"][0]["message"]["content"]
            validate(json.loads(text), SCHEMA)
            assert answer["choices"][0]["finish_reason"] == "stop"
            accepted += answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
            plain = (await chat(client, **asked, speculation={"draft_tokens": 0})).json()
            assert plain["choices"][0]["message"]["content"] == text
            stream = (await chat(client, **asked, stream=True)).text
            events = stream_events(stream)
            assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events) == text
        assert accepted > 0


async def test_completions_take_vllms_structured_outputs():
    async with front() as client:
        forms = {"regex": "[a-c]{3}", "choice": ["yes", "no"], "grammar": 'start: "a" "b"', "json": {"const": 1}}
        for form, wanted in zip(forms.items(), (None, None, "ab", "1"), strict=True):
            body = {"model": "toy", "prompt": "x", "max_tokens": 40, "structured_outputs": dict([form])}
            choice = (await client.post("/v1/completions", json=body)).json()["choices"][0]
            assert choice["finish_reason"] == "stop"
            assert wanted in (None, choice["text"])
            assert choice["text"] in ("yes", "no") or form[0] != "choice"
            assert len(choice["text"]) == 3 or form[0] != "regex"


async def test_invalid_formats_are_refused_without_affecting_others():
    async with front() as client:
        served = asyncio.create_task(chat(client, response_format=FORMAT, seed=1))
        bad = {"type": "json_schema", "json_schema": {"name": "p", "schema": {"not": {}}}}
        bomb = {"type": "json_schema", "json_schema": {"name": "p", "schema": BOMB}}
        for form in (bad, bomb):
            answers = await asyncio.gather(*(chat(client, response_format=form) for _ in range(2)))
            for answer in answers:
                if form is bad:
                    assert answer.status_code == 400
                    assert answer.json()["error"]["param"] == "response_format.json_schema.schema"
                    assert len(answer.content) < 4096
        validate(json.loads((await served).json()["choices"][0]["message"]["content"]), SCHEMA)
