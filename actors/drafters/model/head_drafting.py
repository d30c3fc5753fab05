"""Drafting with a draft head, between or instead of forwards, from the states that blocks were read with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.drafters.model.cached_draft import CachedDraft
from actors.drafters.model.forwards import ReadDraft
from actors.drafters.model.recurrent_head import DraftHead
from actors.drafters.model.sampling import DraftSampler

GUESSED = 16  # most outcomes, and most blocks per pass, that the head predicts first tokens for
GUESS_TOKENS = 2  # tokens predicted for each


@dataclass(frozen=True, slots=True)
class _ReadStates:
    """States where the verdict over a block may stop accepting, by the tokens accepted up to there."""

    base_len: int  # tokens before the block
    states: dict[tuple[int, ...], Tensor]  # each (hidden,)


class HeadDrafting:
    """A head, and the states that it may continue from."""

    def __init__(self, head: DraftHead, sampler: DraftSampler) -> None:
        self.width = head.width
        self._head = head
        self._sampler = sampler
        self._read: dict[str, _ReadStates] = {}  # by session: the block read last

    def go_on(self, drafts: Sequence[CachedDraft], tokens: int, interrupted: Callable[[], bool]) -> None:
        """Adds up to `tokens` further tokens to each draft."""
        for _ in range(tokens):
            drafts = [draft for draft in drafts if not draft.is_complete]
            if not drafts or interrupted():
                return
            for draft in drafts:
                draft.is_guessed = True
            states, taken = zip(*[draft.last for draft in drafts], strict=True)
            output = self._head.predict_next(torch.stack(states), taken)
            assert output.hidden is not None, "a head that goes on from states gives states"
            logits = torch.split(output.logits, 1)
            hidden = torch.split(output.hidden, 1)
            self._sampler.extend([ReadDraft(*each) for each in zip(drafts, logits, hidden, strict=True)])

    def preview(self, drafts: Sequence[CachedDraft], interrupted: Callable[[], bool]) -> None:
        """Predicts the first tokens of the likeliest blocks; forwards replace them if time allows.

        Skipped under rejection sampling, where a prefix must keep its continuation.
        """
        may = [draft for draft in drafts if draft.state is not None and not draft.ratio]
        likeliest = sorted(may, key=lambda draft: -draft.chance)[:GUESSED]
        self.go_on(likeliest, GUESS_TOKENS, interrupted)

    def begin(self, drafts: Sequence[CachedDraft]) -> None:
        """Predicts the tokens after verdicts, if the states just before their last tokens are known.

        A forward would predict them better but takes several times as long, and the target may be waiting. If one of
        the sessions needs a forward, all get one, because their blocks are sent together.
        """
        found = [self._state_before_last(draft) for draft in drafts]
        if any(state is None for state in found):
            return
        for draft, state in zip(drafts, found, strict=True):
            draft.state = state
        self.go_on(drafts, GUESS_TOKENS, never)

    def remember(self, roots: Sequence[CachedDraft]) -> None:
        """Keeps the states of blocks under verification that were just read."""
        for root in roots:
            base_len = root.request.base_len
            session = root.request.session
            read = self._read.get(session)
            if read is None or read.base_len != base_len:
                read = self._read[session] = _ReadStates(base_len, {})
            for place, token in enumerate(root.drafted):
                if token.state is not None:
                    read.states[root.tokens[:place]] = token.state

    def close(self, session: str) -> None:
        self._read.pop(session, None)

    def _state_before_last(self, draft: CachedDraft) -> Tensor | None:
        """Returns the state, (hidden,), that predicted the last decided token; None if unknown or unusable."""
        tokens = draft.text.tokens
        read = self._read.pop(draft.request.session, None)
        if read is None or read.base_len >= len(tokens) or draft.ratio:
            return None
        return read.states.get(tuple(tokens[read.base_len : -1]))
