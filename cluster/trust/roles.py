"""The roles of peers, and the name by which a certificate says that its holder has one."""

from collections.abc import Iterable
from enum import Enum


class PeerRole(Enum):
    """What a peer is to others; a certificate may hold several."""

    ROUTER = "router"
    DRAFTER = "drafter"
    TARGET = "target"

    @property
    def name_in_certificate(self) -> str:
        """A DNS name among the certificate's alternative names.

        The side that is dialled proves it as any server proves its name, so one name serves both sides.
        """
        return f"{self.value}.slipstream"


def roles_of(names: Iterable[str]) -> frozenset[PeerRole]:
    """The roles that a certificate with these alternative names holds."""
    held = set(names)
    return frozenset(role for role in PeerRole if role.name_in_certificate in held)
