"""The wire format of requests: OpenAI's completions and chat completions, with this project's extensions.

Requests are strict: an unknown field, a wrong type or a feature that is not served is refused by name, never ignored.
`null` means "not given", as in OpenAI's API.
"""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from protos.draft_tree import MAX_BLOCK_TOKENS
from serve_app.http.wire.field_types import (
    Count,
    Flag,
    Integer,
    Number,
    RequestPart,
    as_list,
    bounded,
    is_text,
    unserved,
)
from serve_app.http.wire.unserved_fields import (
    UnservedChatFields,
    UnservedCompletionFields,
    UnservedFields,
    UnservedMessageFields,
)

MAX_CHOICES = 128
MAX_STOP_CHARS = 256
MAX_MODEL_CHARS = 512
PROMPT_VERSION = "prompt_version"  # of `metadata`: what it says is told by metrics and traces
VERSION_PATTERN = r"[\w.:/@+-]{1,64}"

TokenIds = Annotated[
    tuple[Annotated[Integer, Field(ge=0)], ...],
    Field(fail_fast=True),
    bounded(lambda most: most.prompt_tokens, least=1),
]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Prompt = Annotated[
    Annotated[Annotated[str, Field(min_length=1)], Tag("text")] | Annotated[TokenIds, Tag("token_ids")],
    Discriminator(lambda value: "text" if is_text(value) else "token_ids"),
]


def _is_prompt(value: Any) -> bool:
    token_ids = isinstance(value, list) and value and type(value[0]) is int
    return is_text(value) or bool(token_ids)


class StreamOptions(RequestPart):
    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # vLLM's: with include_usage, every chunk tells the usage so far

    include_obfuscation: Annotated[Any, unserved(False)] = None


class SpeculationOptions(RequestPart):
    """Extension: how this request is speculated."""

    max_draft_tokens: Annotated[Integer, Field(ge=0, le=MAX_BLOCK_TOKENS)] | None = None  # 0: plain decoding
    acceptance: Literal["ratio", "coupled"] | None = None
    trace: Flag = False  # streamed chunks tell drafted tokens from the target's own


class GenerationRequest(UnservedFields):
    """What both endpoints take."""

    prompt_field: ClassVar[str]
    default_max_tokens: ClassVar[int | None]  # None: the rest of the context

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)]
    max_tokens: Count | None = None
    temperature: Annotated[Number, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[Number, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[Integer, Field(ge=-1, le=2**31 - 1)] = 0  # vLLM's; 0 and -1: all tokens
    min_p: Annotated[Number, Field(ge=0, le=1)] = 0.0  # vLLM's
    frequency_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[Number, Field(ge=-2, le=2)] = 0.0
    seed: Integer | None = None
    stop: Annotated[
        tuple[StopString, ...], Field(fail_fast=True), bounded(lambda most: most.stops), as_list(is_text)
    ] = ()
    n: Annotated[Integer, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: Flag = False
    stream_options: StreamOptions = StreamOptions()
    request_id: Annotated[str, Field(pattern=r"^[\w.:-]{1,128}$")] | None = None  # vLLM's: in the answer's id
    ignore_eos: Flag = False  # vLLM's: go on to max_tokens
    metadata: Annotated[dict[str, str] | None, bounded(lambda most: most.labels)] = None
    speculation: SpeculationOptions = SpeculationOptions()  # extension

    @property
    def prompt_version(self) -> str | None:
        """Which version of its prompt the client says that this is."""
        return (self.metadata or {}).get(PROMPT_VERSION)

    @property
    def prompt_count(self) -> int:
        raise NotImplementedError

    @property
    def prompt_chars(self) -> int:
        """Characters of the longest prompt, as far as it is text."""
        raise NotImplementedError

    @property
    def token_limits(self) -> dict[str, int]:
        """The limits on generated tokens that the client gave, by field."""
        return {"max_tokens": self.max_tokens} if self.max_tokens is not None else {}

    @field_validator("metadata")
    @classmethod
    def _version_is_short(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        version = (value or {}).get(PROMPT_VERSION)
        if version is not None and re.fullmatch(VERSION_PATTERN, version) is None:
            rule = "prompt_version has to be 1 to 64 letters, digits or any of _.:/@+-"
            raise PydanticCustomError("prompt_version", rule)
        return value

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


class CompletionRequest(UnservedCompletionFields, GenerationRequest):
    """POST /v1/completions."""

    prompt_field: ClassVar[str] = "prompt"
    default_max_tokens: ClassVar[int | None] = 16

    prompt: Annotated[
        tuple[Prompt, ...],
        Field(fail_fast=True),
        bounded(lambda most: most.prompts, least=1),
        as_list(_is_prompt),
    ]

    @property
    def prompt_count(self) -> int:
        return len(self.prompt)

    @property
    def prompt_chars(self) -> int:
        return max(len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompt)


class TextPart(RequestPart):
    type: Literal["text"]
    text: str

    prompt_cache_breakpoint: dict[str, Any] | None = None  # accepted and not used


class ChatMessage(UnservedMessageFields):
    role: Literal["system", "user", "assistant"]
    content: Annotated[
        tuple[TextPart, ...],
        Field(fail_fast=True),
        bounded(lambda most: most.parts),
        BeforeValidator(lambda value: [{"type": "text", "text": value}] if is_text(value) else value),
    ]

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


class ChatRequest(UnservedChatFields, GenerationRequest):
    """POST /v1/chat/completions."""

    prompt_field: ClassVar[str] = "messages"
    default_max_tokens: ClassVar[int | None] = None

    messages: Annotated[tuple[ChatMessage, ...], Field(fail_fast=True), bounded(lambda most: most.messages, least=1)]
    max_completion_tokens: Count | None = None

    @property
    def prompt_count(self) -> int:
        return 1

    @property
    def prompt_chars(self) -> int:
        return sum(len(message.text) for message in self.messages)

    @property
    def token_limits(self) -> dict[str, int]:
        newer = self.max_completion_tokens
        return super().token_limits | ({"max_completion_tokens": newer} if newer is not None else {})
