"""The wire format of a conversation: its messages, the tools that are offered, and which of them must be called."""

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, ValidationInfo, field_validator, model_serializer
from pydantic_core import PydanticCustomError

from serve_app.http.wire.field_types import Integer, RequestPart, bounded, is_text, unserved
from serve_app.http.wire.unserved_fields import UnservedMessageFields

MAX_NAME_CHARS = 256
MAX_CALL_ID_CHARS = 512

FunctionName = Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)]
CallId = Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


class TextPart(RequestPart):
    type: Literal["text"]
    text: str

    prompt_cache_breakpoint: dict[str, Any] | None = None  # accepted and not used


class CalledFunction(RequestPart):
    name: FunctionName
    arguments: str = "{}"  # JSON, as the model wrote it

    parsed_arguments: Any = None  # OpenAI's client sends its own reading back; not used


class ToolCall(RequestPart):
    """One that an assistant made earlier."""

    id: CallId | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    index: Integer | None = None  # a streamed call that is sent back as it came; not used


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
    ] = ()  # of an assistant
    tool_call_id: CallId | None = None  # of a tool's answer
    reasoning: str = ""  # vLLM's, of an assistant
    reasoning_content: str = ""  # the same, as others call it

    @field_validator("content")
    @classmethod
    def _only_assistants_say_nothing(cls, value: object, info: ValidationInfo) -> object:
        if value is None and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("missing", "Field required")
        return value

    @field_validator("tool_calls", "reasoning", "reasoning_content")
    @classmethod
    def _only_of_assistants(cls, value: object, info: ValidationInfo) -> object:
        if value and info.data.get("role", "assistant") != "assistant":
            raise PydanticCustomError("not_an_assistant", "only a message of the assistant has this")
        return value

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())

    @property
    def chars(self) -> int:
        """Characters that this adds to a prompt, beside what the template adds."""
        called = sum(len(call.function.name) + len(call.function.arguments) for call in self.tool_calls)
        return len(self.text) + len(self.reasoning or self.reasoning_content) + called


class Function(RequestPart):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # JSON Schema

    strict: Annotated[Any, unserved(False)] = None  # arguments would have to be held to the schema


class Tool(RequestPart):
    type: Literal["function"]
    function: Function

    @model_serializer
    def _as_sent(self) -> dict[str, Any]:
        """As a chat template takes it: with what the client gave, and nothing else."""
        return {"type": self.type, "function": self.function.model_dump(exclude_none=True)}

    @property
    def chars(self) -> int:
        return len(json.dumps(self.model_dump(), ensure_ascii=False))


class NamedFunction(RequestPart):
    name: FunctionName


class NamedTool(RequestPart):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedTool, Tag("named")],
    Discriminator(lambda value: "word" if is_text(value) else "named"),
]
