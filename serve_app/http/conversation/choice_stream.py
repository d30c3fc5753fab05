"""One choice as it is told to a client: its parts as they come, and all of it once they have."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from serve_app.http.conversation.logprobs import ScoredToken
from serve_app.http.conversation.output_parser import Call, Content, Reader, Reasoning, Saying
from serve_app.http.wire.replies import FinishReason, FunctionReply, StopReason, ToolCallReply, Trace


class Gain(Protocol):
    """What a choice has gained: `serve_app.http.generation_stream.Delta`."""

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
    """One choice's share in a chunk: its opening, next content, next reasoning, a call, or its end."""

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
class TellingOptions:
    """What of an answer is told."""

    reasoning: bool = True
    most_calls: int | None = None
    opening: bool = False  # whether the first part has nothing in it
    end_of_calls: FinishReason = "tool_calls"  # of an answer that calls and ends by itself


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text of one kind, with nothing of another in it."""

    kind: Literal["content", "reasoning"]
    text: str


class Telling:
    """One choice: takes what it has gained and gives its parts."""

    def __init__(self, index: int, reader: Reader, options: TellingOptions, draw: Callable[[], int]) -> None:
        """`draw` gives 64 random bits, for the ids of calls."""
        self.index = index
        self.told: list[Stretch | ToolCallReply] = []  # in the order in which it was said
        self.reasoning_tokens = 0  # of which the text was read as reasoning
        self.finish: FinishReason | None = None
        self._reader = reader
        self._options = options
        self._draw = draw
        self._untold = Trace()  # of text that the reader holds back

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
        """What is to be told now."""
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

    def _push(self, text: str) -> list[Saying]:
        sayings = self._reader.push(text)
        self.reasoning_tokens += any(isinstance(saying, Reasoning) for saying in sayings)
        return sayings

    def _part(self, saying: Saying) -> list[Part]:
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
        """The first part tells what all of the gain came from; where there is none, a later one does."""
        untold = self._untold
        trace = Trace(
            tokens=untold.tokens + gain.tokens,
            accepted=untold.accepted + gain.accepted,
            pieces=untold.pieces + gain.pieces,
            rejected=untold.rejected + gain.rejected,
        )
        self._untold = Trace() if parts else trace
        return [replace(parts[0], trace=trace, offset=gain.offset, scored=gain.scored), *parts[1:]] if parts else []


def _joined(sayings: Iterable[Saying]) -> list[Saying]:
    """Neighbours of one kind as one."""
    joined: list[Saying] = []
    for saying in sayings:
        match joined[-1:], saying:
            case [Content(before)], Content(text):
                joined[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                joined[-1] = Reasoning(before + text)
            case _:
                joined.append(saying)
    return joined
