"""The wire format of /tokenize and /detokenize, as vLLM has them."""

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from serve_app.http.wire.field_types import Flag, RequestPart, bounded, unserved
from serve_app.http.wire.messages import ChatMessage, Tool
from serve_app.http.wire.schemas import MAX_MODEL_CHARS, TokenIds


class TokenizeRequest(RequestPart):
    """POST /tokenize: a prompt, or a conversation as /v1/chat/completions would put it."""

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None
    prompt: str | None = None
    messages: Annotated[tuple[ChatMessage, ...], Field(fail_fast=True), bounded(lambda most: most.messages)] = Field(
        (), validate_default=True
    )
    tools: Annotated[tuple[Tool, ...], Field(fail_fast=True), bounded(lambda most: most.tools)] = ()
    chat_template_kwargs: Annotated[dict[str, Any], bounded(lambda most: most.variables)] = Field({})
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag = False
    add_special_tokens: Flag | None = None  # around a prompt: true; a chat template writes its own
    return_token_strs: Flag = False

    chat_template: Annotated[Any, unserved()] = None
    media_io_kwargs: Annotated[Any, unserved({})] = None
    mm_processor_kwargs: Annotated[Any, unserved({})] = None

    @field_validator("messages")
    @classmethod
    def _one_of_both(cls, value: tuple[ChatMessage, ...], info: ValidationInfo) -> tuple[ChatMessage, ...]:
        if bool(value) is (info.data.get("prompt") is not None):
            raise PydanticCustomError("one_of_both", "expected either prompt or messages")
        return value

    @property
    def chars(self) -> int:
        spoken = sum(message.chars for message in self.messages) + sum(tool.chars for tool in self.tools)
        return spoken + len(self.prompt or "")


class TokenizeReply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: tuple[str, ...] | None = None


class DetokenizeRequest(RequestPart):
    """POST /detokenize."""

    model: Annotated[str, Field(max_length=MAX_MODEL_CHARS)] | None = None
    tokens: TokenIds


class DetokenizeReply(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    prompt: str
