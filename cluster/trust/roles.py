"""Roles of peers, and the certificate name that proves each."""

from collections.abc import Iterable
from enum import Enum


class PeerRole(Enum):
    """Role of a peer towards others; a certificate may hold several."""

    ROUTER = "router"
    DRAFTER = "drafter"
    TARGET = "target"

    @property
    def name_in_certificate(self) -> str:
        """A DNS name among the certificate's subject alternative names.

        The accepting side of a connection proves its role like any server name, so one name serves both sides.
        """
        return f"{self.value}.slipstream"


def roles_of(names: Iterable[str]) -> frozenset[PeerRole]:
    """Returns the roles that a certificate with these alternative names holds."""
    held = set(names)
    return frozenset(role for role in PeerRole if role.name_in_certificate in held)
