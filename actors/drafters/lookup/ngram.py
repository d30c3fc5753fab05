"""Prompt lookup: proposes what followed earlier occurrences of the text's own end.

Needs no model and no GPU (Saxena 2023). If trees are allowed, all continuations found in the text are candidates, the
likeliest paths first. A chain is the continuation of the latest occurrence of the longest suffix. Its tokens are point
masses: under rejection sampling each is accepted with its target probability.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.drafters.lookup.calibration import LookupCalibration
from actors.drafters.lookup.occurrences import Continuations, GrowingText
from actors.drafters.setup import DraftSetup
from cluster.config import DraftPool
from cluster.drafting.candidates.outcomes import Choices
from cluster.drafting.candidates.tree_growth import Path, grown_paths, tree_of
from cluster.drafting.draft_state import BlockDraft, DraftedToken
from cluster.drafting.lookahead import draft_ahead, proposals
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from cluster.drafting.session_updates import SessionTexts
from cluster.drafting.timing.forward_time import ForwardTime
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import DraftRequest, Open, Shape
from protos.prefix import hashes_after

TOKEN_BYTES = 4
OUTCOMES = 4  # most outcomes drafted for after each root is read
ROOTS = 4  # draft tokens off the main path whose continuations are drafted ahead


def look_up(tokens: Sequence[int], max_tokens: int, longest: int, shortest: int) -> tuple[int, ...]:
    """Returns what followed the latest earlier occurrence of the longest suffix of `shortest` to `longest` tokens."""
    text = np.asarray(tokens, dtype="<i4").tobytes()  # searched as bytes: contexts are long, and this runs every round
    for size in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        end = _latest(text, text[-TOKEN_BYTES * size :])
        if end is not None:
            return tuple(tokens[end : end + max_tokens])
    return ()


def _latest(text: bytes, suffix: bytes) -> int | None:
    """Returns the index of the token after the latest occurrence of `suffix` that ends before the text does."""
    before = len(text) - 1
    while (start := text.rfind(suffix, 0, before)) >= 0:
        if start % TOKEN_BYTES == 0:
            return (start + len(suffix)) // TOKEN_BYTES
        before = start + len(suffix) - 1  # matched across a token boundary: no occurrence
    return None


def create(draft: DraftPool, setup: DraftSetup) -> "PromptLookup":
    options = draft.prompt_lookup
    return PromptLookup(options.max_ngram, options.min_ngram)


@dataclass(kw_only=True, eq=False)
class LookupDraft(BlockDraft):
    """A block made of the text's own continuations. For a tree, `drafted` is its main path."""

    known: Continuations  # after the outcome
    nodes: list[tuple[Path, float]] = field(default_factory=list)  # of a tree, with acceptance probabilities, falling

    @property
    def paths(self) -> list[tuple[Path, float]]:
        return self.nodes

    @property
    def confidence(self) -> None:
        """None: an author's published acceptance does not apply to lookups."""


class PromptLookup:
    """The drafting method around `look_up` and the text's continuations."""

    shapes = frozenset(Shape)
    tokens_per_forward = 1
    outcomes = OUTCOMES

    def __init__(self, longest: int, shortest: int) -> None:
        self._longest = longest
        self._shortest = shortest
        self._texts = SessionTexts()
        self._arrays: dict[str, GrowingText] = {}  # the same texts
        self._calibration = LookupCalibration()

    def open(self, request: Open) -> None:
        self._texts.open(request)
        self._arrays[request.session] = GrowingText(request.tokens)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._texts.committed(session, tokens)
        self._arrays[session].extend(tokens)
        self._calibration.decided(session, self._texts[session].tokens)

    def close(self, sessions: Sequence[str]) -> None:
        self._texts.close(sessions)
        self._calibration.close(sessions)
        for session in sessions:
            self._arrays.pop(session, None)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [self._begin(request, (), 1.0, request.max_tokens) for request in requests]
        self.extend(drafts)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Drafts for likely outcomes in one go: this is too quick for a verdict to arrive before it ends.

        A session that the target decodes without a block and that has no candidates gets an empty proposal.
        """
        drafts = draft_ahead(self, requests, ForwardTime(), clock=lambda: 0.0, interrupted=interrupted, early=dismiss)
        found = proposals(drafts)
        served = {proposal.session for proposal in found}
        waiting = [each for each in requests if not len(each.unverified) and each.session not in served]
        return found + [Proposal(each.session, each.base_len, each.prefix_hash, NO_TREE) for each in waiting]

    def _begin(
        self, request: DraftRequest | AheadRequest, outcome: tuple[int, ...], chance: float, max_tokens: int
    ) -> LookupDraft:
        return LookupDraft(
            request=request,
            text=self._texts[request.session],
            base_hash=hashes_after(request.prefix_hash, outcome)[-1] if outcome else request.prefix_hash,
            max_tokens=max_tokens,
            outcome=outcome,
            chance=chance,
            known=Continuations(self._arrays[request.session], outcome, self._longest, self._shortest),
        )

    # ------------------------------------------------------------ what the search ahead goes by

    def roots(self, request: AheadRequest) -> list[LookupDraft]:
        """Returns a root for the main path and one for each token beside it.

        Under rejection sampling the whole block is expected to be accepted.
        """
        tree = request.unverified
        trunk = tree.trunk
        paths = [tuple([tree.tokens[node] for node in nodes]) for nodes in ([] if tree.is_chain else tree.paths)]
        beside = [path for path in paths if path != trunk[: len(path)]]
        return [self._root(request, path) for path in (trunk, *beside[:ROOTS])]

    def _root(self, request: AheadRequest, path: Path) -> LookupDraft:
        """Makes a root that reads these tokens; each may be replaced where the text has an alternative."""
        root = self._begin(request, (), 1.0, len(path) + 1)
        root.unverified = path
        for token in path:
            there = _sure(token) if root.ratio else self._choices(root, root.tokens)
            there = there.including(token, request.claim((*root.tokens, token)))
            root.drafted.append(DraftedToken(token, there, root.p_accepted * there.chance_of(token)))
        root.settle()
        return root

    def fork(self, root: LookupDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> LookupDraft:
        return self._begin(root.request, outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[LookupDraft], interrupted: Callable[[], bool]) -> None:
        """Does nothing: a lookup is as quick as any preview."""

    def extend(
        self, drafts: Sequence[LookupDraft], interrupted: Callable[[], bool] = lambda: False
    ) -> list[LookupDraft]:
        """Extends drafts as far as the text continues; returns those that got more tokens."""
        return [draft for draft in drafts if self._extend(draft)]

    def _extend(self, draft: LookupDraft) -> bool:
        before = len(draft.drafted)
        if draft.ratio or not (draft.takes_trees or draft.is_root):
            self._follow(draft)
        elif draft.is_root:
            self._end(draft)
        else:
            self._grow(draft)
        draft.settle()
        draft.is_cut = True
        return len(draft.drafted) > before

    def _follow(self, draft: LookupDraft) -> None:
        """Drafts one continuation, as a chain."""
        text = (*draft.text.tokens, *draft.outcome, *draft.tokens)
        for token in look_up(text, draft.missing, self._longest, self._shortest):
            draft.append(token, _sure(token) if draft.ratio else _first(token, self._choices(draft, draft.tokens)))

    def _end(self, root: LookupDraft) -> None:
        """Adds candidates after the root's last token, except draft tokens that are under verification themselves."""
        path = root.tokens
        expected = _children(root.ahead.unverified, path)
        others = [choice for choice in self._choices(root, path) if choice[0] not in expected]
        if others:
            there = Choices([token for token, _ in others], [chance for _, chance in others])
            root.drafted.append(DraftedToken(there.tokens[0], there, root.p_accepted * there.chances[0]))

    def _grow(self, draft: LookupDraft) -> None:
        """Drafts all continuations that are likely enough, as a tree."""
        draft.nodes = grown_paths(lambda path: self._choices(draft, path), draft.max_tokens, draft.least_chance)
        chances = dict(draft.nodes)
        trunk = tree_of(draft.nodes).trunk
        for depth, token in enumerate(trunk, 1):
            draft.drafted.append(DraftedToken(token, _sure(token), chances[trunk[:depth]]))

    def _choices(self, draft: LookupDraft, path: Path) -> Choices:
        """Returns candidates after these tokens of the block."""
        place = (draft.request.base_len, (*draft.outcome, *path))
        return self._calibration.consider(draft.request.session, place, draft.known.at(path))


def _sure(token: int) -> Choices:
    """Returns the token as the only choice."""
    return Choices((token,), (1.0,))


def _first(token: int, there: Choices) -> Choices:
    """Moves `token` to the front of the choices."""
    others = [choice for choice in there if choice[0] != token]
    tokens = (token, *[other for other, _ in others])
    return Choices(tokens, (there.chance_of(token), *[chance for _, chance in others]))


def _children(tree: DraftTree, path: Path) -> tuple[int, ...]:
    """Returns the tokens drafted after this path of the tree."""
    nodes = tree.along(path)
    return tree.children(nodes[-1] if nodes else -1)
