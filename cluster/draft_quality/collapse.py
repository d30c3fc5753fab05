"""The steps taken when a session's blocks have become bad, and the drafters under suspicion.

The steps concern one session: its drafter opens it again, then another drafter takes it, then it continues with
non-speculative decoding. Each step needs new evidence. A session without speculation stays so; the next session tries
the drafter again.
"""

from collections import OrderedDict
from dataclasses import replace

from cluster.draft_quality.cusum import AcceptanceDrift
from cluster.speculation.ewma import Mean
from protos.frozen import value
from protos.messages import Collapse

RECENT = 32  # blocks of a suspected drafter, over all sessions, that may clear it
RECOVERED = 0.5  # share of the usual acceptance that clears it
MOST_SUSPECTS = 64  # drafters kept: those that were replaced do not come back


@value
class CollapseWatch:
    """The test of one session's blocks at its target, and the steps taken so far."""

    drift: AcceptanceDrift = AcceptanceDrift()
    is_resynced: bool = False  # whether a drafter was sent a Resync for the session
    is_waiting: bool = False  # whether a drafter has yet to attach after a collapse: until then blocks prove nothing

    def after(self, accepted: int) -> "CollapseWatch":
        """Returns the watch after a verified block."""
        return self if self.is_waiting else replace(self, drift=self.drift.after(accepted))

    @property
    def collapse(self) -> Collapse | None:
        """The report to send, or None while the evidence is insufficient."""
        drift = self.drift
        if not drift.is_collapsed:
            return None
        return Collapse(drift.usual, drift.latest.value, is_resynced=self.is_resynced)

    def reported(self) -> "CollapseWatch":
        """Returns the watch after a collapse was reported and a step is under way."""
        return CollapseWatch(self.drift.anew(), is_resynced=True, is_waiting=True)

    def attached(self, suspected: Mean | None = None) -> "CollapseWatch":
        """Returns the watch after a drafter attached, for the first time or again.

        `suspected` is what is usual for a suspected drafter. A session without a history of its own is compared with it
        from the first block on.
        """
        drift = self.drift.anew()
        if suspected is not None and not drift.is_proven:
            drift = AcceptanceDrift(suspected)
        return CollapseWatch(drift, self.is_resynced)


@value
class Suspicion:
    """A drafter with a collapsed session: what was usual there, and the results of all its blocks since."""

    usual: Mean
    since: Mean = Mean()

    @property
    def is_cleared(self) -> bool:
        return self.since.count >= RECENT and self.since.value >= RECOVERED * self.usual.value

    def after(self, accepted: int) -> "Suspicion":
        return Suspicion(self.usual, self.since.after(accepted > 0, 1 / RECENT))


class Suspects:
    """Drafters with a collapsed session, by name, until they draft well again.

    A session that begins with a broken drafter has no good blocks to compare with. It therefore inherits what was usual
    with that drafter before its collapse.
    """

    def __init__(self) -> None:
        self._suspicions: OrderedDict[str, Suspicion] = OrderedDict()  # latest collapse last

    def collapsed(self, drafter: str, usual: Mean) -> None:
        """Records that one of the drafter's sessions collapsed."""
        self._suspicions[drafter] = Suspicion(usual)
        self._suspicions.move_to_end(drafter)
        if len(self._suspicions) > MOST_SUSPECTS:
            self._suspicions.popitem(last=False)

    def block(self, drafter: str, accepted: int) -> None:
        """Records a verified block of the drafter, from any session."""
        suspicion = self._suspicions.get(drafter)
        if suspicion is None:
            return
        suspicion = suspicion.after(accepted)
        self._suspicions[drafter] = suspicion
        if suspicion.is_cleared:
            del self._suspicions[drafter]

    def usual(self, drafter: str) -> Mean | None:
        """Returns what is usual for a suspected drafter; None for any other."""
        suspicion = self._suspicions.get(drafter)
        return None if suspicion is None else suspicion.usual
