"""Message dispatch: the interface of every scheduler, and the names of the streams that messages go to."""

from typing import Protocol

from protos.messages import Message

Send = tuple[str, Message]
"""A message and its destination: a stream, which is one connection to a peer, or a peer's address."""


class Scheduler(Protocol):
    """Interface of the drafting and verification schedulers: pure, used live and simulated."""

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from `peer`; returns the messages to send in response. `now` is in seconds."""
        ...


def stream_name(peer_id: str, count: int) -> str:
    """Returns the name of a peer's stream; a peer that reconnects gets a new one."""
    return f"{peer_id}#{count}"


def peer_of(stream: str) -> str:
    """Returns the peer that a stream belongs to."""
    return stream.rpartition("#")[0]


def states_stream(peer: str) -> str:
    """Returns the separate stream for hidden states and their acknowledgements; `peer` is a stream or an address."""
    return f"{peer_of(peer) or peer}/states"
