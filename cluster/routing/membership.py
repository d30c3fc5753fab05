"""Interface to the current members of both pools.

`Membership` returns a snapshot of endpoints. It does not track connections: a listed endpoint may be unreachable.
"""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and location of a replica."""

    replica: str
    address: str  # host:port of its gRPC server
    node: str = ""  # Ray node of the replica; empty if unknown
    zone: str = ""  # zone of the node; empty if unknown
    translates: bool = False  # drafters only: True if the draft's tokenizer differs from the target's


@dataclass(frozen=True, slots=True)
class Members:
    """A snapshot of both pools."""

    targets: tuple[Endpoint, ...]
    drafters: tuple[Endpoint, ...]


class Membership(Protocol):
    """Source of the current members."""

    async def current(self) -> Members: ...
