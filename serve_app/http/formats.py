"""The two formats of requests and answers: completions and chat completions.

A dialect knows its request's schema and how deltas and transcripts look on the wire; nothing of how they come about.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Literal, TypedDict, TypeVar

from pydantic import BaseModel

from serve_app.http.answers import Choice, Transcript
from serve_app.http.logprobs import ScoredToken, TokenText, chat_logprobs, completion_logprobs, prompt_logprobs
from serve_app.http.text import TextCodec
from serve_app.http.wire.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    FinishReason,
    PromptLogprobs,
    ScoredChatCompletion,
    ScoredCompletionChoice,
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
    offset: int = 0  # characters before the text
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Telling:
    """What is told of tokens beside their text, and by which names."""

    top: int | None  # likeliest ones of each generated token; None: nothing
    prompt_top: int | None  # the same of the prompt
    text_of: TokenText


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
    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage, telling: Telling) -> BaseModel:
        """The answer in one piece."""

    @abstractmethod
    def chunk(self, head: Head, part: Part, usage: Usage | None, telling: Telling) -> BaseModel:
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

    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage, telling: Telling) -> Completion:
        return Completion(
            **head, choices=tuple([_whole_completion(choice, telling) for choice in choices]), usage=usage
        )

    def chunk(self, head: Head, part: Part, usage: Usage | None, telling: Telling) -> CompletionChunk:
        choice = CompletionChoice(
            index=part.index,
            text=part.text,
            logprobs=_of_completion(part.scored, telling, part.offset),
            finish_reason=part.finish,
        )
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

    def whole(self, head: Head, choices: Sequence[Choice], usage: Usage, telling: Telling) -> ChatCompletion:
        made = tuple([_whole_chat(choice.transcript, telling) for choice in choices])
        if telling.prompt_top is None:
            return ChatCompletion(**head, choices=made, usage=usage)
        told = _of_prompt(choices[0], telling.prompt_top, telling)
        return ScoredChatCompletion(**head, choices=made, usage=usage, prompt_logprobs=told)

    def chunk(self, head: Head, part: Part, usage: Usage | None, telling: Telling) -> ChatChunk:
        choice = ChatChunkChoice(
            index=part.index,
            delta=_chat_delta(part),
            logprobs=_of_chat(part.scored, telling),
            finish_reason=part.finish,
        )
        return ChatChunk(**head, choices=(choice,), usage=usage, slipstream=part.trace)

    def closing(self, head: Head, usage: Usage) -> ChatChunk:
        return ChatChunk(**head, choices=(), usage=usage)


def _chat_delta(part: Part) -> dict[Literal["role", "content"], str]:
    if part.opening:
        return {"role": "assistant", "content": ""}
    return {"content": part.text} if part.finish is None else {}


def _whole_completion(choice: Choice, telling: Telling) -> CompletionChoice:
    transcript = choice.transcript
    text = transcript.text
    logprobs = _of_completion(transcript.scored, telling)
    finish = transcript.finish
    if telling.prompt_top is None:
        return CompletionChoice(index=transcript.index, text=text, logprobs=logprobs, finish_reason=finish)
    told = _of_prompt(choice, telling.prompt_top, telling)
    return ScoredCompletionChoice(
        index=transcript.index, text=text, logprobs=logprobs, finish_reason=finish, prompt_logprobs=told
    )


def _whole_chat(transcript: Transcript, telling: Telling) -> ChatChoice:
    assert transcript.finish is not None, "an answer is whole when all its choices have ended"
    return ChatChoice(
        index=transcript.index,
        message=AnswerMessage(content=transcript.text),
        logprobs=_of_chat(transcript.scored, telling),
        finish_reason=transcript.finish,
    )


def _of_completion(scored: Sequence[ScoredToken], telling: Telling, offset: int = 0) -> CompletionLogprobs | None:
    if telling.top is None or not scored:
        return None
    return completion_logprobs(scored, telling.top, telling.text_of, offset)


def _of_chat(scored: Sequence[ScoredToken], telling: Telling) -> ChatLogprobs | None:
    return chat_logprobs(scored, telling.top, telling.text_of) if telling.top is not None and scored else None


def _of_prompt(choice: Choice, top: int, telling: Telling) -> PromptLogprobs:
    return prompt_logprobs(choice.generation.prompt, choice.transcript.prompt_scores, top, telling.text_of)
