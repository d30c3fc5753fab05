"""Target whose next token depends on the whole text, and a head that predicts it from the target's hidden states.

The head uses only the last committed token. Its draft tokens are right if all states are present and belong to the
text; with a missing, stale or foreign state, they are right with probability 1 / `VOCABULARY`.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.compute.hidden_states import decode_rows
from actors.compute.kv_cache import InputRow
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.drafting.hidden_state_receiver import StateBounds
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText, empty_proposals
from cluster.page_allocator import PageCopy, SlotMove
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import DraftRequest, Open, Shape, StatesFormat
from tests.integration.harness import PAGE_SIZE, VOCABULARY, StateReading
from tests.lossless.states import LAYOUT, MODULUS, RememberingRunner, state_after

MIXED = 2  # index of a state's mixed value
TOTAL = 3  # index of the sum of all mixed values so far
LOGITS = torch.randn(MODULUS, VOCABULARY, generator=torch.Generator().manual_seed(11))  # by total


def next_token(total: float) -> int:
    return int(LOGITS[int(total)].argmax())


def continued(state: Sequence[float], position: int) -> Iterator[int]:
    """Returns the target's greedy next token, given a position's state."""
    while True:
        token = next_token(state[TOTAL])
        yield token
        position += 1
        state = state_after(state, token, position)


def text_after(prompt: Sequence[int], length: int) -> list[int]:
    """Returns the reference text, computed independently of the schedulers."""
    state: list[float] | None = None
    for position, token in enumerate(prompt):
        state = state_after(state, token, position)
    assert state is not None, "a prompt has a token"
    return list(islice(continued(state, len(prompt) - 1), length))


class StateTarget(RememberingRunner):
    """Target whose logits depend on the total in its states, and so on every token of the text."""

    def __init__(self, pages: int) -> None:
        super().__init__(torch.zeros(VOCABULARY, VOCABULARY), pages, PAGE_SIZE)

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        super().forward(rows, copies, interrupted, moves)
        wanted = [(row, place) for row in rows for place in row.slots[len(row.tokens) - row.logits :]]
        totals = [int(self._state(row, place)[TOTAL]) for row, place in wanted]
        return ForwardOutput(LOGITS[torch.tensor(totals, dtype=torch.int64)], None)


class StateHead:
    """Head that drafts from the sum of all states, or with `reads_latest` from the total in the latest state.

    It proposes nothing beyond `max_positions` positions.
    """

    shapes = frozenset({Shape.CHAIN})
    tokens_per_forward = 1

    def __init__(self, reads_latest: bool = False, max_positions: int = 1 << 20) -> None:
        self._reads_latest = reads_latest
        self._max_positions = max_positions
        self._texts: dict[str, SessionText] = {}
        self._rows: dict[str, dict[int, Tensor]] = {}  # by position

    @property
    def states_format(self) -> StatesFormat:
        return LAYOUT

    def open(self, request: Open) -> None:
        self._texts[request.session] = SessionText.begin(request)
        self._rows[request.session] = {}

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._texts[session].tokens.extend(tokens)

    def states(self, session: str, first: int, rows: bytes) -> None:
        self._rows[session] |= enumerate(decode_rows(rows, LAYOUT), start=first)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._proposal(request) for request in requests]

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        return empty_proposals(requests)

    def close(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._texts.pop(session, None)
            self._rows.pop(session, None)

    def _proposal(self, request: DraftRequest) -> Proposal:
        tokens = min(request.max_tokens, self._max_positions - request.base_len)
        before = self._state(request.session, request.base_len - 2)
        tree = NO_TREE
        if before is not None and tokens > 0:
            last = request.base_len - 1
            state = state_after(before, self._texts[request.session].tokens[last], last)
            tree = DraftTree.chain(tuple(islice(continued(state, last), tokens)))
        return Proposal(request.session, request.base_len, request.prefix_hash, tree)

    def _state(self, session: str, position: int) -> list[float] | None:
        """Returns the state at a position: the sum of all received rows, or the latest row with `reads_latest`."""
        rows = self._rows[session]
        needed = range(position if self._reads_latest else 0, position + 1)
        if position < 0 or not rows.keys() >= set(needed):
            return None
        latest: list[float] = rows[position].tolist()
        if not self._reads_latest:
            latest[TOTAL] = float(sum(int(rows[at][MIXED]) for at in needed) % MODULUS)
        return latest


def head_reading(reads_latest: bool = False, max_positions: int = 1 << 20) -> StateReading:
    method = partial(StateHead, reads_latest, max_positions)
    return StateReading(StateTarget, method, StateBounds(window=1 if reads_latest else None))
