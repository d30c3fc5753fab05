"""One choice as it is told to a client: its parts as they come, and all of it once they have."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from serve_app.http.conversation.reading import Call, Content, Reader, Reasoning, Saying
from serve_app.http.wire.replies import FinishReason, FunctionReply, ToolCallReply, Trace


class Gain(Protocol):
    """What a choice has gained: `serve_app.http.answers.Delta`."""

    @property
    def index(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    @property
    def accepted(self) -> int: ...

    @property
    def pieces(self) -> tuple[tuple[str, bool], ...]: ...

    @property
    def is_first(self) -> bool: ...

    @property
    def finish(self) -> FinishReason | None: ...


@dataclass(frozen=True, slots=True)
class Part:
    """One choice's share in a chunk: its opening, next content, next reasoning, a call, or its end."""

    index: int
    text: str = ""
    finish: FinishReason | None = None
    trace: Trace = field(default_factory=Trace)
    opening: bool = False
    reasoning: str = ""
    call: ToolCallReply | None = None
    call_index: int = 0


@dataclass(frozen=True, slots=True)
class TellingOptions:
    """What of an answer is told."""

    reasoning: bool = True
    most_calls: int | None = None
    opening: bool = False  # whether the first part has nothing in it


class Telling:
    """One choice: takes what it has gained and gives its parts."""

    def __init__(self, index: int, reader: Reader, options: TellingOptions, draw: Callable[[], int]) -> None:
        """`draw` gives 64 random bits, for the ids of calls."""
        self.index = index
        self.content = ""
        self.reasoning = ""
        self.calls: list[ToolCallReply] = []
        self.finish: FinishReason | None = None
        self._reader = reader
        self._options = options
        self._draw = draw
        self._untold = Trace()  # of text that the reader holds back

    def parts(self, gain: Gain) -> list[Part]:
        """What is to be told now."""
        sayings = [saying for text, _ in gain.pieces for saying in self._reader.push(text)]
        if gain.finish is not None:
            sayings += self._reader.finish()
        parts = [part for saying in _joined(sayings) for part in self._part(saying)]
        if gain.finish is not None:
            self.finish = "tool_calls" if self.calls and gain.finish == "stop" else gain.finish
            parts.append(Part(self.index, finish=self.finish))
        opening = [Part(self.index, opening=True)] if gain.is_first and self._options.opening else []
        return opening + self._traced(parts, gain)

    def _part(self, saying: Saying) -> list[Part]:
        match saying:
            case Content(text):
                self.content += text
                return [Part(self.index, text)]
            case Reasoning(text):
                self.reasoning += text if self._options.reasoning else ""
                return [Part(self.index, reasoning=text)] if self._options.reasoning else []
            case Call(name, arguments):
                return self._called(FunctionReply(name=name, arguments=arguments))

    def _called(self, function: FunctionReply) -> list[Part]:
        if self._options.most_calls is not None and len(self.calls) >= self._options.most_calls:
            return []
        call = ToolCallReply(id=f"call_{self._draw():016x}", function=function)
        self.calls.append(call)
        return [Part(self.index, call=call, call_index=len(self.calls) - 1)]

    def _traced(self, parts: list[Part], gain: Gain) -> list[Part]:
        """The first part tells what all of the gain came from; where there is none, a later one does."""
        untold = self._untold
        trace = Trace(
            tokens=untold.tokens + gain.tokens,
            accepted=untold.accepted + gain.accepted,
            pieces=untold.pieces + gain.pieces,
        )
        self._untold = Trace() if parts else trace
        return [replace(parts[0], trace=trace), *parts[1:]] if parts else []


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
