"""The formats of requests and answers: completions, chat completions and responses.

A dialect knows its request's schema and how deltas and transcripts look on the wire; nothing of how they come about.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Generic, Protocol, TypedDict, TypeVar

from pydantic import BaseModel

from serve_app.http.conversation.reading import PlainReader, Reader
from serve_app.http.conversation.requests import check_talk, messages_for, options_for
from serve_app.http.conversation.telling import Part, Telling, TellingOptions
from serve_app.http.failures import Failure
from serve_app.http.responses.as_chat import ResponsesChat, as_chat
from serve_app.http.responses.response_writer import ResponseWriter, begun
from serve_app.http.streaming import as_event
from serve_app.http.text import TextCodec
from serve_app.http.wire.bounds import RequestBounds
from serve_app.http.wire.parsing import parse
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
from serve_app.http.wire.responses_input import ResponsesRequest
from serve_app.http.wire.schemas import ChatRequest, CompletionRequest, GenerationRequest

RequestT = TypeVar("RequestT", bound=GenerationRequest)


class Head(TypedDict):
    """What every whole answer and every chunk of one request begins with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class EventWriter(Protocol):
    """Tells one answer."""

    def whole(self, tellings: Sequence[Telling], usage: Usage) -> BaseModel:
        """The answer in one piece."""
        ...

    def part(self, part: Part, usage: Callable[[], Usage]) -> Iterable[str]:
        """Events of one choice's opening, next text, call or end; `usage` says what was used so far."""
        ...

    def closing(self, usage: Usage) -> Iterable[str]:
        """The last events."""
        ...

    def failed(self, failure: Failure) -> str:
        """What ends a stream that fails."""
        ...


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

    def parse(self, body: bytes, bounds: RequestBounds) -> RequestT:
        """The request in a body."""
        return parse(self.schema, body, bounds)

    def writer(self, request: RequestT, head: Head) -> EventWriter:
        """What tells the answer."""
        return ChunkWriter(self, request, head)

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


class ChunkWriter(Generic[RequestT]):
    """Tells an answer in chunks, each of which is an event."""

    def __init__(self, dialect: Dialect[RequestT], request: RequestT, head: Head) -> None:
        self._dialect = dialect
        self._head = head
        self._options = request.stream_options
        wanted = {"usage": request.stream_options.include_usage, "slipstream": request.speculation.trace}
        self._left_out = {name for name, is_wanted in wanted.items() if not is_wanted}

    def whole(self, tellings: Sequence[Telling], usage: Usage) -> BaseModel:
        return self._dialect.whole(self._head, tellings, usage)

    def part(self, part: Part, usage: Callable[[], Usage]) -> Iterable[str]:
        so_far = usage() if self._options.continuous_usage_stats else None
        return (self._event(self._dialect.chunk(self._head, part, so_far)),)

    def closing(self, usage: Usage) -> Iterable[str]:
        told = (self._event(self._dialect.closing(self._head, usage)),) if self._options.include_usage else ()
        return (*told, as_event("[DONE]"))

    def failed(self, failure: Failure) -> str:
        return as_event(failure.body)

    def _event(self, chunk: BaseModel) -> str:
        return as_event(chunk.model_dump_json(exclude=self._left_out))


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
                tool_calls=choice.calls or None,
            )
            choices.append(ChatChoice(index=choice.index, message=message, finish_reason=choice.finish))
        return ChatCompletion(**head, choices=tuple(choices), usage=usage)

    def chunk(self, head: Head, part: Part, usage: Usage | None) -> ChatChunk:
        choice = ChatChunkChoice(index=part.index, delta=_chat_delta(part), finish_reason=part.finish)
        return ChatChunk(**head, choices=(choice,), usage=usage, slipstream=part.trace)

    def closing(self, head: Head, usage: Usage) -> ChatChunk:
        return ChatChunk(**head, choices=(), usage=usage)


class ResponsesDialect(ChatDialect):
    """/v1/responses: a chat that is told in another way."""

    endpoint = "responses"
    path = "/v1/responses"
    id_prefix = "resp_"

    def parse(self, body: bytes, bounds: RequestBounds) -> ResponsesChat:
        return as_chat(parse(ResponsesRequest, body, bounds), bounds)

    def writer(self, request: ChatRequest, head: Head) -> EventWriter:
        assert isinstance(request, ResponsesChat), "it was parsed here"
        return _ResponseEvents(ResponseWriter(begun(request.asked, head["id"], head["created"])))


class _ResponseEvents:
    """A writer of responses, as writers of all answers are used."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer

    def whole(self, tellings: Sequence[Telling], usage: Usage) -> BaseModel:
        (telling,) = tellings
        assert telling.finish is not None, "an answer is whole when its choice has ended"
        return self._writer.whole(telling.told, telling.finish, usage)

    def part(self, part: Part, usage: Callable[[], Usage]) -> Iterable[str]:
        del usage
        return self._writer.part(part)

    def closing(self, usage: Usage) -> Iterable[str]:
        return self._writer.closing(usage)

    def failed(self, failure: Failure) -> str:
        return self._writer.failed(failure.detail)


def _chat_delta(part: Part) -> ChatDelta:
    if part.opening:
        return ChatDelta(role="assistant", content="")
    if part.call is not None:
        return ChatDelta(tool_calls=(ToolCallDelta(index=part.call_index, **part.call.model_dump()),))
    if part.reasoning:
        return ChatDelta(reasoning=part.reasoning, reasoning_content=part.reasoning)
    return ChatDelta(content=part.text) if part.finish is None else ChatDelta()
