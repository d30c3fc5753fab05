"""Checks that drafts are as good as expected, when a drafter starts and while it serves. Pure.

Input: the acceptance of verified blocks, by drafter and session, and the draft's own confidence. Output: a warning at
startup, a `Collapse` for the router when a session's blocks became bad, and counts by context length, cached prefix and
position, since an average hides specific faults such as a draft that fails at long contexts.

`CusumDetector` is the statistical test: Page's CUSUM against the session's own history. `CollapseWatch` decides on
steps for one session, each on new evidence: its drafter opens it again, then another drafter takes it, then it
continues without speculation. The next session tries the drafter again. `LoadCheck` compares a new drafter's first
accepted tokens with a figure published with the draft, or else with the draft's own confidence. `VersionWatch` compares
the version of a learned draft that a drafter uses with the one that it used before.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from cluster.speculation.estimators import AcceptanceCounts, Mean, Pairs
from protos.frozen import value
from protos.messages import Collapse

MAX_DRAFTERS = 64  # most recent drafters that are kept


@value
class BlockKind:
    """Features by which blocks are counted, besides their drafter."""

    context: int  # tokens before the block, rounded down to a power of two
    is_prefix_cached: bool  # whether the session began on cached pages


def kind_of(length: int, is_prefix_cached: bool) -> BlockKind:
    """Returns the kind of a block after `length` tokens."""
    return BlockKind(1 << (length.bit_length() - 1), is_prefix_cached)


class AcceptanceStats:
    """Acceptance counts by drafter and block kind. They only grow, until a drafter is dropped for more recent ones."""

    def __init__(self) -> None:
        self._counts: OrderedDict[str, dict[BlockKind, AcceptanceCounts]] = OrderedDict()  # most recent drafter last

    def block_verified(self, drafter: str, kind: BlockKind, requested: int, accepted: int) -> None:
        """Records a block of up to `requested` tokens with `accepted` accepted ones."""
        kinds = self._counts.setdefault(drafter, {})
        self._counts.move_to_end(drafter)
        kinds[kind] = kinds.get(kind, AcceptanceCounts()).after(requested, accepted)
        if len(self._counts) > MAX_DRAFTERS:
            self._counts.popitem(last=False)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per drafter and kind, for display and for sums over replicas."""
        return [
            {"drafter": drafter, **asdict(kind), **asdict(counts)}
            for drafter, kinds in self._counts.items()
            for kind, counts in kinds.items()
        ]

    @property
    def counts(self) -> Mapping[str, Mapping[BlockKind, AcceptanceCounts]]:
        """Acceptance counts by drafter, then by block kind."""
        return self._counts


FALSE_ALARM_RATE = 1e-4  # upper bound of false alarms per block: each costs reading the session again
MIN_GOOD_BLOCKS = 8  # least good blocks in a history before blocks are compared with it
HISTORY_BLOCKS = 128  # approximate number of blocks in the history
MIN_USUAL_ACCEPTANCE = (
    0.25  # usual acceptance below which the test is off: a draft that was always poor raises no alarm
)
HARDER_TEXT_SHARE = 0.85  # least share of the usual acceptance that harder texts are assumed to keep
COLLAPSED_SHARE = (
    0.15  # share of that kept by a drafter that is out of step, since some of its tokens are right by chance
)


@value
class CusumDetector:
    """Acceptance history of a session's blocks and the evidence that it has dropped.

    A block with an accepted token is good.

    `evidence` is the log-likelihood ratio of the latest blocks under two hypotheses: blocks are good COLLAPSED_SHARE *
    HARDER_TEXT_SHARE as often as usual, or HARDER_TEXT_SHARE as often. It never falls below 0. A collapse is concluded
    at -log(FALSE_ALARM_RATE). If the usual rate were known exactly, the mean number of blocks before a false alarm
    would be at least 1 / FALSE_ALARM_RATE, as long as blocks are good at least HARDER_TEXT_SHARE as often as usual
    (Lorden 1971). The rate is estimated; simulated sessions keep that bound at every constant acceptance. An acceptance
    of 0.2 comes closest, with 9e-5 alarms per block in the first hundred blocks; from 0.8 on there is less than one in
    a million. A fall from 0.8 to 0.1 is detected after 12 blocks, one to 0.2 after 17 (medians).
    """

    history: Mean = Mean()  # share of good blocks in the history
    evidence: float = 0.0
    latest: Mean = Mean()  # share of good blocks since there is evidence

    @property
    def is_collapsed(self) -> bool:
        """True if blocks are good so much less often than usual that the drafter's state must be wrong."""
        return self.evidence >= -math.log(FALSE_ALARM_RATE)

    @property
    def is_proven(self) -> bool:
        """True if the history has enough good blocks to compare with."""
        return self._proven >= MIN_GOOD_BLOCKS

    @property
    def usual(self) -> float:
        """Usual share of good blocks."""
        return (self._proven + 0.5) / (self._blocks + 1)

    def after(self, accepted: int) -> "CusumDetector":
        """Returns the detector after a verified block. While there is evidence, blocks do not enter the history."""
        good = accepted > 0
        history = self.history if self.evidence else self.history.after(good, 1 / HISTORY_BLOCKS)
        evidence = self._evidence_after(good)
        latest = self.latest.after(good, 0.0) if evidence else Mean()
        return CusumDetector(history, evidence, latest)

    def anew(self) -> "CusumDetector":
        """Returns the detector with its history kept and its evidence reset."""
        return replace(self, evidence=0.0, latest=Mean())

    @property
    def _blocks(self) -> int:
        return min(self.history.count, HISTORY_BLOCKS)

    @property
    def _proven(self) -> float:
        """Number of good blocks in the history."""
        return self._blocks * self.history.value

    def _evidence_after(self, good: bool) -> float:
        if not self.is_proven or self.usual < MIN_USUAL_ACCEPTANCE:
            return 0.0
        if good:
            return max(0.0, self.evidence + math.log(COLLAPSED_SHARE))
        harder = HARDER_TEXT_SHARE * self.usual
        return self.evidence + math.log((1 - COLLAPSED_SHARE * harder) / (1 - harder))


CHECKED_TOKENS = (
    64  # first tokens of blocks that are checked: an error of at most 0.06, in a second or two on a fast pair
)
WARNING_SHARE = 0.5  # share of the expected acceptance below which the check warns
MIN_EXPECTED_ACCEPTANCE = 0.2  # acceptance expected of any draft: one that is unsure everywhere is probably damaged

USUAL_CAUSES = (
    "usual causes: another tokenizer or chat template than the target's, a draft made for another target, "
    "a wrong dtype, RoPE setting or quantisation, damaged weights"
)


@value
class LoadCheck:
    """State of a new drafter's acceptance check, which ends after CHECKED_TOKENS tokens."""

    published: float | None = None  # share of accepted first tokens, as stated in the draft's folder
    tokens: int = 0
    accepted: int = 0
    confidence: float = 0.0  # sum of the draft's probabilities of these tokens

    @property
    def is_over(self) -> bool:
        return self.tokens >= CHECKED_TOKENS

    @property
    def expected(self) -> float | None:
        """Expected share of accepted first tokens; None before any was published or measured."""
        if self.published is not None:
            return self.published
        return max(MIN_EXPECTED_ACCEPTANCE, self.confidence / self.tokens) if self.tokens else None

    @property
    def reached(self) -> float | None:
        """Share of first tokens that were accepted; None before the first one."""
        return self.accepted / self.tokens if self.tokens else None

    @property
    def warning(self) -> str | None:
        """Text of the warning, or None if acceptance is as expected or the check is not over."""
        expected = self.expected
        reached = self.reached
        if not self.is_over or expected is None or reached is None or reached >= WARNING_SHARE * expected:
            return None
        source = "its own confidence" if self.published is None else "the figure in its folder"
        shares = f"{100 * reached:.0f} % of its first tokens, where {source} promises {100 * expected:.0f} %"
        return f"the target accepts {shares}; {USUAL_CAUSES}"

    def summary(self) -> dict[str, float | str | None]:
        """Returns the check's state for display."""
        return {
            "expected": self.expected,
            "reached": self.reached,
            "tokens": self.tokens,
            "is_over": self.is_over,
            "warning": self.warning,
        }

    def after(self, confidence: float, accepted: bool) -> "LoadCheck":
        """Returns the check after one more first token, of the draft's probability `confidence`."""
        if self.is_over:
            return self
        return LoadCheck(self.published, self.tokens + 1, self.accepted + accepted, self.confidence + confidence)


RECENT_BLOCKS = 32  # memory of a suspected drafter's blocks, over all sessions, and the number needed to clear it
RECOVERED_SHARE = 0.5  # least share of the usual acceptance that clears a drafter
MAX_SUSPECTS = 64  # most suspects kept: replaced drafters do not come back


@value
class CollapseWatch:
    """Collapse test of one session's blocks at its target, and whether the drafter was resynchronised."""

    drift: CusumDetector = CusumDetector()
    is_resynced: bool = False  # whether a drafter was sent a Resync for the session
    is_waiting: bool = False  # whether a drafter has yet to attach after a collapse: until then blocks prove nothing

    def after(self, accepted: int) -> "CollapseWatch":
        """Returns the watch after a verified block."""
        return self if self.is_waiting else replace(self, drift=self.drift.after(accepted))

    @property
    def collapse(self) -> Collapse | None:
        """The collapse to report, or None while the evidence is insufficient."""
        drift = self.drift
        if not drift.is_collapsed:
            return None
        return Collapse(drift.usual, drift.latest.value, is_resynced=self.is_resynced)

    def reported(self) -> "CollapseWatch":
        """Returns the watch after a collapse was reported and a recovery step is under way."""
        return CollapseWatch(self.drift.anew(), is_resynced=True, is_waiting=True)

    def attached(self, suspected: Mean | None = None) -> "CollapseWatch":
        """Returns the watch after a drafter attached, for the first time or again.

        `suspected` is the usual acceptance of a suspected drafter. A session without a history of its own is compared
        with it from the first block on.
        """
        drift = self.drift.anew()
        if suspected is not None and not drift.is_proven:
            drift = CusumDetector(suspected)
        return CollapseWatch(drift, self.is_resynced)


@value
class Suspicion:
    """A drafter with a collapsed session: the usual acceptance there, and the results of all its blocks since."""

    usual: Mean
    since: Mean = Mean()

    @property
    def is_cleared(self) -> bool:
        return self.since.count >= RECENT_BLOCKS and self.since.value >= RECOVERED_SHARE * self.usual.value

    def after(self, accepted: int) -> "Suspicion":
        return Suspicion(self.usual, self.since.after(accepted > 0, 1 / RECENT_BLOCKS))


class Suspects:
    """Drafters with a collapsed session, by name, until they draft well again.

    A session that begins with a broken drafter has no good blocks to compare with. It therefore inherits the drafter's
    usual acceptance from before the collapse.
    """

    def __init__(self) -> None:
        self._suspicions: OrderedDict[str, Suspicion] = OrderedDict()  # by drafter, latest collapse last

    def collapsed(self, drafter: str, usual: Mean) -> None:
        """Records that one of the drafter's sessions collapsed."""
        self._suspicions[drafter] = Suspicion(usual)
        self._suspicions.move_to_end(drafter)
        if len(self._suspicions) > MAX_SUSPECTS:
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
        """Returns the usual acceptance of a suspected drafter; None for any other."""
        suspicion = self._suspicions.get(drafter)
        return None if suspicion is None else suspicion.usual


COMPARED_POSITIONS = 4  # first positions of a block that are compared: the draft length may differ between versions
LEAST_BLOCKS = 128  # least blocks of each version before they are compared
LEAST_SESSIONS = 16  # least sessions of each version: blocks of one session are alike, so a session is the unit
ERRORS = 4.0  # standard errors between the versions: 6e-4 per look by Student's t at the fewest sessions
FEW_BLOCKS_ALARM = 1e-6  # binomial probability below which few accepted first tokens prove a fall, while blocks are few
RECENT_SESSIONS = 256  # approximate number of sessions that a version is judged by


class VersionAcceptance:
    """Acceptance of one version's blocks: the accepted share of the reached positions, counted by session.

    Its error is that of a ratio over independent sessions (the delta method).
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.first_blocks = 0  # first blocks of sessions
        self.first_accepted = 0  # first blocks with an accepted token
        self._ended = Pairs()  # positions reached and accepted in ended sessions, one pair per session
        self._ended_sessions = 0
        self._open: dict[str, tuple[int, int]] = {}  # positions reached and accepted in sessions that are still open

    def block_verified(self, session: str, accepted: int, depth: int) -> None:
        """Records a block of `depth` positions, of which the first `accepted` were accepted."""
        accepted = min(accepted, COMPARED_POSITIONS)
        reached = min(accepted + 1, depth, COMPARED_POSITIONS)
        if session not in self._open:
            self.first_blocks += 1
            self.first_accepted += accepted > 0
        known = self._open.get(session, (0, 0))
        self._open[session] = known[0] + reached, known[1] + accepted
        self.blocks += 1

    def close(self, session: str) -> None:
        """Ends a session; ignores an unknown one."""
        if found := self._open.pop(session, None):
            self._ended = self._ended.after(*found, 1 / RECENT_SESSIONS)
            self._ended_sessions += 1

    @property
    def is_enough(self) -> bool:
        """True if there are enough blocks and sessions to judge the version."""
        return self.blocks >= LEAST_BLOCKS and self._ended_sessions + len(self._open) >= LEAST_SESSIONS

    @property
    def sessions(self) -> Pairs:
        """Positions reached and accepted, one pair per session; their ratio is the acceptance."""
        found = self._ended
        for counts in self._open.values():
            found = found.after(*counts, 1 / RECENT_SESSIONS)
        return found


class VersionWatch:
    """Acceptance of the version in use and of the previous one, as one drafter sees them.

    The texts of the two periods differ, so the new version is worse only if it falls below HARDER_TEXT_SHARE of the
    earlier acceptance, and by several standard errors. Few blocks of a useless version are requested; then the first
    block of each session, which is independent of the others, decides by the binomial distribution. Blocks of a version
    that returns to use are counted from zero.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._used = VersionAcceptance()
        self._before: VersionAcceptance | None = None

    @property
    def blocks(self) -> int:
        """Number of verified blocks of the version in use."""
        return self._used.blocks

    def block_verified(self, session: str, accepted: int, depth: int) -> None:
        """Records a verified block that the version in use drafted."""
        self._used.block_verified(session, accepted, depth)

    def close(self, session: str) -> None:
        self._used.close(session)

    def exchanged(self, version: int) -> None:
        """Begins the comparison of a new version with the one in use."""
        self.version = version
        self._before = self._used
        self._used = VersionAcceptance()

    @property
    def is_worse(self) -> bool:
        """True if the version in use is clearly worse than the previous one."""
        if self._before is None or not self._before.is_enough:
            return False
        if not self._used.is_enough:
            return self._is_collapsed(self._before)
        before = self._before.sessions
        used = self._used.sessions
        error = math.hypot(HARDER_TEXT_SHARE * before.ratio_error, used.ratio_error)
        return HARDER_TEXT_SHARE * before.ratio - used.ratio > ERRORS * error

    def _is_collapsed(self, before: VersionAcceptance) -> bool:
        """Returns whether sessions' first blocks prove a fall, while there are too few blocks to compare ratios."""
        count = before.first_blocks
        share = before.first_accepted / count
        usual = HARDER_TEXT_SHARE * (
            share - 2 * math.sqrt(share * (1 - share) / count)
        )  # lower confidence bound of the usual share
        tried = self._used.first_blocks
        if usual <= 0:
            return False
        chances = [
            math.comb(tried, accepted) * usual**accepted * (1 - usual) ** (tried - accepted)
            for accepted in range(self._used.first_accepted + 1)
        ]
        return sum(chances) < FEW_BLOCKS_ALARM

    def summary(self) -> dict[str, float | None]:
        """Returns the state for display: accepted share of the reached positions; None without blocks."""
        before = self._before
        return {
            "version": self.version,
            "blocks": self._used.blocks,
            "acceptance": self._used.sessions.ratio if self._used.blocks else None,
            "acceptance_before": before.sessions.ratio if before is not None and before.blocks else None,
        }
