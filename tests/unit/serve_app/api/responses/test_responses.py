"""Tests the Responses API with OpenAI's client."""

import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, get_type_hints

import httpx
import openai
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from openai.types.responses import response_create_params as params
from pydantic import BaseModel

from cluster.errors import TargetLostError
from cluster.routing.ledger import Ended
from protos.messages import Finish
from serve_app.api.failures import failure_of
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.responses import ResponseWriter, as_chat, initial_response
from serve_app.api.responses_schemas import ResponsesRequest
from serve_app.api.validation import GenerationDefaults
from tests.asgi_front import MODEL, AsgiFront, asgi_front, stream_events, talking_codec
from tests.call_writers import GrammarSampler
from tests.unit.serve_app.api.conversation.test_chat import CALL, SCHEMA, STOP, rendered

COMPONENTS = "#/components/schemas/"
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA}
SAID = f"<think>where</think>I look.\n{CALL}<|im_end|>"


@pytest_asyncio.fixture
async def front() -> AsyncIterator[AsgiFront]:
    async with asgi_front(talking_codec()) as front:
        yield front


def test_every_field_of_the_openai_client_is_known() -> None:
    assert (
        get_type_hints(params.ResponseCreateParamsNonStreaming).keys() - ResponsesRequest.model_fields.keys() == set()
    )


async def test_a_conversation_can_be_sent_back(front: AsgiFront) -> None:
    front.plays([*front.emits(SAID, 3), STOP])
    first = await front.openai.responses.create(
        model=MODEL, input="Rain?", instructions="Be short.", tools=[WEATHER], store=False, metadata={"a": "b"}
    )
    assert (first.status, first.object, first.output_text, first.metadata) == (
        "completed",
        "response",
        "I look.",
        {"a": "b"},
    )
    reasoning, message, call = first.output
    assert (reasoning.type, message.type, call.type) == ("reasoning", "message", "function_call")
    assert reasoning.content[0].text == "where"
    assert (call.name, call.arguments) == ("weather", '{"city": "Bern"}')
    usage = first.usage
    assert usage.output_tokens == len(front.codec.encode(SAID))
    assert usage.output_tokens_details.reasoning_tokens == len("where")
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens

    front.generator.generations.clear()
    came = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    sent_back = [item.model_dump(exclude_none=True) for item in first.output]
    await front.openai.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Rain?"}, *sent_back, came], tools=[WEATHER]
    )
    assert rendered(front).endswith(
        "<|im_start|>user\nRain?<|im_end|>\n"
        '<|im_start|>assistant\n<think>where</think>I look.<tool_call>{"name": "weather", "arguments":'
        ' {"city": "Bern"}}</tool_call><|im_end|>\n'
        "<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_repeated_items_are_another_turn(front: AsgiFront) -> None:
    front.plays([STOP])
    said = [{"role": "assistant", "content": text} for text in ("one", "two")]
    await front.openai.responses.create(model=MODEL, input=said, instructions="Be short.")
    assert rendered(front).count("<|im_start|>assistant\n") == 3
    assert rendered(front).startswith("<|im_start|>system\nBe short.<|im_end|>\n")


@pytest.mark.parametrize("size", [1, 4, 1000])
async def test_events_add_up_to_the_response(front: AsgiFront, size: int) -> None:
    front.plays([*front.emits(SAID, size), STOP])
    stream = await front.openai.responses.create(model=MODEL, input="Rain?", tools=[WEATHER], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.reasoning_text.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    added = [event.item.id for event in events if event.type == "response.output_item.added"]
    whole = events[-1].response
    assert whole.output == done
    assert [item.id for item in done] == added
    for item, kind in zip(done, ("reasoning_text", "output_text", "function_call_arguments"), strict=True):
        deltas = [e.delta for e in events if e.type == f"response.{kind}.delta" and e.item_id == item.id]
        assert "".join(deltas) == (item.arguments if kind.startswith("function") else item.content[0].text)
    assert whole.usage is not None


async def test_the_clients_accumulated_response_agrees(front: AsgiFront) -> None:
    front.plays([*front.emits("<think>so</think>Yes.<|im_end|>", 2), STOP])
    async with front.openai.responses.stream(model=MODEL, input="Rain?") as stream:
        whole = await stream.get_final_response()
    assert whole.output_text == "Yes."


POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


class Point(BaseModel):
    x: int


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        ({"type": "json_object"}, ['{"a": 1}'], ["[]", "Bern"]),
        ({"type": "json_schema", "name": "p", "schema": POINT, "strict": False}, ['{"x": 7}'], ["{}", '{"x": ""}']),
        ({"type": "json_schema", "name": "p", "schema": POINT, "description": "d"}, ['{"x": 7}'], ["{}"]),
    ],
)
async def test_structured_output(front: AsgiFront, form: Any, good: Any, bad: Any) -> None:
    front.plays([*front.emits(good[0]), STOP])
    whole = await front.openai.responses.create(model=MODEL, input="Tell.", text={"format": form, "verbosity": "low"})
    assert whole.output_text == good[0]
    assert whole.text.model_dump(by_alias=True, exclude_none=True) == {"format": form, "verbosity": "low"}
    (generation,) = front.generator.generations
    sayings = GrammarSampler(front.codec)
    assert [text for text in good if not sayings.takes(generation.grammar, text)] == []
    assert [text for text in bad if sayings.takes(generation.grammar, text)] == []


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ({}, (0.6, 0.9)),
        ({"temperature": None, "top_p": None}, (0.6, 0.9)),
        ({"temperature": 0.0}, (0.0, 0.9)),
        ({"temperature": 1.5, "top_p": 0.5}, (1.5, 0.5)),
    ],
)
async def test_a_response_reports_its_parameters(asked: Any, used: tuple[float, float]) -> None:
    """The response lists the checkpoint's defaults for parameters missing in the request."""
    async with asgi_front(talking_codec(), defaults=GenerationDefaults(temperature=0.6, top_p=0.9)) as front:
        front.plays([*front.emits("Yes."), STOP])
        body = {"model": MODEL, "input": "Tell.", **asked}
        answer = (await front.http.post("/v1/responses", json=body)).json()
        stream = (await front.http.post("/v1/responses", json={**body, "stream": True})).text
        events = stream_events(stream)
    whole = [answer, *(event["response"] for event in events if "response" in event)]
    assert {(one["temperature"], one["top_p"]) for one in whole} == {used}
    assert len(whole) == 4
    sampling = front.generator.generations[0].sampling
    assert (sampling.temperature, sampling.top_p) == used


async def test_without_a_format_an_answer_is_unconstrained(front: AsgiFront) -> None:
    front.plays([STOP])
    for text in (None, {}, {"format": None}, {"format": {"type": "text"}}):
        body = {"model": MODEL, "input": "Tell.", "text": text}
        answer = (await front.http.post("/v1/responses", json=body)).json()
        assert answer["text"] == {"format": {"type": "text"}}
    assert [generation.grammar for generation in front.generator.generations] == [""] * 4


async def test_with_tools_an_answer_has_its_format_or_calls(front: AsgiFront) -> None:
    front.plays([STOP])
    form: Any = {"type": "json_schema", "name": "p", "schema": POINT}
    await front.openai.responses.create(model=MODEL, input="Tell.", tools=[WEATHER], text={"format": form})
    (generation,) = front.generator.generations
    sayings = GrammarSampler(front.codec)
    assert sayings.takes(generation.grammar, '{"x": 7}')
    assert sayings.takes(generation.grammar, CALL)
    assert not sayings.takes(generation.grammar, "It rains.")


async def test_an_answer_parses_into_the_clients_model(front: AsgiFront) -> None:
    front.plays([*front.emits('{"x": 7}'), STOP])
    whole = await front.openai.responses.parse(model=MODEL, input="Tell.", text_format=Point)
    assert whole.output_parsed == Point(x=7)
    async with front.openai.responses.stream(model=MODEL, input="Tell.", text_format=Point) as stream:
        assert (await stream.get_final_response()).output_parsed == Point(x=7)
    again: Any = [{"role": "user", "content": "Tell."}, *(item.to_dict(warnings=False) for item in whole.output)]
    assert (await front.openai.responses.create(model=MODEL, input=again)).output_text == '{"x": 7}'


async def test_a_truncated_answer_is_incomplete(front: AsgiFront) -> None:
    front.plays([*front.emits("Once upon"), Ended(Finish.LENGTH)])
    whole = await front.openai.responses.create(model=MODEL, input="Tell.", max_output_tokens=9)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete"
    (generation,) = front.generator.generations
    assert generation.max_len == len(generation.prompt) + 9
    stream = await front.openai.responses.create(model=MODEL, input="Tell.", stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_a_failure_ends_the_stream_as_failed(front: AsgiFront) -> None:
    front.plays([*front.emits("Once"), TargetLostError("gone")])
    stream = await front.openai.responses.create(model=MODEL, input="Tell.", stream=True)
    last = [event async for event in stream][-1]
    assert (last.type, last.response.status, last.response.error.code) == ("response.failed", "failed", "server_error")


async def test_a_stream_that_fails_before_its_first_text_is_read_by_the_client() -> None:
    chat = as_chat(parse(ResponsesRequest, b'{"model": "toy", "input": "Tell."}', RequestBounds()), RequestBounds())
    text = ResponseWriter(initial_response(chat, "resp_1", 0)).failed(failure_of(TargetLostError("gone")))
    answer = httpx.Response(200, text=text, headers={"Content-Type": "text/event-stream"})
    async with (
        httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer)) as http,
        openai.AsyncOpenAI(base_url="http://test", api_key="none", http_client=http) as client,
        client.responses.stream(model=MODEL, input="Tell.") as stream,
    ):
        kinds = [event.type async for event in stream]
    assert kinds == ["response.created", "response.in_progress", "response.failed"]


async def test_events_are_named_on_the_wire(front: AsgiFront) -> None:
    front.plays([*front.emits("a"), STOP])
    text = (await front.http.post("/v1/responses", json={"model": MODEL, "input": "b", "stream": True})).text
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert json.loads(data.removeprefix("data: "))["type"] == name.removeprefix("event: ")


async def test_exactly_the_sent_events_are_documented(front: AsgiFront) -> None:
    document = (await front.http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    described = Draft202012Validator({"$ref": f"{COMPONENTS}ResponseStreamEvent", "components": {"schemas": schemas}})
    sent: set[str] = set()
    for end in (STOP, Ended(Finish.LENGTH), TargetLostError("gone")):
        front.plays([*front.emits(SAID, 4), end])
        body = {"model": MODEL, "input": "Rain?", "tools": [WEATHER], "stream": True}
        text = (await front.http.post("/v1/responses", json=body)).text
        for event in stream_events(text):
            described.validate(event)
            for missing in event:
                assert not described.is_valid({name: event[name] for name in event.keys() - {missing}}), missing
            sent.add(event["type"])
    assert sent == schemas["ResponseStreamEvent"]["discriminator"]["mapping"].keys()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "snow"}}, "tool_choice"),
        ({"tools": [{**WEATHER, "strict": 1}]}, "tools[0].strict"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "p"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "schema": POINT}}}, "text.format"),
        ({"text": {"format": {"type": "text", "name": "p"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": POINT}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "p", "schema": {"not": {}}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "p", "schema": {"$ref": "#"}}}}, "text.format.schema"),
        ({"text": {"forms": {}}}, "text.forms"),
        ({"max_output_tokens": 4096}, "max_output_tokens"),
        ({"input": "x" * 5000}, "input"),
        ({"unknown": 1}, "unknown"),
        ({"min_p": 7.0}, "min_p"),
        ({"stop": [""]}, "stop[0]"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_unsupported_features_are_refused_by_name(front: AsgiFront, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await front.openai.responses.create(model=MODEL, input="hi", extra_body=fields)
    assert caught.value.param == param
    assert front.generator.generations == []


AS_IN_CHATS = {
    "seed": 7,
    "temperature": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.25,
    "repetition_penalty": 1.5,
    "logit_bias": {"7": -1.5},
    "bad_words": ["no"],
    "allowed_token_ids": [1, 2, 3],
    "min_tokens": 2,
    "stop_token_ids": [9],
    "ignore_eos": True,
    "truncate_prompt_tokens": 4,
    "priority": 3,
    "cache_salt": "s",
    "speculation": {"draft_tokens": 0},
}
OF_ONE_SESSION = {"session", "seed", "draft_seed", "hash_key", "traceparent"}


@pytest.mark.parametrize("name", AS_IN_CHATS)
async def test_chat_fields_have_the_same_meaning(front: AsgiFront, name: str) -> None:
    front.plays([STOP])
    bodies = {
        "responses": {"input": "hi"},
        "chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    }
    for path, body in bodies.items():
        for fields in ({}, {name: AS_IN_CHATS[name]}):
            assert (await front.http.post(f"/v1/{path}", json={"model": MODEL, **body, **fields})).status_code == 200
    outputs = [
        {key: value for key, value in asdict(generation).items() if key not in OF_ONE_SESSION or name == key == "seed"}
        for generation in front.generator.generations
    ]
    plain, asked, _, in_chat = outputs
    assert asked == in_chat != plain


async def test_an_unserved_item_is_refused(front: AsgiFront) -> None:
    asked = {"model": MODEL, "input": [{"type": "custom_tool_call", "call_id": "1", "name": "a", "input": "x"}]}
    error = (await front.http.post("/v1/responses", json=asked)).json()["error"]
    assert error["param"] == "input[0]"
    assert "expected a message, function_call, function_call_output or reasoning" in error["message"]


def test_an_item_without_a_type_is_a_message() -> None:
    said = {"role": "user", "content": "hi"}
    body = json.dumps({"model": MODEL, "input": [said, {**said, "type": None}]}).encode()
    first, second = parse(ResponsesRequest, body, RequestBounds()).input
    assert first == second


async def test_stop_strings_and_omitted_reasoning(front: AsgiFront) -> None:
    front.plays([*front.emits("<think>so</think>Yes. No."), STOP])
    whole = await front.openai.responses.create(
        model=MODEL, input="Tell.", extra_body={"stop": [" No"], "include_reasoning": False}
    )
    assert [item.type for item in whole.output] == ["message"]
    assert whole.output_text == "Yes."


async def test_vllms_structured_outputs_are_served(front: AsgiFront) -> None:
    front.plays([STOP])
    asked = {"structured_outputs": {"json": POINT}}
    await front.openai.responses.create(model=MODEL, input="Tell.", extra_body=asked)
    (generation,) = front.generator.generations
    assert GrammarSampler(front.codec).takes(generation.grammar, '{"x": 7}')


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": None, "ignore_eos": True, "max_output_tokens": 8, "store": False},
        {"stream_options": {"include_usage": True}},
        {"include": ["reasoning.encrypted_content"], "reasoning": {"summary": "auto"}, "store": False},
        {"session_id": "s", "vllm_xargs": {}, "enable_response_messages": False, "media_io_kwargs": None},
        {"tools": [WEATHER | {"defer_loading": False, "allowed_callers": ["direct"]}]},
    ],
)
async def test_fields_of_agents_and_load_generators_are_accepted(front: AsgiFront, fields: Any) -> None:
    front.plays([*front.emits("Yes."), STOP])
    body = {"model": MODEL, "input": "Tell.", "stream": True, **fields}
    answer = (await front.http.post("/v1/responses", json=body)).text
    assert answer.rstrip().rpartition("\n\n")[2].startswith("event: response.completed\n")
