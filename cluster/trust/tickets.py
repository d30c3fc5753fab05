"""How a drafter proves to a target that a session's router gave it the session.

The router tells the target a key with the session's Open, and each drafter that it assigns a ticket: the number of the
assignment, and a code over it that only who has the key can make. So a target need not hear of assignments, which
would come by another stream than the drafter does, and a drafter that was assigned later shuts out those before it.
"""

import hmac
from hashlib import blake2b

from protos.messages import PROOF_BYTES, Ticket

KEY_BYTES = 16


def issue(key: bytes, session: str, assignment: int) -> Ticket:
    """For the drafter that the session is assigned to, the first one by 1."""
    return Ticket(assignment, _proof(key, session, assignment))


def is_valid(ticket: Ticket, key: bytes, session: str) -> bool:
    """Whether who has the key issued it for this session."""
    return hmac.compare_digest(ticket.proof, _proof(key, session, ticket.assignment))


def _proof(key: bytes, session: str, assignment: int) -> bytes:
    said = assignment.to_bytes(4, "little") + session.encode()
    return blake2b(said, digest_size=PROOF_BYTES, key=key).digest()
