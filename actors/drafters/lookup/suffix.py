"""Suffix decoding: proposes what followed the text's end before, in the text or in recent answers of the same salt.

Needs no model and no GPU (SuffixDecoding: Oliaro et al. 2024, arXiv 2411.04975). Several continuations become a tree,
weighted by how frequent they were. Tokens are point masses: under rejection sampling each is accepted with its target
probability.
"""

import time
from collections.abc import Callable, Sequence

from actors.drafters.lookup.recent_answers import RecentAnswers
from actors.drafters.lookup.suffix_index import EscapeRates, Match, SuffixIndex, longer
from actors.drafters.setup import DraftSetup
from cluster.config import DraftPool
from cluster.draft_options import SuffixOptions
from cluster.drafting.candidates.outcomes import NOTHING, Choices
from cluster.drafting.candidates.tree_growth import Path, grow_limbs
from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.lookahead import OUTCOMES, draft_ahead, proposals
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal
from cluster.drafting.session_updates import SessionTexts
from cluster.drafting.timing.forward_time import ForwardTime
from protos.draft_tree import NO_TREE
from protos.messages import DraftRequest, Open, Shape


def create(draft: DraftPool, setup: DraftSetup) -> "SuffixLookup":
    return SuffixLookup(draft.suffix)


class SuffixLookup:
    """The drafting method.

    Answers sampled under rejection sampling are not remembered. Their tokens depend on the noise that decides about
    drafts, and the session may be reopened here to have some of them decided again with the same noise; a draft that
    had seen them would not be independent of it. Other answers are functions of their prompts and seeds.
    """

    shapes = frozenset(Shape)
    tokens_per_forward = 1
    outcomes = OUTCOMES

    def __init__(self, options: SuffixOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._ahead_time = ForwardTime()
        self._texts = SessionTexts()
        self._own: dict[str, SuffixIndex] = {}
        self._answers = RecentAnswers(options.min_ngram, options.remembered_tokens)
        self._rates = EscapeRates()  # shared by all sessions: rates reveal no tokens

    # ------------------------------------------------------------ sessions

    def open(self, request: Open) -> None:
        self._texts.open(request)
        index = SuffixIndex(self._options.min_ngram)
        index.add(self._texts[request.session].tokens)
        self._own[request.session] = index

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        text = self._texts[session].tokens
        self._learn(session, text, tokens)
        known = len(text)
        self._texts.committed(session, tokens)
        self._own[session].grow(known)

    def close(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            if self._own.pop(name, None) is not None:
                self._remember(name)
        self._texts.close(sessions)

    def _remember(self, session: str) -> None:
        """Keeps the answer, with as much of the prompt as marks where it begins."""
        text = self._texts[session]
        is_free = text.open.takes_trees  # independent of the noise that decides about drafts
        first = max(0, text.open.prompt_len - self._options.max_ngram)
        if is_free and len(text.tokens) > text.open.prompt_len:
            self._answers.add(text.open.cache_salt, text.tokens[first:])

    def _learn(self, session: str, text: Sequence[int], tokens: Sequence[int]) -> None:
        """Learns how reliable matches are from what the target decided after them."""
        match = self._find(session, text)
        for place, token in enumerate(tokens):
            if match.places:
                self._rates.learn(match, token)
            match = match.after(token)
            if not match.places:
                match = self._find(session, [*text[-self._options.max_ngram :], *tokens[: place + 1]])

    def _find(self, session: str, text: Sequence[int]) -> Match:
        longest = self._options.max_ngram
        salt = self._texts[session].open.cache_salt
        return longer(self._own[session].find(text, longest), self._answers.find(salt, text, longest))

    # ------------------------------------------------------------ blocks

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [self._begin(request, request.max_tokens) for request in requests]
        self.extend(drafts)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Drafts for likely outcomes.

        A session that the target decodes without a block and that has no candidates gets an empty proposal.
        """
        drafts = draft_ahead(self, requests, self._ahead_time, self._clock, interrupted, early)
        found = proposals(drafts)
        served = {proposal.session for proposal in found}
        waiting = [each for each in requests if not len(each.unverified) and each.session not in served]
        return found + [Proposal(each.session, each.base_len, each.prefix_hash, NO_TREE) for each in waiting]

    def _begin(self, request: DraftRequest | AheadRequest, max_tokens: int) -> BlockDraft:
        text = self._texts[request.session]
        return BlockDraft(request=request, text=text, base_hash=request.prefix_hash, max_tokens=max_tokens)

    def _match(self, draft: BlockDraft) -> Match:
        """Finds the match after all of the draft's tokens so far."""
        end = [*draft.text.tokens[-self._options.max_ngram :], *draft.outcome, *draft.tokens]
        return self._find(draft.request.session, end)

    # ------------------------------------------------------------ what the search ahead goes by

    def roots(self, request: AheadRequest) -> list[BlockDraft]:
        """Returns the block under verification, with alternatives at each of its places."""
        block = request.unverified.trunk
        root = self._begin(request, len(block) + 1)
        root.unverified = block
        for token in block:
            match = self._match(root)
            root.append(token, self._rates.choices(match) if match.places else Choices((token,), (1.0,)))
        root.settle()
        return [root]

    def fork(self, root: BlockDraft, outcome: tuple[int, ...], chance: float, max_tokens: int) -> BlockDraft:
        return root.after(outcome, chance, max_tokens)

    def preview(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool]) -> None:
        """Does nothing: a lookup is as quick as any preview."""

    def extend(self, drafts: Sequence[BlockDraft], interrupted: Callable[[], bool] = lambda: False) -> list[BlockDraft]:
        """Extends drafts as far as any match continues; returns those that got more tokens."""
        return [draft for draft in drafts if self._extend(draft)]

    def _extend(self, draft: BlockDraft) -> bool:
        known = len(draft.drafted)
        matches: dict[Path, Match] = {(): self._match(draft)}

        def after(path: Path) -> Choices:
            if path not in matches:
                matches[path] = matches[path[:-1]].after(path[-1])
            return self._rates.choices(matches[path]) if matches[path].places else NOTHING

        path: Path = ()
        while not draft.is_complete and (choices := after(path)).tokens:
            draft.append(choices.tokens[0], choices)
            path = (*path, choices.tokens[0])
        if draft.takes_trees:
            draft.grown = grow_limbs(after, draft.max_tokens, draft.least_chance)
        draft.settle()
        draft.is_cut = True
        return len(draft.drafted) > known
