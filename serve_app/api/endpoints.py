"""Wire formats of requests and answers: completions, chat completions, responses, tokenize.

A format knows its request's schema and how deltas and finished choices look on the wire, but not how they are
generated. It is pure and also runs on a thread beside the event loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypedDict, TypeVar

from pydantic import BaseModel

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from serve_app.api.chat import check_calls, check_talk, messages_for, options_for, reasoning_before
from serve_app.api.chat_template import ChatTemplate
from serve_app.api.choice_stream import (
    ChoiceStream,
    ChoiceStreamOptions,
    Part,
    ScoredToken,
    TokenText,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from serve_app.api.failures import Failure
from serve_app.api.fields import RequestBounds, parse
from serve_app.api.generation import Choice, metrics_of
from serve_app.api.grammars import RequestedGrammar, held_calls
from serve_app.api.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionLogprobs,
    PromptLogprobs,
    RequestMetrics,
    ScoredChatCompletion,
    ScoredCompletionChoice,
    ToolCallDelta,
    Usage,
)
from serve_app.api.responses import ResponsesChat, ResponseWriter, as_chat, begun
from serve_app.api.responses_schemas import ResponsesRequest
from serve_app.api.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    GenerationRequest,
    NamedTool,
    TokenizeReply,
    TokenizeRequest,
)
from serve_app.api.served_model import check_model
from serve_app.api.streaming import as_event
from serve_app.api.text import TextCodec
from serve_app.api.tool_calls import PlainReader, Reader

RequestT = TypeVar("RequestT", bound=GenerationRequest)


class Head(TypedDict):
    """Fields common to whole answers and chunks of one request."""

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class ScoreForm:
    """Which token scores are sent, and under which names."""

    top: int | None  # alternatives per generated token; None: no scores
    prompt_top: int | None  # the same for prompt tokens
    text_of: TokenText


class ToldChoice(NamedTuple):
    """A choice and its stream of parts."""

    choice: Choice
    telling: ChoiceStream


class EventWriter(Protocol):
    """Writes one answer."""

    def whole(self, told: Sequence[ToldChoice], usage: Usage) -> BaseModel:
        """Returns the answer in one piece."""
        ...

    def part(self, part: Part, usage: Callable[[], Usage]) -> Iterable[str]:
        """Returns events for one choice's opening, text, call or end; `usage` is the usage so far."""
        ...

    def closing(self, usage: Usage, metrics: RequestMetrics | None) -> Iterable[str]:
        """Returns the last events."""
        ...

    def failed(self, failure: Failure) -> str:
        """Returns the events that end a stream that fails."""
        ...


class ApiFormat(ABC, Generic[RequestT]):
    """Wire format of one endpoint."""

    endpoint: ClassVar[str]
    path: ClassVar[str]
    id_prefix: ClassVar[str]
    schema: type[RequestT]

    def check(self, request: RequestT, codec: TextCodec) -> None:
        """Raises RequestError for features the model lacks, before tokenising."""
        del request, codec

    def held(self, request: RequestT, codec: TextCodec, asked: RequestedGrammar | None) -> RequestedGrammar | None:
        """Returns the grammar of the whole answer; `asked` is that of its content."""
        del request, codec
        return asked

    def reads_parts(self, codec: TextCodec) -> bool:
        """Returns whether answers are split into parts, which needs the special tokens that mark them."""
        del codec
        return False

    def reader(self, request: RequestT, codec: TextCodec, prompt: Sequence[int]) -> Reader:
        """Returns the reader that splits an answer into parts."""
        del request, codec, prompt
        return PlainReader()

    def telling(self, request: RequestT) -> ChoiceStreamOptions:
        """Returns which parts of an answer are sent."""
        del request
        return ChoiceStreamOptions()

    def parse(self, body: bytes, bounds: RequestBounds) -> RequestT:
        """Parses a body."""
        return parse(self.schema, body, bounds)

    def writer(self, request: RequestT, head: Head, codec: TextCodec) -> EventWriter:
        """Returns the writer of the answer."""
        return ChunkWriter(self, request, head, codec.token_text)

    @abstractmethod
    def prompts(self, request: RequestT, codec: TextCodec) -> list[tuple[int, ...]]:
        """Tokenises the request's prompts."""

    @abstractmethod
    def whole(self, head: Head, told: Sequence[ToldChoice], usage: Usage, scores: ScoreForm) -> BaseModel:
        """Returns the answer in one piece."""

    @abstractmethod
    def chunk(self, head: Head, part: Part, usage: Usage | None, scores: ScoreForm) -> BaseModel:
        """Returns the chunk for a choice's opening, text or end, with usage so far if requested."""

    @abstractmethod
    def closing(self, head: Head, usage: Usage, metrics: RequestMetrics | None) -> BaseModel:
        """Returns the chunk that reports usage."""


class ChunkWriter(Generic[RequestT]):
    """Writes an answer in chunks, one event each."""

    def __init__(self, dialect: ApiFormat[RequestT], request: RequestT, head: Head, text_of: TokenText) -> None:
        self._dialect = dialect
        self._scores = ScoreForm(request.top_of_tokens, request.prompt_logprobs, text_of)
        self._head = head
        self._options = request.stream_options
        self._left_out = _left_out_of(request)

    def whole(self, told: Sequence[ToldChoice], usage: Usage) -> BaseModel:
        return self._dialect.whole(self._head, told, usage, self._scores)

    def part(self, part: Part, usage: Callable[[], Usage]) -> Iterable[str]:
        so_far = usage() if self._options.continuous_usage_stats else None
        return (self._event(self._dialect.chunk(self._head, part, so_far, self._scores)),)

    def closing(self, usage: Usage, metrics: RequestMetrics | None) -> Iterable[str]:
        if not self._options.include_usage:
            return (as_event("[DONE]"),)
        chunk = self._dialect.closing(self._head, usage, metrics)
        told = chunk.model_dump_json(exclude={name: what for name, what in self._left_out.items() if name != "metrics"})
        return (as_event(told), as_event("[DONE]"))

    def failed(self, failure: Failure) -> str:
        return as_event(failure.body) + as_event("[DONE]")

    def _event(self, chunk: BaseModel) -> str:
        return as_event(chunk.model_dump_json(exclude=self._left_out))


def _left_out_of(request: GenerationRequest) -> dict[str, bool | dict[str, bool]]:
    """Returns the fields of chunks that the request does not ask for."""
    left_out: dict[str, bool | dict[str, bool]] = {"metrics": True}  # all but the last
    if not request.stream_options.include_usage:
        left_out["usage"] = True
    if not request.speculation.rejected:
        left_out["slipstream"] = {"rejected": True} if request.speculation.trace else True
    return left_out


class CompletionFormat(ApiFormat[CompletionRequest]):
    """Format of /v1/completions."""

    endpoint = "completions"
    path = "/v1/completions"
    id_prefix = "cmpl-"
    schema = CompletionRequest

    def prompts(self, request: CompletionRequest, codec: TextCodec) -> list[tuple[int, ...]]:
        return [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]

    def whole(self, head: Head, told: Sequence[ToldChoice], usage: Usage, scores: ScoreForm) -> Completion:
        made = tuple([_whole_completion(one, scores) for one in told])
        return Completion(**head, choices=made, usage=usage, metrics=metrics_of([one.choice for one in told]))

    def chunk(self, head: Head, part: Part, usage: Usage | None, scores: ScoreForm) -> CompletionChunk:
        choice = CompletionChoice(
            index=part.index,
            text=part.text,
            logprobs=_of_completion(part.scored, scores, part.offset),
            finish_reason=part.finish,
            stop_reason=part.stop_reason,
        )
        return CompletionChunk(**head, choices=(choice,), usage=usage, slipstream=part.trace)

    def closing(self, head: Head, usage: Usage, metrics: RequestMetrics | None) -> CompletionChunk:
        return CompletionChunk(**head, choices=(), usage=usage, metrics=metrics)


class ChatFormat(ApiFormat[ChatRequest]):
    """Format of /v1/chat/completions."""

    endpoint = "chat"
    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"
    schema = ChatRequest

    def check(self, request: ChatRequest, codec: TextCodec) -> None:
        check_talk(request, codec.template, reads_answers=codec.readers.tells_parts)
        check_calls(request, codec.call_form)

    def held(self, request: ChatRequest, codec: TextCodec, asked: RequestedGrammar | None) -> RequestedGrammar | None:
        reasoning = partial(reasoning_before, request, codec.template, codec.readers)
        return held_calls(request, codec.call_form, asked, reasoning)

    def prompts(self, request: ChatRequest, codec: TextCodec) -> list[tuple[int, ...]]:
        return [codec.encode_chat(messages_for(request, codec.template), options_for(request))]

    def reads_parts(self, codec: TextCodec) -> bool:
        return codec.readers.tells_parts

    def reader(self, request: ChatRequest, codec: TextCodec, prompt: Sequence[int]) -> Reader:
        return codec.readers.reader(prompt, [tool.model_dump() for tool in request.offered])

    def telling(self, request: ChatRequest) -> ChoiceStreamOptions:
        return ChoiceStreamOptions(
            reasoning=request.include_reasoning,
            most_calls=None if request.parallel_tool_calls else 1,
            opening=True,
            end_of_calls="stop" if isinstance(request.tool_choice, NamedTool) else "tool_calls",  # OpenAI's name
        )

    def whole(self, head: Head, told: Sequence[ToldChoice], usage: Usage, scores: ScoreForm) -> ChatCompletion:
        made = tuple([_whole_chat(one, scores) for one in told])
        metrics = metrics_of([one.choice for one in told])
        if scores.prompt_top is None:
            return ChatCompletion(**head, choices=made, usage=usage, metrics=metrics)
        of_prompt = _of_prompt(told[0].choice, scores.prompt_top, scores)
        return ScoredChatCompletion(**head, choices=made, usage=usage, metrics=metrics, prompt_logprobs=of_prompt)

    def chunk(self, head: Head, part: Part, usage: Usage | None, scores: ScoreForm) -> ChatChunk:
        choice = ChatChunkChoice(
            index=part.index,
            delta=_chat_delta(part),
            logprobs=_of_chat(part.scored, scores),
            finish_reason=part.finish,
            stop_reason=part.stop_reason,
        )
        return ChatChunk(**head, choices=(choice,), usage=usage, slipstream=part.trace)

    def closing(self, head: Head, usage: Usage, metrics: RequestMetrics | None) -> ChatChunk:
        return ChatChunk(**head, choices=(), usage=usage, metrics=metrics)


class ResponsesFormat(ChatFormat):
    """Format of /v1/responses: a chat with another reply."""

    endpoint = "responses"
    path = "/v1/responses"
    id_prefix = "resp_"

    def parse(self, body: bytes, bounds: RequestBounds) -> ResponsesChat:
        return as_chat(parse(ResponsesRequest, body, bounds), bounds)

    def writer(self, request: ChatRequest, head: Head, codec: TextCodec) -> EventWriter:
        del codec
        assert isinstance(request, ResponsesChat), "it was parsed here"
        return _ResponseEvents(ResponseWriter(begun(request, head["id"], head["created"])))


class _ResponseEvents:
    """Adapts the writer of responses to `EventWriter`."""

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer

    def whole(self, told: Sequence[ToldChoice], usage: Usage) -> BaseModel:
        ((_, telling),) = told
        assert telling.finish is not None, "an answer is whole when its choice has ended"
        return self._writer.whole(telling.told, telling.finish, usage)

    def part(self, part: Part, usage: Callable[[], Usage]) -> Iterable[str]:
        del usage
        return self._writer.part(part)

    def closing(self, usage: Usage, metrics: RequestMetrics | None) -> Iterable[str]:
        del metrics
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


def _whole_completion(told: ToldChoice, scores: ScoreForm) -> CompletionChoice:
    transcript = told.choice.transcript
    choice = CompletionChoice(
        index=transcript.index,
        text=transcript.text,
        logprobs=_of_completion(transcript.scored, scores),
        finish_reason=transcript.finish,
        stop_reason=transcript.stop_reason,
    )
    if scores.prompt_top is None:
        return choice
    of_prompt = _of_prompt(told.choice, scores.prompt_top, scores)
    return ScoredCompletionChoice(**dict(choice), prompt_logprobs=of_prompt)


def _whole_chat(told: ToldChoice, scores: ScoreForm) -> ChatChoice:
    telling = told.telling
    assert telling.finish is not None, "an answer is whole when all its choices have ended"
    message = AnswerMessage(
        content=telling.content or (None if telling.calls else ""),
        reasoning=telling.reasoning or None,
        reasoning_content=telling.reasoning or None,
        tool_calls=telling.calls or None,
    )
    transcript = told.choice.transcript
    return ChatChoice(
        index=telling.index,
        message=message,
        logprobs=_of_chat(transcript.scored, scores),
        finish_reason=telling.finish,
        stop_reason=transcript.stop_reason,
    )


def _of_completion(scored: Sequence[ScoredToken], scores: ScoreForm, offset: int = 0) -> CompletionLogprobs | None:
    if scores.top is None or not scored:
        return None
    return completion_logprobs(scored, scores.top, scores.text_of, offset)


def _of_chat(scored: Sequence[ScoredToken], scores: ScoreForm) -> ChatLogprobs | None:
    return chat_logprobs(scored, scores.top, scores.text_of) if scores.top is not None and scored else None


def _of_prompt(choice: Choice, top: int, scores: ScoreForm) -> PromptLogprobs:
    return prompt_logprobs(choice.generation.prompt, choice.transcript.prompt_scores, top, scores.text_of)


@dataclass(frozen=True)
class Tokenizing:
    """The served tokenizer, as /tokenize and /detokenize use it."""

    tokenizer: Any
    template: ChatTemplate
    config: SlipstreamConfig
    max_token_chars: int
    vocabulary: int  # upper bound of token ids

    def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Tokenises a text. Raises RequestError first if it cannot fit the context."""
        self._check_model(request.model)
        context = self.config.model.max_context
        if request.chars > context * self.max_token_chars:
            field = "prompt" if request.prompt is not None else "messages"
            message = f"{field} has {request.chars} characters, expected at most {context * self.max_token_chars}: "
            raise RequestError(f"{message}the context holds {context} tokens", field)
        tokens = self._tokens(request)
        strings = tuple(self.tokenizer.convert_ids_to_tokens(list(tokens))) if request.return_token_strs else None
        return TokenizeReply(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=strings)

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """Spells all tokens, special ones too."""
        self._check_model(request.model)
        if (highest := max(request.tokens)) >= self.vocabulary:
            raise RequestError(f"tokens: {highest} is outside the vocabulary of {self.vocabulary} tokens", "tokens")
        return DetokenizeReply(prompt=self.tokenizer.decode(list(request.tokens)))

    def _tokens(self, request: TokenizeRequest) -> tuple[int, ...]:
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            return tuple(self.tokenizer(request.prompt, add_special_tokens=special).input_ids)
        if request.add_special_tokens:
            raise RequestError(
                "add_special_tokens: a chat template writes its own, expected false", "add_special_tokens"
            )
        chat = ChatRequest(
            model=self.config.model.name,
            messages=request.messages,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )
        return self.template.encode(messages_for(chat, self.template), options_for(chat))

    def _check_model(self, name: str | None) -> None:
        if name is not None:
            check_model(name, self.config.served_names)
