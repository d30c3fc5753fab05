"""Message dispatch: the scheduler interface, and stream names."""

from typing import Protocol

from protos.messages import Message

Send = tuple[str, Message]
"""(destination, message). The destination is a stream, which is one connection to a peer, or a peer's address."""


class Scheduler(Protocol):
    """Interface of the draft and verification schedulers, which are pure."""

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from `peer` at time `now`, in seconds; returns the messages to send."""
        ...


def stream_name(peer_id: str, count: int) -> str:
    """Returns the name of a peer's `count`-th stream; each connection gets a new name."""
    return f"{peer_id}#{count}"


def peer_of(stream: str) -> str:
    """Returns the peer id in a stream name."""
    return stream.rpartition("#")[0]


def states_stream(peer: str) -> str:
    """Returns the name of a peer's stream for hidden states and acknowledgements; `peer` is a stream or an address."""
    return f"{peer_of(peer) or peer}/states"
