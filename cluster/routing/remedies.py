"""What a router does about drafters whose blocks have become bad, and an account of it.

The target finds out, session by session, and has the drafter begin the session anew (`Verdict.collapse`). Where that
was in vain, the session goes to another drafter, once; after that, or where there is no other, it goes on plainly.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from protos.messages import Collapse

log = logging.getLogger(__name__)


class Remedy(Enum):
    """Steps, in order; the last is not about a session but about its drafter."""

    RESYNCED = "resynced"
    REPLACED = "replaced"
    PLAIN = "plain"
    GIVEN_UP = "given up"


MEANING = {
    Remedy.RESYNCED: "it begins the session anew",
    Remedy.REPLACED: "another drafter takes the session",
    Remedy.PLAIN: "the session goes on plainly",
}


@dataclass(frozen=True, slots=True)
class Complaint:
    """What a target says of a session's drafter."""

    session: str
    drafter: str
    collapse: Collapse


def next_remedy(collapse: Collapse, was_replaced: bool, has_other: bool) -> Remedy:
    """The next step for a session; `has_other`: whether another drafter takes sessions."""
    if not collapse.is_resynced:
        return Remedy.RESYNCED
    return Remedy.REPLACED if has_other and not was_replaced else Remedy.PLAIN


class Remedies:
    """Counts and names every step; by drafter's address."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, Remedy]] = Counter()

    def taken(self, complaint: Complaint, remedy: Remedy) -> None:
        """A step about one session."""
        self.counts[complaint.drafter, remedy] += 1
        collapse = complaint.collapse
        log.warning(
            "session %s: drafter %s has something accepted of %.0f %% of its blocks, where %.0f %% were usual; %s",
            complaint.session,
            complaint.drafter,
            100 * collapse.latest,
            100 * collapse.usual,
            MEANING[remedy],
        )

    def given_up(self, drafter: str) -> None:
        """Its sessions collapsed one after the other."""
        self.counts[drafter, Remedy.GIVEN_UP] += 1
        log.warning("drafter %s has become bad in one session after the other; it gets no more for a while", drafter)
