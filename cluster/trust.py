"""Identity and permissions between processes: roles, proofs of assignment, and refusals.

A certificate's name proves its holder's role. An assignment token proves to a target that the session's router assigned
the session to a drafter: the router sends the target a key with the session's Open, and each assigned drafter a token
with the number of the assignment and a code that only a holder of the key can compute. So a target receives no messages
about assignments, which could arrive after the drafter's own, and a later drafter excludes earlier ones.

Refusals are counted by cause and logged once per peer and cause, since a hostile peer retries at full speed and must
not fill the log.
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
    """Returns the assignment token for the drafter of the session's `assignment`-th assignment, counted from 1."""
    return AssignmentToken(assignment, _proof(key, session, assignment))


def is_valid(assignment_token: AssignmentToken, key: bytes, session: str) -> bool:
    """Returns True if a holder of the key issued the assignment token for this session."""
    return hmac.compare_digest(assignment_token.proof, _proof(key, session, assignment_token.assignment))


def _proof(key: bytes, session: str, assignment: int) -> bytes:
    message = assignment.to_bytes(4, "little") + session.encode()
    return blake2b(message, digest_size=PROOF_BYTES, key=key).digest()


MAX_REMEMBERED = 1024  # most pairs of peer and cause remembered; a dropped pair is logged again


class Refusals:
    """Counts and logs the refusals of one process."""

    def __init__(self, log: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()  # number of refusals by cause
        self._log = log
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, peer: str, cause: str, why: str = "") -> None:
        """Counts a refusal and logs the first one per peer and cause; `why` appears only in the log."""
        self.counts[cause] += 1
        self.log_once(peer, cause, why)

    def log_once(self, peer: str, cause: str, why: str = "") -> None:
        if (peer, cause) not in self._logged:
            self._log.warning("refused %s: %s%s; further ones are only counted", peer, cause, why and f": {why}")
        self._logged[peer, cause] = None
        self._logged.move_to_end((peer, cause))
        if len(self._logged) > MAX_REMEMBERED:
            self._logged.popitem(last=False)


def not_permitted(request: Open) -> Refusal:
    """Returns the refusal of a request that the sender may not make; its message gives no details."""
    return Refusal(request.session, request.attempt, RefusalReason.INVALID, "not permitted")


class PeerRole(Enum):
    """Role of a peer in a deployment; a certificate may hold several."""

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
    names_held = set(names)
    return frozenset(role for role in PeerRole if role.name_in_certificate in names_held)


def is_loopback(host: str) -> bool:
    """Returns whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
