"""OpenAI's Responses API without stored state.

A request is converted into a chat request, and the chat's answer into output items and events.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from serve_app.api.choice_stream import Part, Stretch
from serve_app.api.fields import AnswerFormat, RequestBounds, check
from serve_app.api.replies import ErrorDetail, FinishReason, ToolCallReply, Usage
from serve_app.api.responses_schemas import (
    CallInput,
    CallItem,
    CallOutputInput,
    IncompleteDetails,
    InputItem,
    InputTokensDetails,
    ItemPart,
    MessageInput,
    MessageItem,
    OutputItem,
    OutputText,
    OutputTokensDetails,
    ReasoningInput,
    ReasoningItem,
    ReasoningText,
    ResponseFault,
    ResponseReply,
    ResponsesRequest,
    ResponsesUsage,
    Status,
)
from serve_app.api.schemas import ChatRequest

Spoken = dict[str, Any]

IN_ANOTHER_FORM = {"tools", "tool_choice", "stream_options"}
AS_IN_CHATS = (ResponsesRequest.model_fields.keys() & ChatRequest.model_fields.keys()) - IN_ANOTHER_FORM


class ResponsesChat(ChatRequest):
    """A chat request converted from a responses request."""

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
    """Converts items into messages. One assistant message holds a turn's reasoning, text and calls."""
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
    """Returns the assistant message to extend, or a new one if this item cannot follow the last."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in but_for):
        messages.append({"role": "assistant"})


def _text(parts: tuple[ItemPart, ...]) -> str:
    return "".join(part.text for part in parts)


Event = dict[str, Any]
FAULTS = {"rate_limit_error": "rate_limit_exceeded"}  # by error type; others are server errors


class ResponseWriter:
    """Writes one response, whole or as events."""

    def __init__(self, response: ResponseReply) -> None:
        """`response` holds the fields known before generation."""
        self._response = response
        self._name = response.id.removeprefix("resp_")
        self._items: list[OutputItem] = []  # finished items
        self._open: Stretch | None = None  # text of the open item
        self._events = 0
        self._finish: FinishReason = "stop"

    def whole(self, told: Iterable[Stretch | ToolCallReply], finish: FinishReason, usage: Usage) -> ResponseReply:
        """Returns the finished response."""
        stretches = list(told)
        last = len(stretches) - 1
        items = [self._item(one, n, "completed" if n < last else _end(finish)) for n, one in enumerate(stretches)]
        return self._ended(items, finish, usage)

    def part(self, part: Part) -> Iterator[str]:
        """Returns events for a part."""
        if not self._events:
            yield from self._told("response.created", response=self._response.model_dump())
            yield from self._told("response.in_progress", response=self._response.model_dump())
        if part.text:
            yield from self._grow(Stretch("content", part.text))
        if part.reasoning:
            yield from self._grow(Stretch("reasoning", part.reasoning))
        if part.call is not None:
            yield from self._close("completed")
            yield from self._call(part.call)
        if part.finish is not None:
            self._finish = part.finish
            yield from self._close(_end(part.finish))

    def closing(self, usage: Usage) -> Iterator[str]:
        """Returns the last event, which holds the whole response."""
        ended = self._ended(self._items, self._finish, usage)
        yield from self._told(f"response.{ended.status}", response=ended.model_dump())

    def failed(self, error: ErrorDetail) -> str:
        """Returns the events that end a failed response."""
        fault = ResponseFault(code=FAULTS.get(error.type, "server_error"), message=error.message)
        update = {"status": "failed", "error": fault, "output": tuple(self._items)}
        (event,) = self._told("response.failed", response=self._response.model_copy(update=update).model_dump())
        return event

    def _grow(self, new: Stretch) -> Iterator[str]:
        if self._open is None or self._open.kind != new.kind:
            yield from self._close("completed")
            self._open = Stretch(new.kind, "")
            yield from self._told("response.output_item.added", item=self._bare().model_dump())
            if new.kind == "content":
                yield from self._at_part("response.content_part.added", part=OutputText().model_dump())
        self._open = Stretch(new.kind, self._open.text + new.text)
        more: Event = {"logprobs": []} if new.kind == "content" else {}
        yield from self._at_part(f"response.{_named(new)}.delta", delta=new.text, **more)

    def _close(self, status: Status) -> Iterator[str]:
        stretch = self._open
        if stretch is None:
            return
        more: Event = {"logprobs": []} if stretch.kind == "content" else {}
        yield from self._at_part(f"response.{_named(stretch)}.done", text=stretch.text, **more)
        item = self._item(stretch, len(self._items), status)
        if isinstance(item, MessageItem):
            yield from self._at_part("response.content_part.done", part=item.content[0].model_dump())
        yield from self._told("response.output_item.done", item=item.model_dump())
        self._items.append(item)
        self._open = None

    def _call(self, call: ToolCallReply) -> Iterator[str]:
        """Returns the events of a growing call, all at once, since only whole calls are recognized."""
        item = self._item(call, len(self._items), "completed")
        assert isinstance(item, CallItem), "a call is one"
        begun = item.model_copy(update={"status": "in_progress", "arguments": ""})
        yield from self._told("response.output_item.added", item=begun.model_dump())
        written = {"item_id": item.id, "name": item.name, "arguments": item.arguments}
        yield from self._told("response.function_call_arguments.delta", item_id=item.id, delta=item.arguments)
        yield from self._told("response.function_call_arguments.done", **written)
        yield from self._told("response.output_item.done", item=item.model_dump())
        self._items.append(item)

    def _bare(self) -> OutputItem:
        """Returns the open item in its initial state."""
        assert self._open is not None, "an item is open"
        item = self._item(self._open, len(self._items), "in_progress")
        return item.model_copy(update={"content": ()})

    def _item(self, told: Stretch | ToolCallReply, index: int, status: Status) -> OutputItem:
        match told:
            case Stretch(kind="content"):
                content = (OutputText(text=told.text),)
                return MessageItem(id=f"msg_{self._name}_{index}", status=status, content=content)
            case Stretch():
                thought = (ReasoningText(text=told.text),)
                return ReasoningItem(id=f"rs_{self._name}_{index}", status=status, content=thought)
            case ToolCallReply():
                function = told.function
                return CallItem(
                    id=f"fc_{self._name}_{index}",
                    status="completed",
                    call_id=told.id,
                    name=function.name,
                    arguments=function.arguments,
                )

    def _ended(self, items: list[OutputItem], finish: FinishReason, usage: Usage) -> ResponseReply:
        update = {
            "status": _end(finish),
            "incomplete_details": IncompleteDetails() if finish == "length" else None,
            "output": tuple(items),
            "usage": _usage(usage),
        }
        return self._response.model_copy(update=update)

    def _at_part(self, kind: str, **fields: Any) -> Iterator[str]:
        """Returns an event about the only content part of the open item."""
        yield from self._told(kind, item_id=self._bare().id, content_index=0, **fields)

    def _told(self, kind: str, **fields: Any) -> Iterator[str]:
        event: Event = {"type": kind, "sequence_number": self._events, **fields}
        if "response" not in fields:
            event["output_index"] = len(self._items)
        self._events += 1
        yield f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def begun(chat: ResponsesChat, name: str, created: int) -> ResponseReply:
    """Returns the response before generation. Parameters left out are reported with the chat's defaults."""
    asked = chat.asked
    choice = asked.tool_choice
    return ResponseReply(
        id=name,
        created_at=created,
        model=asked.model,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        metadata=asked.metadata,
        parallel_tool_calls=asked.parallel_tool_calls,
        reasoning={"effort": asked.reasoning.effort, "summary": None},
        temperature=chat.temperature,
        text=asked.text.model_dump(by_alias=True, exclude_none=True),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=tuple({"parameters": None, "strict": False} | tool.model_dump(exclude_none=True) for tool in asked.tools),
        top_p=chat.top_p,
        user=asked.user,
    )


def _named(stretch: Stretch) -> str:
    return "output_text" if stretch.kind == "content" else "reasoning_text"


def _end(finish: FinishReason) -> Status:
    return "incomplete" if finish == "length" else "completed"


def _usage(usage: Usage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
