"""The two formats of requests and answers: completions and chat completions.

A dialect knows its request's schema and how deltas and transcripts look on the wire; nothing of how they come about.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypedDict, TypeVar

from pydantic import BaseModel

from serve_app.http.answers import Transcript
from serve_app.http.text import TextCodec
from serve_app.http.wire.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionChunk,
    FinishReason,
    Trace,
    Usage,
)
from serve_app.http.wire.schemas import ChatRequest, CompletionRequest, GenerationRequest

RequestT = TypeVar("RequestT", bound=GenerationRequest)


class Head(TypedDict):
    """What every whole answer and every chunk of one request begins with."""

    id: str
    created: int
    model: str


@dataclass(frozen=True, slots=True)
class Part:
    """One choice's share in a chunk."""

    index: int
    text: str = ""
    finish: FinishReason | None = None
    trace: Trace = field(default_factory=Trace)
    opening: bool = False


class Dialect(ABC, Generic[RequestT]):
    """One endpoint's wire format."""

    endpoint: ClassVar[str]
    path: ClassVar[str]
    id_prefix: ClassVar[str]
    has_openings: ClassVar[bool]  # whether each choice's stream begins with a chunk without text
    schema: type[RequestT]

    @abstractmethod
    def prompts(self, request: RequestT, codec: TextCodec) -> list[tuple[int, ...]]:
        """The request's prompts as tokens."""

    @abstractmethod
    def whole(self, head: Head, transcripts: Sequence[Transcript], usage: Usage) -> BaseModel:
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
    has_openings = False
    schema = CompletionRequest

    def prompts(self, request: CompletionRequest, codec: TextCodec) -> list[tuple[int, ...]]:
        return [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]

    def whole(self, head: Head, transcripts: Sequence[Transcript], usage: Usage) -> Completion:
        choices = tuple(
            CompletionChoice(index=choice.index, text=choice.text, finish_reason=choice.finish)
            for choice in transcripts
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
    has_openings = True
    schema = ChatRequest

    def prompts(self, request: ChatRequest, codec: TextCodec) -> list[tuple[int, ...]]:
        return [codec.encode_chat([{"role": item.role, "content": item.text} for item in request.messages])]

    def whole(self, head: Head, transcripts: Sequence[Transcript], usage: Usage) -> ChatCompletion:
        choices = []
        for choice in transcripts:
            assert choice.finish is not None, "an answer is whole when all its choices have ended"
            message = AnswerMessage(content=choice.text)
            choices.append(ChatChoice(index=choice.index, message=message, finish_reason=choice.finish))
        return ChatCompletion(**head, choices=tuple(choices), usage=usage)

    def chunk(self, head: Head, part: Part, usage: Usage | None) -> ChatChunk:
        choice = ChatChunkChoice(index=part.index, delta=_chat_delta(part), finish_reason=part.finish)
        return ChatChunk(**head, choices=(choice,), usage=usage, slipstream=part.trace)

    def closing(self, head: Head, usage: Usage) -> ChatChunk:
        return ChatChunk(**head, choices=(), usage=usage)


def _chat_delta(part: Part) -> dict[Literal["role", "content"], str]:
    if part.opening:
        return {"role": "assistant", "content": ""}
    return {"content": part.text} if part.finish is None else {}
