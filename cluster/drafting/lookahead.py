"""Drafting ahead: a block for each likely outcome of the verification under way, until its verdict is due.

The likeliest outcomes come first (a speculation cache: Kumar et al. 2026, arXiv 2603.03251). The search is pure: a
method extends branches, and the caller passes the time in, so drafters of any method and the simulator run the same
search.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from cluster.drafting.candidates.outcomes import Outcome, accepted_chance, continuations, rejections
from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.method import Early
from cluster.drafting.requests import AheadRequest, Proposal, max_block_len
from cluster.drafting.timing.forward_time import ForwardTime

AHEAD_ROWS = 8  # most rows of a forward pass: this many, or ROWS_EACH for each session
ROWS_EACH = 2
OUTCOMES = 8  # outcomes drafted for after a rejection, and as many after full acceptance
SIBLING_FIRST = 0.5  # urgency of reading a token beside the main path under verification; that of the main path is 1
SIBLINGS_READ = 4  # tokens beside the main path whose continuations are drafted ahead
LEAST_CHANCE = 0.01  # least probability of an outcome that is drafted for

D = TypeVar("D", bound=BlockDraft)


class BranchingMethod(Protocol[D]):
    """Interface of a method to the search."""

    @property
    def outcomes(self) -> int:
        """Most outcomes to draft for each time a root reveals some."""
        ...

    def roots(self, request: AheadRequest) -> list[D]:
        """Returns what to read of the step under way, its block first."""
        ...

    def fork(self, root: D, outcome: tuple[int, ...], chance: float, max_tokens: int) -> D | None:
        """Returns a block of up to `max_tokens` after an outcome.

        None if the root has not read all tokens before the outcome's last one.
        """
        ...

    def preview(self, drafts: Sequence[D], interrupted: Callable[[], bool]) -> None:
        """Drafts what is available at once, without a forward pass."""
        ...

    def extend(self, drafts: Sequence[D], interrupted: Callable[[], bool]) -> list[D]:
        """Runs one forward pass for all of them; returns those that gained tokens or are done."""
        ...


class AheadSearch(Generic[D]):
    """One pass over some sessions: `choose` and `extended` alternate until nothing is chosen."""

    def __init__(
        self,
        method: BranchingMethod[D],
        requests: Sequence[AheadRequest],
        forward_time: ForwardTime,
        interrupted: Callable[[], bool],
    ) -> None:
        self._method = method
        self._forward_time = forward_time
        self._interrupted = interrupted
        self._most_rows = max(AHEAD_ROWS, ROWS_EACH * len(requests))
        self._took_s = 0.0  # duration of the latest forward pass, taken as the estimate for the next
        self._begun = [draft for request in requests for draft in self._begin(request)]
        self._open = list(self._begun)
        method.preview(self._begun, interrupted)

    def choose(self, now: float) -> list[D]:
        """Returns the drafts that the next forward pass extends: the most urgent of those that it reaches in time."""
        due = now + self._took_s
        in_time = [draft for draft in self._open if due <= draft.ahead.until]
        self._open = sorted(in_time, key=lambda draft: -draft.urgency)
        if not self._open:
            return []
        rows = self._rows(min(draft.ahead.until for draft in self._open) - now)
        chosen = self._open[:rows]
        del self._open[:rows]
        return chosen

    def extended(self, chosen: Sequence[D], advanced: Sequence[D], seconds: float) -> None:
        """Records a forward pass over `chosen` that extended `advanced`; roots among them branch out."""
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
        """All blocks so far."""
        return [draft for draft in self._begun if not draft.is_root]

    @property
    def may_leave(self) -> list[D]:
        """Blocks that may be sent before the pass ends.

        Under rejection sampling an incomplete block must wait, because only one version of it may be sent.
        """
        return [draft for draft in self.drafts if draft.is_done or not draft.ratio]

    def _rows(self, left_s: float) -> int:
        """Returns the rows of the next forward pass: few enough for two passes in the time left, if possible.

        Two forward passes of few rows bring the likeliest blocks sooner, and further, than one of many rows.
        """
        twice = self._forward_time.most_rows(self._most_rows, left_s / 2)
        return twice or self._forward_time.most_rows(self._most_rows, left_s) or 1

    def _begin(self, request: AheadRequest) -> list[D]:
        """Returns the roots, and blocks for rejections if the alternatives to the block's tokens are known already."""
        roots = self._method.roots(request)
        root = roots[0]
        if root.tells_all:
            return roots
        known = rejections(request.unverified, root.choices)
        return [*roots, *self._branch_out(root, known)]

    def _branch_out(self, root: D, outcomes: list[Outcome]) -> list[D]:
        """Returns a block for each of the likeliest outcomes."""
        request = root.request
        session = root.text.open
        stops = frozenset(session.stop_ids)  # no block follows a stop id
        found = []
        for outcome, chance in sorted(outcomes, key=lambda outcome: -outcome[1])[: self._method.outcomes]:
            longest = min(request.max_tokens, max_block_len(session, request.base_len + len(outcome)))
            if chance < LEAST_CHANCE or longest <= 0 or not stops.isdisjoint(outcome):
                continue
            draft = self._method.fork(root, outcome, chance, longest)
            if draft is not None:
                found.append(draft)
        return found


def draft_ahead(
    method: BranchingMethod[D],
    requests: Sequence[AheadRequest],
    forward_time: ForwardTime,
    clock: Callable[[], float],
    interrupted: Callable[[], bool],
    early: Early,
) -> list[D]:
    """Drafts blocks for possible verdicts; calls `early` after each forward pass with the blocks that may be sent."""
    search = AheadSearch(method, requests, forward_time, interrupted)
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
    """Returns the outcomes that the root's latest forward pass revealed."""
    block = root.unverified or ()
    if len(root.choices) <= len(block):
        return []  # some of its logits were not finite
    (*there, after) = root.choices
    if root.main is not None:
        known = root.main.choices[: len(block)]
        return continuations(block, accepted_chance(block, known), after) if len(known) == len(block) else []
    told = rejections(root.ahead.unverified, there) if root.tells_all else []
    return told + continuations(block, accepted_chance(block, there), after)
