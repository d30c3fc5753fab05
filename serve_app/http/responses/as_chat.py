"""What is asked of /v1/responses, as the chat that it comes to."""

from collections.abc import Iterable
from typing import Any, ClassVar

from serve_app.http.wire.bounds import RequestBounds
from serve_app.http.wire.grammar_fields import AnswerFormat
from serve_app.http.wire.parsing import check
from serve_app.http.wire.responses_input import (
    CallInput,
    CallOutputInput,
    InputItem,
    ItemPart,
    MessageInput,
    ReasoningInput,
    ResponsesRequest,
)
from serve_app.http.wire.schemas import ChatRequest

Spoken = dict[str, Any]

IN_ANOTHER_FORM = {"tools", "tool_choice", "stream_options"}
AS_IN_CHATS = (ResponsesRequest.model_fields.keys() & ChatRequest.model_fields.keys()) - IN_ANOTHER_FORM


class ResponsesChat(ChatRequest):
    """A chat that was asked for as a response."""

    prompt_field: ClassVar[str] = "input"
    strict_field: ClassVar[str] = "tools[{}].strict"

    asked: ResponsesRequest

    @property
    def answer_format(self) -> AnswerFormat | None:
        return self.asked.text.format

    @property
    def token_limits(self) -> dict[str, int]:
        limit = self.asked.max_output_tokens
        return {} if limit is None else {"max_output_tokens": limit}


def as_chat(asked: ResponsesRequest, bounds: RequestBounds) -> ResponsesChat:
    """Items become messages, of which one of the assistant holds its reasoning, its text and its calls."""
    instructions = [] if asked.instructions is None else [{"role": "system", "content": asked.instructions}]
    same = asked.model_dump(mode="json", include=AS_IN_CHATS, exclude_unset=True, by_alias=True)
    choice = asked.tool_choice
    chat = {
        **same,
        "messages": [*instructions, *_messages(asked.input)],
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in asked.tools],
        "tool_choice": choice if isinstance(choice, str) else _tool({"type": "function", "name": choice.name}),
        "reasoning_effort": asked.reasoning.effort,
        "asked": asked,
    }
    return check(ResponsesChat, chat, bounds)


def _tool(flat: Spoken) -> Spoken:
    return {"type": flat.pop("type"), "function": flat}


def _messages(items: Iterable[InputItem]) -> list[Spoken]:
    messages: list[Spoken] = []
    for item in items:
        match item:
            case ReasoningInput():
                _turn(messages, but_for=("reasoning_content", "content", "tool_calls"))
                messages[-1]["reasoning_content"] = _text(item.content)
            case MessageInput(role="assistant"):
                _turn(messages, but_for=("content", "tool_calls"))
                messages[-1]["content"] = _text(item.content)
            case CallInput():
                function = {"name": item.name, "arguments": item.arguments}
                _turn(messages, but_for=())
                messages[-1].setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            case CallOutputInput():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case MessageInput():
                messages.append({"role": item.role, "content": _text(item.content)})
    return messages


def _turn(messages: list[Spoken], but_for: tuple[str, ...]) -> None:
    """Goes on in the assistant's turn, or begins another where this one has what comes again or earlier."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in but_for):
        messages.append({"role": "assistant"})


def _text(parts: tuple[ItemPart, ...]) -> str:
    return "".join(part.text for part in parts)
