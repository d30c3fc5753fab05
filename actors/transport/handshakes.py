"""Counter of callers that fail the TLS handshake. gRPC reports when a handshake begins, but not how it ends.

So every handshake is checked again a little later: callers that were admitted have made a call, and the others were
refused or sent nothing. gRPC does not report who they were.
"""

import asyncio

from cluster.trust.refusals import Refusals

PASSED_S = 10.0  # as long as a caller may take to send its Hello
CAUSE = "a caller that did not get through the TLS handshake"


class Handshakes:
    """Counts the handshakes of one server; must be created on the server's event loop."""

    def __init__(self, refusals: Refusals) -> None:
        self._refusals = refusals
        self._loop = asyncio.get_running_loop()
        self._begun = 0  # handshakes that were not checked yet
        self._passed = 0  # those that were followed by a call

    def begins(self) -> None:
        """Records that a handshake begins; called in a gRPC thread, sometimes after the loop has closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begins)

    def called(self) -> None:
        """Records a call by an admitted caller. Our peers make one call per connection, so extra calls are rare."""
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
