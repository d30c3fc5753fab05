"""A target's monitoring of its drafters: counts the acceptance of their blocks and detects blocks that became bad."""

from cluster.draft_quality.acceptance_stats import AcceptanceTally, kind_of
from cluster.draft_quality.collapse import Suspects
from cluster.envelope import peer_of
from cluster.verification.sequence import TargetSession
from protos.messages import Collapse


class AcceptanceSentinel:
    """Monitors the drafters of one target replica."""

    def __init__(self) -> None:
        self.tally = AcceptanceTally()
        self.desyncs = 0  # Resyncs sent to drafters because their blocks became bad
        self._suspects = Suspects()

    def attached(self, session: TargetSession, drafter: str) -> None:
        """Records that a drafter begins to draft for the session, for the first time or again."""
        session.watch = session.watch.attached(self._suspects.usual(peer_of(drafter)))

    def block_verified(self, session: TargetSession, length: int, asked: int, accepted: int) -> Collapse | None:
        """Records a block of up to `asked` tokens after `length` tokens; returns the collapse to report, or None."""
        if session.drafter is None:
            return None  # the drafter has left
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
