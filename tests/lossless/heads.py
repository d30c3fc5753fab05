"""Heads over toy states, and worlds whose drafters use them: every kind of method that reads hidden states.

Each head has memorized the toy target, but knows a text only through the received states.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from actors.attention.batch import Interrupted, never
from actors.compute.hidden_states import decode_rows
from actors.compute.kv_cache import InputRow
from actors.drafters.heads.head_drafter import HeadDrafter
from actors.drafters.heads.last_state import LastRows, LastStatePredictor
from actors.drafters.model.draft_cache import DraftCache, FedStates
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import Calibration, DraftingLimits, DraftSampler
from actors.models.decoder import ForwardOutput
from cluster.page_allocator import PageCopy
from protos.messages import StatesNeeded
from tests.lossless.parts import PAGE_SIZE
from tests.lossless.states import LAYOUT, MODULUS, ReadingMethod, state_after
from tests.lossless.world import ToyDrafter, World
from tests.toys import ToyRunner

WIDTH = 4
MAX_POSITIONS = 1000


@dataclass(frozen=True)
class ToyConfig:
    recurs: bool
    width: int = WIDTH
    needs: StatesNeeded = StatesNeeded((1,), LAYOUT.width)

    def reach(self, depth: int) -> int:
        return self.width if self.recurs else max(0, self.width - depth)

    def describe(self) -> list[str]:
        return []


class StatePositionHead:
    """Head like Medusa's: predicts each later position from the target's state of a token."""

    config = ToyConfig(recurs=False)

    def __init__(self, logits: Tensor) -> None:
        self._next = (3 * logits).softmax(dim=-1)  # probabilities after each token, sharpened

    def predict_next(self, states: Tensor, tokens: Sequence[int], depth: int) -> ForwardOutput:
        likely = torch.linalg.matrix_power(self._next, depth + 2)
        return ForwardOutput(likely[states[:, 0].long()].log(), states)


class StateTokenHead:
    """Head like an MLPSpeculator: its state starts from the target's and includes the tokens drafted after it."""

    config = ToyConfig(recurs=True)

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def predict_next(self, states: Tensor, tokens: Sequence[int], depth: int) -> ForwardOutput:
        if depth == 0:
            states = torch.stack((states[:, 1], torch.zeros(len(states))), dim=-1)
        assert (states[:, 1] == depth).all(), "a state is taken for another"
        return ForwardOutput(self._logits[torch.tensor(tokens)], states + torch.tensor([0.0, 1.0]))


class StateBesideTokenHead(ToyRunner):
    """Head like EAGLE: from a token and the state before it, predicts the next token and the token's own state.

    If texts may begin in the middle, a state's position counts from the start of its row.
    """

    def __init__(self, logits: Tensor, begins_late: bool = False) -> None:
        super().__init__(logits)
        self._begins_late = begins_late

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[Any] = (),
    ) -> ForwardOutput:
        if interrupted():
            raise Interrupted
        made = [self._states_after(row) for row in rows]
        wanted = [states[len(states) - row.logits :] for row, states in zip(rows, made, strict=True)]
        return super().forward(rows, copies)._replace(hidden=torch.cat(wanted))

    def _states_after(self, row: InputRow) -> Tensor:
        """Returns the target's states, (tokens, width), each computed from the previous state."""
        assert row.states is not None, "a token comes with the state before it"
        fed = row.states.tolist()
        first = int(fed[0][1]) if self._begins_late else row.start
        made: list[list[float]] = []
        for position, (token, before) in enumerate(zip(row.tokens, fed, strict=True), start=first):
            assert before[1] == position % MODULUS, "the state of another place"
            assert not made or before[2:] == made[-1][2:], "the state of another text"
            made.append(state_after(before, token, position + 1))
        return torch.tensor(made)


class HeadReading(ReadingMethod):
    """Checks the states against the text, and passes them on."""

    def states(self, session: str, first: int, rows: bytes) -> None:
        if self._known[session] == 0:
            self.head.begin(session, first)
        super().states(session, first, rows)
        self.head.states(session, first, decode_rows(rows, LAYOUT))

    @property
    def head(self) -> HeadDrafter | DraftModel:
        found: Any = self._model
        assert isinstance(found, HeadDrafter | DraftModel)
        return found


class HeadWorld(World):
    """World whose drafters use a head that each subclass defines."""

    def _new_drafter(self) -> ToyDrafter:
        drafter = super()._new_drafter()
        method: Any = self._head_method()
        drafter.method = HeadReading(method, self._setting.enough_states)
        drafter.model = method
        return drafter

    def _head_method(self) -> HeadDrafter | DraftModel:
        raise NotImplementedError

    @property
    def _limits(self) -> DraftingLimits:
        return DraftingLimits(top_k=self._setting.vocabulary, weight_scale=self._setting.weight_scale)

    @property
    def _token_ids(self) -> Tensor:
        return torch.arange(self._setting.vocabulary)


class _LastStateWorld(HeadWorld):
    """World whose heads read one state per round."""

    made_of: type[StatePositionHead] | type[StateTokenHead]

    def _head_method(self) -> HeadDrafter:
        sampler = DraftSampler(self._token_ids, self._setting.vocabulary, self._limits, Calibration())
        rows = LastRows(torch.device("cpu"), torch.float32)
        head = self.made_of(self._setting.draft_logits)
        return HeadDrafter(LastStatePredictor(head, sampler, rows), sampler, lambda: self._now)


class PlacesWorld(_LastStateWorld):
    """World whose head drafts ahead from the last received target state, up to its maximum position."""

    made_of = StatePositionHead


class TokensWorld(_LastStateWorld):
    """World whose head drafts ahead from its own states."""

    made_of = StateTokenHead


class EagleWorld(HeadWorld):
    """World whose head drafts ahead from its own states, and later reads the target's states in their place."""

    def _head_method(self) -> DraftModel:
        return DraftModel(
            StateBesideTokenHead(self._setting.draft_logits, begins_late=self._setting.enough_states is not None),
            self._token_ids,
            DraftCache(8 * self._count, PAGE_SIZE, unfed=1),
            self._limits,
            clock=lambda: self._now,
            feed=FedStates(StatesNeeded((1,), LAYOUT.width), lambda rows: rows, MAX_POSITIONS),
        )
