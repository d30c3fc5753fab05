"""Drafting ahead: a block for each likely outcome of the verification under way, until its verdict is due.

The likeliest outcomes come first (a speculation cache: Kumar et al. 2026, arXiv 2603.03251). The search is pure: a
method extends branches, and whoever drives the search tells it the time, so that drafters of any method and the
simulator run the same one.
"""

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from cluster.drafting.block_draft import BlockDraft
from cluster.drafting.candidates.outcomes import Outcome, accepted_chance, continuations, rejections
from cluster.drafting.method import Early
from cluster.drafting.requests import AheadRequest, Proposal, max_block_len
from cluster.drafting.timing.forward_time import ForwardTime

AHEAD_ROWS = 8  # most branches of a forward: this many, or ROWS_EACH for each session
ROWS_EACH = 2
OUTCOMES = 8  # that are drafted for after a rejection; as many where there is none
SIBLING_FIRST = 0.5  # how urgent it is to read a token beside the trunk under verification; to read that is 1
SIBLINGS_READ = 4  # tokens beside the trunk whose continuations are drafted ahead
LEAST_CHANCE = 0.01  # an outcome less likely is not drafted for

D = TypeVar("D", bound=BlockDraft)


class BranchingMethod(Protocol[D]):
    """What a method gives the search."""

    @property
    def outcomes(self) -> int:
        """Most outcomes that are drafted for each time that a root tells of some."""
        ...

    def roots(self, request: AheadRequest) -> list[D]:
        """What is to be read of the step under way: its block first."""
        ...

    def fork(self, root: D, outcome: tuple[int, ...], chance: float, max_tokens: int) -> D | None:
        """A block of up to `max_tokens` after an outcome; None if the root has not read all before its last token."""
        ...

    def preview(self, drafts: Sequence[D], interrupted: Callable[[], bool]) -> None:
        """Drafts what can be had at once, without a forward."""
        ...

    def extend(self, drafts: Sequence[D], interrupted: Callable[[], bool]) -> list[D]:
        """One forward for all of them; returns those that have more tokens for it, or are done."""
        ...


class AheadSearch(Generic[D]):
    """One pass over some sessions: `choose` and `extended` take turns until nothing is chosen."""

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
        self._took_s = 0.0  # the latest forward, and the next one will take as long
        self._begun = [draft for request in requests for draft in self._begin(request)]
        self._open = list(self._begun)
        method.preview(self._begun, interrupted)

    def choose(self, now: float) -> list[D]:
        """What the next forward extends: what is likeliest to be of use, of what it would reach in time."""
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
        """A forward was made for those that were chosen, and these got on by it: roots branch out."""
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
        """Those to send before the pass ends: not what is incomplete under ratio, where one version must do."""
        return [draft for draft in self.drafts if draft.is_done or not draft.ratio]

    def _rows(self, left_s: float) -> int:
        """Two forwards of few rows bring the likeliest blocks sooner, and further, than one of many."""
        twice = self._forward_time.most_rows(self._most_rows, left_s / 2)
        return twice or self._forward_time.most_rows(self._most_rows, left_s) or 1

    def _begin(self, request: AheadRequest) -> list[D]:
        """Roots, and blocks for a rejection if what may follow the tokens before it is known already."""
        roots = self._method.roots(request)
        root = roots[0]
        if root.tells_all:
            return roots
        known = rejections(request.unverified, root.choices)
        return [*roots, *self._branch_out(root, known)]

    def _branch_out(self, root: D, outcomes: list[Outcome]) -> list[D]:
        """A block for each of the likeliest outcomes."""
        request = root.request
        session = root.text.open
        stops = frozenset(session.stop_ids)  # no block follows the end
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
    """Blocks for what the verdicts may bring. `early` is told of what there is after each forward."""
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
    """What there is to offer, the likeliest outcomes first."""
    offered = [draft for draft in drafts if draft.drafted]
    return [draft.proposal() for draft in sorted(offered, key=lambda draft: -draft.chance)]


def _outcomes(root: BlockDraft) -> list[Outcome]:
    """What the verdict may bring of which the root has told just now."""
    block = root.unverified or ()
    if len(root.choices) <= len(block):
        return []  # its logits were not finite somewhere
    (*there, after) = root.choices
    if root.main is not None:
        known = root.main.choices[: len(block)]
        return continuations(block, accepted_chance(block, known), after) if len(known) == len(block) else []
    told = rejections(root.ahead.unverified, there) if root.tells_all else []
    return told + continuations(block, accepted_chance(block, there), after)
