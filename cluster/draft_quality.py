"""Monitors draft quality at a drafter's start and while it serves. Pure.

Inputs are the acceptance of verified blocks, by drafter and session, and the draft's own confidence. Outputs are a
warning at startup, a `Collapse` when acceptance in a session collapses, and acceptance counts. The counts are split by
context length, cached prefix and position, because an average hides faults such as a draft that fails at long contexts.

`CusumDetector` is the statistical test: Page's CUSUM against the session's own history. `CollapseWatch` reports
collapses of one session. Each report needs new evidence and triggers the next recovery step: the drafter reopens the
session, another drafter takes it, or it continues without speculation. Later sessions still use the drafter.
`LoadCheck` compares a new drafter's acceptance of first tokens with the published rate, or else with the draft's own
confidence. `VersionWatch` compares the current version of a learned draft with the previous one.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from cluster.speculation.estimators import AcceptanceCounts, Mean, Pairs
from protos.frozen import value
from protos.messages import Collapse

MAX_DRAFTERS = 64  # number of most recent drafters kept


class BlockKind(NamedTuple):
    """Grouping keys for block counts, in addition to the drafter."""

    context: int  # number of tokens before the block, rounded down to a power of two
    is_prefix_cached: bool  # whether the session started with cached pages


def kind_of(length: int, is_prefix_cached: bool) -> BlockKind:
    """Returns the grouping key of a block that follows `length` tokens."""
    return BlockKind(1 << (length.bit_length() - 1), is_prefix_cached)


class AcceptanceStats:
    """Acceptance counts by drafter and block kind. Counts never decrease; the least recent drafters are dropped."""

    def __init__(self) -> None:
        # Number of blocks by drafter (most recent last), kind, and (requested, accepted) tokens.
        self._blocks: OrderedDict[str, defaultdict[BlockKind, Counter[tuple[int, int]]]] = OrderedDict()

    def block_verified(self, drafter: str, kind: BlockKind, requested: int, accepted: int) -> None:
        """Records a verified block: the requested length and the number of accepted tokens."""
        kinds = self._blocks.get(drafter)
        if kinds is None:
            kinds = self._blocks[drafter] = defaultdict(Counter)
        self._blocks.move_to_end(drafter)
        kinds[kind][requested, accepted] += 1
        if len(self._blocks) > MAX_DRAFTERS:
            self._blocks.popitem(last=False)

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per drafter and kind, for display and for aggregation over replicas."""
        return [
            {"drafter": drafter, **kind._asdict(), **asdict(counts)}
            for drafter, kinds in self.counts.items()
            for kind, counts in kinds.items()
        ]

    @property
    def counts(self) -> Mapping[str, Mapping[BlockKind, AcceptanceCounts]]:
        """Acceptance counts by drafter, then by block kind."""
        return {
            drafter: {kind: AcceptanceCounts.of(blocks) for kind, blocks in kinds.items()}
            for drafter, kinds in self._blocks.items()
        }


FALSE_ALARM_RATE = 1e-4  # upper bound on false alarms per block; each costs another prefill of the session
MIN_GOOD_BLOCKS = 8  # minimum good blocks in the history before the test starts
HISTORY_BLOCKS = 128  # approximate number of blocks in the history
MIN_USUAL_ACCEPTANCE = 0.25  # minimum usual rate for the test; constantly poor drafts raise no alarm
HARDER_TEXT_SHARE = 0.85  # assumed lower bound for harder text, as a share of the usual rate
COLLAPSED_SHARE = 0.15  # further factor for a drafter out of sync, some of whose tokens match by chance


NO_BLOCKS = Mean()


@value
class CusumDetector:
    """Acceptance history of a session, and the evidence for a drop.

    A block is good if at least one of its tokens was accepted.

    `evidence` is the log-likelihood ratio of two hypotheses for the latest blocks. Relative to the usual rate, the
    share of good blocks is COLLAPSED_SHARE * HARDER_TEXT_SHARE under the first and HARDER_TEXT_SHARE under the second.
    The evidence is clamped at 0 and signals a collapse at -log(FALSE_ALARM_RATE). With a known usual rate, the mean
    number of blocks before a false alarm is at least 1 / FALSE_ALARM_RATE under the second hypothesis (Lorden 1971).
    Here the rate is estimated. Simulated sessions keep the bound at every constant acceptance: at 0.2, the worst case,
    there are 9e-5 alarms per block in the first hundred blocks, and from 0.8 on fewer than one per million. The median
    detection delay is 12 blocks for a fall from 0.8 to 0.1, and 17 blocks for a fall to 0.2.
    """

    history: Mean = Mean()  # share of good blocks in the history
    evidence: float = 0.0
    latest: Mean = Mean()  # share of good blocks since evidence appeared

    @property
    def is_collapsed(self) -> bool:
        """True if good blocks are so rare that the drafter's state must be wrong."""
        return self.evidence >= -math.log(FALSE_ALARM_RATE)

    @property
    def is_proven(self) -> bool:
        """True if the history has enough good blocks for a comparison."""
        return self._proven >= MIN_GOOD_BLOCKS

    @property
    def usual(self) -> float:
        """Usual share of good blocks."""
        return (self._proven + 0.5) / (self._blocks + 1)

    def after(self, accepted: int) -> "CusumDetector":
        """Returns the detector after a verified block, which enters the history only while `evidence` is 0."""
        good = accepted > 0
        history = self.history if self.evidence else self.history.after(good, 1 / HISTORY_BLOCKS)
        evidence = self._evidence_after(good)
        latest = self.latest.after(good, 0.0) if evidence else NO_BLOCKS
        return CusumDetector(history, evidence, latest)

    def anew(self) -> "CusumDetector":
        """Returns a detector with the same history and no evidence."""
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
    64  # number of first tokens in the check: standard error up to 0.06, in about two seconds on a fast pair
)
WARNING_SHARE = 0.5  # share of the expected acceptance below which the check warns
MIN_EXPECTED_ACCEPTANCE = 0.2  # minimum expectation: a draft without confidence is probably damaged

USUAL_CAUSES = (
    "usual causes: a tokenizer or chat template that differs from the target's, a draft made for another target, "
    "a wrong dtype, RoPE setting or quantization, damaged weights"
)


@value
class LoadCheck:
    """Acceptance check of a new drafter; ends after CHECKED_TOKENS tokens."""

    published: float | None = None  # published share of accepted first tokens, from the draft's folder
    tokens: int = 0
    accepted: int = 0
    confidence: float = 0.0  # sum of the draft's probabilities of these tokens

    @property
    def is_over(self) -> bool:
        return self.tokens >= CHECKED_TOKENS

    @property
    def expected(self) -> float | None:
        """Expected share of accepted first tokens; None if neither published nor measured."""
        if self.published is not None:
            return self.published
        return max(MIN_EXPECTED_ACCEPTANCE, self.confidence / self.tokens) if self.tokens else None

    @property
    def reached(self) -> float | None:
        """Share of accepted first tokens; None before the first block."""
        return self.accepted / self.tokens if self.tokens else None

    @property
    def warning(self) -> str | None:
        """Warning text, or None if acceptance is sufficient or the check is not over."""
        expected = self.expected
        reached = self.reached
        if not self.is_over or expected is None or reached is None or reached >= WARNING_SHARE * expected:
            return None
        source = "its own confidence" if self.published is None else "the rate published in its folder"
        shares = f"{100 * reached:.0f} % of the draft's first tokens, but {source} predicts {100 * expected:.0f} %"
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
        """Returns the check after another first token; `confidence` is the draft's probability of that token."""
        if self.is_over:
            return self
        return LoadCheck(self.published, self.tokens + 1, self.accepted + accepted, self.confidence + confidence)


RECENT_BLOCKS = 32  # averaging window for a suspect's blocks over all sessions, and the minimum to clear it
RECOVERED_SHARE = 0.5  # share of the usual rate that clears a suspect
MAX_SUSPECTS = 64  # maximum number of suspects; replaced drafters never return


@value
class CollapseWatch:
    """Collapse test of one session, with the state of its recovery."""

    drift: CusumDetector = CusumDetector()
    is_resynced: bool = False  # whether the session's drafter has received a Resync
    is_waiting: bool = False  # after a collapse: ignore blocks until a drafter attaches

    def after(self, accepted: int) -> "CollapseWatch":
        """Returns the watch after a verified block."""
        return self if self.is_waiting else CollapseWatch(self.drift.after(accepted), self.is_resynced)

    @property
    def collapse(self) -> Collapse | None:
        """The collapse to report, or None if the evidence is insufficient."""
        drift = self.drift
        if not drift.is_collapsed:
            return None
        return Collapse(drift.usual, drift.latest.value, is_resynced=self.is_resynced)

    def reported(self) -> "CollapseWatch":
        """Returns the watch after the report of a collapse; recovery is in progress."""
        return CollapseWatch(self.drift.anew(), is_resynced=True, is_waiting=True)

    def attached(self, suspected: Mean | None = None) -> "CollapseWatch":
        """Returns the watch after a drafter has attached, for the first time or again.

        `suspected` is the usual rate of a suspected drafter. It replaces the history of a session that has too few good
        blocks.
        """
        drift = self.drift.anew()
        if suspected is not None and not drift.is_proven:
            drift = CusumDetector(suspected)
        return CollapseWatch(drift, self.is_resynced)


@value
class Suspicion:
    """A drafter with a collapsed session: the usual rate in that session, and the rate of all its blocks since."""

    usual: Mean
    since: Mean = Mean()

    @property
    def is_cleared(self) -> bool:
        return self.since.count >= RECENT_BLOCKS and self.since.value >= RECOVERED_SHARE * self.usual.value

    def after(self, accepted: int) -> "Suspicion":
        return Suspicion(self.usual, self.since.after(accepted > 0, 1 / RECENT_BLOCKS))


class Suspects:
    """Tracks drafters with a collapsed session until their blocks are good again.

    A session that starts on a broken drafter never builds a history of good blocks. It therefore inherits the drafter's
    usual rate from before the collapse.
    """

    def __init__(self) -> None:
        self._suspicions: OrderedDict[str, Suspicion] = OrderedDict()  # by drafter; the latest collapse is last

    def collapsed(self, drafter: str, usual: Mean) -> None:
        """Records a collapse in one of the drafter's sessions."""
        self._suspicions[drafter] = Suspicion(usual)
        self._suspicions.move_to_end(drafter)
        if len(self._suspicions) > MAX_SUSPECTS:
            self._suspicions.popitem(last=False)

    def block(self, drafter: str, accepted: int) -> None:
        """Records a verified block of the drafter in any session."""
        suspicion = self._suspicions.get(drafter)
        if suspicion is None:
            return
        suspicion = suspicion.after(accepted)
        self._suspicions[drafter] = suspicion
        if suspicion.is_cleared:
            del self._suspicions[drafter]

    def usual(self, drafter: str) -> Mean | None:
        """Returns the usual rate of a suspected drafter; None if the drafter is not suspected."""
        suspicion = self._suspicions.get(drafter)
        return None if suspicion is None else suspicion.usual


COMPARED_POSITIONS = 4  # number of leading block positions compared; draft lengths may differ between versions
LEAST_BLOCKS = 128  # minimum blocks per version before the comparison
LEAST_SESSIONS = 16  # minimum sessions per version; sessions are the unit, because blocks of one session are correlated
ERRORS = 4.0  # required difference in standard errors: 6e-4 false alarms per test (Student's t at LEAST_SESSIONS)
FEW_BLOCKS_ALARM = 1e-6  # binomial probability that proves a fall while blocks are few
RECENT_SESSIONS = 256  # approximate number of sessions in a version's average


class VersionAcceptance:
    """Acceptance of one version: the accepted share of the reached positions, aggregated by session.

    Its standard error is that of a ratio over independent sessions (delta method).
    """

    def __init__(self) -> None:
        self.blocks = 0
        self.first_blocks = 0  # number of first blocks of sessions
        self.first_accepted = 0  # number of first blocks with an accepted token
        self._ended = Pairs()  # (reached, accepted) positions, one pair per ended session
        self._ended_sessions = 0
        self._open: dict[str, tuple[int, int]] = {}  # (reached, accepted) positions per open session

    def block_verified(self, session: str, accepted: int, depth: int) -> None:
        """Records a block of `depth` positions with `accepted` accepted tokens."""
        accepted = min(accepted, COMPARED_POSITIONS)
        reached = min(accepted + 1, depth, COMPARED_POSITIONS)
        if session not in self._open:
            self.first_blocks += 1
            self.first_accepted += accepted > 0
        known = self._open.get(session, (0, 0))
        self._open[session] = known[0] + reached, known[1] + accepted
        self.blocks += 1

    def close(self, session: str) -> None:
        """Ends a session; ignores unknown sessions."""
        if found := self._open.pop(session, None):
            self._ended = self._ended.after(*found, 1 / RECENT_SESSIONS)
            self._ended_sessions += 1

    @property
    def is_enough(self) -> bool:
        """True if there are enough blocks and sessions to judge the version."""
        return self.blocks >= LEAST_BLOCKS and self._ended_sessions + len(self._open) >= LEAST_SESSIONS

    @property
    def sessions(self) -> Pairs:
        """(reached, accepted) positions, one pair per session; the ratio of their sums is the acceptance."""
        found = self._ended
        for counts in self._open.values():
            found = found.after(*counts, 1 / RECENT_SESSIONS)
        return found


class VersionWatch:
    """Compares the current version of a learned draft with the previous one, on one drafter.

    The two versions draft for different texts. The current version therefore counts as worse only if its acceptance
    is several standard errors below HARDER_TEXT_SHARE of the previous acceptance. Targets request few blocks of a
    useless version. In that case a binomial test over the sessions' first blocks, which are independent, decides.
    When a version returns, its counts start at zero.
    """

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self._used = VersionAcceptance()
        self._before: VersionAcceptance | None = None

    @property
    def blocks(self) -> int:
        """Number of verified blocks of the current version."""
        return self._used.blocks

    def block_verified(self, session: str, accepted: int, depth: int) -> None:
        """Records a verified block of the current version."""
        self._used.block_verified(session, accepted, depth)

    def close(self, session: str) -> None:
        self._used.close(session)

    def exchanged(self, version: int) -> None:
        """Starts to compare a new version with the current one."""
        self.version = version
        self._before = self._used
        self._used = VersionAcceptance()

    @property
    def is_worse(self) -> bool:
        """True if the current version is significantly worse than the previous one."""
        if self._before is None or not self._before.is_enough:
            return False
        if not self._used.is_enough:
            return self._is_collapsed(self._before)
        before = self._before.sessions
        used = self._used.sessions
        error = math.hypot(HARDER_TEXT_SHARE * before.ratio_error, used.ratio_error)
        return HARDER_TEXT_SHARE * before.ratio - used.ratio > ERRORS * error

    def _is_collapsed(self, before: VersionAcceptance) -> bool:
        """Returns True if the sessions' first blocks prove a fall; used while blocks are too few to compare ratios."""
        count = before.first_blocks
        share = before.first_accepted / count
        usual = HARDER_TEXT_SHARE * (
            share - 2 * math.sqrt(share * (1 - share) / count)
        )  # lower confidence bound of the expected share
        tried = self._used.first_blocks
        if usual <= 0:
            return False
        chances = [
            math.comb(tried, accepted) * usual**accepted * (1 - usual) ** (tried - accepted)
            for accepted in range(self._used.first_accepted + 1)
        ]
        return sum(chances) < FEW_BLOCKS_ALARM

    def summary(self) -> dict[str, float | None]:
        """Returns the state for display; `acceptance` is the accepted share of reached positions, or None without
        blocks.
        """
        before = self._before
        return {
            "version": self.version,
            "blocks": self._used.blocks,
            "acceptance": self._used.sessions.ratio if self._used.blocks else None,
            "acceptance_before": before.sessions.ratio if before is not None and before.blocks else None,
        }
