"""How the schedulers name what they send to: a stream is one life of the connection to a peer.

Knows nothing of gRPC.
"""

from protos.messages import Message

Send = tuple[str, Message]
"""A message and the stream it goes to."""


def stream_name(peer_id: str, count: int) -> str:
    """Name of a peer's stream: a peer that comes back has a new one."""
    return f"{peer_id}#{count}"


def peer_of(stream: str) -> str:
    """The peer whose stream this is."""
    return stream.rpartition("#")[0]
