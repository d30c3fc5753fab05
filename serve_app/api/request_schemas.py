"""Wire format of requests: completions, chat completions, /tokenize and /detokenize, with this project's extensions.

Requests are strict: unknown fields, wrong types and unsupported features raise errors that name the field. `null` means
"not given", as in OpenAI's API.
"""

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from protos.draft_tree import MAX_BLOCK_TOKENS
from protos.from_pb import MAX_BIAS, MAX_SALT_CHARS, REPETITION_PENALTIES
from protos.messages import MAX_TOP
from serve_app.api.fields import (
    AnswerFormat,
    Count,
    Flag,
    Integer,
    Number,
    RequestPart,
    ResponseFormat,
    Seed,
    StructuredOutputs,
    UnservedChatFields,
    UnservedCompletionFields,
    UnservedFields,
    UnservedMessageFields,
    as_list,
    bounded,
    is_text,
    member,
    unserved,
)

MAX_NAME_CHARS = 256
MAX_CALL_ID_CHARS = 512

FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
CallId = Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(RequestPart):
    type: Literal["text"]
    text: str

    prompt_cache_breakpoint: dict[str, Any] | None = None  # accepted and ignored


class CalledFunction(RequestPart):
    name: FunctionName
    arguments: str = "{}"  # JSON text, verbatim from the model

    parsed_arguments: Any = None  # ignored; OpenAI's client sends back its parsed value


class ToolCall(RequestPart):
    """Tool call from an earlier answer."""

    id: CallId | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    index: Integer | None = None  # ignored; clients send it back from streamed calls


class ChatMessage(UnservedMessageFields):
    role: Role
    content: Annotated[
        tuple[TextPart, ...] | None,
        Field(fail_fast=True, validate_default=True),
        bounded(lambda most: most.parts),
        BeforeValidator(
            lambda value: [{"type": "text", "text": value}] if is_text(value) else value,
            json_schema_input_type=str | list[TextPart] | None,
        ),
    ] = None
    tool_calls: Annotated[
        tuple[ToolCall, ...], Field(fail_fast=True), bounded(lambda most: most.parts)
    ] = ()  # assistant messages only
    tool_call_id: CallId | None = None  # tool messages only
    reasoning: str = ""  # vLLM extension; assistant messages only
    reasoning_content: str = ""  # alias of `reasoning`

    @field_validator("content")
    @classmethod
    def _only_assistants_omit_content(cls, value: object, info: ValidationInfo) -> object:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "missing field; add it")
        return value

    @field_validator("tool_calls", "reasoning", "reasoning_content")
    @classmethod
    def _only_of_assistants(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("not_an_assistant", "only assistant messages may have this")
        return value

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())

    @property
    def chars(self) -> int:
        """Returns the message's characters in a prompt, without text that the template adds."""
        call_chars = sum(len(call.function.name) + len(call.function.arguments) for call in self.tool_calls)
        return len(self.text) + len(self.reasoning or self.reasoning_content) + call_chars


class Function(RequestPart):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON Schema
    strict: Flag | None = None  # True: arguments must match the schema


class Tool(RequestPart):
    type: Literal["function"]
    function: Function

    @model_serializer
    def _as_sent(self) -> dict[str, Any]:
        """Serializes only the fields that were given, as chat templates expect."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True)}

    @property
    def chars(self) -> int:
        return len(json.dumps(self.model_dump(), ensure_ascii=False))


class NamedFunction(RequestPart):
    name: FunctionName


class NamedTool(RequestPart):
    """Names the one tool that the answer must call."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(member("word"))] | Annotated[NamedTool, Tag(member("named"))],
    Discriminator(lambda value: member("word" if is_text(value) else "named")),
]


MAX_CHOICES = 128
MAX_STOP_CHARS = 256
MAX_MODEL_CHARS = 512
PROMPT_VERSION = "prompt_version"  # `metadata` key of the prompt version, reported in metrics and traces
LEARN = "learn"  # `metadata` key that opts a request in to or out of learning
VERSION_PATTERN = r"[A-Za-z0-9_.:/@+-]{1,64}"
MAX_EFFORT_CHARS = 32
REQUEST_ID_PATTERN = r"^[A-Za-z0-9_.:-]{1,128}$"  # ASCII only, for use in an HTTP header

TokenIds = Annotated[
    tuple[Annotated[Integer, Field(ge=0)], ...],
    Field(fail_fast=True),
    bounded(lambda most: most.prompt_tokens, least=1),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    tuple[StopString, ...],
    Field(fail_fast=True),
    bounded(lambda most: most.stops),
    as_list(is_text, StopString | list[StopString]),
]
Prompt = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag(member("text"))] | Annotated[TokenIds, Tag(member("token_ids"))],
    Discriminator(lambda value: member("text" if is_text(value) else "token_ids")),
]


def _is_prompt(value: Any) -> bool:
    token_ids = isinstance(value, list) and value and type(value[0]) is int
    return is_text(value) or bool(token_ids)


class StreamOptions(RequestPart):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # vLLM extension; with include_usage, all chunks report usage

    include_obfuscation: Annotated[Any, unserved(False)] = None


MAX_WORD_CHARS = 256
MAX_DIGITS = 10  # maximum digits of a token id

TokenId = Annotated[Integer, Field(ge=0, lt=2**31)]
Top = Annotated[Integer, Field(ge=0, le=MAX_TOP)]
Word = Annotated[str, Field(min_length=1, max_length=MAX_WORD_CHARS)]
Bias = Annotated[Number, Field(ge=-MAX_BIAS, le=MAX_BIAS)]


def _as_ids(value: Any) -> Any:
    """Converts keys to token ids, since JSON's keys are strings."""
    if not isinstance(value, dict):
        return value
    if not all(key.isascii() and key.isdecimal() and len(key) <= MAX_DIGITS for key in value):
        raise PydanticCustomError("token_id", "a key is not a token id, expected digits only")
    return {int(key): bias for key, bias in value.items()}


class SamplingFields(RequestPart):
    """Sampling fields of completions and chats; most are vLLM extensions."""

    repetition_penalty: Annotated[Number, Field(ge=REPETITION_PENALTIES[0], le=REPETITION_PENALTIES[1])] = 1.0
    logit_bias: Annotated[
        dict[TokenId, Bias], BeforeValidator(_as_ids), bounded(lambda most: most.token_ids)  # `bounded` runs first
    ] = Field(default_factory=dict)
    bad_words: Annotated[tuple[Word, ...], Field(fail_fast=True), bounded(lambda most: most.words)] = ()
    allowed_token_ids: Annotated[
        tuple[TokenId, ...], Field(fail_fast=True), bounded(lambda most: most.allowed, least=1)
    ] = ()
    min_tokens: Annotated[Integer, Field(ge=0, lt=2**31)] = 0
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(fail_fast=True), bounded(lambda most: most.token_ids)] = ()
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    spaces_between_special_tokens: Flag = True  # False: no space between added tokens
    truncate_prompt_tokens: Annotated[Integer, Field(ge=-1, lt=2**31)] | None = None  # -1: fit the context
    truncation_side: Literal["left", "right"] = "left"
    prompt_logprobs: Top | None = None
    priority: Annotated[Integer, Field(ge=-(2**31), lt=2**31)] = 0  # lower values are served first
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    @field_validator("truncate_prompt_tokens")
    @classmethod
    def _at_least_one(cls, value: int | None) -> int | None:
        if value == 0:
            raise PydanticCustomError("no_tokens", "this is 0, expected -1 or at least 1")
        return value


class SpeculationOptions(RequestPart):
    """Extension: speculation options of one request."""

    draft_tokens: Annotated[Integer, Field(ge=0, le=MAX_BLOCK_TOKENS)] | None = None  # 0 turns speculation off
    acceptance: Literal["rejection", "coupled"] | None = None
    trace: Flag = False  # mark drafted tokens in streamed chunks
    rejected: Flag = False  # also send rejected draft tokens in chunks

    @model_validator(mode="before")
    @classmethod
    def _earlier_names(cls, data: Any) -> Any:
        """Accepts names from earlier development versions: option `max_draft_tokens` and rule `ratio`."""
        if not isinstance(data, dict):
            return data
        renamed = {EARLIER_OPTIONS.get(name, name): value for name, value in data.items()}
        return {**renamed, **({"acceptance": "rejection"} if data.get("acceptance") == "ratio" else {})}


EARLIER_OPTIONS: Mapping[str, str] = MappingProxyType({"max_draft_tokens": "draft_tokens"})


class GenerationRequest(SamplingFields, UnservedFields):
    """Fields common to completions and chats."""

    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]  # None: the remaining context

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)]
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] = 0  # vLLM extension; 0 or -1: no limit
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0  # vLLM extension
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    seed: Seed | None = None
    stop: StopStrings = ()
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    request_id: Annotated[str, Field(pattern=REQUEST_ID_PATTERN)] | None = None  # vLLM extension; sets the response id
    ignore_eos: Flag = False  # vLLM extension; generate until max_tokens
    metadata: Annotated[dict[str, str] | None, bounded(lambda most: most.labels)] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None  # vLLM extension
    speculation: SpeculationOptions = SpeculationOptions()  # own extension

    @property
    def prompt_version(self) -> str | None:
        """Returns the prompt version from `metadata`."""
        return (self.metadata or {}).get(PROMPT_VERSION)

    @property
    def learn(self) -> str | None:
        """Returns the client's learning consent from `metadata`: "true", "false", or None if not given."""
        return (self.metadata or {}).get(LEARN)

    @property
    def answer_format(self) -> AnswerFormat | None:
        """Returns `response_format`, which only chats and completions have."""
        return self.response_format

    @property
    def prompt_count(self) -> int:
        raise NotImplementedError

    @property
    def prompt_chars(self) -> int:
        """Returns the number of characters in the longest text prompt."""
        raise NotImplementedError

    @property
    def token_limits(self) -> dict[str, int]:
        """Returns the request's limits on generated tokens, by field."""
        return {"max_tokens": self.max_tokens} if self.max_tokens is not None else {}

    @field_validator("metadata")
    @classmethod
    def _version_is_short(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        version = (value or {}).get(PROMPT_VERSION)
        if version is not None and re.fullmatch(VERSION_PATTERN, version) is None:
            rule = "prompt_version must be 1 to 64 characters from A-Za-z0-9_.:/@+-"
            raise PydanticCustomError("prompt_version", rule)
        if (value or {}).get(LEARN, "true") not in ("true", "false"):
            raise PydanticCustomError("learn", 'learn must be "true" or "false"')
        return value

    @property
    def top_of_tokens(self) -> int | None:
        """Returns the number of alternatives to score per generated token, or None for no scores."""
        raise NotImplementedError

    @property
    def is_echoed(self) -> bool:
        """Returns whether the answer begins with the prompt."""
        return False

    @property
    def top_of_prompt(self) -> int | None:
        """Returns the number of alternatives to score per prompt token, or None for no scores."""
        echoed = self.top_of_tokens if self.is_echoed else None
        tops = [top for top in (self.prompt_logprobs, echoed) if top is not None]
        return max(tops, default=None)

    @property
    def is_scored(self) -> bool:
        """Returns whether the answer has log probabilities."""
        return self.top_of_tokens is not None or self.prompt_logprobs is not None

    @field_validator("stream_options")
    @classmethod
    def _only_in_streams(cls, value: StreamOptions, info: ValidationInfo) -> StreamOptions:
        if info.data.get("stream") is False:
            raise PydanticCustomError("not_a_stream", "this is only allowed when stream is true")
        return value

    @field_validator("speculation")
    @classmethod
    def _trace_only_in_streams(cls, value: SpeculationOptions, info: ValidationInfo) -> SpeculationOptions:
        for name in ("trace", "rejected"):
            if getattr(value, name) and info.data.get("stream") is False:
                raise PydanticCustomError("not_a_stream", "{name} is only allowed when stream is true", {"name": name})
        return value


class CompletionRequest(UnservedCompletionFields, GenerationRequest):
    """Body of POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Annotated[
        tuple[Prompt, ...],
        Field(fail_fast=True),
        bounded(lambda most: most.prompts, least=1),
        as_list(_is_prompt, Prompt | list[Prompt]),
    ]

    echo: Flag = False
    logprobs: Top | None = None

    @property
    def top_of_tokens(self) -> int | None:
        return self.logprobs

    @property
    def is_echoed(self) -> bool:
        return self.echo

    @property
    def prompt_count(self) -> int:
        return len(self.prompt)

    @property
    def prompt_chars(self) -> int:
        return max(len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompt)


class ChatRequest(UnservedChatFields, GenerationRequest):
    """Body of POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    strict_field: ClassVar[str] = "tools[{}].function.strict"
    default_max_tokens: ClassVar[int | None] = None

    messages: Annotated[tuple[ChatMessage, ...], Field(fail_fast=True), bounded(lambda most: most.messages, least=1)]
    max_completion_tokens: Count | None = None
    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True), bounded(lambda most: most.tools)] = ()
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: Flag = True
    reasoning_effort: Annotated[str, Field(max_length=MAX_EFFORT_CHARS)] | None = None  # defined by the template
    include_reasoning: Flag = True  # vLLM extension
    chat_template_kwargs: Annotated[dict[str, Any], bounded(lambda most: most.variables)] = Field({})  # vLLM extension
    add_generation_prompt: Flag | None = None  # vLLM extension; default: not continue_final_message
    continue_final_message: Flag = False  # vLLM extension

    @field_validator("continue_final_message")
    @classmethod
    def _adds_no_message(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("add_generation_prompt"):
            message = "add_generation_prompt is true, expected false, since continue_final_message is true"
            raise PydanticCustomError("two_beginnings", message)
        return value

    @property
    def offered(self) -> tuple[Tool, ...]:
        """Returns the tools that the model may call."""
        return () if self.tool_choice == "none" else self.tools

    @property
    def must_call(self) -> bool:
        """Returns whether the answer must be a call."""
        return self.tool_choice not in ("auto", "none")

    logprobs: Flag = False
    top_logprobs: Top | None = None

    @field_validator("top_logprobs")
    @classmethod
    def _only_with_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and info.data.get("logprobs") is False:
            raise PydanticCustomError("no_logprobs", "this is only allowed when logprobs is true")
        return value

    @property
    def top_of_tokens(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def prompt_chars(self) -> int:
        return sum(message.chars for message in self.messages) + sum(tool.chars for tool in self.tools)

    @property
    def token_limits(self) -> dict[str, int]:
        newer = self.max_completion_tokens
        return super().token_limits | ({"max_completion_tokens": newer} if newer is not None else {})


class TokenizeRequest(RequestPart):
    """Body of POST /tokenize: a prompt, or a conversation as /v1/chat/completions renders it."""

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Field(fail_fast=True), bounded(lambda most: most.messages)] = Field(
        (), validate_default=True
    )
    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True), bounded(lambda most: most.tools)] = ()
    chat_template_kwargs: Annotated[dict[str, Any], bounded(lambda most: most.variables)] = Field({})
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False
    add_special_tokens: Flag | None = None  # prompts only; chat templates add special tokens
    return_token_strs: Flag = False

    chat_template: Annotated[Any, unserved()] = None
    media_io_kwargs: Annotated[Any, unserved({})] = None
    mm_processor_kwargs: Annotated[Any, unserved({})] = None

    @field_validator("messages")
    @classmethod
    def _check_one_of(cls, value: tuple[ChatMessage, ...], info: ValidationInfo) -> tuple[ChatMessage, ...]:
        if bool(value) is (info.data.get("prompt") is not None):
            raise PydanticCustomError("one_of_both", "expected either prompt or messages")
        return value

    @property
    def chars(self) -> int:
        chars = sum(message.chars for message in self.messages) + sum(tool.chars for tool in self.tools)
        return chars + len(self.prompt or "")


class TokenizeReply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizeRequest(RequestPart):
    """Body of POST /detokenize."""

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None
    tokens: TokenIds


class DetokenizeReply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str
