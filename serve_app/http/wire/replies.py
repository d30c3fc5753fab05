"""The wire format of answers: OpenAI's completions and chat completions, models, health and errors."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

FinishReason = Literal["stop", "length"]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


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
    rejected: tuple[str, ...] = ()  # on request: for each piece, what the draft had instead of it and after it, or ""


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
