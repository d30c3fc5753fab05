"""A target's watch over its drafters: counts what their blocks bring, and notices blocks that have become bad."""

from cluster.dispatch import peer_of
from cluster.sentinel.collapse import Suspects
from cluster.sentinel.tally import AcceptanceTally, kind_of
from cluster.verification.sequence import TargetSession
from protos.messages import Collapse


class AcceptanceSentinel:
    """Of one target replica."""

    def __init__(self) -> None:
        self.tally = AcceptanceTally()
        self.desyncs = 0  # drafters that were told to begin a session anew because their blocks had become bad
        self._suspects = Suspects()

    def attached(self, session: TargetSession, drafter: str) -> None:
        """A drafter begins to draft for the session, or begins anew."""
        session.watch = session.watch.attached(self._suspects.usual(peer_of(drafter)))

    def block_verified(self, session: TargetSession, length: int, asked: int, accepted: int) -> Collapse | None:
        """Of a block of up to `asked` tokens, after `length`. Returns what is wrong with its drafter."""
        if session.drafter is None:
            return None  # it has left, and what it is good for is no longer asked
        drafter = peer_of(session.drafter)
        self.tally.block_verified(drafter, kind_of(length, session.prefix_cached > 0), asked, accepted)
        self._suspects.block(drafter, accepted)
        session.watch = session.watch.after(accepted)
        collapse = session.watch.collapse
        if collapse is None:
            return None
        self._suspects.collapsed(drafter, session.watch.drift.history)
        session.watch = session.watch.reported()
        self.desyncs += not collapse.is_resynced
        return collapse
