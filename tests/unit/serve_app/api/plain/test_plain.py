"""Tests endpoints without text generation."""

import json
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import cached_property
from html.parser import HTMLParser
from typing import Any

import openai
import pytest
import pytest_asyncio
from jsonschema import Draft202012Validator
from transformers import PreTrainedTokenizerFast

from cluster.config import SlipstreamConfig, validated
from cluster.errors import TargetLostError
from cluster.routing.ledger import CommittedTokens, Ended
from protos.messages import Finish, TokenScore
from serve_app.api.served_model import fingerprint
from serve_app.api.text import TextCodec
from tests.asgi_front import MODEL, AsgiFront, asgi_front, config_of, stream_data, stream_events
from tests.byte_tokenizer import TEMPLATE
from tests.talking_tokenizer import talking_tokenizer
from tests.unit.serve_app.api.test_text import byte_fallback

USER = {"role": "user", "content": "hi"}


@pytest_asyncio.fixture
async def front() -> AsyncIterator[AsgiFront]:
    tokenizer = talking_tokenizer()
    async with asgi_front(TextCodec(tokenizer, ()), {"served_names": ["other", MODEL]}) as front:
        yield front


async def posted(front: AsgiFront, path: str, **fields: Any) -> Any:
    response = await front.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_tokenizing_and_detokenizing(front: AsgiFront) -> None:
    answer = await posted(front, "/tokenize", model="other", prompt="hé<think>", return_token_strs=True)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 4
    assert answer["token_strs"][-1] == "<think>"
    assert answer["max_model_len"] == 4096
    assert await posted(front, "/detokenize", tokens=answer["tokens"]) == {"prompt": "hé<think>"}


async def test_a_tokenized_conversation_equals_its_prompt(front: AsgiFront) -> None:
    answer = await posted(front, "/tokenize", messages=[USER], chat_template_kwargs={"enable_thinking": True})
    front.plays([Ended(Finish.STOP)])
    await front.openai.chat.completions.create(
        model=MODEL, messages=[USER], extra_body={"chat_template_kwargs": {"enable_thinking": True}}
    )
    assert tuple(answer["tokens"]) == front.prompt


@pytest.mark.parametrize(
    ("path", "fields", "status", "param"),
    [
        ("/tokenize", {}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * (4096 * 12 + 1)}, 400, "prompt"),
        ("/tokenize", {"messages": [USER], "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": [USER], "chat_template": "x"}, 400, "chat_template"),
        (
            "/tokenize",
            {"messages": [USER], "add_generation_prompt": True, "continue_final_message": True},
            400,
            "continue_final_message",
        ),
        ("/detokenize", {"tokens": [1, 1 << 40]}, 400, "tokens"),
        ("/detokenize", {"tokens": []}, 400, "tokens"),
    ],
)
async def test_errors_name_the_field(front: AsgiFront, path: str, fields: Any, status: int, param: str) -> None:
    response = await front.http.post(path, json=fields)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


async def test_the_model_is_served_under_all_its_names(front: AsgiFront) -> None:
    models = await front.openai.models.list()
    assert [(model.id, model.model_dump()["max_model_len"]) for model in models.data] == [
        (MODEL, 4096),
        ("other", 4096),
    ]
    assert (await front.openai.models.retrieve("other")).id == "other"
    with pytest.raises(openai.NotFoundError) as caught:
        await front.openai.models.retrieve("nobody")
    assert caught.value.code == "model_not_found"
    front.plays([Ended(Finish.STOP)])
    assert (await front.openai.completions.create(model="other", prompt="a")).model == "other"


async def test_answers_have_the_system_fingerprint(front: AsgiFront) -> None:
    front.plays([Ended(Finish.STOP)])
    whole = await front.openai.completions.create(model=MODEL, prompt="a")
    stream = await front.openai.completions.create(model=MODEL, prompt="a", stream=True)
    fingerprints = {chunk.system_fingerprint async for chunk in stream} | {whole.system_fingerprint}
    assert fingerprints == {fingerprint(config_of({}), "")}


def configured(**sections: Any) -> SlipstreamConfig:
    return validated({"model": {"target": "toy"}, "draft": {"method": "ngram"}} | sections)


def vllm(**arguments: Any) -> dict[str, Any]:
    return {"engine": "vllm", "vllm": arguments, "cache_per_rank": {"gib": 1}}


QUANTISED = vllm(quantization="fp8", enforce_eager=True)


@pytest.mark.parametrize(
    "other",
    [
        {"server": {"routers": 2}},
        {"target": {"max_sessions": 8}},
        {"draft": {"method": "suffix"}},
    ],
)
def test_a_fingerprint_ignores_settings_that_do_not_affect_answers(other: dict[str, Any]) -> None:
    assert fingerprint(configured(**other), "a") == fingerprint(configured(), "a")


def test_a_fingerprint_covers_settings_that_affect_answers() -> None:
    configs = [
        configured(),
        configured(model={"target": "toy", "dtype": "float32"}),
        configured(model={"target": "toy", "max_context": 64}),
        configured(target={"tensor_parallel": 2}),
        configured(target=vllm()),
        configured(target=QUANTISED),
        configured(target=vllm(quantization="awq")),
        *(configured(server=one) for one in ({"generation_defaults": "none"}, {"response_template": "none"})),
        configured(server={"allow_special_tokens_in_text": True}),
    ]
    invariant = configured(model={"target": "toy", "numerics": "invariant"})
    assert fingerprint(configured(), "a").endswith("_fast")
    assert fingerprint(invariant, "a").endswith("_invariant")
    told = [fingerprint(config, weights) for config in configs for weights in ("a", "b")]
    assert len(set(told)) == len(told)
    other_order = vllm(enforce_eager=True, quantization="fp8")
    assert fingerprint(configured(target=other_order), "a") == fingerprint(configured(target=QUANTISED), "a")


async def test_usage_reports_cached_prompt_tokens(front: AsgiFront) -> None:
    (emit,) = front.emits("a")
    front.plays([replace(emit, cached=3), emit, Ended(Finish.STOP)])
    answer = await front.openai.completions.create(model=MODEL, prompt=["one", "two"], n=2)
    assert answer.usage.prompt_tokens_details.cached_tokens == 6


@pytest.mark.parametrize(
    ("path", "fields", "text"),
    [
        ("/v1/completions", {"prompt": "a"}, " a"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "a a"),
        ("/v1/chat/completions", {"messages": [USER]}, "a"),
        ("/v1/chat/completions", {"messages": [USER], "continue_final_message": True}, " a"),
    ],
)
async def test_an_answer_that_continues_its_prompt_keeps_its_first_space(path: str, fields: Any, text: str) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_fallback(), chat_template=TEMPLATE)
    async with asgi_front(TextCodec(tokenizer, ())) as front:
        front.plays([CommittedTokens(front.codec.encode(" a"), 0, 0), Ended(Finish.STOP)])
        (choice,) = (await posted(front, path, model=MODEL, **fields))["choices"]
        assert (choice["message"]["content"] if "message" in choice else choice["text"]) == text


async def test_offsets_in_a_stream_count_held_text(front: AsgiFront) -> None:
    score = TokenScore(-0.5, 1)
    emits = [replace(emit, scores=(score,) * len(emit.tokens)) for emit in front.emits("xEN!", 3)]
    front.plays([*emits, Ended(Finish.STOP)])
    asked = {"model": MODEL, "prompt": "a", "stop": "END", "logprobs": 0}
    (whole,) = (await posted(front, "/v1/completions", **asked))["choices"]
    stream = stream_events((await front.http.post("/v1/completions", json=asked | {"stream": True})).text)
    scored = [one["logprobs"] for event in stream for one in event["choices"] if one["logprobs"]]
    assert [one["text_offset"] for one in scored] == [[0, 1, 2], [3]]
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 3]


async def test_a_failure_before_the_first_token_sets_the_status_of_an_echoed_stream(front: AsgiFront) -> None:
    front.plays([TargetLostError("lost")])
    asked = {"model": MODEL, "prompt": "a", "echo": True, "stream": True}
    assert (await front.http.post("/v1/completions", json=asked)).status_code == 503


class ThreadRecordingCodec(TextCodec):
    """Codec that records the threads that format scores."""

    threads: set[threading.Thread]

    @cached_property
    def token_bytes(self) -> Callable[[int], bytes]:
        self.threads = set()

        def recorded(token: int) -> bytes:
            self.threads.add(threading.current_thread())
            return bytes([token])

        return recorded


async def test_scores_of_a_whole_answer_are_formatted_off_the_event_loop() -> None:
    codec = ThreadRecordingCodec(talking_tokenizer(), ())
    async with asgi_front(codec) as front:
        (emit,) = front.emits("a")
        front.plays([replace(emit, scores=(TokenScore(-0.5, 1),)), Ended(Finish.STOP)])
        await posted(front, "/v1/chat/completions", model=MODEL, messages=[USER], logprobs=True)
    assert codec.threads
    assert threading.current_thread() not in codec.threads


async def test_the_version(front: AsgiFront) -> None:
    assert (await front.http.get("/version")).json().keys() == {"version"}


@pytest.mark.parametrize(
    ("path", "fields", "code"),
    [
        ("/v1/completions", {"prompt": "a", "temprature": 1}, "unknown_parameter"),
        ("/v1/completions", {}, "missing_required_parameter"),
        ("/v1/completions", {"prompt": "a", "n": "1"}, "invalid_type"),
        ("/v1/completions", {"prompt": "a", "n": 0}, "invalid_value"),
        ("/v1/completions", {"prompt": "a", "best_of": 2}, "unsupported_value"),
        ("/v1/completions", {"prompt": "a" * 5000}, "context_length_exceeded"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4096}, "context_length_exceeded"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 4095, "model": "nobody"}, "model_not_found"),
        ("/v1/nothing", {}, "not_found"),
    ],
)
async def test_error_codes(front: AsgiFront, path: str, fields: Any, code: str) -> None:
    response = await front.http.post(path, json={"model": MODEL} | fields)
    assert response.json()["error"]["code"] == code


# ------------------------------------------------------------ the OpenAPI schema


async def described(front: AsgiFront) -> Any:
    return (await front.http.get("/openapi.json")).json()


def validator(document: Any, schema: Any) -> Draft202012Validator:
    return Draft202012Validator({**schema, "components": document["components"]})


NEW_IN_3_2 = {"itemSchema", "itemEncoding", "prefixEncoding", "$self", "additionalOperations", "query", "mediaTypes"}


async def test_the_schema_has_openapi_version_3_1(front: AsgiFront) -> None:
    document = await described(front)
    assert document["openapi"] == "3.1.0"
    for methods in document["paths"].values():
        assert not NEW_IN_3_2 & methods.keys()
        for operation in methods.values():
            for response in (operation.get("requestBody", {}), *operation["responses"].values()):
                assert {key for content in response.get("content", {}).values() for key in content} <= {"schema"}
    assert not NEW_IN_3_2 & (document.keys() | document["components"].keys())


async def test_every_endpoint_is_documented(front: AsgiFront) -> None:
    document = await described(front)
    app_routes = {
        (method.lower(), route.path.replace("{name:path}", "{name}"))
        for route in front.app.routes
        for method in route.methods - {"HEAD"}
    }
    told = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert app_routes - {("get", "/openapi.json"), ("get", "/docs")} == told


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a", "stop": "b"}),
        ("/v1/completions", {"prompt": [[1], [2]], "stop": ["b"], "best_of": 1}),
        ("/v1/chat/completions", {"messages": [USER, {"role": "assistant", "content": None}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/responses", {"input": [USER]}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
async def test_requests_and_responses_match_the_schema(front: AsgiFront, path: str, fields: Any) -> None:
    front.plays([*front.emits("Hello."), Ended(Finish.STOP)])
    document = await described(front)
    operation = document["paths"][path]["post"]
    asked = {"model": MODEL} | fields
    validator(document, operation["requestBody"]["content"]["application/json"]["schema"]).validate(asked)
    answer = await posted(front, path, **asked)
    validator(document, operation["responses"]["200"]["content"]["application/json"]["schema"]).validate(answer)


async def test_prompt_logprobs_match_the_schema(front: AsgiFront) -> None:
    score = TokenScore(-0.5, 1, (1,), (-0.5,))
    prompt_len = len(front.codec.encode_chat([USER]))
    emit = CommittedTokens(front.codec.encode("a"), 0, 0, (), (score,) * (prompt_len - 1))
    front.plays([emit, Ended(Finish.STOP)])
    document = await described(front)
    answer = await posted(front, "/v1/chat/completions", model=MODEL, messages=[USER], prompt_logprobs=0)
    told = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]["application/json"]
    assert len(answer["prompt_logprobs"]) == prompt_len
    validator(document, told["schema"]).validate(answer)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [USER]}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
@pytest.mark.parametrize("end", [Ended(Finish.STOP), TargetLostError("lost")], ids=["whole", "lost"])
async def test_stream_events_match_the_schema(front: AsgiFront, path: str, fields: Any, end: Any) -> None:
    front.plays([*front.emits("Hello."), end])
    document = await described(front)
    content = document["paths"][path]["post"]["responses"]["200"]["content"]
    event = content["text/event-stream"]["schema"]
    answer = await front.http.post(path, json={"model": MODEL, "stream": True} | fields)
    told = stream_data(answer.text)
    data = event["properties"]["data"]
    (read,) = [one["contentSchema"] for one in (data, *data.get("anyOf", ())) if "contentSchema" in one]
    assert len(told) > len("Hello.")
    for one in told:
        validator(document, event).validate({"data": one})
        if one != "[DONE]":
            validator(document, read).validate(json.loads(one))
            assert not validator(document, read).is_valid({"unheard_of": 1})


@pytest.mark.parametrize("name", ["ChatRequest", "CompletionRequest", "ResponsesRequest", "TokenizeRequest"])
async def test_null_is_documented_as_not_given(front: AsgiFront, name: str) -> None:
    document = await described(front)
    schema = document["components"]["schemas"][name]
    for field, about in schema["properties"].items():
        assert validator(document, about).is_valid(None) is (field not in schema.get("required", ())), field


@pytest.mark.parametrize("fields", [{"prompt": 1}, {"prompt": "a", "best_of": 2}, {"prompt": "a", "unknown": 1}, {}])
async def test_refused_requests_violate_the_schema(front: AsgiFront, fields: Any) -> None:
    document = await described(front)
    schema = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert not validator(document, schema).is_valid({"model": MODEL} | fields)
    refused = await front.http.post("/v1/completions", json={"model": MODEL} | fields)
    error = document["paths"]["/v1/completions"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    validator(document, error).validate(refused.json())


class Links(HTMLParser):
    """Collects the URLs that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


async def test_the_docs_page_names_every_field_and_loads_nothing_external(front: AsgiFront) -> None:
    page = (await front.http.get("/docs")).text
    links = Links()
    links.feed(page)
    assert links.found == ["openapi.json"]
    document = await described(front)
    for name in ("ChatRequest", "CompletionRequest", "ResponsesRequest"):
        for field in document["components"]["schemas"][name]["properties"]:
            assert f"<code>{field}</code>" in page
    assert json.dumps(document).count("http://") == 0
