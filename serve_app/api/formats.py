"""Wire formats of the generating endpoints, and the implementation of /tokenize and /detokenize.

An `ApiFormat` parses one endpoint's requests, tokenizes their prompts, and creates an `AnswerWriter` for each answer. A
writer serializes the answer, whole or event by event. Formats are pure, independent of token generation, and safe to
use on worker threads.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, Protocol, TypedDict, TypeVar

from pydantic import BaseModel
from pydantic_core import to_json

from cluster.config import SlipstreamConfig
from cluster.errors import RequestError
from serve_app.api.chat import check_call_form, check_features, messages_of, options_of, reasoning_before
from serve_app.api.choices import Choice, ChoiceEvent, ChoiceStreamOptions
from serve_app.api.draft_prompt import DraftPrompts
from serve_app.api.failures import Failure
from serve_app.api.fields import RequestBounds, check, parse
from serve_app.api.generation import metrics_of
from serve_app.api.grammars import RequestedGrammar, call_grammar, check_end, content_grammar
from serve_app.api.logprobs import TokenBytes, chat_logprobs, completion_logprobs, end_offset, prompt_logprobs
from serve_app.api.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    Completion,
    CompletionChoice,
    CompletionChunk,
    FunctionReply,
    PromptLogprobs,
    RequestMetrics,
    ScoredChatCompletion,
    ScoredCompletionChoice,
    ToolCallDelta,
    ToolCallReply,
    Trace,
    Usage,
)
from serve_app.api.request_schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    GenerationRequest,
    NamedTool,
    TokenizeReply,
    TokenizeRequest,
)
from serve_app.api.responses import ResponsesChat, ResponseWriter, as_chat, initial_response
from serve_app.api.responses_schemas import ResponsesRequest
from serve_app.api.streaming import as_event
from serve_app.api.text import TextCodec
from serve_app.api.tool_calls import Call, Content, PlainReader, Reader, Reasoning

RequestT = TypeVar("RequestT", bound=GenerationRequest)
NO_TRACE = Trace()
PLACEHOLDER = "\0"  # no other string after it in a chunk comes from the client


class Head(TypedDict):
    """Fields common to an answer and all its chunks."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class AnswerWriter(Protocol):
    """Serializes one answer."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> BaseModel:
        """Returns the whole answer; called after all choices have ended."""
        ...

    def event(self, event: ChoiceEvent, usage: Callable[[], Usage]) -> Iterable[str]:
        """Returns the server-sent events for one event of a choice; `usage` returns the usage so far."""
        ...

    def closing(self, usage: Usage, metrics: RequestMetrics | None) -> Iterable[str]:
        """Returns the last server-sent events."""
        ...

    def failed(self, failure: Failure) -> str:
        """Returns the server-sent events that end a failed stream."""
        ...


class ApiFormat(ABC, Generic[RequestT]):
    """Wire format of one endpoint."""

    endpoint: ClassVar[str]
    path: ClassVar[str]
    id_prefix: ClassVar[str]

    @abstractmethod
    def parse(self, body: bytes, bounds: RequestBounds) -> RequestT:
        """Parses a body into a request."""

    def check(self, request: RequestT, codec: TextCodec) -> None:
        """Raises RequestError for features the model lacks, before tokenizing."""
        del request, codec

    def grammar(self, request: RequestT, codec: TextCodec) -> RequestedGrammar | None:
        """Returns the grammar that constrains the answer, if any."""
        del codec
        grammar = content_grammar(request.answer_format, request.structured_outputs)
        check_end(grammar, ignore_eos=request.ignore_eos)
        return grammar

    @abstractmethod
    def prompts(self, request: RequestT, codec: TextCodec) -> list[tuple[int, ...]]:
        """Tokenizes the request's prompts."""

    def draft_prompt(self, request: RequestT, prompts: DraftPrompts) -> tuple[int, ...]:
        """Returns the prompt in the draft's tokens; empty if drafters must translate the target's prompt."""
        del request, prompts
        return ()

    def needs_special_tokens(self, codec: TextCodec) -> bool:
        """Returns whether the reader needs the text of special tokens, which separate an answer's parts."""
        del codec
        return False

    def reader(self, request: RequestT, codec: TextCodec, prompt: Sequence[int]) -> Reader:
        """Returns a reader, which splits an answer into segments."""
        del request, codec, prompt
        return PlainReader()

    def continues_prompt(self, request: RequestT) -> bool:
        """Returns whether an answer continues the prompt's text, rather than begins a message."""
        del request
        return False

    def stream_options(self, request: RequestT) -> ChoiceStreamOptions:
        """Returns the selection of events to send."""
        return ChoiceStreamOptions(trace=_has_trace(request))

    @abstractmethod
    def writer(self, request: RequestT, head: Head, codec: TextCodec) -> AnswerWriter:
        """Returns the writer of the answer."""


def _as_json(text: str) -> str:
    return to_json(text).decode()


def _has_trace(request: GenerationRequest) -> bool:
    return request.speculation.trace or request.speculation.rejected


class ChunkWriter(ABC):
    """Writes an answer in chunks; each is one server-sent event."""

    def __init__(self, request: GenerationRequest, head: Head, codec: TextCodec) -> None:
        self._head = head
        # Loaded here, on a worker thread, and only for scores: a large vocabulary takes seconds.
        self._bytes_of: TokenBytes = codec.token_bytes if request.is_scored else _no_bytes
        self._top = request.top_of_tokens
        self._prompt_top = request.prompt_logprobs
        self._includes_usage = request.stream_options.include_usage
        self._continuous_usage = request.stream_options.continuous_usage_stats
        self._excluded = _excluded_fields(request)
        self._templates: dict[tuple[int, type], list[str]] = {}  # text chunks cut at the text, by index and segment

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Usage) -> BaseModel:
        """Returns the whole answer."""

    @abstractmethod
    def _chunk(self, event: ChoiceEvent, usage: Usage | None) -> BaseModel:
        """Returns the chunk for one event, with the usage so far if requested."""

    @abstractmethod
    def _usage_chunk(self, usage: Usage, metrics: RequestMetrics | None) -> BaseModel:
        """Returns the chunk that reports usage."""

    def event(self, event: ChoiceEvent, usage: Callable[[], Usage]) -> Iterable[str]:
        segment = event.segment
        if isinstance(segment, Content | Reasoning) and event.is_bare and not self._continuous_usage:
            return (self._text_event(event.index, segment),)
        chunk = self._chunk(event, usage() if self._continuous_usage else None)
        return (as_event(chunk.model_dump_json(exclude=self._excluded)),)

    def _text_event(self, index: int, segment: Content | Reasoning) -> str:
        """Returns the event for text alone: only the text is encoded, since the rest of such chunks is the same."""
        kind = type(segment)
        template = self._templates.get((index, kind))
        if template is None:
            chunk = self._chunk(ChoiceEvent(index, kind(PLACEHOLDER)), None)
            places = 1 if kind is Content else 2  # reasoning has two names
            whole = as_event(chunk.model_dump_json(exclude=self._excluded))
            template = self._templates[index, kind] = whole.rsplit(_as_json(PLACEHOLDER), places)
        return _as_json(segment.text).join(template)

    def closing(self, usage: Usage, metrics: RequestMetrics | None) -> Iterable[str]:
        if not self._includes_usage:
            return (as_event("[DONE]"),)
        chunk = self._usage_chunk(usage, metrics)
        excluded = {name: fields for name, fields in self._excluded.items() if name != "metrics"}
        return (as_event(chunk.model_dump_json(exclude=excluded)), as_event("[DONE]"))

    def failed(self, failure: Failure) -> str:
        return as_event(failure.body) + as_event("[DONE]")

    def _prompt_logprobs(self, choice: Choice, top: int) -> PromptLogprobs:
        return prompt_logprobs(choice.generation.prompt, choice.text.prompt_scores, top, self._bytes_of)


def _no_bytes(token: int) -> bytes:
    raise AssertionError(f"no scores were requested, so the bytes of token {token} are not loaded")


def _excluded_fields(request: GenerationRequest) -> dict[str, bool | dict[str, bool]]:
    """Returns the chunk fields to omit for this request."""
    excluded: dict[str, bool | dict[str, bool]] = {"metrics": True}  # only the final usage chunk has metrics
    if not request.stream_options.include_usage:
        excluded["usage"] = True
    if not request.speculation.rejected:
        excluded["slipstream"] = {"rejected": True} if request.speculation.trace else True
    return excluded


class CompletionFormat(ApiFormat[CompletionRequest]):
    """Format of /v1/completions."""

    endpoint = "completions"
    path = "/v1/completions"
    id_prefix = "cmpl-"

    def parse(self, body: bytes, bounds: RequestBounds) -> CompletionRequest:
        return parse(CompletionRequest, body, bounds)

    def prompts(self, request: CompletionRequest, codec: TextCodec) -> list[tuple[int, ...]]:
        return [codec.encode(prompt) if isinstance(prompt, str) else prompt for prompt in request.prompt]

    def continues_prompt(self, request: CompletionRequest) -> bool:
        del request
        return True

    def writer(self, request: CompletionRequest, head: Head, codec: TextCodec) -> AnswerWriter:
        return CompletionWriter(request, head, codec)


class CompletionWriter(ChunkWriter):
    """Writes answers of /v1/completions."""

    def __init__(self, request: GenerationRequest, head: Head, codec: TextCodec) -> None:
        super().__init__(request, head, codec)
        self._offsets = Counter[int]()  # characters of each choice's scored tokens so far, some of them held back

    def whole(self, choices: Sequence[Choice], usage: Usage) -> Completion:
        written = tuple([self._choice(choice) for choice in choices])
        return Completion(**self._head, choices=written, usage=usage, metrics=metrics_of(choices))

    def _choice(self, choice: Choice) -> CompletionChoice:
        text = choice.text
        logprobs = None
        if self._top is not None and text.scored:
            logprobs = completion_logprobs(text.scored, self._top, self._bytes_of)
        written = CompletionChoice(
            index=text.index,
            text=text.text,
            logprobs=logprobs,
            finish_reason=text.finish,
            stop_reason=text.stop_reason,
        )
        if self._prompt_top is None:
            return written
        prompt_scores = self._prompt_logprobs(choice, self._prompt_top)
        return ScoredCompletionChoice(**dict(written), prompt_logprobs=prompt_scores)

    def _chunk(self, event: ChoiceEvent, usage: Usage | None) -> CompletionChunk:
        logprobs = None
        if self._top is not None and event.scored:
            offset = self._offsets[event.index]
            logprobs = completion_logprobs(event.scored, self._top, self._bytes_of, offset)
            self._offsets[event.index] = end_offset(event.scored, self._bytes_of, offset)
        choice = CompletionChoice(
            index=event.index,
            text=event.text,
            logprobs=logprobs,
            finish_reason=event.finish,
            stop_reason=event.stop_reason,
        )
        return CompletionChunk(**self._head, choices=(choice,), usage=usage, slipstream=event.trace or NO_TRACE)

    def _usage_chunk(self, usage: Usage, metrics: RequestMetrics | None) -> CompletionChunk:
        return CompletionChunk(**self._head, choices=(), usage=usage, metrics=metrics)


class ChatFormat(ApiFormat[ChatRequest]):
    """Format of /v1/chat/completions."""

    endpoint = "chat"
    path = "/v1/chat/completions"
    id_prefix = "chatcmpl-"

    def parse(self, body: bytes, bounds: RequestBounds) -> ChatRequest:
        return parse(ChatRequest, body, bounds)

    def check(self, request: ChatRequest, codec: TextCodec) -> None:
        check_features(request, codec.template, reads_answers=codec.readers.have_template)
        check_call_form(request, codec.call_form)

    def grammar(self, request: ChatRequest, codec: TextCodec) -> RequestedGrammar | None:
        content = super().grammar(request, codec)
        reasoning = partial(reasoning_before, request, codec.template, codec.readers)
        return call_grammar(request, codec.answer_form, content, reasoning)

    def prompts(self, request: ChatRequest, codec: TextCodec) -> list[tuple[int, ...]]:
        return [codec.encode_chat(messages_of(request, codec.template), options_of(request))]

    def draft_prompt(self, request: ChatRequest, prompts: DraftPrompts) -> tuple[int, ...]:
        return prompts.tokens(request)

    def needs_special_tokens(self, codec: TextCodec) -> bool:
        return codec.readers.have_template

    def reader(self, request: ChatRequest, codec: TextCodec, prompt: Sequence[int]) -> Reader:
        return codec.readers.reader(prompt, [tool.model_dump() for tool in request.offered])

    def continues_prompt(self, request: ChatRequest) -> bool:
        return request.continue_final_message

    def stream_options(self, request: ChatRequest) -> ChoiceStreamOptions:
        return ChoiceStreamOptions(
            reasoning=request.include_reasoning,
            max_calls=None if request.parallel_tool_calls else 1,
            opening=True,
            call_finish="stop" if isinstance(request.tool_choice, NamedTool) else "tool_calls",  # as OpenAI does
            trace=_has_trace(request),
        )

    def writer(self, request: ChatRequest, head: Head, codec: TextCodec) -> AnswerWriter:
        return ChatWriter(request, head, codec)


class ChatWriter(ChunkWriter):
    """Writes answers of /v1/chat/completions."""

    def whole(self, choices: Sequence[Choice], usage: Usage) -> ChatCompletion:
        written = tuple([self._choice(choice) for choice in choices])
        metrics = metrics_of(choices)
        if self._prompt_top is None:
            return ChatCompletion(**self._head, choices=written, usage=usage, metrics=metrics)
        prompt_scores = self._prompt_logprobs(choices[0], self._prompt_top)
        return ScoredChatCompletion(
            **self._head, choices=written, usage=usage, metrics=metrics, prompt_logprobs=prompt_scores
        )

    def _choice(self, choice: Choice) -> ChatChoice:
        text, stream = choice.text, choice.stream
        assert stream.finish is not None, "every choice of a whole answer has ended"
        reasoning = stream.reasoning or None
        message = AnswerMessage(
            content=stream.content or (None if stream.calls else ""),
            reasoning=reasoning,
            reasoning_content=reasoning,
            tool_calls=tuple([ToolCallReply(**_call_fields(call)) for call in stream.calls]) or None,
        )
        logprobs = None
        if self._top is not None and text.scored:
            logprobs = chat_logprobs(text.scored, self._top, self._bytes_of)
        return ChatChoice(
            index=text.index,
            message=message,
            logprobs=logprobs,
            finish_reason=stream.finish,
            stop_reason=text.stop_reason,
        )

    def _chunk(self, event: ChoiceEvent, usage: Usage | None) -> ChatChunk:
        logprobs = None
        if self._top is not None and event.scored:
            logprobs = chat_logprobs(event.scored, self._top, self._bytes_of)
        choice = ChatChunkChoice(
            index=event.index,
            delta=_chat_delta(event),
            logprobs=logprobs,
            finish_reason=event.finish,
            stop_reason=event.stop_reason,
        )
        return ChatChunk(**self._head, choices=(choice,), usage=usage, slipstream=event.trace or NO_TRACE)

    def _usage_chunk(self, usage: Usage, metrics: RequestMetrics | None) -> ChatChunk:
        return ChatChunk(**self._head, choices=(), usage=usage, metrics=metrics)


def _chat_delta(event: ChoiceEvent) -> ChatDelta:
    segment = event.segment
    if event.is_opening:
        return ChatDelta(role="assistant", content="")
    if isinstance(segment, Call):
        return ChatDelta(tool_calls=(ToolCallDelta(index=segment.index, **_call_fields(segment)),))
    if isinstance(segment, Reasoning):
        return ChatDelta(reasoning=segment.text, reasoning_content=segment.text)
    return ChatDelta(content=event.text) if event.finish is None else ChatDelta()


def _call_fields(call: Call) -> dict[str, Any]:
    return {"id": call.id, "function": FunctionReply(name=call.name, arguments=call.arguments)}


class ResponsesFormat(ChatFormat):
    """Format of /v1/responses: a chat request with another reply format."""

    endpoint = "responses"
    path = "/v1/responses"
    id_prefix = "resp_"

    def parse(self, body: bytes, bounds: RequestBounds) -> ResponsesChat:
        return as_chat(parse(ResponsesRequest, body, bounds), bounds)

    def writer(self, request: ChatRequest, head: Head, codec: TextCodec) -> AnswerWriter:
        del codec
        assert isinstance(request, ResponsesChat), "`parse` returns ResponsesChat"
        return ResponseWriter(initial_response(request, head["id"], head["created"]))


@dataclass(frozen=True)
class Tokenizing:
    """Implements /tokenize and /detokenize."""

    codec: TextCodec
    config: SlipstreamConfig

    def tokenize(self, request: TokenizeRequest) -> TokenizeReply:
        """Tokenizes a text. Raises RequestError without tokenizing if the text cannot fit the context."""
        context = self.config.model.max_context
        max_chars = context * self.codec.max_token_chars
        if request.chars > max_chars:
            field = "prompt" if request.prompt is not None else "messages"
            message = f"{field} has {request.chars} characters, expected at most {max_chars}: "
            raise RequestError(f"{message}the context holds {context} tokens", field)
        tokens = self._tokens(request)
        strings = None
        if request.return_token_strs:
            strings = tuple(self.codec.tokenizer.convert_ids_to_tokens(list(tokens)))
        return TokenizeReply(count=len(tokens), max_model_len=context, tokens=tokens, token_strs=strings)

    def detokenize(self, request: DetokenizeRequest) -> DetokenizeReply:
        """Returns the text of all tokens, including special tokens."""
        if (highest := max(request.tokens)) >= self.codec.vocabulary:
            raise RequestError(
                f"tokens: {highest} is outside the vocabulary of {self.codec.vocabulary} tokens", "tokens"
            )
        return DetokenizeReply(prompt=self.codec.tokenizer.decode(list(request.tokens)))

    def _tokens(self, request: TokenizeRequest) -> tuple[int, ...]:
        if request.prompt is not None:
            special = request.add_special_tokens is not False
            return tuple(self.codec.tokenizer(request.prompt, add_special_tokens=special).input_ids)
        if request.add_special_tokens:
            raise RequestError(
                "add_special_tokens is true, expected false: chat templates add special tokens", "add_special_tokens"
            )
        fields = ("messages", "tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
        values = {name: getattr(request, name) for name in fields}
        chat = check(ChatRequest, {"model": self.config.model.name, **values}, RequestBounds())
        return self.codec.encode_chat(messages_of(chat, self.codec.template), options_of(chat))
