"""Tests valid requests, and the field names in refusals of invalid requests."""

import re
from typing import Any

import pytest

from cluster.errors import RequestError
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.request_schemas import ChatRequest, CompletionRequest
from tests.unit.serve_app.api.sample_requests import CHAT, COMPLETION, parsed, refusal_of


def prompts(prompt: object) -> object:
    request = parsed(COMPLETION | {"prompt": prompt})
    assert isinstance(request, CompletionRequest)
    return request.prompt


def test_defaults_match_openais() -> None:
    request = parsed(COMPLETION)
    assert (request.temperature, request.top_p, request.n, request.stream) == (1.0, 1.0, 1, False)
    assert (request.stop, request.seed, request.default_max_tokens) == ((), None, 16)
    assert parsed(CHAT).default_max_tokens is None


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1, 2], [3]], ((1, 2), (3,))),
        (["a", [1]], ("a", (1,))),
    ],
)
def test_a_prompt_is_a_list_of_prompts(given: object, taken: object) -> None:
    assert prompts(given) == taken


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = parsed(CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert isinstance(request, ChatRequest)
    assert request.messages[0].text == "ab"


def test_one_stop_string_is_a_list_of_one() -> None:
    assert parsed(COMPLETION | {"stop": "x"}).stop == ("x",)


@pytest.mark.parametrize("base", [COMPLETION, CHAT])
def test_null_means_not_given(base: dict[str, Any]) -> None:
    optional = ("temperature", "top_p", "stop", "n", "seed", "stream", "stream_options", "speculation", "max_tokens")
    assert parsed(base | dict.fromkeys(optional)) == parsed(base)


@pytest.mark.parametrize(
    ("base", "fields"),
    [
        (COMPLETION, {"logprobs": None, "echo": False, "best_of": 1, "suffix": "", "logit_bias": {}}),
        (CHAT, {"logprobs": False, "tools": [], "tool_choice": "none", "response_format": {"type": "text"}}),
    ],
)
def test_neutral_values_of_unserved_fields_are_accepted(base: dict[str, Any], fields: dict[str, Any]) -> None:
    asked = parsed(base | fields)
    plainly = parsed(base)
    assert asked.model_dump(exclude=set(fields)) == plainly.model_dump(exclude=set(fields)), "it changes nothing else"


def test_an_assistant_message_may_be_sent_back() -> None:
    answer = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None, "audio": None}
    sent_back = parsed(CHAT | {"messages": [*CHAT["messages"], answer]})
    assert sent_back.messages[-1].role == "assistant"
    assert [part.text for part in sent_back.messages[-1].content] == ["hi"]


@pytest.mark.parametrize(
    ("base", "fields", "field"),
    [
        (COMPLETION, {"temprature": 1}, "temprature"),
        (COMPLETION, {"unknown": None}, "unknown"),
        (COMPLETION, {"temperature": -0.1}, "temperature"),
        (COMPLETION, {"temperature": 2.1}, "temperature"),
        (COMPLETION, {"temperature": "1"}, "temperature"),
        (COMPLETION, {"temperature": True}, "temperature"),
        (COMPLETION, {"top_p": 0}, "top_p"),
        (COMPLETION, {"min_p": 1.5}, "min_p"),
        (COMPLETION, {"top_k": 1.5}, "top_k"),
        (COMPLETION, {"frequency_penalty": 3}, "frequency_penalty"),
        (COMPLETION, {"seed": "1"}, "seed"),
        (COMPLETION, {"seed": 1.0}, "seed"),
        (COMPLETION, {"max_tokens": 0}, "max_tokens"),
        (COMPLETION, {"n": 0}, "n"),
        (COMPLETION, {"n": 129}, "n"),
        (COMPLETION, {"stop": ["a"] * 4097}, "stop"),
        (COMPLETION, {"stop": ["a", ""]}, "stop[1]"),
        (COMPLETION, {"stop": "x" * 257}, "stop[0]"),
        (COMPLETION, {"stream": "yes"}, "stream"),
        (COMPLETION, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETION, {"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        (COMPLETION, {"speculation": {"draft_tokens": -1}}, "speculation.draft_tokens"),
        (COMPLETION, {"speculation": {"acceptance": "always"}}, "speculation.acceptance"),
        (COMPLETION, {"speculation": {"trace": True}}, "speculation"),
        (COMPLETION, {"speculation": {"rejected": True}}, "speculation"),
        (COMPLETION, {"prompt": ""}, "prompt[0]"),
        (COMPLETION, {"prompt": []}, "prompt"),
        (COMPLETION, {"prompt": None}, "prompt"),
        (COMPLETION, {"prompt": [[]]}, "prompt[0]"),
        (COMPLETION, {"prompt": [-1]}, "prompt[0][0]"),
        (COMPLETION, {"prompt": {"text": "a"}}, "prompt"),
        (COMPLETION, {"logprobs": 21}, "logprobs"),
        (COMPLETION, {"logprobs": True}, "logprobs"),
        (COMPLETION, {"echo": 1}, "echo"),
        (COMPLETION, {"best_of": 2}, "best_of"),
        (COMPLETION, {"suffix": "x"}, "suffix"),
        (COMPLETION, {"repetition_penalty": 0}, "repetition_penalty"),
        (COMPLETION, {"repetition_penalty": 101}, "repetition_penalty"),
        (COMPLETION, {"logit_bias": {"one": 5}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {"-1": 5}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {"99999999999": 5}}, "logit_bias"),
        (COMPLETION, {"logit_bias": {"1": 101}}, "logit_bias[1]"),
        (COMPLETION, {"logit_bias": [1]}, "logit_bias"),
        (COMPLETION, {"logit_bias": {str(token): 1 for token in range(4097)}}, "logit_bias"),
        (COMPLETION, {"allowed_token_ids": []}, "allowed_token_ids"),
        (COMPLETION, {"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        (COMPLETION, {"bad_words": [""]}, "bad_words[0]"),
        (COMPLETION, {"bad_words": "word"}, "bad_words"),
        (COMPLETION, {"bad_words": ["a"] * 1025}, "bad_words"),
        (COMPLETION, {"min_tokens": -1}, "min_tokens"),
        (COMPLETION, {"stop_token_ids": [1.5]}, "stop_token_ids[0]"),
        (COMPLETION, {"stop_token_ids": [1] * 4097}, "stop_token_ids"),
        (COMPLETION, {"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
        (COMPLETION, {"skip_special_tokens": 0}, "skip_special_tokens"),
        (COMPLETION, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (COMPLETION, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (COMPLETION, {"truncation_side": "up"}, "truncation_side"),
        (COMPLETION, {"prompt_logprobs": 21}, "prompt_logprobs"),
        (COMPLETION, {"priority": 2**31}, "priority"),
        (COMPLETION, {"cache_salt": ""}, "cache_salt"),
        (COMPLETION, {"cache_salt": "x" * 257}, "cache_salt"),
        (COMPLETION, {"max_completion_tokens": 5}, "max_completion_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        (CHAT, {"logprobs": 1}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"echo": True}, "echo"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {"response_format": {"type": "structural_tag"}}, "response_format.type"),
        (CHAT, {"prompt": "x"}, "prompt"),
    ],
)
def test_a_refusal_names_the_field(base: dict[str, Any], fields: dict[str, Any], field: str) -> None:
    with refusal_of(field, match=re.escape(field)):
        parsed(base | fields)


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(missing: str) -> None:
    with refusal_of(missing):
        parsed({name: value for name, value in COMPLETION.items() if name != missing})


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"model": "\xff"}', b'{"temperature": NaN}', b"[" * 100_000, b'{"model": "\\ud800"}', b"[]", b"1"],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError, match="body"):
        parse(CompletionRequest, body, RequestBounds())
