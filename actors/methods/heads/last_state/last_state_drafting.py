"""Drafting with heads that read one state of the target: its final one, from which it drew the last decided token.

Such heads keep nothing of the text, so a session needs one row a round, and none of its prompt.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.methods.model.sampling import DraftSampler
from actors.models.forward_output import ForwardOutput
from cluster.drafting.block_draft import BlockDraft
from cluster.drafting.candidates.tree_growth import Path, least_of, limbs_by_depth, worth_a_limb
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal, nothing_ahead
from cluster.drafting.session_texts import SessionTexts
from protos.messages import DraftRequest, Open, Shape
from protos.prefix import hashes_after
from protos.states import StatesNeeded

LIMB_TOKENS = 2  # that a limb has, at most: what is further off is seldom among a block's likeliest
MOST_ROWS = 512  # of a session, which may come before the verdicts that they belong to


class LastStateHead(Protocol):
    """Predicts some tokens after a state of the target."""

    @property
    def width(self) -> int:
        """Tokens that it predicts."""
        ...

    @property
    def reads_tokens(self) -> bool:
        """Whether what it predicts depends on the tokens taken before; otherwise on their number alone."""
        ...

    @property
    def needs(self) -> StatesNeeded: ...

    def predict_next(self, states: Tensor, tokens: Sequence[int], depth: int) -> ForwardOutput:
        """What follows `tokens`, which come after as many as `depth` drafted ones or are the last decided ones.

        Each was taken after one of the states, (rows, hidden): the target's, or what was returned before.
        """
        ...


class LastRows:
    """Of each session the target's states from its last decided token but one on, by position."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device = device
        self._dtype = dtype
        self._rows: dict[str, dict[int, Tensor]] = {}

    def keep(self, session: str, first: int, rows: Tensor, wanted: int) -> None:
        """Rows of the positions from `first` on, (rows, width), as far as they are `wanted` ones or later."""
        kept = self._rows.setdefault(session, {})
        for position in range(max(first, wanted), first + len(rows)):
            kept[position] = rows[position - first].to(self._device, self._dtype, copy=True)
        for position in sorted(kept)[MOST_ROWS:]:
            del kept[position]

    def forget_before(self, session: str, wanted: int) -> None:
        kept = self._rows.get(session, {})
        for position in [position for position in kept if position < wanted]:
            del kept[position]

    def at(self, session: str, position: int) -> Tensor | None:
        """(width,), if it has come."""
        return self._rows.get(session, {}).get(position)

    def close(self, session: str) -> None:
        self._rows.pop(session, None)


class LastStateDrafting:
    """The method around such a head. A session whose state has not come gets nothing."""

    shapes = frozenset(Shape)

    def __init__(self, head: LastStateHead, sampler: DraftSampler, rows: LastRows) -> None:
        self._head = head
        self._sampler = sampler
        self._rows = rows
        self._texts = SessionTexts()

    @property
    def tokens_per_forward(self) -> int:
        return self._head.width

    @property
    def needs(self) -> StatesNeeded:
        return self._head.needs

    # ------------------------------------------------------------ sessions

    def open(self, request: Open) -> None:
        self._texts.open(request)
        self._rows.close(request.session)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._texts.committed(session, tokens)
        self._sampler.decided(session, self._texts[session].tokens)
        self._rows.forget_before(session, self._position(session))

    def states(self, session: str, first: int, rows: Tensor) -> None:
        """The target's states of positions from `first` on, (rows, width): in any order, and more than once.

        Those of a session that is not open are ignored.
        """
        assert rows.shape[-1] == self.needs.width, "rows are as wide as was asked for"
        if session in self._texts:
            self._rows.keep(session, first, rows, self._position(session))

    def close(self, sessions: Sequence[str]) -> None:
        self._texts.close(sessions)
        for name in sessions:
            self._rows.close(name)
            self._sampler.close(name)

    def _position(self, session: str) -> int:
        """Of the state that the last decided token was drawn from."""
        return len(self._texts[session].tokens) - 2

    # ------------------------------------------------------------ blocks

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [self._begin(request) for request in requests]
        ready = [draft for draft in drafts if draft.state is not None]
        self._go_on(ready, self._head.width)
        trees = [draft for draft in ready if draft.takes_trees and draft.drafted]
        if self._head.reads_tokens:
            self._go_on([limb for draft in trees for limb in self._branch_off(draft)], LIMB_TOKENS)
        else:
            for draft in trees:
                draft.grown = limbs_by_depth(draft.choices, draft.max_tokens, draft.least_chance)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """The state that the next token is drawn from is being computed, so nothing can be drafted after it."""
        return nothing_ahead(requests)

    def _begin(self, request: DraftRequest) -> BlockDraft:
        return BlockDraft(
            request=request,
            text=self._texts[request.session],
            base_hash=request.prefix_hash,
            max_tokens=request.max_tokens,
            state=self._rows.at(request.session, self._position(request.session)),
        )

    def _go_on(self, drafts: Sequence[BlockDraft], tokens: int) -> None:
        """Up to so many further tokens for each, as far as the head reaches; those of one depth together."""
        for _ in range(tokens):
            by_depth: dict[int, list[BlockDraft]] = {}
            for draft in drafts:
                depth = len(draft.stem) + len(draft.drafted)
                if not draft.is_complete and depth < self._head.width:
                    by_depth.setdefault(depth, []).append(draft)
            for depth, together in by_depth.items():
                self._extend(together, depth)

    def _extend(self, drafts: Sequence[BlockDraft], depth: int) -> None:
        states, taken = zip(*[_last(draft) for draft in drafts], strict=True)
        output = self._head.predict_next(torch.stack(states), taken, depth)
        assert output.hidden is not None, "such a head gives the states to go on from"
        self._sampler.extend(
            list(zip(drafts, torch.split(output.logits, 1), torch.split(output.hidden, 1), strict=True))
        )

    def _branch_off(self, block: BlockDraft) -> list[BlockDraft]:
        """Limbs from tokens beside its own."""
        paths = block.paths
        least = max(block.least_chance, least_of(paths, block.max_tokens))
        block.limbs += [
            self._limb(block, stem, chance)
            for stem, chance in worth_a_limb(paths, block.tokens, least)
            if len(stem) < min(block.max_tokens, self._head.width)
        ]
        return block.limbs

    def _limb(self, block: BlockDraft, stem: Path, chance: float) -> BlockDraft:
        return BlockDraft(
            request=block.request,
            text=block.text,
            base_hash=hashes_after(block.base_hash, stem)[-1],
            max_tokens=min(LIMB_TOKENS, block.max_tokens - len(stem)),
            outcome=stem,
            chance=chance,
            stem=stem,
            state=block.drafted[len(stem) - 1].state,
        )


def _last(draft: BlockDraft) -> tuple[Tensor, int]:
    """The last token so far, and the state that it was taken after."""
    state, token = draft.last
    assert isinstance(state, Tensor), "a draft begins with a state"
    return state, token
