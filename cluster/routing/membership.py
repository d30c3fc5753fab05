"""The current drafters and target replicas.

`Membership` returns a snapshot of endpoints and hides how it is kept current. It does not know about connections; the
caller finds out whether an endpoint answers.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A replica's address and location."""

    replica: str
    address: str  # host:port of its gRPC server
    node: str = ""  # Ray node of the replica; empty if unknown
    zone: str = ""  # zone of the node; empty if unknown


@dataclass(frozen=True, slots=True)
class Members:
    """The members of both pools at one moment."""

    targets: tuple[Endpoint, ...]
    drafters: tuple[Endpoint, ...]


class Membership(Protocol):
    """Source of the current members."""

    async def current(self) -> Members: ...
