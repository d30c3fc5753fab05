"""Monitors draft quality at a drafter's start and while it serves. Pure.

Inputs are the acceptance of verified blocks, by drafter and session, and the draft's own confidence. Outputs are a
warning at startup, the detection of a session whose acceptance collapses, and acceptance counts. The counts are split
by context length, cached prefix and position, because an average hides faults such as a draft that fails at long
contexts.

`CollapseWatch` detects a drafter whose copy of a session is wrong; the drafter then reopens the session. `LoadCheck`
compares a new drafter's acceptance of first tokens with the published rate, or else with the draft's own confidence.
`VersionWatch` compares the current version of a learned draft with the previous one.
"""

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from cluster.speculation.estimators import AcceptanceCounts, Mean, Pairs
from protos.frozen import value

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


MIN_GOOD_BLOCKS = 8  # minimum good blocks before a collapse counts; without them there is nothing to compare with
USUAL_MEMORY = 1 / 128  # weight of the latest block in the usual rate
FALSE_ALARM_RATE = 1e-4  # probability of a run of rejected blocks that counts as a collapse; costs a prefill
HARDER_TEXT_SHARE = 0.85  # assumed lower bound for harder text, as a share of the usual rate


@dataclass(slots=True)
class CollapseWatch:
    """Detects that a session's blocks, usually good, are all rejected: the drafter's copy of the session is wrong.

    A block is good if at least one of its tokens was accepted. A run of bad blocks is a collapse if it has at most
    FALSE_ALARM_RATE probability on harder text. Blocks of the run leave the usual rate unchanged: a block counts only
    if the previous one was good.
    """

    usual: Mean = Mean()  # usual share of good blocks
    good: int = 0  # number of good blocks since the start or the latest collapse
    bad_run: int = 0  # number of consecutive bad blocks

    def block_verified(self, accepted: int) -> bool:
        """Records a verified block; returns True if acceptance has collapsed."""
        if not self.bad_run:
            self.usual = self.usual.after(accepted > 0, USUAL_MEMORY)
        self.bad_run = 0 if accepted else self.bad_run + 1
        self.good += accepted > 0
        rejected = 1 - HARDER_TEXT_SHARE * self.usual.value
        if self.good < MIN_GOOD_BLOCKS or rejected**self.bad_run > FALSE_ALARM_RATE:
            return False
        self.good = self.bad_run = 0
        return True


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
