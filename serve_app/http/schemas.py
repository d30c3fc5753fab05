"""The wire format: OpenAI's completions and chat completions, with this project's extensions.

Requests are strict: an unknown field, a wrong type or an OpenAI feature that is not served is refused by name, never
ignored. `null` means "not given", as in OpenAI's API. Long because the format is: it reads best beside itself.
"""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from protos.draft_tree import MAX_BLOCK_TOKENS

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 256

Integer = Annotated[int, Field(strict=True)]  # neither 1.0 nor "1" nor true
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
TokenIds = Annotated[tuple[Annotated[Integer, Field(ge=0)], ...], Field(min_length=1)]
FinishReason = Literal["stop", "length"]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _RequestPart(_Body):
    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        """Drops known fields that are null, so that they take their defaults."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None or name not in cls.model_fields}


def _unserved(*neutral: object) -> AfterValidator:
    """A field of OpenAI's API that is not served: only null and the given values, which ask for nothing, pass."""

    def check(value: object) -> object:
        if not any(type(value) is type(other) and value == other for other in neutral):
            raise PydanticCustomError("unserved", "this is not supported by this server; leave the field out")
        return value

    return AfterValidator(check)


def _as_list(is_single: Callable[[Any], bool]) -> BeforeValidator:
    """A field that takes one item or a list of them is always a list inside."""
    return BeforeValidator(lambda value: [value] if is_single(value) else value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_prompt(value: Any) -> bool:
    token_ids = isinstance(value, list) and value and all(type(item) is int for item in value)
    return _is_text(value) or bool(token_ids)


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Prompt = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag("text")] | Annotated[TokenIds, Tag("token_ids")],
    Discriminator(lambda value: "text" if _is_text(value) else "token_ids"),
]


class StreamOptions(_RequestPart):
    include_usage: Flag = False


class SpeculationOptions(_RequestPart):
    """Extension: how this request is speculated."""

    max_draft_tokens: Annotated[Integer, Field(ge=0, le=MAX_BLOCK_TOKENS)] | None = None  # 0: plain decoding
    acceptance: Literal["ratio", "coupled"] | None = None
    trace: Flag = False  # streamed chunks tell drafted tokens from the target's own


class GenerationRequest(_RequestPart):
    """What both endpoints take."""

    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]  # None: the rest of the context

    model: str
    max_tokens: Annotated[Integer, Field(ge=1)] | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] = 0  # extension; 0 and -1: all tokens
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0  # extension
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    seed: Integer | None = None
    stop: Annotated[tuple[StopString, ...], Field(max_length=MAX_STOPS), _as_list(_is_text)] = ()
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    user: str | None = None  # accepted and not used
    ignore_eos: Flag = False  # extension: go on to max_tokens
    speculation: SpeculationOptions = SpeculationOptions()  # extension

    logit_bias: Annotated[Any, _unserved({})] = None

    @property
    def token_limits(self) -> dict[str, int]:
        """The limits on generated tokens that the client gave, by field."""
        return {"max_tokens": self.max_tokens} if self.max_tokens is not None else {}

    @field_validator("stream_options")
    @classmethod
    def _only_in_streams(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if info.data.get("stream") is False:
            raise PydanticCustomError("not_a_stream", "this is only allowed when stream is true")
        return value

    @field_validator("speculation")
    @classmethod
    def _trace_only_in_streams(cls, value: SpeculationOptions, info: ValidationInfo) -> SpeculationOptions:
        if value.trace and info.data.get("stream") is False:
            raise PydanticCustomError("not_a_stream", "trace is only allowed when stream is true")
        return value


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Annotated[tuple[Prompt, ...], Field(min_length=1), _as_list(_is_prompt)]

    best_of: Annotated[Any, _unserved(1)] = None
    echo: Annotated[Any, _unserved(False)] = None
    logprobs: Annotated[Any, _unserved()] = None
    suffix: Annotated[Any, _unserved("")] = None


class TextPart(_Body):
    type: Literal["text"]
    text: str


class ChatMessage(_RequestPart):
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        tuple[TextPart, ...],
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if _is_text(value) else value),
    ]
    name: str | None = None  # accepted and not used

    # clients send a response's message back as it was
    annotations: Annotated[Any, _unserved([])] = None
    audio: Annotated[Any, _unserved()] = None
    function_call: Annotated[Any, _unserved()] = None
    refusal: Annotated[Any, _unserved()] = None
    tool_calls: Annotated[Any, _unserved([])] = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    default_max_tokens: ClassVar[int | None] = None

    messages: Annotated[tuple[ChatMessage, ...], Field(min_length=1)]
    max_completion_tokens: Annotated[Integer, Field(ge=1)] | None = None

    audio: Annotated[Any, _unserved()] = None
    function_call: Annotated[Any, _unserved("none")] = None
    functions: Annotated[Any, _unserved([])] = None
    logprobs: Annotated[Any, _unserved(False)] = None
    metadata: Annotated[Any, _unserved({})] = None
    modalities: Annotated[Any, _unserved(["text"])] = None
    parallel_tool_calls: Annotated[Any, _unserved(True, False)] = None
    prediction: Annotated[Any, _unserved()] = None
    reasoning_effort: Annotated[Any, _unserved("none")] = None
    response_format: Annotated[Any, _unserved({"type": "text"})] = None
    service_tier: Annotated[Any, _unserved("auto", "default")] = None
    store: Annotated[Any, _unserved(False)] = None
    tool_choice: Annotated[Any, _unserved("none", "auto")] = None
    tools: Annotated[Any, _unserved([])] = None
    top_logprobs: Annotated[Any, _unserved(0)] = None

    @property
    def token_limits(self) -> dict[str, int]:
        newer = self.max_completion_tokens
        return super().token_limits | ({"max_completion_tokens": newer} if newer is not None else {})


# ---------------------------------------------------------------- responses


class CompletionTokensDetails(_Body):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(_Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: CompletionTokensDetails


class Trace(_Body):
    """Extension, on request: what the chunk's text came from."""

    tokens: int = 0
    accepted: int = 0
    pieces: tuple[tuple[str, bool], ...] = ()  # text, whether it was drafted


class _Reply(_Body):
    """The head that every whole answer and every chunk has."""

    id: str
    created: int
    model: str
    system_fingerprint: None = None


class CompletionChoice(_Body):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None


class Completion(_Reply):
    object: Literal["text_completion"] = "text_completion"
    choices: tuple[CompletionChoice, ...]
    usage: Usage | None = None


class CompletionChunk(Completion):
    slipstream: Trace = Trace()


class AnswerMessage(_Body):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(_Body):
    index: int
    message: AnswerMessage
    logprobs: None = None
    finish_reason: FinishReason


class ChatCompletion(_Reply):
    object: Literal["chat.completion"] = "chat.completion"
    choices: tuple[ChatChoice, ...]
    usage: Usage


class ChatChunkChoice(_Body):
    index: int
    delta: dict[Literal["role", "content"], str]  # holds what is new, and nothing else
    logprobs: None = None
    finish_reason: FinishReason | None


class ChatChunk(_Reply):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None
    slipstream: Trace = Trace()


class ModelCard(_Body):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "slipstream"


class ModelList(_Body):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


class HealthReport(_Body):
    """GET /health."""

    status: Literal["ok", "unavailable"]
    audit: Literal["off", "ok", "differs"]


class ErrorDetail(_Body):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Body):
    error: ErrorDetail
