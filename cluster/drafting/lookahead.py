"""Lookahead: drafts one block per likely outcome of the current verification until the verdict is due.

The likeliest outcomes come first. The result is a speculation cache (Kumar et al. 2026, arXiv 2603.03251). The drafting
method extends branches and the caller passes in the time, so all methods and the simulator share the search.

`PendingPositions` stores predictions for undecided positions for later calibration. `ForwardTime` fits the duration of
a forward pass to its number of rows. `DraftTiming` scales the startup profile by measured passes, because other work on
the machine slows drafting. Pure arithmetic.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from cluster.costs import DraftCost
from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.method import Early
from cluster.drafting.requests import LookaheadRequest, Proposal, max_draft_tokens
from cluster.drafting.trees import Outcome, accepted_chance, continuations, rejections
from cluster.speculation.estimators import Mean, Pairs, pace_after

FORWARD_MEMORY = 0.02  # weight of the latest forward pass in the fit


class ForwardTime:
    """Linear model of a forward pass's duration over its rows, fitted to recent passes."""

    def __init__(self) -> None:
        self._line = Pairs()

    def learn(self, rows: int, seconds: float) -> None:
        self._line = self._line.after(rows, seconds, FORWARD_MEMORY)

    def max_rows(self, limit: int, seconds: float) -> int:
        """Returns the maximum number of rows, up to `limit`, for a forward pass of at most `seconds`; `limit` without
        measurements.
        """
        slope = self._line.slope
        if not slope:  # rows have no measurable cost
            return limit if self._line.base <= seconds else 0
        return max(0, int(min(limit, (seconds - self._line.base) / slope)))


TextPosition = tuple[int, tuple[int, ...]]
"""(number of committed tokens, tokens assumed after them)."""

T = TypeVar("T")


class PendingPositions(Generic[T]):
    """Predictions for undecided positions, by session and position."""

    def __init__(self) -> None:
        self._open: defaultdict[str, dict[TextPosition, T]] = defaultdict(dict)

    def note(self, session: str, position: TextPosition, prediction: T) -> None:
        """Stores a prediction; replaces an earlier prediction for the same position."""
        self._open[session][position] = prediction

    def resolve(self, session: str, tokens: Sequence[int]) -> list[tuple[T, int]]:
        """Returns the predictions for newly decided positions, each with the decided token.

        `tokens` is the session's whole committed text. Predictions on a path that contradicts it are dropped.
        """
        resolved = []
        still_open = {}
        for (base_len, path), prediction in self._open.pop(session, {}).items():
            end = base_len + len(path)
            overlap = tuple(tokens[base_len:end])
            if path[: len(overlap)] != overlap:
                continue
            if end < len(tokens):
                resolved.append((prediction, tokens[end]))
            else:
                still_open[base_len, path] = prediction
        if still_open:
            self._open[session] = still_open
        return resolved

    def close(self, session: str) -> None:
        self._open.pop(session, None)


@dataclass(frozen=True, slots=True)
class DraftTiming:
    """Measured timing of a drafter's passes."""

    profile: DraftCost
    pace: Mean = Mean()  # recent pass times relative to the profile
    read: frozenset[str] = frozenset()  # sessions whose prompts have been fed

    def after(self, sessions: Sequence[str], tokens: int, seconds: float) -> "DraftTiming":
        """Returns the timing after a pass for `sessions`; `tokens` is the length of the longest block.

        Ignores passes that fed a prompt, because they do not measure drafting.
        """
        expected_s = self.profile.seconds(len(sessions), tokens)
        is_decoding = self.read.issuperset(sessions)
        pace = pace_after(self.pace, seconds / expected_s) if is_decoding and tokens and expected_s else self.pace
        return replace(self, pace=pace, read=self.read if is_decoding else self.read | frozenset(sessions))

    def without(self, sessions: Collection[str]) -> "DraftTiming":
        """Returns the timing without these sessions, which have ended or must feed their prompts again."""
        return replace(self, read=self.read - frozenset(sessions))

    @property
    def cost(self) -> DraftCost:
        """Current cost of a pass: the profile scaled by the measured pace."""
        return self.profile.times(self.pace.value) if self.pace.count else self.profile


MIN_ROW_LIMIT = 8  # lower bound of the row limit, which is ROWS_PER_SESSION per session
ROWS_PER_SESSION = 2
MAX_OUTCOMES = 8  # maximum number of outcomes with a rejection, and likewise with full acceptance
SIBLING_URGENCY = 0.5  # urgency of reading an off-path token under verification; 1 on the main path
MAX_SIBLINGS_READ = 4  # maximum number of off-path tokens with lookahead
MIN_OUTCOME_CHANCE = 0.01  # minimum probability of an outcome worth drafting for

D = TypeVar("D", bound=BlockDraft)


class BranchingMethod(Protocol[D]):
    """Interface of drafting methods that support the lookahead search."""

    @property
    def outcomes(self) -> int:
        """Maximum number of outcomes to draft for whenever a root reveals outcomes."""
        ...

    def roots(self, request: LookaheadRequest) -> list[D]:
        """Returns the roots to read for the current step, starting with the root of the step's block."""
        ...

    def fork(self, root: D, outcome: tuple[int, ...], chance: float, max_tokens: int) -> D | None:
        """Returns an empty block of up to `max_tokens` tokens after an outcome.

        Returns None if the root has not read all tokens before the outcome's last token.
        """
        ...

    def preview(self, drafts: Sequence[D], interrupted: Callable[[], bool]) -> None:
        """Drafts tokens that need no forward pass."""
        ...

    def extend(self, drafts: Sequence[D], interrupted: Callable[[], bool]) -> list[D]:
        """Runs one forward pass over `drafts`; returns the drafts that gained tokens or are done."""
        ...


class LookaheadSearch(Generic[D]):
    """One lookahead pass: the caller alternates `choose` and `extended` until `choose` returns no drafts."""

    def __init__(
        self,
        method: BranchingMethod[D],
        requests: Sequence[LookaheadRequest],
        forward_time: ForwardTime,
        interrupted: Callable[[], bool],
    ) -> None:
        self._method = method
        self._forward_time = forward_time
        self._interrupted = interrupted
        self._max_rows = max(MIN_ROW_LIMIT, ROWS_PER_SESSION * len(requests))
        self._took_s = 0.0  # duration of the latest forward pass, used as estimate for the next
        self._begun = [draft for request in requests for draft in self._begin(request)]
        self._open = list(self._begun)
        method.preview(self._begun, interrupted)

    def choose(self, now: float) -> list[D]:
        """Returns the drafts for the next forward pass: the most urgent drafts with verdicts due after its end."""
        due = now + self._took_s
        in_time = [draft for draft in self._open if due <= draft.lookahead.until]
        self._open = sorted(in_time, key=lambda draft: -draft.urgency)
        if not self._open:
            return []
        rows = self._rows(min(draft.lookahead.until for draft in self._open) - now)
        chosen = self._open[:rows]
        del self._open[:rows]
        return chosen

    def extended(self, chosen: Sequence[D], advanced: Sequence[D], seconds: float) -> None:
        """Records a forward pass over `chosen` that extended `advanced`; extended roots branch out."""
        self._took_s = seconds
        if advanced:
            self._forward_time.learn(len(chosen), seconds)
        roots = [draft for draft in advanced if draft.is_root]
        after = [draft for root in roots for draft in self._branch_out(root, _outcomes(root))]
        self._method.preview(after, self._interrupted)
        self._begun += after
        self._open += after
        self._open += [draft for draft in advanced if not draft.is_root and not draft.is_done]

    @property
    def drafts(self) -> list[D]:
        """All drafted blocks, excluding roots."""
        return [draft for draft in self._begun if not draft.is_root]

    @property
    def may_leave(self) -> list[D]:
        """Blocks that may be sent during the pass.

        Under rejection sampling, an incomplete block must wait, because only one version of a block may be sent.
        """
        return [draft for draft in self.drafts if draft.is_done or not draft.sends_probs]

    def _rows(self, left_s: float) -> int:
        """Returns the number of rows for the next forward pass: if possible, few enough for two passes in the remaining
        time.

        Two passes with few rows extend the likeliest blocks sooner and further than one pass with many rows.
        """
        twice = self._forward_time.max_rows(self._max_rows, left_s / 2)
        return twice or self._forward_time.max_rows(self._max_rows, left_s) or 1

    def _begin(self, request: LookaheadRequest) -> list[D]:
        """Returns the roots, plus blocks for rejections if the alternatives to the block's tokens are already known."""
        roots = self._method.roots(request)
        root = roots[0]
        if root.needs_read_for_choices:
            return roots
        outcomes = rejections(request.unverified, root.choices)
        return [*roots, *self._branch_out(root, outcomes)]

    def _branch_out(self, root: D, outcomes: list[Outcome]) -> list[D]:
        """Returns one block for each of the likeliest outcomes."""
        request = root.request
        session = root.text.open
        stops = frozenset(session.stop_ids)  # no block can follow a stop id
        branches = []
        for outcome, chance in sorted(outcomes, key=lambda outcome: -outcome[1])[: self._method.outcomes]:
            longest = min(request.max_tokens, max_draft_tokens(session, request.base_len + len(outcome)))
            if chance < MIN_OUTCOME_CHANCE or longest <= 0 or not stops.isdisjoint(outcome):
                continue
            draft = self._method.fork(root, outcome, chance, longest)
            if draft is not None:
                branches.append(draft)
        return branches


def draft_ahead(
    method: BranchingMethod[D],
    requests: Sequence[LookaheadRequest],
    forward_time: ForwardTime,
    clock: Callable[[], float],
    interrupted: Callable[[], bool],
    early: Early,
) -> list[D]:
    """Drafts blocks for likely verdicts; after each forward pass, calls `early` with the blocks that may be sent."""
    search = LookaheadSearch(method, requests, forward_time, interrupted)
    while not interrupted():
        began = clock()
        chosen = search.choose(began)
        if not chosen:
            break
        advanced = method.extend(chosen, interrupted)
        search.extended(chosen, advanced, clock() - began)
        early(proposals(search.may_leave))
    return search.drafts


def proposals(drafts: Sequence[BlockDraft]) -> list[Proposal]:
    """Returns the proposals of non-empty drafts, likeliest outcomes first."""
    offered = [draft for draft in drafts if draft.drafted]
    return [draft.proposal() for draft in sorted(offered, key=lambda draft: -draft.chance)]


def _outcomes(root: BlockDraft) -> list[Outcome]:
    """Returns the outcomes revealed by the root's latest forward pass."""
    block = root.unverified or ()
    if len(root.choices) <= len(block):
        return []  # the root had non-finite logits
    (*there, after) = root.choices
    if root.main is not None:
        choices = root.main.choices[: len(block)]
        return continuations(block, accepted_chance(block, choices), after) if len(choices) == len(block) else []
    rejected = rejections(root.lookahead.unverified, there) if root.needs_read_for_choices else []
    return rejected + continuations(block, accepted_chance(block, there), after)
