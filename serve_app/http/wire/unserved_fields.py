"""Fields that clients of OpenAI and vLLM send and that change nothing here.

Inert ones are accepted with any value of their type: they tell a hosted service who asks, what to keep or how to bill.
The others ask for a feature that is not served: the values that leave it off are accepted, any other is refused by
name, for an answer without the feature would be a wrong one.
"""

from typing import Annotated, Any, Literal

from serve_app.http.wire.field_types import Flag, RequestPart, bounded, unserved


class UnservedFields(RequestPart):
    """Of both endpoints."""

    user: str | None = None
    session_id: str | None = None

    add_special_tokens: Annotated[Any, unserved()] = None
    ec_transfer_params: Annotated[Any, unserved()] = None
    kv_transfer_params: Annotated[Any, unserved()] = None
    length_penalty: Annotated[Any, unserved(1)] = None
    logprob_token_ids: Annotated[Any, unserved()] = None
    repetition_detection: Annotated[Any, unserved()] = None
    return_mm_kwargs: Annotated[Any, unserved(True)] = None
    return_token_ids: Annotated[Any, unserved(False)] = None
    return_token_offsets: Annotated[Any, unserved(False)] = None
    return_tokens_as_token_ids: Annotated[Any, unserved(False)] = None
    routed_experts_prompt_start: Annotated[Any, unserved(0)] = None
    spaces_between_special_tokens: Annotated[Any, unserved(True)] = None
    stream_interval: Annotated[Any, unserved(1)] = None
    thinking_token_budget: Annotated[Any, unserved(-1)] = None
    use_beam_search: Annotated[Any, unserved(False)] = None
    vllm_xargs: Annotated[Any, unserved({})] = None
    watermarking: Annotated[Any, unserved(False)] = None


class UnservedCompletionFields(UnservedFields):
    """Of completions."""

    add_special_tokens: Annotated[Any, unserved(True)] = None
    best_of: Annotated[Any, unserved(1)] = None
    prompt_embeds: Annotated[Any, unserved()] = None
    suffix: Annotated[Any, unserved("")] = None


class UnservedChatFields(UnservedFields):
    """Of chat completions."""

    metadata: Annotated[dict[str, str] | None, bounded(lambda most: most.labels)] = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: Flag | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    add_special_tokens: Annotated[Any, unserved(False)] = None
    audio: Annotated[Any, unserved()] = None
    chat_template: Annotated[Any, unserved()] = None
    documents: Annotated[Any, unserved([])] = None
    echo: Annotated[Any, unserved(False)] = None
    function_call: Annotated[Any, unserved("none")] = None
    functions: Annotated[Any, unserved([])] = None
    media_io_kwargs: Annotated[Any, unserved({})] = None
    mm_processor_kwargs: Annotated[Any, unserved({})] = None
    modalities: Annotated[Any, unserved(["text"])] = None
    moderation: Annotated[Any, unserved()] = None
    prediction: Annotated[Any, unserved()] = None
    return_prompt_text: Annotated[Any, unserved(False)] = None
    web_search_options: Annotated[Any, unserved()] = None


class UnservedMessageFields(RequestPart):
    """Of a chat's message; clients send an answer's message back as it was."""

    name: str | None = None
    parsed: Any = None  # OpenAI's client sends its own reading back

    annotations: Annotated[Any, unserved([])] = None
    audio: Annotated[Any, unserved()] = None
    function_call: Annotated[Any, unserved()] = None
    refusal: Annotated[Any, unserved()] = None
