"""A draft model over a toy, whose cache is checked at every read, and what it is asked for."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from actors.attention.batch import never
from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import DraftingLimits
from actors.models.decoder import ForwardOutput, ToyRunner
from cluster.page_allocator import PageCopy
from protos.messages import Sampling
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting_requests import Want
from tests.unit.cluster.samples import GREEDY, KEY, an_open
from tests.unit.cluster.token_memory import TokenMemory

VOCABULARY = 10
PAGE_SIZE = 4
LOGITS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4))
DRAWN = Sampling(temperature=1.0)


class SpyRunner(ToyRunner):
    """Remembers what it was fed, and reads all of every row's pages."""

    def __init__(self, logits: Tensor = LOGITS) -> None:
        super().__init__(logits)
        self.fed: list[list[InputRow]] = []
        self.read: list[tuple[int, ...]] = []  # all tokens up to the end of every row fed
        self.interrupted: Callable[[], bool] = never  # as the latest forward was told
        self._memory = TokenMemory(PAGE_SIZE)

    def forward(
        self, rows: Sequence[InputRow], copies: Sequence[PageCopy] = (), interrupted: Callable[[], bool] = never
    ) -> ForwardOutput:
        self.interrupted = interrupted
        self.fed.append(list(rows))
        self._memory.copy(copies)
        for row in rows:
            self._memory.write(row.tokens, row.start, row.pages)
        whole = [self._memory.read(row.end, row.pages) for row in rows]
        self.read += whole
        return ForwardOutput(self.logits(rows, whole), self.hidden(rows))

    def logits(self, rows: Sequence[InputRow], whole: list[tuple[int, ...]]) -> Tensor:
        """Returns the last token's logits; `whole` are all tokens of each row."""
        return super().forward(rows).logits

    def hidden(self, rows: Sequence[InputRow]) -> Tensor:
        """The token itself, at each wanted place."""
        return torch.tensor([[token] for row in rows for token in row.tokens[-row.logits :]])


class PrefixRunner(SpyRunner):
    """A runner whose output depends on every earlier token, so that any fault of the cache shows."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self._scale = scale

    def logits(self, rows: Sequence[InputRow], whole: list[tuple[int, ...]]) -> Tensor:
        wanted = [(tokens, end) for row, tokens in zip(rows, whole, strict=True) for end in range(1 - row.logits, 1)]
        return torch.stack([self._after(tokens[: len(tokens) + end]) for tokens, end in wanted])

    def _after(self, tokens: tuple[int, ...]) -> Tensor:
        drawn = random.Random(str(tokens))
        return self._scale * torch.tensor([drawn.gauss(0, 1) for _ in range(VOCABULARY)])


def a_method(
    runner: SpyRunner,
    kept: Sequence[int] = range(VOCABULARY),
    top_k: int = 4,
    pages: int = 64,
    pass_tokens: int = 2048,
    clock: Callable[[], float] = lambda: 0.0,
    min_confidence: float = 0.0,
    max_positions: int | None = None,
) -> DraftModel:
    """`kept` are the ids whose logits the runner's columns are."""
    limits = DraftingLimits(top_k, min_confidence, pass_tokens, max_positions=max_positions)
    return DraftModel(runner, torch.tensor(list(kept)), DraftCache(pages, PAGE_SIZE), limits, clock)


def a_want(tokens: tuple[int, ...], max_tokens: int = 3, session: str = "s", **changes: Any) -> Want:
    changes = {"sampling": GREEDY, "tokens": (1,)} | changes
    return Want(an_open(session, **changes), tokens, Prefix(KEY, tokens).hash, max_tokens)


def after_checks(count: int) -> Callable[[], bool]:
    """Interrupts at the check after so many."""
    checks = iter(range(count))
    return lambda: next(checks, None) is None
