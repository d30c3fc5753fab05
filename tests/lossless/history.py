"""Language model whose next token depends on all earlier tokens in its pages, so any wrong page changes the text."""

import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from actors.attention.batch import Interrupted, never
from actors.compute.kv_cache import InputRow
from actors.models.decoder import ForwardOutput
from actors.sampling.draws import NO_DRAWS, Draws
from cluster.page_allocator import PageCopy, SlotMove
from tests.lossless.parts import EOS, PAGE_SIZE
from tests.unit.cluster.token_memory import TokenMemory

NextLogits = Callable[[tuple[int, ...]], Tensor]
"""Logits of the token after these, (vocabulary,)."""


def drawn_by_history(vocabulary: int, seed: int, scale: float) -> NextLogits:
    """Returns pseudorandom Gaussian logits for each text."""
    known: dict[tuple[int, ...], Tensor] = {}

    def after(tokens: tuple[int, ...]) -> Tensor:
        if tokens not in known:
            rng = random.Random(f"{seed} {tokens}")
            known[tokens] = torch.tensor(
                [scale * rng.gauss(0, 1) - 2.0 * (token == EOS) for token in range(vocabulary)]
            )
        return known[tokens]

    return after


def disturbed(model: NextLogits, by: NextLogits) -> NextLogits:
    """Returns the draft model's logits: the target's with noise."""
    return lambda tokens: model(tokens) + by(tokens)


class HistoryRunner:
    """Runs a `NextLogits` model on cache pages that store tokens instead of keys and values."""

    def __init__(self, model: NextLogits, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._model = model
        self._memory = TokenMemory(PAGE_SIZE)

    def forward(
        self,
        rows: Sequence[InputRow],
        copies: Sequence[PageCopy] = (),
        interrupted: Callable[[], bool] = never,
        moves: Sequence[SlotMove] = (),
        draws: Draws = NO_DRAWS,
    ) -> ForwardOutput:
        if moves:
            self._memory.move(moves)
        self._memory.copy(copies)  # first, as in a model that can be interrupted between layers
        if interrupted():
            raise Interrupted
        for row in rows:
            self._memory.write(row.tokens, row.start, row.pages)
        wanted = [seen for row in rows for seen in self._seen(row)]
        return ForwardOutput(torch.stack(wanted) if wanted else torch.empty(0, self.vocabulary), None)

    def read_states(self, slots: Sequence[int]) -> bytes:
        raise AssertionError("a history has no hidden states, and nobody reads any")

    def _seen(self, row: InputRow) -> list[Tensor]:
        """Returns the logits at the last places of the row; a tree node sees only its own path."""
        whole = self._memory.read(row.end, row.pages)
        texts = [whole[: place + 1] for place in range(row.start, row.tree_start)]
        stem = whole[: row.tree_start]
        for node, parent in enumerate(row.parents):
            before = texts[row.tree_start - row.start + parent] if parent >= 0 else stem
            texts.append((*before, whole[row.tree_start + node]))
        return [self._model(text) for text in texts[len(texts) - row.logits :]]
