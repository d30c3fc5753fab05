"""The two formats of requests and answers: completions and chat completions.

A dialect knows its request's schema and how deltas and transcripts look on the wire; nothing of how they come about.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypedDict, TypeVar

from pydantic import BaseModel

from serve_app.http.conversation.reading import PlainReader, Reader
from serve_app.http.conversation.requests import check_talk, messages_for, options_for
from serve_app.http.conversation.telling import Part, Telling, TellingOptions
from serve_app.http.text import TextCodec
from serve_app.http.wire.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionChunk,
    ToolCallDelta,
    Usage,
)
from serve_app.http.wire.schemas import ChatRequest, CompletionRequest, GenerationRequest

RequestT = TypeVar("RequestT", bound=GenerationRequest)


class Head(TypedDict):
    """What every whole answer and every chunk of one request begins with."""

    id: str
    created: int
    model: str


class Dialect(ABC, Generic[RequestT]):
    """One endpoint's wire format."""

    endpoint: ClassVar[str]
    path: ClassVar[str]
    id_prefix: ClassVar[str]
    schema: type[RequestT]

    def check(self, request: RequestT, codec: TextCodec) -> None:
        """Refuses what the model cannot do, before anything becomes tokens."""
        del request, codec

    def reads_parts(self, codec: TextCodec) -> bool:
        """Whether answers are told apart into their parts, and text is to have the special tokens that mark them."""
        del codec
        return False

    def reader(self, request: RequestT, codec: TextCodec, prompt: Sequence[int]) -> Reader:
        """What tells an answer's parts apart."""
        del request, codec, prompt
        return PlainReader()

    def telling(self, request: RequestT) -> TellingOptions:
        """What of an answer is told."""
        del request
        return TellingOptions()

    @abstractmethod
    def prompts(self, request: RequestT, codec: TextCodec) -> list[tuple[int, ...]]:
        """The request's prompts as tokens."""

    @abstractmethod
    def whole(self, head: Head, tellings: Sequence[Telling], usage: Usage) -> BaseModel:
        """The answer in one piece."""

    @abstractmethod
    def chunk(self, head: Head, part: Part, usage: Usage | None) -> BaseModel:
        """One choice's opening, next text or end, and the usage so far where the client asked for it."""

    @abstractmethod
    def closing(self, head: Head, usage: Usage) -> BaseModel:
        """The chunk that tells the usage."""


class CompletionDialect(Dialect[CompletionRequest]):
    """/v1/completions."""

    endpoint = "completions"
    path = "/v1/completions"
    id_prefix = "cmpl-"
    schema = CompletionRequest

    def prompts(self, request: CompletionRequest, codec: TextCodec) -> list[tuple[int, ...]]:
        return [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]

    def whole(self, head: Head, tellings: Sequence[Telling], usage: Usage) -> Completion:
        choices = tuple(
            CompletionChoice(index=choice.index, text=choice.content, finish_reason=choice.finish)
            for choice in tellings
        )
        return Completion(**head, choices=choices, usage=usage)

    def chunk(self, head: Head, part: Part, usage: Usage | None) -> CompletionChunk:
        choice = CompletionChoice(index=part.index, text=part.text, finish_reason=part.finish)
        return CompletionChunk(**head, choices=(choice,), usage=usage, slipstream=part.trace)

    def closing(self, head: Head, usage: Usage) -> CompletionChunk:
        return CompletionChunk(**head, choices=(), usage=usage)


class ChatDialect(Dialect[ChatRequest]):
    """/v1/chat/completions."""

    endpoint = "chat"
    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    schema = ChatRequest

    def check(self, request: ChatRequest, codec: TextCodec) -> None:
        check_talk(request, codec.template, reads_answers=codec.readers.tells_parts)

    def prompts(self, request: ChatRequest, codec: TextCodec) -> list[tuple[int, ...]]:
        return [codec.encode_chat(messages_for(request, codec.template), options_for(request))]

    def reads_parts(self, codec: TextCodec) -> bool:
        return codec.readers.tells_parts

    def reader(self, request: ChatRequest, codec: TextCodec, prompt: Sequence[int]) -> Reader:
        return codec.readers.reader(prompt, [tool.model_dump() for tool in request.offered])

    def telling(self, request: ChatRequest) -> TellingOptions:
        most_calls = None if request.parallel_tool_calls else 1
        return TellingOptions(request.include_reasoning, most_calls, opening=True)

    def whole(self, head: Head, tellings: Sequence[Telling], usage: Usage) -> ChatCompletion:
        choices = []
        for choice in tellings:
            assert choice.finish is not None, "an answer is whole when all its choices have ended"
            message = AnswerMessage(
                content=choice.content or (None if choice.calls else ""),
                reasoning=choice.reasoning or None,
                reasoning_content=choice.reasoning or None,
                tool_calls=tuple(choice.calls) or None,
            )
            choices.append(ChatChoice(index=choice.index, message=message, finish_reason=choice.finish))
        return ChatCompletion(**head, choices=tuple(choices), usage=usage)

    def chunk(self, head: Head, part: Part, usage: Usage | None) -> ChatChunk:
        choice = ChatChunkChoice(index=part.index, delta=_chat_delta(part), finish_reason=part.finish)
        return ChatChunk(**head, choices=(choice,), usage=usage, slipstream=part.trace)

    def closing(self, head: Head, usage: Usage) -> ChatChunk:
        return ChatChunk(**head, choices=(), usage=usage)


def _chat_delta(part: Part) -> ChatDelta:
    if part.opening:
        return ChatDelta(role="assistant", content="")
    if part.call is not None:
        return ChatDelta(tool_calls=(ToolCallDelta(index=part.call_index, **part.call.model_dump()),))
    if part.reasoning:
        return ChatDelta(reasoning=part.reasoning, reasoning_content=part.reasoning)
    return ChatDelta(content=part.text) if part.finish is None else ChatDelta()
