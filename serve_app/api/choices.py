"""Converts the committed tokens of one choice into the events its client receives.

`ChoiceText` detokenizes committed tokens and cuts the text at stop strings. Each `Delta` holds newly final text.
`ChoiceStream` splits deltas into content, reasoning and tool calls, and returns one `ChoiceEvent` for each. An
endpoint's writer serializes the events of a stream, or all segments of a whole answer.
"""

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from cluster.routing.ledger import CommittedTokens, Generation
from protos.frozen import value
from protos.messages import Finish, TokenScore
from serve_app.api.logprobs import ScoredToken
from serve_app.api.replies import FinishReason, StopReason, Trace
from serve_app.api.text import Detokenizer, StopMatcher
from serve_app.api.tool_calls import Call, Content, Reader, Reasoning, Segment


class Piece(NamedTuple):
    """Text of one token, and the rejected draft text that it replaced (if requested).

    Unless `TextOptions.by_token` is set, text of several tokens.
    """

    text: str
    drafted: bool
    rejected: str = ""
    tokens: int = 1  # number of tokens whose text ends here


@value
class Delta:
    """New text and tokens of one choice since its previous delta."""

    index: int
    text: str
    tokens: int
    accepted: int
    pieces: tuple[Piece, ...]
    is_first: bool
    finish: FinishReason | None  # set only in the choice's last delta
    scored: tuple[ScoredToken, ...] = ()  # empty unless scores were requested
    stop_reason: StopReason = None


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Options for an answer's text, apart from its stop strings."""

    stop_ids: frozenset[int] = frozenset()  # tokens that end the session; their text is omitted
    keeps_stop: bool = False  # include the text of the stop string or token
    named_stop_ids: frozenset[int] = frozenset()  # stop ids from the request, which are reported as stop reasons
    min_tokens: int = 0  # number of initial tokens excluded from the stop-string search
    echoed: tuple[int, ...] = ()  # prompt tokens to repeat at the start of the answer
    echoed_text: str = ""
    by_token: bool = True  # split text by token, as stop strings, traces and some readers require


class ChoiceText:
    """Detokenizes one choice up to a stop string, and counts its tokens.

    Releases the first text immediately, and later text after at least `interval` tokens.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        interval: int = 1,
        options: TextOptions = TextOptions(),
    ) -> None:
        self.index = index
        self.tokens = 0
        self.accepted = 0
        self.rejected = 0
        self.drafted = 0
        self.accepted_by_step: Counter[int] = Counter()  # verify steps with a draft, by accepted token count
        self.cached = 0  # prompt tokens found in the prefix cache
        self.scored: list[ScoredToken] = []  # empty unless scores were requested
        self.prompt_scores: tuple[TokenScore, ...] = ()
        self.finish: FinishReason | None = None
        self.stop_reason: StopReason = None
        self.first_token_s: float | None = None  # seconds since the session's start
        self.last_token_s: float | None = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._interval = interval
        self._options = options
        self._last_token = -1
        self._rejected_text = ""  # rejected draft text to attach to the next piece
        self._tokens_in_pieces = 0
        self._unmatched: deque[Piece] = deque()  # detokenized text that may be part of a stop string
        # Pieces for the next delta.
        self._pieces: list[Piece] = [Piece(options.echoed_text, False)] if options.echoed_text else []
        self._has_sent = False
        self._texts: list[str] = []  # text of each released delta
        self._sent_tokens = 0
        self._sent_accepted = 0
        self._sent_scores = 0

    @property
    def text(self) -> str:
        """Returns the text released so far."""
        return "".join(self._texts)

    def extend(self, committed: CommittedTokens) -> Delta | None:
        """Adds committed tokens. Returns None if no text can be released yet."""
        self.rejected += committed.drafted - committed.accepted
        if committed.drafted:
            self.drafted += committed.drafted
            self.accepted_by_step[committed.accepted] += 1
        self.cached += committed.cached
        if not self.tokens:
            self._add_prompt_scores(committed)
        add = self._add_by_token if self._options.by_token else self._add_at_once
        add(committed)
        is_due = not self._has_sent or self.tokens - self._sent_tokens >= self._interval
        return self._delta() if self.finish or (self._pieces and is_due) else None

    def _add_at_once(self, committed: CommittedTokens) -> None:
        tokens = committed.tokens
        self._last_token = tokens[-1]
        self.tokens += len(tokens)
        self.accepted += min(committed.accepted, len(tokens))
        if committed.scores:
            self.scored += map(ScoredToken, tokens, committed.scores)
        if self._last_token in self._options.stop_ids and not self._options.keeps_stop:
            tokens = tokens[:-1]  # stop tokens end the session and have no text
        if text := self._detokenizer.extend(tokens):
            self._pieces.append(Piece(text, False))

    def _add_by_token(self, committed: CommittedTokens) -> None:
        for position, token in enumerate(committed.tokens):
            self._last_token = token
            drafted = position < committed.accepted
            if committed.rejected and not drafted:
                self._rejected_text = self._detokenizer.preview(committed.rejected)
            self.tokens += 1
            self.accepted += drafted
            if committed.scores:
                self.scored.append(ScoredToken(token, committed.scores[position]))
            if token in self._options.stop_ids and not self._options.keeps_stop:
                continue  # stop tokens have no text
            self._add_text(self._detokenizer.push(token), drafted)
            if self._stops.matched:
                self.finish = "stop"
                self.stop_reason = self._stops.match
                break

    def flush(self) -> Delta | None:
        """Releases text held back by the interval; returns None if there is none, or only the echoed prompt."""
        return self._delta() if self._pieces and self.tokens else None

    def end(self, finish: Finish) -> Delta:
        """Ends the choice and releases all remaining text."""
        self._add_text(self._detokenizer.finish(), drafted=False)
        self._release(len(self._stops.finish()))
        self.finish = "length" if finish is Finish.LENGTH and not self._stops.matched else "stop"
        self.stop_reason = self._stops.match
        if not self._stops.matched and finish is Finish.STOP and self._last_token in self._options.named_stop_ids:
            self.stop_reason = self._last_token
        return self._delta()

    def _add_text(self, text: str, drafted: bool) -> None:
        if not text:
            return
        piece = Piece(text, drafted, self._rejected_text, self.tokens - self._tokens_in_pieces)
        self._tokens_in_pieces = self.tokens
        self._rejected_text = ""
        if self.tokens <= self._options.min_tokens:
            self._pieces.append(piece)
        else:
            self._unmatched.append(piece)
            self._release(len(self._stops.push(text)))

    def _add_prompt_scores(self, first: CommittedTokens) -> None:
        """Adds the prompt's scores, which come with the first tokens."""
        self.prompt_scores = first.prompt_scores
        if self._options.echoed and first.scores:
            scores = (None, *first.prompt_scores)
            self.scored += [ScoredToken(*one) for one in zip(self._options.echoed, scores, strict=True)]

    def _release(self, count: int) -> None:
        """Releases the first `count` characters of the unmatched text."""
        while count > 0:
            piece = self._unmatched.popleft()
            text = piece.text
            if len(text) > count:
                self._unmatched.appendleft(piece._replace(text=text[count:], rejected=""))
                piece = piece._replace(text=text[:count], tokens=0)
            self._pieces.append(piece)
            count -= len(text)

    def _delta(self) -> Delta:
        text = "".join([piece.text for piece in self._pieces])
        delta = Delta(
            self.index,
            text,
            self.tokens - self._sent_tokens,
            self.accepted - self._sent_accepted,
            tuple(self._pieces),
            not self._has_sent,
            self.finish,
            tuple(self.scored[self._sent_scores :]),
            self.stop_reason,
        )
        self._texts.append(text)
        self._pieces = []
        self._has_sent = True
        self._sent_tokens = self.tokens
        self._sent_accepted = self.accepted
        self._sent_scores = len(self.scored)
        return delta


@dataclass(slots=True)
class ChoiceEvent:
    """One event of a choice's stream: the opening, a segment, or the end."""

    index: int
    segment: Segment | None = None
    is_opening: bool = False
    finish: FinishReason | None = None
    stop_reason: StopReason = None
    # Fields of a delta's first event only:
    scored: tuple[ScoredToken, ...] = ()
    trace: Trace | None = None  # set if requested

    @property
    def is_bare(self) -> bool:
        """Returns whether the event has nothing but its segment."""
        return self.finish is None and self.trace is None and not self.scored

    @property
    def text(self) -> str:
        """Returns the event's content; empty for all other events."""
        return self.segment.text if isinstance(self.segment, Content) else ""


@dataclass(frozen=True, slots=True)
class ChoiceStreamOptions:
    """Selects the events of a choice to send."""

    reasoning: bool = True
    max_calls: int | None = None
    opening: bool = False  # send an opening event before the first segment
    call_finish: FinishReason = "tool_calls"  # replaces "stop" as the finish reason of an answer with calls
    trace: bool = False


class ChoiceStream:
    """Splits the text of one choice into segments and events."""

    def __init__(self, index: int, reader: Reader, options: ChoiceStreamOptions, draw: Callable[[], int]) -> None:
        """`draw` returns 64 random bits for a call id."""
        self.index = index
        self.calls: list[Call] = []
        self.reasoning_tokens = 0  # number of reasoning tokens
        self.finish: FinishReason | None = None
        self._segments: list[Segment] = []
        self._reader = reader
        self._options = options
        self._draw = draw
        self._trace = Trace()  # trace of text held back by the reader

    @property
    def segments(self) -> list[Segment]:
        """Returns all segments in generation order."""
        return _joined(self._segments)

    @property
    def content(self) -> str:
        return "".join([segment.text for segment in self._segments if isinstance(segment, Content)])

    @property
    def reasoning(self) -> str:
        return "".join([segment.text for segment in self._segments if isinstance(segment, Reasoning)])

    def events(self, delta: Delta) -> list[ChoiceEvent]:
        """Returns the events completed by a delta."""
        segments = self._admitted(self._read(delta))
        self._segments += segments
        events = [ChoiceEvent(self.index, segment) for segment in segments]
        if delta.scored and not events:
            events = [ChoiceEvent(self.index)]
        if delta.finish is not None:
            self.finish = self._options.call_finish if self.calls and delta.finish == "stop" else delta.finish
            events.append(ChoiceEvent(self.index, finish=self.finish, stop_reason=delta.stop_reason))
        if events:
            events[0].scored = delta.scored
        if self._options.trace:
            self._add_trace(delta, events)
        if delta.is_first and self._options.opening:
            events.insert(0, ChoiceEvent(self.index, is_opening=True))
        return events

    def _read(self, delta: Delta) -> list[Segment]:
        segments: list[Segment] = []
        for piece in delta.pieces:
            read = self._reader.push(piece.text)
            if Reasoning in map(type, read):
                self.reasoning_tokens += piece.tokens
            segments += read
        if delta.finish is not None:
            segments += self._reader.finish()
        return _joined(segments) if len(segments) > 1 else segments

    def _admitted(self, segments: list[Segment]) -> list[Segment]:
        """Drops segments that the options exclude, and numbers calls."""
        admitted: list[Segment] = []
        for segment in segments:
            if isinstance(segment, Call):
                if self._options.max_calls is not None and len(self.calls) >= self._options.max_calls:
                    continue
                segment = replace(segment, id=f"call_{self._draw():016x}", index=len(self.calls))
                self.calls.append(segment)
            elif isinstance(segment, Reasoning) and not self._options.reasoning:
                continue
            admitted.append(segment)
        return admitted

    def _add_trace(self, delta: Delta, events: list[ChoiceEvent]) -> None:
        """Attaches the delta's trace to its first event; if there is none, the next delta carries the trace."""
        before = self._trace
        trace = Trace(
            tokens=before.tokens + delta.tokens,
            accepted=before.accepted + delta.accepted,
            pieces=before.pieces + tuple([(piece.text, piece.drafted) for piece in delta.pieces]),
            rejected=before.rejected + tuple([piece.rejected for piece in delta.pieces]),
        )
        if events:
            events[0].trace = trace
            trace = Trace()
        self._trace = trace


def _joined(segments: list[Segment]) -> list[Segment]:
    """Joins adjacent segments of one kind, except calls."""
    joined: list[Segment] = []
    for kind, run in groupby(segments, type):
        if kind is Call:
            joined += run
        else:
            text = "".join([segment.text for segment in run if not isinstance(segment, Call)])
            joined.append(Content(text) if kind is Content else Reasoning(text))
    return joined


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice of an answer: its session, text and event stream."""

    generation: Generation
    text: ChoiceText
    stream: ChoiceStream
