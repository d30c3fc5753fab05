"""What the API asks of the router: one session in, committed tokens out.

The seam between HTTP and the distributed system; tests put a scripted generator behind it.
"""

from collections.abc import AsyncGenerator
from typing import Protocol

from cluster.routing.ledger import Emit, Ended, Generation


class Generator(Protocol):
    """Generates one session's tokens."""

    def check_room(self, sessions: int) -> None:
        """Raises CapacityError or DrainingError where so many more sessions would not be taken now."""
        ...

    def generate(self, generation: Generation) -> AsyncGenerator[Emit | Ended, None]:
        """Yields committed tokens as they come, then exactly one `Ended`.

        Closing the iterator early (a client that left, a stop string that was found) cancels the session
        everywhere. Raises CapacityError when there is no room, DrainingError when the server is stopping, RequestError
        when the target finds fault with the request, TargetLostError when no replica could finish it.
        """
        ...
