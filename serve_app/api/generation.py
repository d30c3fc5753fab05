"""Runs a request's sessions and counts their usage.

`Generator` is the interface between HTTP and the distributed system: one session in, committed tokens out. Tests use a
scripted generator. `follow` runs all sessions of a request and yields each choice's deltas.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol

from cluster.errors import SlipstreamError
from cluster.routing.ledger import CommittedTokens, Ended, Generation
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

    def generate(self, generation: Generation) -> AsyncGenerator[CommittedTokens | Ended, None]:
        """Yields committed tokens as they arrive, then exactly one `Ended`.

        Closing the iterator early (after a disconnect or a stop string) cancels the session everywhere. Raises
        CapacityError if there is no room, DrainingError while the server stops, RequestError if the target refuses the
        request, and TargetLostError if no replica could finish it.
        """
        ...


async def follow(
    generator: Generator, choices: Sequence[Choice], metrics: Metrics, clock: Callable[[], float]
) -> AsyncGenerator[Delta, None]:
    """Runs all sessions at once and yields their deltas as they arrive; raises the first failure.

    Closing the iterator cancels all running sessions; a stop string cancels its own session.
    """
    deltas: asyncio.Queue[Delta | None] = asyncio.Queue()  # no size limit: session lengths are limited

    async def run_all() -> None:
        async with asyncio.TaskGroup() as group:
            for choice in choices:
                group.create_task(_run_choice(generator, choice, deltas, metrics, clock))

    running = asyncio.create_task(run_all())
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


async def _run_choice(
    generator: Generator,
    choice: Choice,
    deltas: asyncio.Queue[Delta | None],
    metrics: Metrics,
    clock: Callable[[], float],
) -> None:
    text = choice.text
    last = clock()
    outputs = generator.generate(choice.generation)
    try:
        async with aclosing(outputs):
            async for output in outputs:
                if isinstance(output, CommittedTokens):
                    now = clock()
                    is_first = text.first_token_s is None
                    if is_first:
                        text.first_token_s = now - last
                    metrics.committed(output, now - last, first=is_first)
                    last = now
                    delta = text.extend(output)
                else:
                    delta = text.end(output.finish)
                if delta is not None:
                    deltas.put_nowait(delta)
                if text.finish is not None:
                    break
    except SlipstreamError:  # release tokens committed before the failure
        if (rest := text.flush()) is not None:
            deltas.put_nowait(rest)
        raise
    assert text.finish is not None, "a generator ends with Ended or raises"


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
