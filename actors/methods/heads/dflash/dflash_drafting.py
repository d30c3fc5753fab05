"""Drafting with a DFlash head: a whole block in one forward, after the target's states at all earlier positions."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.methods.heads.dflash.dflash_context import DFlashContext
from actors.methods.heads.dflash.dflash_decoder import DFlashDecoder
from actors.methods.model.sampling import DraftSampler
from cluster.drafting.block_draft import BlockDraft
from cluster.drafting.candidates.tree_growth import limbs_by_depth
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import AheadRequest, Proposal, nothing_ahead
from cluster.drafting.session_texts import SessionTexts
from protos.messages import DraftRequest, Open, Shape
from protos.states import StatesNeeded


class DFlashDrafting:
    """The method. A session of which a state is missing gets nothing.

    Rows come as the target has them or, with `is_projected`, as it has projected them.
    """

    shapes = frozenset(Shape)

    def __init__(self, decoder: DFlashDecoder, sampler: DraftSampler, is_projected: bool = False) -> None:
        self._decoder = decoder
        self._is_projected = is_projected
        self._sampler = sampler
        self._texts = SessionTexts()
        self._contexts: dict[str, DFlashContext] = {}

    @property
    def tokens_per_forward(self) -> int:
        return self._decoder.config.block_size - 1

    @property
    def needs(self) -> StatesNeeded:
        return self._decoder.config.needs

    # ------------------------------------------------------------ sessions

    def open(self, request: Open) -> None:
        self._texts.open(request)
        self._contexts[request.session] = DFlashContext()

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._texts.committed(session, tokens)
        self._sampler.decided(session, self._texts[session].tokens)

    @torch.inference_mode()
    def states(self, session: str, first: int, rows: Tensor) -> None:
        """The target's states of positions from `first` on, in any order and more than once.

        (rows, width) as `needs` says, or (rows, hidden) where they were projected at the source. Those of a session
        that is not open are ignored.
        """
        needs = self.needs
        width = needs.projected_width if self._is_projected else needs.width
        assert rows.shape[-1] == width, "rows are as wide as was asked for"
        if session not in self._texts:
            return
        like = self._decoder.like
        rows = rows.to(like.device, like.dtype)
        self._contexts[session].put(first, rows.clone() if self._is_projected else self._decoder.project(rows))

    def close(self, sessions: Sequence[str]) -> None:
        self._texts.close(sessions)
        for name in sessions:
            self._contexts.pop(name, None)
            self._sampler.close(name)

    # ------------------------------------------------------------ blocks

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [self._begin(request) for request in requests]
        ready = [draft for draft in drafts if self._contexts[draft.request.session].has(draft.request.base_len - 1)]
        if ready:
            self._fill(ready)
        return [draft.proposal() for draft in drafts]

    def draft_ahead(
        self, requests: Sequence[AheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """The states that the next block comes after are being computed, so nothing can be drafted ahead."""
        return nothing_ahead(requests)

    def _begin(self, request: DraftRequest) -> BlockDraft:
        return BlockDraft(
            request=request,
            text=self._texts[request.session],
            base_hash=request.prefix_hash,
            max_tokens=min(request.max_tokens, self.tokens_per_forward),
        )

    def _fill(self, drafts: Sequence[BlockDraft]) -> None:
        """Blocks are computed whole, however few of their tokens are asked for: masks see one another."""
        contexts = [self._contexts[draft.request.session] for draft in drafts]
        anchors = [draft.text.tokens[-1] for draft in drafts]
        starts = [draft.request.base_len - 1 for draft in drafts]
        hidden = self._decoder.hidden(contexts, anchors, starts)
        counts = [draft.max_tokens for draft in drafts]
        wanted = [row[1 : 1 + count] for row, count in zip(hidden, counts, strict=True)]
        logits = torch.split(self._decoder.logits(torch.cat(wanted)), counts)
        self._sampler.extend([(draft, rows, None) for draft, rows in zip(drafts, logits, strict=True)])
        for draft in drafts:
            if draft.takes_trees:
                draft.grown = limbs_by_depth(draft.choices, draft.max_tokens, draft.least_chance)
