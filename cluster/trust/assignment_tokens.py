"""Proof by which a drafter shows a target that the session's router assigned the session to it.

The router sends the target a key with the session's Open. It sends each drafter that it assigns a ticket: the number of
the assignment, and a code over it that only a holder of the key can compute. So a target need not be informed of
assignments, which would arrive on another stream than the drafter's, and a later drafter excludes earlier ones.
"""

import hmac
from hashlib import blake2b

from protos.messages import PROOF_BYTES, Ticket

KEY_BYTES = 16


def issue(key: bytes, session: str, assignment: int) -> Ticket:
    """Returns the ticket for the drafter of the session's `assignment`-th assignment, counted from 1."""
    return Ticket(assignment, _proof(key, session, assignment))


def is_valid(ticket: Ticket, key: bytes, session: str) -> bool:
    """Returns True if a holder of the key issued the ticket for this session."""
    return hmac.compare_digest(ticket.proof, _proof(key, session, ticket.assignment))


def _proof(key: bytes, session: str, assignment: int) -> bytes:
    said = assignment.to_bytes(4, "little") + session.encode()
    return blake2b(said, digest_size=PROOF_BYTES, key=key).digest()
