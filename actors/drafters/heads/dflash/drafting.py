"""Drafting with a DFlash head: a whole block in one forward, given the target's states at all earlier positions."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.drafters.heads.dflash.context import DFlashContext
from actors.drafters.heads.dflash.decoder import DFlashDecoder
from actors.drafters.heads.head_drafter import PredictedDraft
from actors.drafters.heads.parallel_heads import fill_places
from actors.drafters.model.sampling import DraftSampler
from protos.states import StatesNeeded


class DFlashPredictor:
    """A `StatePredictor`. Blocks ahead of a verdict come from further places of the block before them.

    Rows arrive as the target has them or, with `is_projected`, already projected by the target.
    """

    def __init__(self, decoder: DFlashDecoder, sampler: DraftSampler, is_projected: bool = False) -> None:
        self._decoder = decoder
        self._is_projected = is_projected
        self._sampler = sampler
        self._contexts: dict[str, DFlashContext] = {}
        self._blocks: dict[str, tuple[int, Tensor]] = {}  # latest: hash of the text before it, and (places, hidden)

    @property
    def width(self) -> int:
        return self._decoder.config.block_size - 1

    @property
    def needs(self) -> StatesNeeded:
        return self._decoder.config.needs

    def reach(self, depth: int) -> int:
        """Returns the places left in the block after `depth` tokens.

        A block's context holds only the target's states, so after the last place the head waits for new ones.
        """
        return max(0, self.width - depth)

    # ------------------------------------------------------------ states

    def open(self, session: str) -> None:
        self._contexts[session] = DFlashContext()
        self._blocks.pop(session, None)

    def begin(self, session: str, first: int) -> None:
        self._contexts[session] = DFlashContext(first)

    def states(self, session: str, first: int, rows: Tensor, length: int) -> None:
        """Adds rows, (rows, width) as in `needs`, or (rows, hidden) if projected at the target."""
        needs = self.needs
        width = needs.projected_width if self._is_projected else needs.width
        assert rows.shape[-1] == width, "rows are as wide as was asked for"
        like = self._decoder.like
        rows = rows.to(like.device, like.dtype)
        self._contexts[session].put(first, rows.clone() if self._is_projected else self._decoder.project(rows))

    def decided(self, session: str, length: int) -> None:
        """Does nothing: the context is read when the next block is drafted."""

    def close(self, session: str) -> None:
        self._contexts.pop(session, None)
        self._blocks.pop(session, None)

    def is_ready(self, session: str, length: int) -> bool:
        return self._contexts[session].has(length - 1)

    # ------------------------------------------------------------ blocks

    def fill(self, drafts: Sequence[PredictedDraft], interrupted: Callable[[], bool]) -> None:
        fill_places(drafts, self.width, self._foresee, self._sampler, interrupted)

    def _foresee(self, drafts: Sequence[PredictedDraft], places: Sequence[int]) -> Sequence[Tensor]:
        self._draft_blocks([draft for draft in drafts if self._known(draft) is None])
        hidden = [
            known[:count]
            for draft, count in zip(drafts, places, strict=True)
            if (known := self._known(draft)) is not None
        ]
        return torch.split(self._decoder.logits(torch.cat(hidden)), list(places))

    def _draft_blocks(self, drafts: Sequence[PredictedDraft]) -> None:
        """Computes whole blocks, however few tokens are requested, because masks attend to one another."""
        if not drafts:
            return
        sessions = [draft.request.session for draft in drafts]
        contexts = [self._contexts[session] for session in sessions]
        anchors = [draft.text.tokens[-1] for draft in drafts]
        starts = [draft.request.base_len - 1 for draft in drafts]
        for draft, hidden in zip(drafts, self._decoder.hidden(contexts, anchors, starts), strict=True):
            self._blocks[draft.request.session] = (draft.base_hash, hidden[1:])

    def _known(self, draft: PredictedDraft) -> Tensor | None:
        """Returns the latest block, (places, hidden), if it follows the same text; else None."""
        base_hash, hidden = self._blocks.get(draft.request.session, (None, None))
        return hidden if base_hash == draft.base_hash else None
