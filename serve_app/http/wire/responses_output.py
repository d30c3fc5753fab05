"""The wire format of POST /v1/responses on its way out: items, and the response that holds them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

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
    """A response, finished or under way; what was asked is told again."""

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
