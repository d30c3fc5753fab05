"""Authentication and authorization between processes: roles, assignment tokens, and refusals.

The names in a certificate prove its holder's roles. An assignment token proves to a target that the session's router
assigned the session to a drafter. The router sends the target a key in the session's Open. It sends each assigned
drafter a token: the number of the assignment and a code computed with the key. The target thus needs no messages about
assignments, which could arrive after the drafter's own messages. A later assignment excludes earlier drafters.

Refusals are counted by cause and logged once per peer and cause, so that a hostile peer cannot flood the log.
"""

import hmac
import ipaddress
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterable
from enum import Enum
from hashlib import blake2b

from protos.messages import PROOF_BYTES, AssignmentToken, Open, Refusal, RefusalReason

KEY_BYTES = 16


def issue(key: bytes, session: str, assignment: int) -> AssignmentToken:
    """Returns the token of the session's assignment number `assignment`, counted from 1."""
    return AssignmentToken(assignment, _proof(key, session, assignment))


def is_valid(assignment_token: AssignmentToken, key: bytes, session: str) -> bool:
    """Returns True if the assignment token was issued with this key for this session."""
    return hmac.compare_digest(assignment_token.proof, _proof(key, session, assignment_token.assignment))


def _proof(key: bytes, session: str, assignment: int) -> bytes:
    message = assignment.to_bytes(4, "little") + session.encode()
    return blake2b(message, digest_size=PROOF_BYTES, key=key).digest()


MAX_REMEMBERED = 1024  # maximum number of (peer, cause) pairs kept; a dropped pair is logged again


class Refusals:
    """Counts and logs refusals."""

    def __init__(self, log: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()  # number of refusals by cause
        self._log = log
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, peer: str, cause: str, why: str = "") -> None:
        """Counts a refusal and logs the first one per peer and cause. `why` appears only in the log."""
        self.counts[cause] += 1
        self.log_once(peer, cause, why)

    def log_once(self, peer: str, cause: str, why: str = "") -> None:
        if (peer, cause) not in self._logged:
            self._log.warning("refused %s: %s%s; further ones are only counted", peer, cause, why and f": {why}")
        self._logged[peer, cause] = None
        self._logged.move_to_end((peer, cause))
        if len(self._logged) > MAX_REMEMBERED:
            self._logged.popitem(last=False)


def ownership_refusal(request: Open) -> Refusal:
    """Returns the refusal of an unauthorized request; its message reveals no details."""
    return Refusal(request.session, request.attempt, RefusalReason.INVALID, "not permitted")


class PeerRole(Enum):
    """Role of a peer in a deployment; a certificate may contain several roles."""

    ROUTER = "router"
    DRAFTER = "drafter"
    TARGET = "target"

    @property
    def name_in_certificate(self) -> str:
        """DNS name that represents the role among a certificate's subject alternative names.

        The accepting side of a connection proves its role as a TLS server name, so the same name works for both sides.
        """
        return f"{self.value}.slipstream"


def roles_of(names: Iterable[str]) -> frozenset[PeerRole]:
    """Returns the roles among a certificate's subject alternative names."""
    names_held = set(names)
    return frozenset(role for role in PeerRole if role.name_in_certificate in names_held)


def is_loopback(host: str) -> bool:
    """Returns True if an address is a loopback address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
