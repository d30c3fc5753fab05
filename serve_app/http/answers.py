"""From committed tokens to the text of an answer, for all its choices at once."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from cluster.errors import SlipstreamError
from cluster.routing.session import Emit, Generation
from protos.messages import Finish
from serve_app.http.generation import Generator
from serve_app.http.metrics import Metrics
from serve_app.http.text import Detokenizer, StopMatcher
from serve_app.http.wire.replies import FinishReason

Piece = tuple[str, bool]
"""Text of one token, and whether the token was drafted."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice has gained since its last delta."""

    index: int
    text: str
    tokens: int
    accepted: int
    pieces: tuple[Piece, ...]
    is_first: bool
    finish: FinishReason | None  # set in the last


class Transcript:
    """One choice as it grows: its text up to a stop string, and what it cost.

    Its first text is given out at once, and then what `interval` tokens or more have brought.
    """

    def __init__(self, index: int, detokenizer: Detokenizer, stops: StopMatcher, interval: int = 1) -> None:
        self.index = index
        self.text = ""
        self.tokens = 0
        self.accepted = 0
        self.rejected = 0
        self.finish: FinishReason | None = None
        self.first_token_s: float | None = None  # after the session's start
        self._detokenizer = detokenizer
        self._stops = stops
        self._interval = interval
        self._held: deque[Piece] = deque()  # detokenised, and may be the beginning of a stop string
        self._due: list[Piece] = []  # for the next delta
        self._told: tuple[int, int] | None = None  # tokens and accepted at the last delta

    def extend(self, emit: Emit) -> Delta | None:
        """Adds committed tokens; None while there is no text that is to be given out."""
        self.rejected += emit.drafted - emit.accepted
        for position, token in enumerate(emit.tokens):
            drafted = position < emit.accepted
            self.tokens += 1
            self.accepted += drafted
            self._due += self._release(self._detokenizer.push(token), drafted)
            if self._stops.matched:
                self.finish = "stop"
                break
        return self._delta() if self.finish or (self._due and self._is_time()) else None

    def rest(self) -> Delta | None:
        """What waits for further tokens that will not come; None when nothing does."""
        return self._delta() if self._due else None

    def end(self, finish: Finish) -> Delta:
        """No token follows: gives out what was held back."""
        self._due += self._release(self._detokenizer.finish(), drafted=False)
        self._due += self._take(len(self._stops.finish()))
        self.finish = "length" if finish is Finish.LENGTH and not self._stops.matched else "stop"
        return self._delta()

    def _release(self, text: str, drafted: bool) -> list[Piece]:
        if not text:
            return []
        self._held.append((text, drafted))
        return self._take(len(self._stops.push(text)))

    def _take(self, count: int) -> list[Piece]:
        """The first `count` characters of the pieces held back."""
        taken: list[Piece] = []
        while count > 0:
            text, drafted = self._held.popleft()
            taken.append((text[:count], drafted))
            if len(text) > count:
                self._held.appendleft((text[count:], drafted))
            count -= len(text)
        return taken

    def _is_time(self) -> bool:
        return self._told is None or self.tokens - self._told[0] >= self._interval

    def _delta(self) -> Delta:
        pieces = self._due
        self._due = []
        text = "".join(piece for piece, _ in pieces)
        tokens, accepted = self._told or (0, 0)
        is_first = self._told is None
        self._told = (self.tokens, self.accepted)
        self.text += text
        gained = self.tokens - tokens, self.accepted - accepted
        return Delta(self.index, text, *gained, tuple(pieces), is_first, self.finish)


@dataclass(frozen=True, slots=True)
class Choice:
    """A session and the text that it becomes."""

    generation: Generation
    transcript: Transcript


async def follow(
    generator: Generator, choices: Sequence[Choice], metrics: Metrics, clock: Callable[[], float]
) -> AsyncGenerator[Delta, None]:
    """Runs all sessions at once and yields their deltas as they come; raises the first failure of any.

    Closing it, or a stop string, cancels what still runs.
    """
    deltas: asyncio.Queue[Delta | None] = asyncio.Queue()  # bounded by the sessions' length limits

    async def follow_all() -> None:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(_follow_one(generator, choice, deltas, metrics, clock))

    running = asyncio.create_task(follow_all())
    running.add_done_callback(lambda _: deltas.put_nowait(None))
    try:
        while (delta := await deltas.get()) is not None:
            yield delta
        await running
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        running.cancel()
        await asyncio.wait([running])


async def _follow_one(
    generator: Generator,
    choice: Choice,
    deltas: asyncio.Queue[Delta | None],
    metrics: Metrics,
    clock: Callable[[], float],
) -> None:
    transcript = choice.transcript
    last = clock()
    outputs = generator.generate(choice.generation)
    try:
        async with aclosing(outputs):
            async for output in outputs:
                if isinstance(output, Emit):
                    now = clock()
                    first = transcript.first_token_s is None
                    if first:
                        transcript.first_token_s = now - last
                    metrics.committed(output, now - last, first=first)
                    last = now
                    delta = transcript.extend(output)
                else:
                    delta = transcript.end(output.finish)
                if delta is not None:
                    deltas.put_nowait(delta)
                if transcript.finish is not None:
                    break
    except SlipstreamError:  # what was committed before it failed is given out before it fails
        if (rest := transcript.rest()) is not None:
            deltas.put_nowait(rest)
        raise
    assert transcript.finish is not None, "a generator ends with Ended or raises"
