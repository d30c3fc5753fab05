"""Wire format of POST /v1/responses: input items, parameters, output items, responses and stream events."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, RootModel, Tag

from serve_app.api.fields import (
    Count,
    Flag,
    Integer,
    Number,
    RequestPart,
    Seed,
    StructuredOutputs,
    TextFormat,
    UnservedFields,
    bounded,
    is_text,
    member,
    unserved,
)
from serve_app.api.request_schemas import (
    MAX_EFFORT_CHARS,
    MAX_MODEL_CHARS,
    CallId,
    FunctionName,
    NamedFunction,
    SamplingFields,
    SpeculationOptions,
    StopStrings,
)


class ItemPart(RequestPart):
    """Text part of an input item, from a user or an earlier answer."""

    type: Literal["input_text", "output_text", "text", "reasoning_text"]
    text: str

    annotations: Annotated[Any, unserved([])] = None
    logprobs: Annotated[Any, unserved([])] = None
    parsed: Any = None  # ignored; OpenAI's client sends back its parsed value
    prompt_cache_breakpoint: dict[str, Any] | None = None  # accepted and ignored


ItemText = Annotated[
    tuple[ItemPart, ...],
    Field(fail_fast=True),
    bounded(lambda most: most.parts),
    BeforeValidator(
        lambda value: [{"type": "input_text", "text": value}] if is_text(value) else value,
        json_schema_input_type=str | list[ItemPart],
    ),
]


class Item(RequestPart):
    """Ignored fields common to all items."""

    id: CallId | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class MessageInput(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: ItemText

    phase: Literal["commentary", "final_answer"] | None = None


class CallInput(Item):
    """Tool call from an earlier answer."""

    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str = "{}"

    namespace: Annotated[Any, unserved()] = None
    caller: Annotated[Any, unserved({"type": "direct"})] = None


class CallOutputInput(Item):
    """Result of a tool call."""

    type: Literal["function_call_output"]
    call_id: CallId
    output: ItemText

    caller: Annotated[Any, unserved({"type": "direct"})] = None


class ReasoningInput(Item):
    type: Literal["reasoning"]
    content: ItemText = ()

    summary: Annotated[Any, unserved([])] = None
    encrypted_content: Annotated[Any, unserved()] = None


def _kind(value: Any) -> str:
    return member(str(value.get("type") or "message") if isinstance(value, dict) else "message")


InputItem = Annotated[
    Annotated[MessageInput, Tag(member("message"))]
    | Annotated[CallInput, Tag(member("function_call"))]
    | Annotated[CallOutputInput, Tag(member("function_call_output"))]
    | Annotated[ReasoningInput, Tag(member("reasoning"))],
    Discriminator(
        _kind,
        custom_error_type="item_type",
        custom_error_message="unsupported item type, expected a message, function_call, function_call_output"
        " or reasoning",
    ),
]


class ResponsesTool(RequestPart):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None  # null means false

    defer_loading: Annotated[Any, unserved(False)] = None
    allowed_callers: Annotated[Any, unserved(["direct"])] = None
    output_schema: Annotated[Any, unserved()] = None


class ResponsesNamedTool(NamedFunction):
    type: Literal["function"]


class ReasoningOptions(RequestPart):
    effort: Annotated[str, Field(max_length=MAX_EFFORT_CHARS)] | None = None

    summary: str | None = None  # accepted and ignored: reasoning is sent in full
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


class TextOptions(RequestPart):
    format: TextFormat = TextFormat(type="text")

    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(RequestPart):
    include_usage: Flag | None = None  # ignored; the final event always reports usage

    include_obfuscation: Annotated[Any, unserved(False)] = None


class ResponsesRequest(SamplingFields, UnservedFields):
    """Body of POST /v1/responses. Fields shared with chats have the same meaning."""

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)]
    input: Annotated[
        tuple[InputItem, ...],
        Field(fail_fast=True),
        bounded(lambda most: most.messages, least=1),
        BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if is_text(value) else value,
            json_schema_input_type=str | list[InputItem],
        ),
    ]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    stream: Flag = False
    text: TextOptions = TextOptions()
    tools: Annotated[tuple[ResponsesTool, ...], Field(fail_fast=True), bounded(lambda most: most.tools)] = ()
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag(member("word"))]
        | Annotated[ResponsesNamedTool, Tag(member("named"))],
        Discriminator(lambda value: member("word" if is_text(value) else "named")),
    ] = "auto"
    parallel_tool_calls: Flag = True
    reasoning: ReasoningOptions = ReasoningOptions()
    metadata: Annotated[dict[str, str], bounded(lambda most: most.labels)] = Field({})  # returned in the response

    # Extensions, as in chats.
    seed: Seed | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    stop: StopStrings = ()
    ignore_eos: Flag | None = None
    structured_outputs: StructuredOutputs | None = None
    include_reasoning: Flag | None = None
    request_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: SpeculationOptions | None = None

    # Accepted and ignored.
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: Flag | None = None  # ignored; responses always report store=false
    stream_options: ResponsesStreamOptions | None = None

    background: Annotated[Any, unserved(False)] = None
    context_management: Annotated[Any, unserved([])] = None
    conversation: Annotated[Any, unserved()] = None
    enable_response_messages: Annotated[Any, unserved(False)] = None
    include: Annotated[Any, unserved([], ["reasoning.encrypted_content"])] = None  # reasoning is not encrypted
    max_tool_calls: Annotated[Any, unserved()] = None
    media_io_kwargs: Annotated[Any, unserved({})] = None
    mm_processor_kwargs: Annotated[Any, unserved({})] = None
    moderation: Annotated[Any, unserved()] = None
    previous_input_messages: Annotated[Any, unserved()] = None
    previous_response_id: Annotated[Any, unserved()] = None
    prompt: Annotated[Any, unserved()] = None
    prompt_logprobs: Annotated[Any, unserved()] = None
    top_logprobs: Annotated[Any, unserved(0)] = None
    truncation: Annotated[Any, unserved("disabled")] = None


Status = Literal["in_progress", "completed", "incomplete"]


class _Output(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class OutputText(_Output):
    type: Literal["output_text"] = "output_text"
    text: str = ""
    annotations: tuple[()] = ()
    logprobs: tuple[()] = ()


class ReasoningText(_Output):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class MessageItem(_Output):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: Status
    content: tuple[OutputText, ...] = ()


class ReasoningItem(_Output):
    id: str
    type: Literal["reasoning"] = "reasoning"
    status: Status
    summary: tuple[()] = ()
    content: tuple[ReasoningText, ...] = ()


class CallItem(_Output):
    id: str
    type: Literal["function_call"] = "function_call"
    status: Status
    call_id: str
    name: str
    arguments: str = ""


OutputItem = MessageItem | ReasoningItem | CallItem


class InputTokensDetails(_Output):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(_Output):
    reasoning_tokens: int


class ResponsesUsage(_Output):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(_Output):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponseFault(_Output):
    code: str
    message: str


class ResponseReply(_Output):
    """A response, finished or in progress, with the request's parameters."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    error: ResponseFault | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: tuple[OutputItem, ...] = ()
    usage: ResponsesUsage | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: tuple[dict[str, Any], ...]
    top_p: float
    background: Literal[False] = False
    previous_response_id: None = None
    store: Literal[False] = False
    truncation: Literal["disabled"] = "disabled"
    user: str | None = None


class _ResponsesEvent(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence_number: int


class ResponseEvent(_ResponsesEvent):
    """Event with the response so far; the last three types end the stream."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseReply


class _OutputEvent(_ResponsesEvent):
    output_index: int


class ItemEvent(_OutputEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class ArgumentsDelta(_OutputEvent):
    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    delta: str


class ArgumentsDone(_OutputEvent):
    type: Literal["response.function_call_arguments.done"]
    item_id: str
    name: str
    arguments: str


class _PartEvent(_OutputEvent):
    item_id: str
    content_index: Literal[0]


class PartEvent(_PartEvent):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText


class TextDelta(_PartEvent):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: tuple[()]


class TextDone(_PartEvent):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: tuple[()]


class ReasoningDelta(_PartEvent):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningDone(_PartEvent):
    type: Literal["response.reasoning_text.done"]
    text: str


class ResponseStreamEvent(
    RootModel[
        Annotated[
            ResponseEvent
            | ItemEvent
            | PartEvent
            | TextDelta
            | TextDone
            | ReasoningDelta
            | ReasoningDone
            | ArgumentsDelta
            | ArgumentsDone,
            Field(discriminator="type"),
        ]
    ]
):
    """One event of the stream; its SSE event name is its `type`."""
