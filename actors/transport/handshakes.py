"""Callers that do not get through the TLS handshake, counted: gRPC tells a server that one begins, not how it ends.

So every handshake is looked at again a little later. By then whoever was let in has called; the others are refused, or
said nothing. Who they were gRPC does not tell either.
"""

import asyncio

from cluster.trust.refusals import Refusals

PASSED_S = 10.0  # as long as a caller may take to greet
CAUSE = "a caller that did not get through the TLS handshake"


class Handshakes:
    """Of one server, on the event loop of which it is made."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._begun = 0  # of those that were not looked at yet
        self._passed = 0  # of them

    def begins(self) -> None:
        """In a thread of gRPC's, and now and then after the end of the loop."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begins)

    def called(self) -> None:
        """Somebody who was let in calls. Each connection of ours has one call, so that further ones are seldom."""
        self._passed = min(self._passed + 1, self._begun)

    def _begins(self) -> None:
        self._begun += 1
        self._loop.call_later(PASSED_S, self._look)

    def _look(self) -> None:
        self._begun -= 1
        if self._passed:
            self._passed -= 1
        else:
            self._refusals.note("somebody", CAUSE)
