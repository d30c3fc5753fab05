"""Target whose hidden states identify their text, and a drafting method that checks them against its own text."""

from collections.abc import Callable, Sequence

import torch

from actors.attention.batch import never
from actors.compute.hidden_states import LatestStates, StateCache, decode_rows, encode_rows
from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_model import DraftModel
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.drafting.method import Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionText
from cluster.page_allocator import PageCopy, SlotMove
from protos.messages import DraftRequest, Open, Shape, StateDtype, StatesFormat
from tests.toys import ToyRunner

LAYOUT = StatesFormat(width=4, dtype=StateDtype.BFLOAT16)
CPU = torch.device("cpu")
MODULUS = 251  # smaller integers are exact in bfloat16


def after(mixed: int, token: int) -> int:
    """Returns the hash after a token, which distinguishes nearly all texts with the same last token."""
    return (mixed * 31 + token + 7) % MODULUS


def state_after(before: Sequence[float] | None, token: int, position: int) -> list[float]:
    """Returns a token's state, computed from the previous state: token, position, hash of the text, and their sum."""
    mixed = after(0 if before is None else int(before[2]), token)
    total = (0 if before is None else int(before[3])) + mixed
    return [float(token), float(position % MODULUS), float(mixed), float(total % MODULUS)]


def expected_rows(tokens: Sequence[int], first: int) -> list[list[float]]:
    """Returns a text's states from position `first` on."""
    rows: list[list[float]] = []
    for position, token in enumerate(tokens):
        rows.append(state_after(rows[-1] if rows else None, token, position))
    return rows[first:]


class RememberingRunner(ToyRunner):
    """Runner that stores states in pages like a real target, each computed from the previous state in its page."""

    def __init__(self, table: torch.Tensor, pages: int, page_size: int, keeps: bool = True) -> None:
        super().__init__(table)
        self._page_size = page_size
        self._cache = StateCache(pages, page_size, LAYOUT.row_bytes, CPU)
        self._latest = None if keeps else LatestStates(CPU)

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        self._cache.move(moves)
        self._cache.copy(copies)
        written = [place for row in rows for place in self._feed(row)]
        if self._latest is not None:
            encoded = torch.frombuffer(bytearray(self._cache.read(written)), dtype=torch.uint8)
            self._latest.write(torch.tensor(written), encoded.view(-1, LAYOUT.row_bytes))
        return super().forward(rows)

    def read_states(self, slots: Sequence[int]) -> bytes:
        return self._cache.read(slots) if self._latest is None else self._latest.read(slots)

    def _feed(self, row: InputRow) -> list[int]:
        """Writes the row's states; returns their slots."""
        for index, token in enumerate(row.tokens):
            node = index - (len(row.tokens) - len(row.parents))
            before = row.start + index - 1 if node < 0 else self._place_before(row, node)
            state = state_after(self._state(row, before) if before >= 0 else None, token, row.positions[index])
            at = torch.tensor([self._place(row, row.start + index)])
            self._cache.write(at, encode_rows(torch.tensor([state]), LAYOUT.dtype))
        return [self._place(row, row.start + index) for index in range(len(row.tokens))]

    def _state(self, row: InputRow, position: int) -> list[float]:
        """Returns the state stored at a position's slot."""
        found: list[float] = decode_rows(self._cache.read([self._place(row, position)]), LAYOUT)[0].tolist()
        return found

    def _place_before(self, row: InputRow, node: int) -> int:
        return row.tree_start + row.parents[node]  # -1: the token before the tree

    def _place(self, row: InputRow, position: int) -> int:
        return row.pages[position // self._page_size] * self._page_size + position % self._page_size


class ReadingMethod:
    """Drafting method that drafts only with correct states for all tokens that the target has processed.

    With `enough`, states may begin in the middle of a text, if at least the last `enough` are present.
    """

    def __init__(self, model: DraftModel, enough: int | None = None) -> None:
        self.rows_read = 0
        self.begun_late = 0  # sessions whose states began in the middle of the text
        self._enough = enough
        self._begin_by: dict[str, int] = {}
        self._model = model
        self._texts: dict[str, SessionText] = {}
        self._known: dict[str, int] = {}  # number of positions with received states

    @property
    def shapes(self) -> frozenset[Shape]:
        return self._model.shapes

    @property
    def tokens_per_forward(self) -> int:
        return self._model.tokens_per_forward

    @property
    def states_format(self) -> StatesFormat:
        return LAYOUT

    def open(self, request: Open) -> None:
        self._texts[request.session] = SessionText.begin(request)
        self._known[request.session] = 0
        read_to = len(request.tokens) - 1
        self._begin_by[request.session] = 0 if self._enough is None else max(0, read_to - self._enough)
        self._model.open(request)

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._texts[session].tokens.extend(tokens)
        self._model.committed(session, tokens)

    def states(self, session: str, first: int, rows: bytes) -> None:
        if self._known[session] == 0 and first > 0:
            assert first <= self._begin_by[session], "they begin later than there are enough"
            self._known[session] = first
            self.begun_late += 1
        assert first == self._known[session], "states are missing, or come twice"
        found = decode_rows(rows, LAYOUT).tolist()
        tokens = self._texts[session].tokens
        assert found == expected_rows(tokens[: first + len(found)], first), "these are the states of another text"
        self._known[session] += len(found)
        self.rows_read += len(found)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._check(requests)
        return self._model.draft(requests)

    def draft_ahead(
        self, requests: Sequence[LookaheadRequest], interrupted: Callable[[], bool], early: Early = dismiss
    ) -> list[Proposal]:
        self._check(requests)
        return self._model.draft_ahead(requests, interrupted, early)

    def close(self, sessions: Sequence[str]) -> None:
        for session in sessions:
            self._texts.pop(session, None)
            self._known.pop(session, None)
            self._begin_by.pop(session, None)
        self._model.close(sessions)

    def _check(self, requests: Sequence[DraftRequest | LookaheadRequest]) -> None:
        for request in requests:
            known = self._known[request.session]
            assert request.base_len - 1 <= known <= request.base_len, "it is to draft from states that are not here"
