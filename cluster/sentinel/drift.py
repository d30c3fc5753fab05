"""Whether a session's blocks are as good as they were: Page's CUSUM test against the session's own history."""

import math
from dataclasses import replace

from cluster.pacing.smoothing import Mean
from protos.values import value

ALARM = 1e-4  # false alarms a block, at most: each costs reading the session again
PROOF = 8  # blocks that must have been good before, or there is no history to fall short of
HISTORY = 128  # blocks, about, from which it is known what is usual
POOR = 0.25  # usual acceptance below which there is nothing to fall from: a draft that was always poor raises no alarm
HARDER = 0.85  # of the usual acceptance: what texts that become harder are granted
COLLAPSED = 0.15  # of that: what is left to a drafter that is out of step, for some of what it names is right by luck


@value
class AcceptanceDrift:
    """A block is good if anything of it was accepted.

    `evidence` is the logarithm of how much likelier the latest blocks are if blocks are good COLLAPSED * HARDER as
    often as usual than if HARDER as often; it never falls below 0. At -log(ALARM) a collapse is concluded. If it were
    known exactly what is usual, there would be 1 / ALARM blocks or more on average before a false alarm, as long as
    blocks are good at least HARDER as often (Lorden 1971). It is estimated; simulated sessions keep to that rate at
    every constant acceptance: 0.2 comes closest, with 9e-5 alarms a block in the first hundred, and from 0.8 on there
    is less than one in a million. A fall from 0.8 to 0.1 is found after 12 blocks, one to 0.2 after 17 (medians).
    """

    history: Mean = Mean()  # share of good blocks
    evidence: float = 0.0
    latest: Mean = Mean()  # share of good blocks since there is evidence

    @property
    def is_collapsed(self) -> bool:
        """Blocks are good so much more seldom than before that the drafter's state must be wrong."""
        return self.evidence >= -math.log(ALARM)

    @property
    def is_proven(self) -> bool:
        """Whether there is a history to fall short of."""
        return self._proven >= PROOF

    @property
    def usual(self) -> float:
        """Share of blocks that are good as a rule."""
        return (self._proven + 0.5) / (self._blocks + 1)

    def after(self, accepted: int) -> "AcceptanceDrift":
        """A block was verified. While there is evidence it is no part of the history: a collapse is not usual."""
        good = accepted > 0
        history = self.history if self.evidence else self.history.after(good, 1 / HISTORY)
        evidence = self._evidence_after(good)
        latest = self.latest.after(good, 0.0) if evidence else Mean()
        return AcceptanceDrift(history, evidence, latest)

    def anew(self) -> "AcceptanceDrift":
        """What is usual stays, and evidence begins from nothing."""
        return replace(self, evidence=0.0, latest=Mean())

    @property
    def _blocks(self) -> int:
        return min(self.history.count, HISTORY)

    @property
    def _proven(self) -> float:
        """Good blocks among those that are remembered."""
        return self._blocks * self.history.value

    def _evidence_after(self, good: bool) -> float:
        if not self.is_proven or self.usual < POOR:
            return 0.0
        if good:
            return max(0.0, self.evidence + math.log(COLLAPSED))
        harder = HARDER * self.usual
        return self.evidence + math.log((1 - COLLAPSED * harder) / (1 - harder))
