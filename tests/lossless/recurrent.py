"""Target with a recurrent layer, whose logits depend on the whole text through a state that cannot be rolled back."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.compute.kv_cache import InputRow
from actors.compute.recurrent_states import RecurrentStates, State
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.page_allocator import PageCopy, SlotMove
from tests.lossless.states import after
from tests.toys import ToyRunner
from tests.unit.cluster.token_memory import TokenMemory


def advance(inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
    """Implements `Advance` for tokens, (tokens, 1): outputs are the hashes of the text up to each token."""
    mixed = 0 if state is None or state[0] is None else int(state[0])
    hashes = []
    for token in inputs.flatten().tolist():
        mixed = after(mixed, token)
        hashes.append(mixed)
    return torch.tensor(hashes).unsqueeze(1), (torch.tensor(mixed),)


class RecurrentRunner(ToyRunner):
    """Runner over a logits table; after one of four tokens, rotates the logits by the hash of the text.

    Fails if a row's hashes differ from those of the text in its pages.
    """

    def __init__(self, table: Tensor, page_size: int) -> None:
        super().__init__(table)
        self._states = RecurrentStates(page_size)
        self._memory = TokenMemory(page_size)
        self.replayed = 0  # tokens computed again

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        assert not moves, "chains need no moves"
        self._states.copy(copies)
        self._memory.copy(copies)
        logits = super().forward(rows).logits
        rotations = [rotation for row in rows for rotation in self._feed(row)]
        rotated = [part.roll(rotation) for part, rotation in zip(logits, rotations, strict=True)]
        return ForwardOutput(torch.stack(rotated) if rotated else logits, None)

    def _feed(self, row: InputRow) -> list[int]:
        """Returns the hashes of the text up to each token with logits."""
        self._memory.write(row.tokens, row.start, row.pages)
        hashes = self._states.feed(0, row, torch.tensor(row.tokens).unsqueeze(1), self._advance).flatten().tolist()
        self.replayed -= len(row.tokens)
        expected, _ = advance(torch.tensor(self._memory.read(row.end, row.pages)), None)
        assert hashes == expected.flatten().tolist()[row.start :], "a row begins with the state of another text"
        return [mixed if mixed % 4 == 0 else 0 for mixed in hashes[len(hashes) - row.logits :]]

    def _advance(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        self.replayed += len(inputs)
        return advance(inputs, state)
