"""One choice as its client sees it: parts as they arrive, or everything at the end. Formats of log probabilities."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from protos.frozen import value
from protos.messages import TokenScore
from serve_app.api.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    FinishReason,
    FunctionReply,
    PromptLogprob,
    PromptLogprobs,
    StopReason,
    TokenLogprob,
    ToolCallReply,
    Trace,
)
from serve_app.api.tool_calls import Call, Content, Reader, Reasoning, Segment

LEAST = -9999.0  # JSON has no infinity

TokenText = Callable[[int], str]
"""The text of one token by itself."""


@value
class ScoredToken:
    """A token of an answer with the target's scores; a prompt's first token has none."""

    token: int
    score: TokenScore | None


def chat_logprobs(scored: Sequence[ScoredToken], top: int, text_of: TokenText) -> ChatLogprobs:
    """Returns log probabilities in the chat format, with up to `top` alternatives per token."""
    return ChatLogprobs(content=tuple([_chat_token(one.token, one.score, top, text_of) for one in scored]))


def completion_logprobs(
    scored: Sequence[ScoredToken], top: int, text_of: TokenText, offset: int = 0
) -> CompletionLogprobs:
    """Returns log probabilities in the completions format; `offset` is the first token's place in the answer's text."""
    texts = [text_of(one.token) for one in scored]
    offsets: list[int] = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return CompletionLogprobs(
        text_offset=tuple(offsets),
        token_logprobs=tuple([None if one.score is None else _finite(one.score.logprob) for one in scored]),
        tokens=tuple(texts),
        top_logprobs=tuple([_top(one, top, text_of) for one in scored]),
    )


def prompt_logprobs(
    prompt: Sequence[int], scores: Sequence[TokenScore], top: int, text_of: TokenText
) -> PromptLogprobs:
    """Returns a prompt's log probabilities in vLLM's format; scores start at the second token."""
    return (None, *[_of_prompt(token, score, top, text_of) for token, score in zip(prompt[1:], scores, strict=True)])


def _chat_token(token: int, score: TokenScore | None, top: int, text_of: TokenText) -> ChatTokenLogprob:
    assert score is not None, "a chat's answer holds nothing of its prompt"
    likeliest = [_logprob(other, logprob, text_of) for other, logprob in _likeliest(score, top)]
    text = text_of(token)
    return ChatTokenLogprob(
        token=text,
        logprob=_finite(score.logprob),
        bytes=tuple(text.encode()),
        top_logprobs=tuple(likeliest),
    )


def _logprob(token: int, logprob: float, text_of: TokenText) -> TokenLogprob:
    text = text_of(token)
    return TokenLogprob(token=text, logprob=logprob, bytes=tuple(text.encode()))


def _top(one: ScoredToken, top: int, text_of: TokenText) -> dict[str, float] | None:
    """Returns the token itself, then the likeliest alternatives. Of tokens with equal text, the likelier wins."""
    if one.score is None:
        return None
    found = {text_of(one.token): _finite(one.score.logprob)}
    for token, logprob in _likeliest(one.score, top):
        found.setdefault(text_of(token), logprob)
    return found


def _of_prompt(token: int, score: TokenScore, top: int, text_of: TokenText) -> dict[int, PromptLogprob]:
    found = {token: PromptLogprob(logprob=_finite(score.logprob), rank=score.rank, decoded_token=text_of(token))}
    for rank, (other, logprob) in enumerate(_likeliest(score, top), 1):
        found.setdefault(other, PromptLogprob(logprob=logprob, rank=rank, decoded_token=text_of(other)))
    return found


def _likeliest(score: TokenScore, top: int) -> list[tuple[int, float]]:
    pairs = zip(score.top_ids[:top], score.top_logprobs[:top], strict=True)
    return [(token, _finite(logprob)) for token, logprob in pairs]


def _finite(logprob: float) -> float:
    """Replaces infinities of forbidden tokens and broken models, which JSON cannot hold."""
    return max(LEAST, logprob)


class Gain(Protocol):
    """Interface of what a choice has gained; `serve_app.api.generation.Delta` implements it."""

    @property
    def index(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def accepted(self) -> int: ...

    @property
    def pieces(self) -> tuple[tuple[str, bool], ...]: ...

    @property
    def rejected(self) -> tuple[str, ...]: ...

    @property
    def is_first(self) -> bool: ...

    @property
    def offset(self) -> int: ...

    @property
    def scored(self) -> tuple[ScoredToken, ...]: ...

    @property
    def finish(self) -> FinishReason | None: ...

    @property
    def stop_reason(self) -> StopReason: ...


@dataclass(frozen=True, slots=True)
class Part:
    """One choice's share of a chunk: its opening, new content, new reasoning, a call, or its end."""

    index: int
    text: str = ""
    finish: FinishReason | None = None
    stop_reason: StopReason = None
    trace: Trace = field(default_factory=Trace)
    opening: bool = False
    reasoning: str = ""
    call: ToolCallReply | None = None
    call_index: int = 0
    offset: int = 0  # characters before the text
    scored: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceStreamOptions:
    """Which parts of an answer are sent."""

    reasoning: bool = True
    most_calls: int | None = None
    opening: bool = False  # whether an empty first part is sent
    end_of_calls: FinishReason = "tool_calls"  # finish reason of an answer that calls tools and ends by itself


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of text of one kind."""

    kind: Literal["content", "reasoning"]
    text: str


class ChoiceStream:
    """Turns what one choice gains into parts."""

    def __init__(self, index: int, reader: Reader, options: ChoiceStreamOptions, draw: Callable[[], int]) -> None:
        """`draw` returns 64 random bits, for the ids of calls."""
        self.index = index
        self.told: list[Stretch | ToolCallReply] = []  # in the order the model produced them
        self.reasoning_tokens = 0  # tokens whose text was read as reasoning
        self.finish: FinishReason | None = None
        self._reader = reader
        self._options = options
        self._draw = draw
        self._untold = Trace()  # traces of text that the reader holds back

    @property
    def content(self) -> str:
        return self._text("content")

    @property
    def reasoning(self) -> str:
        return self._text("reasoning")

    @property
    def calls(self) -> tuple[ToolCallReply, ...]:
        return tuple(one for one in self.told if isinstance(one, ToolCallReply))

    def parts(self, gain: Gain) -> list[Part]:
        """Returns the parts to send now."""
        sayings = [saying for text, _ in gain.pieces for saying in self._push(text)]
        if gain.finish is not None:
            sayings += self._reader.finish()
        parts = [part for saying in _joined(sayings) for part in self._part(saying)]
        if gain.scored and not parts:
            parts = [Part(self.index)]
        if gain.finish is not None:
            self.finish = self._options.end_of_calls if self.calls and gain.finish == "stop" else gain.finish
            parts.append(Part(self.index, finish=self.finish, stop_reason=gain.stop_reason))
        opening = [Part(self.index, opening=True)] if gain.is_first and self._options.opening else []
        return opening + self._traced(parts, gain)

    def _push(self, text: str) -> list[Segment]:
        sayings = self._reader.push(text)
        self.reasoning_tokens += any(isinstance(saying, Reasoning) for saying in sayings)
        return sayings

    def _part(self, saying: Segment) -> list[Part]:
        match saying:
            case Content(text):
                self._tell(Stretch("content", text))
                return [Part(self.index, text)]
            case Reasoning(text):
                if not self._options.reasoning:
                    return []
                self._tell(Stretch("reasoning", text))
                return [Part(self.index, reasoning=text)]
            case Call(name, arguments):
                return self._called(FunctionReply(name=name, arguments=arguments))

    def _called(self, function: FunctionReply) -> list[Part]:
        if self._options.most_calls is not None and len(self.calls) >= self._options.most_calls:
            return []
        call = ToolCallReply(id=f"call_{self._draw():016x}", function=function)
        index = len(self.calls)
        self.told.append(call)
        return [Part(self.index, call=call, call_index=index)]

    def _tell(self, new: Stretch) -> None:
        last = self.told[-1] if self.told else None
        if isinstance(last, Stretch) and last.kind == new.kind:
            self.told[-1] = Stretch(new.kind, last.text + new.text)
        else:
            self.told.append(new)

    def _text(self, kind: str) -> str:
        return "".join(one.text for one in self.told if isinstance(one, Stretch) and one.kind == kind)

    def _traced(self, parts: list[Part], gain: Gain) -> list[Part]:
        """Attaches the gain's trace to its first part; without a part, a later gain carries it."""
        untold = self._untold
        trace = Trace(
            tokens=untold.tokens + gain.tokens,
            accepted=untold.accepted + gain.accepted,
            pieces=untold.pieces + gain.pieces,
            rejected=untold.rejected + gain.rejected,
        )
        self._untold = Trace() if parts else trace
        return [replace(parts[0], trace=trace, offset=gain.offset, scored=gain.scored), *parts[1:]] if parts else []


def _joined(sayings: Iterable[Segment]) -> list[Segment]:
    """Joins neighbors of the same kind."""
    joined: list[Segment] = []
    for saying in sayings:
        match joined[-1:], saying:
            case [Content(before)], Content(text):
                joined[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case _:
                joined.append(saying)
    return joined
