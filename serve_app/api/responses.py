"""OpenAI's Responses API without stored state.

A request is converted into a chat request, and the chat's answer into output items and events.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel

from serve_app.api.choices import Choice, ChoiceEvent
from serve_app.api.failures import Failure
from serve_app.api.fields import AnswerFormat, RequestBounds, check
from serve_app.api.replies import FinishReason, RequestMetrics, Usage
from serve_app.api.request_schemas import ChatRequest, Function
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
from serve_app.api.tool_calls import Call, Content, Reasoning, Segment

Json = dict[str, Any]

CONVERTED_FIELDS = {"tools", "tool_choice", "stream_options"}  # fields with another form in chats
TOOL_FIELDS = {"type", *Function.model_fields}
SHARED = (ResponsesRequest.model_fields.keys() & ChatRequest.model_fields.keys()) - CONVERTED_FIELDS
ERROR_CODES = {"rate_limit_error": "rate_limit_exceeded"}  # code by error type; the default is server_error


class ResponsesChat(ChatRequest):
    """A chat request that was converted from a responses request."""

    prompt_field: ClassVar[str] = "input"
    strict_field: ClassVar[str] = "tools[{}].strict"

    original: ResponsesRequest

    @property
    def answer_format(self) -> AnswerFormat | None:
        return self.original.text.format

    @property
    def token_limits(self) -> dict[str, int]:
        limit = self.original.max_output_tokens
        return {} if limit is None else {"max_output_tokens": limit}


def as_chat(request: ResponsesRequest, bounds: RequestBounds) -> ResponsesChat:
    """Converts input items into messages. Consecutive reasoning, text and calls share one assistant message."""
    instructions = [] if request.instructions is None else [{"role": "system", "content": request.instructions}]
    shared = request.model_dump(mode="json", include=SHARED, exclude_unset=True, by_alias=True)
    choice = request.tool_choice
    chat = {
        **shared,
        "messages": [*instructions, *_messages(request.input)],
        "tools": [_tool(tool.model_dump(include=TOOL_FIELDS, exclude_none=True)) for tool in request.tools],
        "tool_choice": choice if isinstance(choice, str) else _tool({"type": "function", "name": choice.name}),
        "reasoning_effort": request.reasoning.effort,
        "original": request,
    }
    return check(ResponsesChat, chat, bounds)


def _tool(flat: Json) -> Json:
    return {"type": flat.pop("type"), "function": flat}


def _messages(items: Iterable[InputItem]) -> list[Json]:
    messages: list[Json] = []
    for item in items:
        match item:
            case ReasoningInput():
                message = _assistant_message(messages, without=("reasoning_content", "content", "tool_calls"))
                message["reasoning_content"] = _text(item.content)
            case MessageInput(role="assistant"):
                message = _assistant_message(messages, without=("content", "tool_calls"))
                message["content"] = _text(item.content)
            case CallInput():
                function = {"name": item.name, "arguments": item.arguments}
                message = _assistant_message(messages, without=())
                message.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})
            case CallOutputInput():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
            case MessageInput():
                messages.append({"role": item.role, "content": _text(item.content)})
    return messages


def _assistant_message(messages: list[Json], without: tuple[str, ...]) -> Json:
    """Returns the last message if it is an assistant message with none of these fields, else adds a new one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(name in last for name in without):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(parts: tuple[ItemPart, ...]) -> str:
    return "".join(part.text for part in parts)


class ResponseWriter:
    """Writes one response, whole or as events."""

    def __init__(self, response: ResponseReply) -> None:
        """`response` holds the fields known before generation."""
        self._response = response
        self._name = response.id.removeprefix("resp_")
        self._items: list[OutputItem] = []  # finished items
        self._open: OutputItem | None = None  # item in progress, without its text
        self._texts: list[str] = []  # text pieces of the open item
        self._events = 0
        self._finish: FinishReason = "stop"

    def whole(self, choices: Sequence[Choice], usage: Usage) -> BaseModel:
        (choice,) = choices
        finish = choice.stream.finish
        assert finish is not None, "an answer is whole when its choice has ended"
        segments = choice.stream.segments
        last = len(segments) - 1
        items = [
            self._item(segment, place, "completed" if place < last else _status(finish))
            for place, segment in enumerate(segments)
        ]
        return self._ended(items, finish, usage)

    def event(self, event: ChoiceEvent, usage: Callable[[], Usage]) -> Iterator[str]:
        del usage
        yield from self._begin()
        match event.segment:
            case Content(text) | Reasoning(text) if text:
                yield from self._grow(event.segment)
            case Call():
                yield from self._close("completed")
                yield from self._call(event.segment)
        if event.finish is not None:
            self._finish = event.finish
            yield from self._close(_status(event.finish))

    def closing(self, usage: Usage, metrics: RequestMetrics | None) -> Iterator[str]:
        """Returns the last event, which holds the whole response."""
        del metrics
        ended = self._ended(self._items, self._finish, usage)
        yield self._sent(f"response.{ended.status}", response=ended.model_dump())

    def failed(self, failure: Failure) -> str:
        error = failure.detail
        fault = ResponseFault(code=ERROR_CODES.get(error.type, "server_error"), message=error.message)
        update = {"status": "failed", "error": fault, "output": tuple(self._items)}
        begun = "".join(self._begin())  # a stream may fail after a keep-alive comment, before its first event
        return begun + self._sent("response.failed", response=self._response.model_copy(update=update).model_dump())

    def _begin(self) -> Iterator[str]:
        """Returns the events that begin a stream, once."""
        if not self._events:
            yield self._sent("response.created", response=self._response.model_dump())
            yield self._sent("response.in_progress", response=self._response.model_dump())

    def _grow(self, new: Content | Reasoning) -> Iterator[str]:
        kind = MessageItem if isinstance(new, Content) else ReasoningItem
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            self._open = self._item(new, len(self._items), "in_progress").model_copy(update={"content": ()})
            yield self._sent("response.output_item.added", item=self._open.model_dump())
            if kind is MessageItem:
                yield self._sent_part("response.content_part.added", part=OutputText().model_dump())
        self._texts.append(new.text)
        yield self._sent_text("delta", delta=new.text)

    def _close(self, status: Status) -> Iterator[str]:
        if self._open is None:
            return
        text = "".join(self._texts)
        segment = Content(text) if isinstance(self._open, MessageItem) else Reasoning(text)
        item = self._item(segment, len(self._items), status)
        yield self._sent_text("done", text=text)
        if isinstance(item, MessageItem):
            yield self._sent_part("response.content_part.done", part=item.content[0].model_dump())
        yield self._sent("response.output_item.done", item=item.model_dump())
        self._items.append(item)
        self._open = None
        self._texts = []

    def _call(self, call: Call) -> Iterator[str]:
        """Returns all events of a call at once, since the parser only recognizes complete calls."""
        item = self._item(call, len(self._items), "completed")
        assert isinstance(item, CallItem), "calls become call items"
        initial = item.model_copy(update={"status": "in_progress", "arguments": ""})
        written = {"item_id": item.id, "name": item.name, "arguments": item.arguments}
        yield self._sent("response.output_item.added", item=initial.model_dump())
        yield self._sent("response.function_call_arguments.delta", item_id=item.id, delta=item.arguments)
        yield self._sent("response.function_call_arguments.done", **written)
        yield self._sent("response.output_item.done", item=item.model_dump())
        self._items.append(item)

    def _item(self, segment: Segment, index: int, status: Status) -> OutputItem:
        match segment:
            case Content(text):
                content = (OutputText(text=text),)
                return MessageItem(id=f"msg_{self._name}_{index}", status=status, content=content)
            case Reasoning(text):
                reasoning = (ReasoningText(text=text),)
                return ReasoningItem(id=f"rs_{self._name}_{index}", status=status, content=reasoning)
            case Call(name, arguments, id=call_id):
                return CallItem(
                    id=f"fc_{self._name}_{index}",
                    status="completed",
                    call_id=call_id,
                    name=name,
                    arguments=arguments,
                )

    def _ended(self, items: list[OutputItem], finish: FinishReason, usage: Usage) -> ResponseReply:
        update = {
            "status": _status(finish),
            "incomplete_details": IncompleteDetails() if finish == "length" else None,
            "output": tuple(items),
            "usage": _usage(usage),
        }
        return self._response.model_copy(update=update)

    def _sent_text(self, step: str, **fields: Any) -> str:
        """Returns an event for the open item's text."""
        if isinstance(self._open, MessageItem):
            return self._sent_part(f"response.output_text.{step}", **fields, logprobs=[])
        return self._sent_part(f"response.reasoning_text.{step}", **fields)

    def _sent_part(self, kind: str, **fields: Any) -> str:
        """Returns an event for the open item's only content part."""
        assert self._open is not None, "an item is open"
        return self._sent(kind, item_id=self._open.id, content_index=0, **fields)

    def _sent(self, kind: str, **fields: Any) -> str:
        event: Json = {"type": kind, "sequence_number": self._events, **fields}
        if "response" not in fields:
            event["output_index"] = len(self._items)
        self._events += 1
        return f"event: {kind}\ndata: {json.dumps(event, ensure_ascii=False)}\n\n"


def initial_response(chat: ResponsesChat, name: str, created: int) -> ResponseReply:
    """Returns the initial response, with chat defaults in place of omitted parameters."""
    request = chat.original
    choice = request.tool_choice
    tools = [{"parameters": None, "strict": False} | tool.model_dump(exclude_none=True) for tool in request.tools]
    return ResponseReply(
        id=name,
        created_at=created,
        model=request.model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata,
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning={"effort": request.reasoning.effort, "summary": None},
        temperature=chat.temperature,
        text=request.text.model_dump(by_alias=True, exclude_none=True),
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=tuple(tools),
        top_p=chat.top_p,
        user=request.user,
    )


def _status(finish: FinishReason) -> Status:
    return "incomplete" if finish == "length" else "completed"


def _usage(usage: Usage) -> ResponsesUsage:
    return ResponsesUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(cached_tokens=usage.prompt_tokens_details.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(reasoning_tokens=usage.completion_tokens_details.reasoning_tokens),
        total_tokens=usage.total_tokens,
    )
