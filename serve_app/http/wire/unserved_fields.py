"""Fields that clients of OpenAI and vLLM send and that change nothing here.

Inert ones are accepted with any value of their type: they tell a hosted service who asks, what to keep or how to bill.
The others ask for a feature that is not served: the values that leave it off are accepted, any other is refused by
name, for an answer without the feature would be a wrong one.
"""

from typing import Annotated, Any, Literal

from serve_app.http.wire.field_types import Flag, RequestPart, unserved


class UnservedFields(RequestPart):
    """Of both endpoints."""

    user: str | None = None
    session_id: str | None = None
    truncation_side: Literal["left", "right"] | None = None  # of a truncation that can only be off

    add_special_tokens: Annotated[Any, unserved()] = None
    allowed_token_ids: Annotated[Any, unserved()] = None
    bad_words: Annotated[Any, unserved([])] = None
    cache_salt: Annotated[Any, unserved()] = None
    ec_transfer_params: Annotated[Any, unserved()] = None
    echo: Annotated[Any, unserved(False)] = None
    include_stop_str_in_output: Annotated[Any, unserved(False)] = None
    kv_transfer_params: Annotated[Any, unserved()] = None
    length_penalty: Annotated[Any, unserved(1)] = None
    logit_bias: Annotated[Any, unserved({})] = None
    logprob_token_ids: Annotated[Any, unserved()] = None
    min_tokens: Annotated[Any, unserved(0)] = None
    priority: Annotated[Any, unserved(0)] = None
    prompt_logprobs: Annotated[Any, unserved()] = None
    repetition_detection: Annotated[Any, unserved()] = None
    repetition_penalty: Annotated[Any, unserved(1)] = None
    response_format: Annotated[Any, unserved({"type": "text"})] = None
    return_mm_kwargs: Annotated[Any, unserved(True)] = None
    return_token_ids: Annotated[Any, unserved(False)] = None
    return_token_offsets: Annotated[Any, unserved(False)] = None
    return_tokens_as_token_ids: Annotated[Any, unserved(False)] = None
    routed_experts_prompt_start: Annotated[Any, unserved(0)] = None
    skip_special_tokens: Annotated[Any, unserved(True)] = None
    spaces_between_special_tokens: Annotated[Any, unserved(True)] = None
    stop_token_ids: Annotated[Any, unserved([])] = None
    stream_interval: Annotated[Any, unserved(1)] = None
    structured_outputs: Annotated[Any, unserved()] = None
    thinking_token_budget: Annotated[Any, unserved(-1)] = None
    truncate_prompt_tokens: Annotated[Any, unserved()] = None
    use_beam_search: Annotated[Any, unserved(False)] = None
    vllm_xargs: Annotated[Any, unserved({})] = None
    watermarking: Annotated[Any, unserved(False)] = None


class UnservedCompletionFields(UnservedFields):
    """Of completions."""

    add_special_tokens: Annotated[Any, unserved(True)] = None
    best_of: Annotated[Any, unserved(1)] = None
    logprobs: Annotated[Any, unserved()] = None
    prompt_embeds: Annotated[Any, unserved()] = None
    suffix: Annotated[Any, unserved("")] = None


class UnservedChatFields(UnservedFields):
    """Of chat completions."""

    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: Flag | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    add_generation_prompt: Annotated[Any, unserved(True)] = None
    add_special_tokens: Annotated[Any, unserved(False)] = None
    audio: Annotated[Any, unserved()] = None
    chat_template: Annotated[Any, unserved()] = None
    chat_template_kwargs: Annotated[Any, unserved({})] = None
    continue_final_message: Annotated[Any, unserved(False)] = None
    documents: Annotated[Any, unserved([])] = None
    function_call: Annotated[Any, unserved("none")] = None
    functions: Annotated[Any, unserved([])] = None
    include_reasoning: Annotated[Any, unserved(True)] = None
    logprobs: Annotated[Any, unserved(False)] = None
    media_io_kwargs: Annotated[Any, unserved({})] = None
    mm_processor_kwargs: Annotated[Any, unserved({})] = None
    modalities: Annotated[Any, unserved(["text"])] = None
    moderation: Annotated[Any, unserved()] = None
    parallel_tool_calls: Annotated[Any, unserved(True, False)] = None
    prediction: Annotated[Any, unserved()] = None
    reasoning_effort: Annotated[Any, unserved("none")] = None
    return_prompt_text: Annotated[Any, unserved(False)] = None
    tool_choice: Annotated[Any, unserved("none", "auto")] = None
    tools: Annotated[Any, unserved([])] = None
    top_logprobs: Annotated[Any, unserved(0)] = None
    web_search_options: Annotated[Any, unserved()] = None


class UnservedMessageFields(RequestPart):
    """Of a chat's message; clients send an answer's message back as it was."""

    name: str | None = None

    annotations: Annotated[Any, unserved([])] = None
    audio: Annotated[Any, unserved()] = None
    function_call: Annotated[Any, unserved()] = None
    reasoning: Annotated[Any, unserved("")] = None
    reasoning_content: Annotated[Any, unserved("")] = None
    refusal: Annotated[Any, unserved()] = None
    tool_calls: Annotated[Any, unserved([])] = None
