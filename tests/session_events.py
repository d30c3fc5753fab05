"""Iterates over the events of one session."""

import asyncio
from collections.abc import AsyncGenerator

from cluster.routing.ledger import CommittedTokens, Ended, Event, Failed, Generation
from serve_app.api.generation import Generator


async def events_of(generator: Generator, generation: Generation) -> AsyncGenerator[CommittedTokens | Ended, None]:
    """Yields a session's events, and raises its failure. Closing the iterator ends the session."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    end = generator.start(generation, events.put_nowait)
    try:
        while True:
            event = await events.get()
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Ended):
                return
    finally:
        end()
