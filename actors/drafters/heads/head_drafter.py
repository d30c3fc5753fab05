"""Drafts with a head that predicts several tokens from the target's states, on request and ahead of verdicts.

During verification, the target's states for the draft tokens do not exist yet. Lookahead blocks therefore continue from
the head's own results for the preceding text, up to `StatePredictor.reach`. After the verdict, the true states arrive.
Later blocks start from them, and the head reads the verified block again.

`fill_positions` supports heads that predict each position independently of the preceding tokens. One prediction after a
text then suffices for blocks after every outcome: after k further tokens, the block starts at position k.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.drafters.model.sampling import DraftSampler
from cluster.drafting.draft_state import BlockDraft, DraftedToken
from cluster.drafting.lookahead import (
    MAX_OUTCOMES,
    MAX_SIBLINGS_READ,
    SIBLING_URGENCY,
    ForwardTime,
    draft_ahead,
    proposals,
)
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText, with_empty_proposals
from cluster.drafting.trees import NO_CHOICES, branches_by_depth
from cluster.errors import ModelError
from protos.messages import DraftRequest, Open, Shape, StatesNeeded
from protos.prefix import hashes_after

UNKNOWN_TOKEN = DraftedToken(0, NO_CHOICES, 0.0)  # placeholder for a position that the head cannot predict


@dataclass(kw_only=True, eq=False)
class PredictedDraft(BlockDraft):
    """Block with a chain of up to `longest` tokens, or a tree of up to `max_tokens` tokens."""

    longest: int
    logits: Tensor | None = None  # (positions, columns) after the request's text, if predicted together

    @property
    def depth(self) -> int:
        """Number of drafted or assumed tokens past the target's states."""
        return len(self.outcome) + len(self.drafted)

    def is_consecutive_prediction(self, offset: int) -> bool:
        return self.depth + offset > 0

    def end(self) -> None:
        """Ends the block. For a root, marks the remaining positions unknown."""
        if self.is_root:
            self.drafted += [UNKNOWN_TOKEN] * (self.max_tokens - len(self.drafted))
        self.settle()
        self.is_cut = True


class StatePredictor(Protocol):
    """A head and the states of all sessions. Methods require open sessions, except `open` and `close`."""

    @property
    def width(self) -> int:
        """Number of tokens predicted after a text with known states."""
        ...

    @property
    def needs(self) -> StatesNeeded: ...

    def reach(self, depth: int) -> int:
        """Returns how many tokens the head can predict `depth` tokens past the target's states; 0: it must wait."""
        ...

    def open(self, session: str) -> None: ...

    def begin(self, session: str, first: int) -> None:
        """Sets the first position of an open session's states."""
        ...

    def states(self, session: str, first: int, rows: Tensor, length: int) -> None:
        """Receives the target's states, (n, width), at positions `first` and up, in any order of calls.

        `length` is the number of committed tokens.
        """
        ...

    def committed(self, session: str, length: int) -> None:
        """Sets the session's number of committed tokens."""
        ...

    def close(self, session: str) -> None:
        """Drops a session. Ignores an unknown session."""
        ...

    def is_ready(self, session: str, length: int) -> bool:
        """Returns whether the required states of the first `length` - 1 tokens have arrived."""
        ...

    def fill(self, drafts: Sequence[PredictedDraft], interrupted: Callable[[], bool]) -> None:
        """Drafts the maximum number of tokens for each draft and ends it. Interrupted drafts stay unchanged."""
        ...


PrepareWeights = Callable[[Path], Callable[[], object]]
"""Implements `ExchangesWeights.prepare_weights`."""


class HeadDrafter:
    """Drafting method for a `StatePredictor`. A session gets no tokens while its states are missing.

    With `prepare`, the head's weights can be exchanged.
    """

    shapes = frozenset(Shape)
    outcomes = MAX_OUTCOMES

    def __init__(
        self,
        predictor: StatePredictor,
        sampler: DraftSampler,
        clock: Callable[[], float] = time.monotonic,
        prepare: PrepareWeights | None = None,
    ) -> None:
        self._predictor = predictor
        self._sampler = sampler
        self._clock = clock
        self._prepare = prepare
        self._lookahead_time = ForwardTime()
        self._texts: dict[str, SessionText] = {}

    @property
    def tokens_per_forward(self) -> int:
        return self._predictor.width

    @property
    def needs(self) -> StatesNeeded:
        return self._predictor.needs

    def prepare_weights(self, folder: Path) -> Callable[[], object]:
        if self._prepare is None:
            raise ModelError(f"{folder} cannot replace the head in use: heads of this kind do not learn")
        return self._prepare(folder)

    # ------------------------------------------------------------ sessions

    def open(self, request: Open) -> None:
        self._texts[request.session] = SessionText.begin(request)
        self._predictor.open(request.session)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        text = self._texts[session].tokens
        text.extend(tokens)
        self._sampler.committed(session, text)
        self._predictor.committed(session, len(text))

    def begin(self, session: str, first: int) -> None:
        """Sets the first position of an open session's states; 0 by default."""
        self._predictor.begin(session, first)

    @torch.inference_mode()
    def states(self, session: str, first: int, rows: Tensor) -> None:
        """Receives the target's states, (n, width), at positions `first` and up, in any order and possibly repeated.

        Ignores states of sessions that are not open.
        """
        if session in self._texts:
            self._predictor.states(session, first, rows, len(self._texts[session].tokens))

    def close(self, sessions: Sequence[str]) -> None:
        for name in sessions:
            self._texts.pop(name, None)
            self._predictor.close(name)
            self._sampler.close(name)

    @property
    def is_idle(self) -> bool:
        """True if no session is open."""
        return not self._texts

    # ------------------------------------------------------------ blocks

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        drafts = [self._block(request) for request in requests]
        self._predictor.fill([draft for draft in drafts if self._is_ready(draft.request)], never)
        return [draft.proposal() for draft in drafts]

    @torch.inference_mode()
    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        """Drafts for likely outcomes.

        Without candidates, proposes an empty block if the target currently decodes the session without blocks.
        """
        ready = [request for request in requests if self._is_ready(request)]
        drafts: list[PredictedDraft] = draft_ahead(self, ready, self._lookahead_time, self._clock, interrupted, early)
        return with_empty_proposals(proposals(drafts), requests)

    def _is_ready(self, request: DraftRequest | LookaheadRequest) -> bool:
        return self._predictor.is_ready(request.session, request.base_len)

    def _block(self, request: DraftRequest) -> PredictedDraft:
        return PredictedDraft(
            request=request,
            text=self._texts[request.session],
            base_hash=request.prefix_hash,
            max_tokens=request.max_tokens,
            longest=min(request.max_tokens, self._predictor.reach(0)),
        )

    # ------------------------------------------------------------ blocks ahead of a verdict

    def roots(self, request: LookaheadRequest) -> list[PredictedDraft]:
        """Returns roots for the main path under verification, based on true states, and for its siblings."""
        main = self._root(request, request.unverified.main_path)
        siblings = request.unverified.off_main_path[:MAX_SIBLINGS_READ]
        return [main, *[self._root(request, path, main) for path in siblings]]

    def _root(
        self, request: LookaheadRequest, path: tuple[int, ...], main: PredictedDraft | None = None
    ) -> PredictedDraft:
        return PredictedDraft(
            request=request,
            text=self._texts[request.session],
            base_hash=request.prefix_hash,
            max_tokens=len(path) + 1,
            unverified=path,
            needs_read_for_choices=main is None,
            main=main,
            chance=1.0 if main is None else SIBLING_URGENCY,
            longest=sum(self._predictor.reach(depth) > 0 for depth in range(len(path) + 1)),
        )

    def fork(
        self, root: PredictedDraft, outcome: tuple[int, ...], chance: float, max_tokens: int
    ) -> PredictedDraft | None:
        longest = min(max_tokens, self._predictor.reach(len(outcome)))
        if not longest:
            return None
        return PredictedDraft(
            request=root.request,
            text=root.text,
            base_hash=hashes_after(root.request.prefix_hash, outcome)[-1],
            max_tokens=max_tokens,
            outcome=outcome,
            chance=chance,
            state=root.drafted[len(outcome) - 1].state,
            longest=longest,
            logits=root.logits,
        )

    def preview(self, drafts: Sequence[PredictedDraft], interrupted: Callable[[], bool]) -> None:
        """Does nothing, since a forward of the head is as fast as any preview."""

    def extend(self, drafts: Sequence[PredictedDraft], interrupted: Callable[[], bool]) -> list[PredictedDraft]:
        self._predictor.fill(drafts, interrupted)
        return [draft for draft in drafts if draft.is_cut]


PredictLogits = Callable[[Sequence[PredictedDraft], Sequence[int]], Sequence[Tensor]]
"""Returns logits, (positions, columns), after each draft's text, for at least the requested positions."""


def fill_positions(
    drafts: Sequence[PredictedDraft],
    width: int,
    predict_logits: PredictLogits,
    sampler: DraftSampler,
    interrupted: Callable[[], bool],
) -> None:
    """Implements `StatePredictor.fill` for a head that predicts `width` positions independently."""
    if interrupted():
        return
    unread = [draft for draft in drafts if draft.logits is None and draft.main is None]
    if unread:
        counts = [min(width, draft.longest + (draft.request.max_tokens if draft.is_root else 0)) for draft in unread]
        for draft, logits in zip(unread, predict_logits(unread, counts), strict=True):
            draft.logits = logits
    sampler.extend([(draft, _own_logits(draft), None) for draft in drafts])
    for draft in drafts:
        if draft.takes_trees:
            draft.grown = branches_by_depth(draft.choices, draft.max_tokens, draft.least_chance)
        draft.end()


def _own_logits(draft: PredictedDraft) -> Tensor:
    if isinstance(draft.main, PredictedDraft):
        draft.logits = draft.main.logits  # siblings share predictions, which depend only on the position
    assert draft.logits is not None, "the main path must be read before its siblings"
    return draft.logits[len(draft.outcome) :][: draft.longest]
