"""Blocks of heads that predict places independently of the tokens before them: one prediction serves many blocks.

A prediction for the places after a text also serves blocks after each outcome: after k further tokens, place k comes
next.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from actors.drafters.heads.head_drafter import PredictedDraft
from actors.drafters.model.sampling import DraftSampler
from cluster.drafting.candidates.tree_growth import limbs_by_depth

Foresee = Callable[[Sequence[PredictedDraft], Sequence[int]], Sequence[Tensor]]
"""Returns logits of the places after each draft's text, (places, columns): at least as many as requested."""


def fill_places(
    drafts: Sequence[PredictedDraft],
    width: int,
    foresee: Foresee,
    sampler: DraftSampler,
    interrupted: Callable[[], bool],
) -> None:
    """Implements `StatePredictor.fill` for a head that predicts `width` places."""
    if interrupted():
        return
    unread = [draft for draft in drafts if draft.logits is None and draft.main is None]
    if unread:
        places = [min(width, draft.longest + (draft.request.max_tokens if draft.is_root else 0)) for draft in unread]
        for draft, logits in zip(unread, foresee(unread, places), strict=True):
            draft.logits = logits
    sampler.extend([(draft, _own_places(draft), None) for draft in drafts])
    for draft in drafts:
        if draft.takes_trees:
            draft.grown = limbs_by_depth(draft.choices, draft.max_tokens, draft.least_chance)
        draft.end()


def _own_places(draft: PredictedDraft) -> Tensor:
    if isinstance(draft.main, PredictedDraft):
        draft.logits = draft.main.logits  # it reads other tokens at the same places
    assert draft.logits is not None, "a block is read before what comes after it"
    return draft.logits[len(draft.outcome) :][: draft.longest]
