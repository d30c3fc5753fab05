"""Which drafters and target replicas there are.

A snapshot of endpoints; who keeps it current is behind `Membership`. Knows nothing of connections: whether an
endpoint answers is seen by whoever dials it.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One replica that can be dialled."""

    replica: str
    address: str  # host:port of its gRPC server
    node: str = ""  # where it runs; empty where nobody knows
    zone: str = ""  # of its node


@dataclass(frozen=True, slots=True)
class Members:
    """The pools at one moment."""

    targets: tuple[Endpoint, ...]
    drafters: tuple[Endpoint, ...]


class Membership(Protocol):
    """Says who is there."""

    async def current(self) -> Members: ...


class StaticMembership:
    """A fixed list, for tests and for running without Serve."""

    def __init__(self, members: Members) -> None:
        self._members = members

    async def current(self) -> Members:
        return self._members
