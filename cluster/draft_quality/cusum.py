"""Detection of a drop in a session's acceptance: Page's CUSUM test against the session's own history."""

import math
from dataclasses import replace

from cluster.speculation.ewma import Mean
from protos.frozen import value

ALARM = 1e-4  # upper bound of false alarms per block: each costs reading the session again
PROOF = 8  # good blocks before there is a history to compare with
HISTORY = 128  # approximate number of blocks in the history
POOR = 0.25  # usual acceptance below which the test is off: a draft that was always poor raises no alarm
HARDER = 0.85  # share of the usual acceptance that texts which become harder may fall to
COLLAPSED = 0.15  # share of that left to a drafter that is out of step, since some of its tokens are right by chance


@value
class AcceptanceDrift:
    """Acceptance history of a session's blocks and the evidence that it has dropped.

    A block with an accepted token is good.

    `evidence` is the log-likelihood ratio of the latest blocks under two hypotheses: blocks are good COLLAPSED * HARDER
    as often as usual, or HARDER as often. It never falls below 0. A collapse is concluded at -log(ALARM). If the usual
    rate were known exactly, the mean number of blocks before a false alarm would be at least 1 / ALARM, as long as
    blocks are good at least HARDER as often as usual (Lorden 1971). The rate is estimated; simulated sessions keep to
    that bound at every constant acceptance. An acceptance of 0.2 comes closest, with 9e-5 alarms per block in the first
    hundred blocks; from 0.8 on there is less than one in a million. A fall from 0.8 to 0.1 is detected after 12 blocks,
    one to 0.2 after 17 (medians).
    """

    history: Mean = Mean()  # share of good blocks
    evidence: float = 0.0
    latest: Mean = Mean()  # share of good blocks while there is evidence

    @property
    def is_collapsed(self) -> bool:
        """True if blocks are good so much less often than before that the drafter's state must be wrong."""
        return self.evidence >= -math.log(ALARM)

    @property
    def is_proven(self) -> bool:
        """True if there is a history to compare with."""
        return self._proven >= PROOF

    @property
    def usual(self) -> float:
        """Usual share of good blocks."""
        return (self._proven + 0.5) / (self._blocks + 1)

    def after(self, accepted: int) -> "AcceptanceDrift":
        """Returns the drift after a verified block. While there is evidence, blocks do not enter the history."""
        good = accepted > 0
        history = self.history if self.evidence else self.history.after(good, 1 / HISTORY)
        evidence = self._evidence_after(good)
        latest = self.latest.after(good, 0.0) if evidence else Mean()
        return AcceptanceDrift(history, evidence, latest)

    def anew(self) -> "AcceptanceDrift":
        """Returns the drift with the history kept and the evidence reset."""
        return replace(self, evidence=0.0, latest=Mean())

    @property
    def _blocks(self) -> int:
        return min(self.history.count, HISTORY)

    @property
    def _proven(self) -> float:
        """Number of good blocks in the history."""
        return self._blocks * self.history.value

    def _evidence_after(self, good: bool) -> float:
        if not self.is_proven or self.usual < POOR:
            return 0.0
        if good:
            return max(0.0, self.evidence + math.log(COLLAPSED))
        harder = HARDER * self.usual
        return self.evidence + math.log((1 - COLLAPSED * harder) / (1 - harder))
