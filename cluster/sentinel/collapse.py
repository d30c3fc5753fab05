"""What is done about blocks that have become bad, one step after the other, and which drafters are suspected.

The steps are of one session: its drafter begins it anew, then another drafter takes it, then it goes on plainly. Each
needs evidence of its own. A session that goes on plainly stays so; the next one tries the drafter again.
"""

from collections import OrderedDict
from dataclasses import replace

from cluster.pacing.smoothing import Mean
from cluster.sentinel.drift import AcceptanceDrift
from protos.messages import Collapse
from protos.values import value

RECENT = 32  # a suspected drafter's blocks of all sessions by which it is cleared
RECOVERED = 0.5  # of what was usual: with so much it is out of suspicion
MOST_SUSPECTS = 64  # drafters that are remembered: those that were replaced do not come back


@value
class CollapseWatch:
    """One session's blocks at its target, and how far it has come on the way."""

    drift: AcceptanceDrift = AcceptanceDrift()
    is_resynced: bool = False  # whether a drafter was told to begin the session anew
    is_waiting: bool = False  # for a drafter to attach, after a collapse: until then blocks prove nothing

    def after(self, accepted: int) -> "CollapseWatch":
        """A block was verified."""
        return self if self.is_waiting else replace(self, drift=self.drift.after(accepted))

    @property
    def collapse(self) -> Collapse | None:
        """What there is to report, if the evidence suffices."""
        drift = self.drift
        if not drift.is_collapsed:
            return None
        return Collapse(drift.usual, drift.latest.value, is_resynced=self.is_resynced)

    def reported(self) -> "CollapseWatch":
        """Something is being done about it."""
        return CollapseWatch(self.drift.anew(), is_resynced=True, is_waiting=True)

    def attached(self, suspected: Mean | None = None) -> "CollapseWatch":
        """A drafter begins, or begins anew; a suspected one has `suspected` to fall short of from its first block."""
        drift = self.drift.anew()
        if suspected is not None and not drift.is_proven:
            drift = AcceptanceDrift(suspected)
        return CollapseWatch(drift, self.is_resynced)


@value
class Suspicion:
    """Of a drafter with a session that collapsed: what was usual there, and how its blocks have fared since."""

    usual: Mean
    since: Mean = Mean()

    @property
    def is_cleared(self) -> bool:
        return self.since.count >= RECENT and self.since.value >= RECOVERED * self.usual.value

    def after(self, accepted: int) -> "Suspicion":
        return Suspicion(self.usual, self.since.after(accepted > 0, 1 / RECENT))


class Suspects:
    """Drafters with a session that collapsed, by name, until they draft well again.

    A session that begins with a drafter that is broken has no good blocks to fall short of. So it inherits what was
    usual of the drafter before.
    """

    def __init__(self) -> None:
        self._suspicions: OrderedDict[str, Suspicion] = OrderedDict()  # latest collapse last

    def collapsed(self, drafter: str, usual: Mean) -> None:
        """One of its sessions did."""
        self._suspicions[drafter] = Suspicion(usual)
        self._suspicions.move_to_end(drafter)
        if len(self._suspicions) > MOST_SUSPECTS:
            self._suspicions.popitem(last=False)

    def block(self, drafter: str, accepted: int) -> None:
        """A block of it was verified, of whatever session."""
        suspicion = self._suspicions.get(drafter)
        if suspicion is None:
            return
        suspicion = suspicion.after(accepted)
        self._suspicions[drafter] = suspicion
        if suspicion.is_cleared:
            del self._suspicions[drafter]

    def usual(self, drafter: str) -> Mean | None:
        """What is to be expected of a suspected drafter; None: it is not suspected."""
        suspicion = self._suspicions.get(drafter)
        return None if suspicion is None else suspicion.usual
