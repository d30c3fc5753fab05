"""Runs a request's sessions and counts their usage.

`Generator` is the interface between HTTP and the distributed system: one session in, committed tokens out. Tests use a
scripted generator. `follow` runs all sessions of a request and yields their deltas.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

from cluster.routing.ledger import CommittedTokens, Event, Failed, Generation
from serve_app.api.choices import Choice, Delta
from serve_app.api.metrics import Metrics
from serve_app.api.replies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    RequestMetrics,
    SpeculativeDecoding,
    Usage,
)


class Generator(Protocol):
    """Generates the tokens of one session."""

    def check_room(self, sessions: int) -> None:
        """Raises CapacityError or DrainingError if `sessions` additional sessions would be refused now."""
        ...

    def start(self, generation: Generation, deliver: Callable[[Event], None]) -> Callable[[], None]:
        """Starts a session; returns a function that ends it everywhere, which must be called even after the last event.

        Calls `deliver` with each event on this event loop: committed tokens as they arrive, then exactly one `Ended` or
        `Failed`. `deliver` may end the session. Raises CapacityError if there is no room, and DrainingError while the
        server stops. A session fails with RequestError if the target refuses the request, and with TargetLostError if
        no replica could finish it.
        """
        ...


class _Inbox:
    """Deltas of a request's sessions that its reader has not taken yet; session lengths limit their number."""

    def __init__(self, sessions: int) -> None:
        self.deltas: list[Delta] = []
        self.error: Exception | None = None  # first failure
        self.running = sessions
        self.arrived = asyncio.Event()


class _ChoiceSession:
    """Session of one choice. Converts its events into deltas as they arrive, however slowly the client reads."""

    def __init__(self, choice: Choice, inbox: _Inbox, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._choice = choice
        self._inbox = inbox
        self._metrics = metrics
        self._clock = clock
        self._start = self._last = clock()  # times of the session's start and of the latest tokens
        self._has_ended = False
        self._close: Callable[[], None] | None = None

    def start(self, generator: Generator) -> None:
        self._close = generator.start(self._choice.generation, self._on_event)
        if self._has_ended:
            self.close()

    def close(self) -> None:
        self._has_ended = True
        if self._close is not None:
            self._close()

    def _on_event(self, event: Event) -> None:
        if self._has_ended:
            return
        inbox = self._inbox
        inbox.arrived.set()
        try:
            if (delta := self._delta(event)) is not None:
                inbox.deltas.append(delta)
        except Exception as error:  # noqa: BLE001  # raised to the reader; the generator serves other requests too
            inbox.error = inbox.error or error
        if inbox.error is not None or self._choice.text.finish is not None:
            inbox.running -= 1
            self.close()

    def _delta(self, event: Event) -> Delta | None:
        text = self._choice.text
        if isinstance(event, CommittedTokens):
            now = self._clock()
            is_first = text.first_token_s is None
            if is_first:
                text.first_token_s = now - self._start
            text.last_token_s = now - self._start
            self._metrics.committed(event, now - self._last, first=is_first)
            self._last = now
            return text.extend(event)
        if isinstance(event, Failed):
            self._inbox.error = self._inbox.error or event.error
            return text.flush()  # releases tokens committed before the failure
        return text.end(event.finish)


async def follow(
    generator: Generator, choices: Sequence[Choice], metrics: Metrics, clock: Callable[[], float]
) -> AsyncGenerator[list[Delta], None]:
    """Runs all sessions at once and yields the deltas that have arrived; raises the first failure after the deltas.

    Closing the iterator ends all running sessions; a stop string ends its own session.
    """
    inbox = _Inbox(len(choices))
    sessions = [_ChoiceSession(choice, inbox, metrics, clock) for choice in choices]
    try:
        for session in sessions:
            session.start(generator)
        while True:
            if deltas := inbox.deltas:
                inbox.deltas = []
                yield deltas
            elif inbox.error is not None:
                raise inbox.error
            elif not inbox.running:
                return
            else:
                inbox.arrived.clear()
                await inbox.arrived.wait()
    finally:
        for session in sessions:
            session.close()


def usage_of(choices: Sequence[Choice], prompt_tokens: int) -> Usage:
    """Returns the usage so far; counts each prompt once for all its choices."""
    completion_tokens = sum(choice.text.tokens for choice in choices)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(choice.text.cached for choice in choices if choice.generation.choice == 0)
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=sum(choice.text.accepted for choice in choices),
            rejected_prediction_tokens=sum(choice.text.rejected for choice in choices),
            reasoning_tokens=sum(choice.stream.reasoning_tokens for choice in choices),
        ),
    )


def metrics_of(choices: Sequence[Choice]) -> RequestMetrics | None:
    """Returns the request's speculation metrics; None if nothing was drafted."""
    counts = sum((choice.text.accepted_by_step for choice in choices), Counter[int]())
    steps = counts.total()
    if not steps:
        return None
    most = max(max(counts), *(choice.generation.draft_tokens for choice in choices))
    accepted = sum(length * count for length, count in counts.items())
    drafted = sum(choice.text.drafted for choice in choices)
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
