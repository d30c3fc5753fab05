"""One dispatch: what every scheduler does with a message, and how it names whom it answers."""

from typing import Protocol

from protos.messages import Message

Send = tuple[str, Message]
"""A message and where it goes: a stream, which is one life of the connection to a peer, or a peer's address."""


class Scheduler(Protocol):
    """Of drafts, of verification, of assignments: pure, used live and simulated alike."""

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Takes a message that came from `peer` and returns what is to be sent for it; `now` is in seconds."""
        ...


def stream_name(peer_id: str, count: int) -> str:
    """Name of a peer's stream: a peer that comes back has a new one."""
    return f"{peer_id}#{count}"


def peer_of(stream: str) -> str:
    """The peer whose stream this is."""
    return stream.rpartition("#")[0]


def states_stream(peer: str) -> str:
    """Where hidden states go apart from all else, and what is said of them; `peer` is a stream or an address."""
    return f"{peer_of(peer) or peer}/states"
