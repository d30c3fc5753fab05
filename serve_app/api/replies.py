"""Wire format of answers: OpenAI's completions and chat completions, models, health and errors."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, SerializerFunctionWrapHandler, model_serializer
from starlette.responses import Response

RETRY_AFTER_S = 1  # sent with possibly temporary errors
FinishReason = Literal["stop", "length", "tool_calls"]
StopReason = int | str | None
"""vLLM extension; stop string or stop token of the request that ended the choice."""


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PromptTokensDetails(_Body):
    cached_tokens: int = 0  # prompt tokens found in the prefix cache


class CompletionTokensDetails(_Body):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(_Body):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()
    completion_tokens_details: CompletionTokensDetails


class SpeculativeDecoding(_Body):
    """vLLM's speculation metrics, over the verify steps of all choices."""

    acceptance_histogram: tuple[int, ...]  # number of verify steps with 0 to `num_spec_tokens` accepted tokens
    num_spec_tokens: int  # maximum draft tokens per step, along one path
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    draft_acceptance_rate: float
    mean_acceptance_length: float  # includes the target's own token


class RequestMetrics(_Body):
    speculative_decoding: SpeculativeDecoding


class Trace(_Body):
    """Extension, sent on request; marks the drafted parts of a chunk's text."""

    tokens: int = 0
    accepted: int = 0
    pieces: tuple[tuple[str, bool], ...] = ()  # (text, is drafted) pairs
    rejected: tuple[str, ...] = ()  # if requested, the rejected draft text replaced by each piece, or ""


class _Reply(_Body):
    """Fields of both whole answers and chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class TokenLogprob(_Body):
    """Log probability of a token at one position."""

    token: str
    logprob: float
    bytes: tuple[int, ...]


class ChatTokenLogprob(TokenLogprob):
    top_logprobs: tuple[TokenLogprob, ...]


class ChatLogprobs(_Body):
    content: tuple[ChatTokenLogprob, ...]
    refusal: None = None


class CompletionLogprobs(_Body):
    text_offset: tuple[int, ...]
    token_logprobs: tuple[float | None, ...]  # None for a prompt's first token
    tokens: tuple[str, ...]
    top_logprobs: tuple[dict[str, float] | None, ...]


class PromptLogprob(_Body):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = tuple[dict[int, PromptLogprob] | None, ...]
"""vLLM extension; scores of each prompt token and its likeliest alternatives; None for the first token."""


class CompletionChoice(_Body):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None


class ScoredCompletionChoice(CompletionChoice):
    prompt_logprobs: PromptLogprobs


class Completion(_Reply):
    object: Literal["text_completion"] = "text_completion"
    choices: tuple[ScoredCompletionChoice | CompletionChoice, ...]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None  # None if nothing was drafted


class CompletionChunk(Completion):
    slipstream: Trace = Trace()


class FunctionReply(_Body):
    name: str
    arguments: str  # JSON object as text


class ToolCallReply(_Body):
    """A tool call by the model."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionReply


class AnswerMessage(_Body):
    """The model's message; `content` is null if it only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | None = None  # also sent as `reasoning_content`
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallReply, ...] | None = None

    @model_serializer(mode="wrap")
    def _without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Omits empty optional fields, which some clients misinterpret."""
        fields: dict[str, Any] = serialize(self)
        left_out = {name for name in ("reasoning", "reasoning_content", "tool_calls") if fields[name] is None}
        return {name: value for name, value in fields.items() if name not in left_out}


class ToolCallDelta(ToolCallReply):
    """A tool call in a stream, sent in one piece since the parser only recognizes complete calls."""

    index: int


class ChatDelta(_Body):
    """Change to a choice in a stream; unset fields are omitted."""

    role: Literal["assistant"] = "assistant"
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] = ()

    @model_serializer(mode="wrap")
    def _only_set(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in serialize(self).items() if name in self.model_fields_set}


class ChatChoice(_Body):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: StopReason = None


class ChatCompletion(_Reply):
    object: Literal["chat.completion"] = "chat.completion"
    choices: tuple[ChatChoice, ...]
    usage: Usage
    metrics: RequestMetrics | None = None  # None if nothing was drafted


class ScoredChatCompletion(ChatCompletion):
    prompt_logprobs: PromptLogprobs


class ChatChunkChoice(_Body):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    stop_reason: StopReason = None


class ChatChunk(_Reply):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: tuple[ChatChunkChoice, ...]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None
    slipstream: Trace = Trace()


class ModelCard(_Body):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "slipstream"
    root: str | None = None  # vLLM extension; checkpoint of the model `id`
    parent: str | None = None  # vLLM extension; base model of an adapter
    max_model_len: int  # vLLM extension; limit on prompt plus answer tokens


class ModelList(_Body):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


class VersionReport(_Body):
    """Reply of GET /version."""

    version: str


class HealthReport(_Body):
    """Reply of GET /health."""

    status: Literal["ok", "unavailable"]  # ok: at least one model can be served
    models: dict[str, Literal["ok", "unavailable"]] = {}
    audit: Literal["off", "ok", "differs"]


class ProbeReport(_Body):
    """Reply of GET /health/live and /health/ready."""

    status: Literal["ok", "unavailable"]


class ErrorDetail(_Body):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(_Body):
    error: ErrorDetail


def error_response(status: int, detail: ErrorDetail, headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with OpenAI's error body."""
    return Response(ErrorBody(error=detail).model_dump_json(), status, dict(headers or {}), "application/json")
