"""Tests unsupported fields of OpenAI's and vLLM's clients: accepted values, refused values, and completeness."""

import re
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionFunctionToolParam,
    ChatCompletionMessageFunctionToolCallParam,
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import (
    completion_create_params as chat_params,
)
from openai.types.chat.chat_completion_message_function_tool_call_param import Function as CalledFunctionParam
from openai.types.shared_params import FunctionDefinition
from pydantic import BaseModel

from cluster.errors import RequestError
from serve_app.api.request_schemas import (
    CalledFunction,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    Function,
    NamedTool,
    SamplingFields,
    StreamOptions,
    TextPart,
    Tool,
    ToolCall,
)
from tests.unit.serve_app.api.sample_requests import CHAT, COMPLETION, parsed, refusal_of

API_PAGE = Path(__file__).parents[4] / "docs" / "api.md"

OF_BOTH = {  # vLLM fields: values without effect, and a value with one
    "ec_transfer_params": ([None], {}),
    "kv_transfer_params": ([None], {"a": 1}),
    "length_penalty": ([1.0, 1], 0.9),
    "logprob_token_ids": ([None], [1]),
    "repetition_detection": ([None], {"min_count": 2}),
    "return_mm_kwargs": ([True], False),
    "return_token_ids": ([None, False], True),
    "return_token_offsets": ([None, False], True),
    "return_tokens_as_token_ids": ([None, False], True),
    "routed_experts_prompt_start": ([0], 1),
    "session_id": ([None, "conversation 7"], 7),
    "stream_interval": ([None, 1], 2),
    "thinking_token_budget": ([None, -1], 5),
    "use_beam_search": ([False], True),
    "user": ([None, "me"], 1),
    "vllm_xargs": ([None, {}], {"a": 1}),
    "watermarking": ([None, False], True),
}
OF_COMPLETIONS = {
    "add_special_tokens": ([True], False),
    "best_of": ([None, 1], 2),
    "prompt_embeds": ([None], "AAAA"),
    "suffix": ([None, ""], "x"),
}
OF_CHAT = {
    "add_special_tokens": ([False], True),
    "audio": ([None], {"voice": "x"}),
    "chat_template": ([None], "{{ messages }}"),
    "documents": ([None, []], [{"text": "x"}]),
    "echo": ([None, False], True),
    "function_call": ([None, "none"], "auto"),
    "functions": ([None, []], [{"name": "f"}]),
    "media_io_kwargs": ([None, {}], {"image": {}}),
    "mm_processor_kwargs": ([None, {}], {"a": 1}),
    "modalities": ([None, ["text"]], ["audio"]),
    "moderation": ([None], {"model": "x"}),
    "prediction": ([None], {"type": "content", "content": "x"}),
    "prompt_cache_key": ([None, "k"], 1),
    "prompt_cache_options": ([None, {"mode": "explicit"}], "explicit"),
    "prompt_cache_retention": ([None, "24h"], 24),
    "return_prompt_text": ([None, False], True),
    "safety_identifier": ([None, "someone"], 1),
    "service_tier": ([None, "auto", "default", "flex", "priority"], 1),
    "store": ([None, True, False], "yes"),
    "verbosity": ([None, "low", "medium", "high"], "loud"),
    "web_search_options": ([None], {}),
}
EACH = [
    *[
        pytest.param(COMPLETION, name, *values, id=f"text-{name}")
        for name, values in (OF_BOTH | OF_COMPLETIONS).items()
    ],
    *[pytest.param(CHAT, name, *values, id=f"chat-{name}") for name, values in (OF_BOTH | OF_CHAT).items()],
]


@pytest.mark.parametrize(("base", "name", "neutral", "asking"), EACH)
def test_neutral_values_change_nothing(base: dict[str, Any], name: str, neutral: list[Any], asking: Any) -> None:
    plain = parsed(base).model_dump(exclude={name})
    for value in neutral:
        assert parsed(base | {name: value}).model_dump(exclude={name}) == plain


@pytest.mark.parametrize(("base", "name", "neutral", "asking"), EACH)
def test_other_values_are_refused_with_the_field_name(
    base: dict[str, Any], name: str, neutral: list[Any], asking: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(base | {name: asking})
    assert (caught.value.field or "").split(".")[0] == name


@pytest.mark.parametrize("neutral", [True, 0, "1", [1]])
def test_a_neutral_value_of_another_type_is_refused(neutral: object) -> None:
    with pytest.raises(RequestError):
        parsed(COMPLETION | {"length_penalty": neutral})


def fields_of(params: object) -> set[str]:
    """Returns the fields of a TypedDict or of a union of TypedDicts."""
    return set().union(*(get_type_hints(one) for one in get_args(params) or (params,)))


@pytest.mark.parametrize(
    ("schema", "params"),
    [
        (CompletionRequest, text_params.CompletionCreateParams),
        (ChatRequest, chat_params.CompletionCreateParams),
        (StreamOptions, ChatCompletionStreamOptionsParam),
        (ChatMessage, ChatCompletionSystemMessageParam),
        (ChatMessage, ChatCompletionUserMessageParam),
        (ChatMessage, ChatCompletionDeveloperMessageParam),
        (ChatMessage, ChatCompletionAssistantMessageParam),
        (ChatMessage, ChatCompletionToolMessageParam),
        (Tool, ChatCompletionFunctionToolParam),
        (Function, FunctionDefinition),
        (ToolCall, ChatCompletionMessageFunctionToolCallParam),
        (CalledFunction, CalledFunctionParam),
        (NamedTool, ChatCompletionNamedToolChoiceParam),
        (TextPart, ChatCompletionContentPartTextParam),
    ],
)
def test_every_field_of_the_openai_client_is_known(schema: type[BaseModel], params: object) -> None:
    sent = fields_of(params)
    assert len(sent) > 1
    assert sent - schema.model_fields.keys() == set(), "serve it, or say which of its values ask for nothing"


def test_the_tables_cover_every_unserved_field() -> None:
    served = {
        *(
            "model",
            "prompt",
            "messages",
            "max_tokens",
            "max_completion_tokens",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
        ),
        *("frequency_penalty", "presence_penalty", "seed", "stop", "n", "stream", "stream_options", "request_id"),
        *("ignore_eos", "metadata", "speculation", "tools", "tool_choice", "parallel_tool_calls"),
        *("include_reasoning", "reasoning_effort", "chat_template_kwargs", "add_generation_prompt"),
        *("continue_final_message", "response_format", "structured_outputs", "logprobs", "top_logprobs"),
        *SamplingFields.model_fields,
    }
    assert CompletionRequest.model_fields.keys() - served - {"echo"} == (OF_BOTH | OF_COMPLETIONS).keys()
    assert ChatRequest.model_fields.keys() - served == (OF_BOTH | OF_CHAT).keys()


def test_the_api_documentation_names_every_field() -> None:
    named = set(re.findall(r"`(\w+)`", API_PAGE.read_text()))
    for schema in (CompletionRequest, ChatRequest, StreamOptions):
        assert schema.model_fields.keys() - named == set()


def test_fields_of_load_generators_are_accepted() -> None:
    bench = {"repetition_penalty": 1.0, "logprobs": None, "max_tokens": 8, "ignore_eos": True}
    asked = parsed(COMPLETION | bench | {"stream": True, "stream_options": {"include_usage": True}})
    assert (asked.ignore_eos, asked.max_tokens) == (True, 8)
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = parsed(CHAT | {"stream": True, "stream_options": options, "stop": None, "max_completion_tokens": 8})
    assert asked.stream_options.continuous_usage_stats


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\n", "é"])
def test_request_ids_are_restricted(name: str) -> None:
    assert parsed(COMPLETION | {"request_id": "job-7.a:b_c"}).request_id == "job-7.a:b_c"
    with refusal_of("request_id"):
        parsed(COMPLETION | {"request_id": name})
