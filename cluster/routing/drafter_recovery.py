"""A router's steps against drafters whose blocks have become bad, with counts and logs.

The target detects it per session and has the drafter open the session again (`Verdict.collapse`). If that does not
help, the session moves to another drafter, once. After that, or without another drafter, the session continues with
non-speculative decoding.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from protos.messages import Collapse

log = logging.getLogger(__name__)


class Remedy(Enum):
    """Steps, in order; the last one concerns not a session but its drafter."""

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
    """A target's report on a session's drafter."""

    session: str
    drafter: str
    collapse: Collapse


def next_remedy(collapse: Collapse, was_replaced: bool, has_other: bool) -> Remedy:
    """Returns the next step for a session; `has_other`: another drafter accepts sessions."""
    if not collapse.is_resynced:
        return Remedy.RESYNCED
    return Remedy.REPLACED if has_other and not was_replaced else Remedy.PLAIN


class Remedies:
    """Counts and logs every step, by drafter address."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, Remedy]] = Counter()

    def taken(self, complaint: Complaint, remedy: Remedy) -> None:
        """Records a step for one session."""
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
        """Records that a drafter is given up because its blocks became bad in several sessions."""
        self.counts[drafter, Remedy.GIVEN_UP] += 1
        log.warning("drafter %s has become bad in one session after the other; it gets no more for a while", drafter)
