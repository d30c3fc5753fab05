"""From committed tokens to the text of an answer, for all choices of a request at once.

`Generator` is the interface between HTTP and the distributed system: one session in, committed tokens out. Tests
implement it with a script. `follow` runs a request's sessions and yields what each choice gained.
"""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cluster.errors import SlipstreamError
from cluster.routing.ledger import CommittedTokens, Ended, Generation
from protos.messages import Finish, TokenScore
from serve_app.api.choice_stream import ScoredToken
from serve_app.api.metrics import Metrics
from serve_app.api.replies import (
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    RequestMetrics,
    SpeculativeDecoding,
    StopReason,
    Usage,
)
from serve_app.api.text import Detokenizer, StopMatcher


class Generator(Protocol):
    """Generates one session's tokens."""

    def check_room(self, sessions: int) -> None:
        """Raises CapacityError or DrainingError if this many more sessions would be refused now."""
        ...

    def generate(self, generation: Generation) -> AsyncGenerator[CommittedTokens | Ended, None]:
        """Yields committed tokens as they arrive, then exactly one `Ended`.

        Closing the iterator early (after a disconnect or a stop string) cancels the session everywhere. Raises
        CapacityError if there is no room, DrainingError while the server stops, RequestError if the target refuses the
        request, and TargetLostError if no replica could finish it.
        """
        ...


Piece = tuple[str, bool]
"""Text of one token, and whether the token was drafted."""


class HeldPiece(NamedTuple):
    """A piece of text, with the rejected draft text it replaced, if requested."""

    text: str
    drafted: bool
    rejected: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice has gained since its previous delta."""

    index: int
    text: str
    tokens: int
    accepted: int
    pieces: tuple[Piece, ...]
    is_first: bool
    finish: FinishReason | None  # set in the last delta
    offset: int = 0  # characters before the text
    scored: tuple[ScoredToken, ...] = ()  # tokens of the text, if scores were requested
    rejected: tuple[str, ...] = ()  # for each piece, on request
    stop_reason: StopReason = None


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """Which of a session's tokens become text, beside the effect of stop strings."""

    stop_ids: frozenset[int] = frozenset()  # tokens that end the session; the last one's text is left out
    keeps_stop: bool = False  # keep the text of a stop string or token
    named_stop_ids: frozenset[int] = frozenset()  # those that the request gave, in addition to the model's
    min_tokens: int = 0  # tokens whose text is not searched for stop strings
    echoed: tuple[int, ...] = ()  # tokens of the prompt, if the answer begins with it
    echoed_text: str = ""


class ChoiceText:
    """One choice as it grows: its text up to a stop string, and its cost.

    The first text is released at once, later text after at least `interval` tokens.
    """

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopMatcher,
        interval: int = 1,
        form: AnswerForm = AnswerForm(),
    ) -> None:
        self.index = index
        self.scored: list[ScoredToken] = []  # if scores were requested
        self.prompt_scores: tuple[TokenScore, ...] = ()
        self._form = form
        self._scores_told = 0
        self.text = ""
        self.tokens = 0
        self.accepted = 0
        self.rejected = 0
        self.drafted = 0
        self.accepted_by_step: Counter[int] = Counter()  # verify steps with a draft, by accepted tokens
        self.cached = 0  # prompt tokens found in the prefix cache
        self.finish: FinishReason | None = None
        self.first_token_s: float | None = None  # seconds after the session's start
        self.stop_reason: StopReason = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._interval = interval
        self._held: deque[HeldPiece] = deque()  # detokenised text that may begin a stop string
        # Collected for the next delta.
        self._due: list[HeldPiece] = [HeldPiece(form.echoed_text, False)] if form.echoed_text else []
        self._rejected = ""  # rejected draft tokens to report with the next piece
        self._told: tuple[int, int] | None = None  # tokens and accepted tokens at the previous delta
        self._last = -1  # token

    def extend(self, emit: CommittedTokens) -> Delta | None:
        """Adds committed tokens. Returns None while there is no text to release."""
        self.rejected += emit.drafted - emit.accepted
        if emit.drafted:
            self.drafted += emit.drafted
            self.accepted_by_step[emit.accepted] += 1
        self.cached += emit.cached
        if emit.prompt_scores:
            self._take_prompt_scores(emit.prompt_scores)
        for position, token in enumerate(emit.tokens):
            self._last = token
            drafted = position < emit.accepted
            if emit.rejected and not drafted:
                self._rejected = self._detokenizer.preview(emit.rejected)
            self.tokens += 1
            self.accepted += drafted
            if emit.scores:
                self.scored.append(ScoredToken(token, emit.scores[position]))
            if token in self._form.stop_ids and not self._form.keeps_stop:
                continue  # no text follows
            self._due += self._release(self._detokenizer.push(token), drafted)
            if self._stops.matched:
                self.finish = "stop"
                self.stop_reason = self._stops.match
                break
        return self._delta() if self.finish or (self._due and self._is_time()) else None

    def rest(self) -> Delta | None:
        """Releases text that was held back for further tokens; None if there is none."""
        return self._delta() if self._due else None

    def end(self, finish: Finish) -> Delta:
        """Ends the choice and releases what was held back."""
        self._due += self._release(self._detokenizer.finish(), drafted=False)
        self._due += self._take(len(self._stops.finish()))
        self.finish = "length" if finish is Finish.LENGTH and not self._stops.matched else "stop"
        if finish is Finish.STOP and self._last in self._form.named_stop_ids:
            self.stop_reason = self._last
        return self._delta()

    def _release(self, text: str, drafted: bool) -> list[HeldPiece]:
        if not text:
            return []
        piece = HeldPiece(text, drafted, self._rejected)
        self._rejected = ""
        if self.tokens <= self._form.min_tokens:
            return [piece]
        self._held.append(piece)
        return self._take(len(self._stops.push(text)))

    def _take_prompt_scores(self, scores: tuple[TokenScore, ...]) -> None:
        self.prompt_scores = scores
        if self._form.echoed:
            first, *others = self._form.echoed
            self.scored.append(ScoredToken(first, None))
            self.scored += [ScoredToken(token, score) for token, score in zip(others, scores, strict=True)]

    def _take(self, count: int) -> list[HeldPiece]:
        """Takes the first `count` characters of the pieces held back."""
        taken: list[HeldPiece] = []
        while count > 0:
            text, drafted, rejected = self._held.popleft()
            taken.append(HeldPiece(text[:count], drafted, rejected))
            if len(text) > count:
                self._held.appendleft(HeldPiece(text[count:], drafted))
            count -= len(text)
        return taken

    def _is_time(self) -> bool:
        return self._told is None or self.tokens - self._told[0] >= self._interval

    def _delta(self) -> Delta:
        pieces = self._due
        self._due = []
        text = "".join(piece.text for piece in pieces)
        tokens, accepted = self._told or (0, 0)
        is_first = self._told is None
        self._told = (self.tokens, self.accepted)
        offset = len(self.text)
        self.text += text
        scored = tuple(self.scored[self._scores_told :])
        self._scores_told = len(self.scored)
        gained = self.tokens - tokens, self.accepted - accepted
        told = tuple((piece.text, piece.drafted) for piece in pieces)
        rejected = tuple(piece.rejected for piece in pieces)
        return Delta(self.index, text, *gained, told, is_first, self.finish, offset, scored, rejected, self.stop_reason)


@dataclass(frozen=True, slots=True)
class Choice:
    """A session and the text it becomes."""

    generation: Generation
    transcript: ChoiceText


async def follow(
    generator: Generator, choices: Sequence[Choice], metrics: Metrics, clock: Callable[[], float]
) -> AsyncGenerator[Delta, None]:
    """Runs all sessions at once and yields their deltas as they arrive; raises the first failure of any.

    Closing the iterator, or a stop string, cancels what still runs.
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
                if isinstance(output, CommittedTokens):
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
    except SlipstreamError:  # release what was committed before the failure
        if (rest := transcript.rest()) is not None:
            deltas.put_nowait(rest)
        raise
    assert transcript.finish is not None, "a generator ends with Ended or raises"


def usage_of(choices: Sequence[Choice], prompt_tokens: int, reasoning_tokens: int) -> Usage:
    """Returns the usage so far; a prompt counts once, however many choices it has."""
    transcripts = [choice.transcript for choice in choices]
    completion_tokens = sum(transcript.tokens for transcript in transcripts)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(choice.transcript.cached for choice in choices if choice.generation.choice == 0)
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(transcript.accepted for transcript in transcripts),
            rejected_prediction_tokens=sum(transcript.rejected for transcript in transcripts),
            reasoning_tokens=reasoning_tokens,
        ),
    )


def metrics_of(choices: Sequence[Choice]) -> RequestMetrics | None:
    """Returns the request's speculation metrics; None if nothing was drafted."""
    counts = sum((choice.transcript.accepted_by_step for choice in choices), Counter[int]())
    steps = counts.total()
    if not steps:
        return None
    most = max(max(counts), *(choice.generation.draft_tokens for choice in choices))
    accepted = sum(length * count for length, count in counts.items())
    drafted = sum(choice.transcript.drafted for choice in choices)
    return RequestMetrics(
        speculative_decoding=SpeculativeDecoding(
            acceptance_histogram=tuple([counts[length] for length in range(most + 1)]),
            num_spec_tokens=most,
            num_spec_steps=steps,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            draft_acceptance_rate=accepted / drafted,
            mean_acceptance_length=1 + accepted / steps,
        )
    )
