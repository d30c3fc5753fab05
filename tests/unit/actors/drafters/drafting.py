"""Builders for tests of drafting methods: requests, toy models over a checked cache, and published heads."""

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.attention.batch import never
from actors.compute.hidden_states import encode_rows
from actors.compute.kv_cache import InputRow
from actors.compute.linear import Product, projection
from actors.drafters.heads.dflash.drafting import DFlashPredictor, load_dflash
from actors.drafters.heads.eagle.config import NO_OVERRIDES, EagleOverrides
from actors.drafters.heads.eagle.method import eagle_draft_model
from actors.drafters.heads.head_drafter import HeadDrafter
from actors.drafters.heads.last_state import LastRows, LastStatePredictor
from actors.drafters.heads.medusa import load_medusa
from actors.drafters.heads.mlp_speculator import load_mlp_speculator
from actors.drafters.heads.projection import DecodedStates
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import ONE_AT_A_TIME, MaskTokens
from actors.drafters.model.sampling import Calibration, DraftingLimits, DraftKind, DraftSampler
from actors.drafters.registry import DraftSetup, create_method, states_format
from actors.engine import memory
from actors.models.decoder import ForwardOutput
from cluster.config import DraftPool
from cluster.drafting.method import DraftingMethod, Early, dismiss
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.errors import ModelError
from cluster.page_allocator import PageCopy
from protos.draft_tree import DraftTree
from protos.frozen import value
from protos.messages import Acceptance, DraftRequest, Open, Sampling, Shape
from protos.prefix import Prefix
from tests.toys import ToyRunner
from tests.unit.actors.drafters.heads.eagle_fixtures import CPU, TARGET, Case, loaded
from tests.unit.cluster.samples import GREEDY, KEY, an_open
from tests.unit.cluster.token_memory import TokenMemory

DRAWN = Sampling(temperature=1.0)
COUPLED, REJECTION = Acceptance
RULES = pytest.mark.parametrize(
    ("acceptance", "sampling"),
    [(COUPLED, GREEDY), (COUPLED, DRAWN), (REJECTION, DRAWN)],
    ids=["greedy", "coupled", "rejection"],
)
SAMPLINGS = pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])

# ---------------------------------------------------------------- requests


@value
class WantedBlock:
    """Session's text and requested block; with `unverified`, requests lookahead blocks for a step over that tree."""

    open: Open
    tokens: tuple[int, ...]
    prefix_hash: int
    max_tokens: int
    unverified: DraftTree | None = None
    until: float = math.inf
    least_chance: float = 0.0
    shape: Shape = Shape.CHAIN
    chances: tuple[float, ...] = ()

    @property
    def request(self) -> DraftRequest:
        return DraftRequest(
            session=self.open.session,
            attempt=self.open.attempt,
            base_len=len(self.tokens),
            prefix_hash=self.prefix_hash,
            max_tokens=self.max_tokens,
            least_chance=self.least_chance,
            shape=self.shape,
        )

    @property
    def ahead(self) -> LookaheadRequest:
        assert self.unverified is not None
        return LookaheadRequest(
            session=self.open.session,
            base_len=len(self.tokens),
            prefix_hash=self.prefix_hash,
            max_tokens=self.max_tokens,
            unverified=self.unverified,
            until=self.until,
            least_chance=self.least_chance,
            shape=self.shape,
            chances=self.chances,
        )

    def after(self, *tokens: int, **changes: Any) -> "WantedBlock":
        """Returns the request for a block after a verdict with these tokens."""
        whole = (*self.tokens, *tokens)
        return replace(self, tokens=whole, prefix_hash=Prefix(KEY, whole).hash, unverified=None, **changes)

    def under(self, tree: DraftTree | Sequence[int], **changes: Any) -> "WantedBlock":
        """Returns the lookahead request during the verification of this chain or tree."""
        unverified = tree if isinstance(tree, DraftTree) else DraftTree.chain(tuple(tree))
        return replace(self, **{"max_tokens": self.open.draft_tokens, "unverified": unverified} | changes)


OWN_FIELDS = {field.name for field in dataclasses.fields(WantedBlock)}


def wanted_block(tokens: Sequence[int], max_tokens: int = 3, session: str = "s", **changes: Any) -> WantedBlock:
    """Returns a request with `changes` to its fields or its Open; all but the first token were generated."""
    own = {name: changes.pop(name) for name in OWN_FIELDS & changes.keys()}
    opened = an_open(session, **{"sampling": GREEDY, "tokens": (1,)} | changes)
    return WantedBlock(opened, tuple(tokens), Prefix(KEY, tuple(tokens)).hash, max_tokens, **own)


def propose(
    method: DraftingMethod,
    wants: Sequence[WantedBlock],
    interrupted: Callable[[], bool] = never,
    early: Early = dismiss,
) -> list[Proposal]:
    """Opens the sessions, keeping cached tokens, and drafts; regular blocks precede lookahead blocks."""
    for want in wants:
        method.open(replace(want.open, tokens=want.tokens))
    requests = [want.request for want in wants if want.unverified is None]
    ahead = [want.ahead for want in wants if want.unverified is not None]
    found = method.draft(requests) if requests else []
    return found + (method.draft_ahead(ahead, interrupted, early) if ahead else [])


def block_of(method: DraftingMethod, want: WantedBlock) -> Proposal:
    (proposal,) = propose(method, [want])
    return proposal


def after_checks(count: int) -> Callable[[], bool]:
    """Returns a function that interrupts after the given number of checks."""
    checks = iter(range(count))
    return lambda: next(checks, None) is None


def first(proposal: Proposal, tokens: int) -> Proposal:
    """Returns the first tokens of a block."""
    return replace(proposal, tree=proposal.tree.first(tokens))


def are_beginnings(found: Sequence[Proposal], whole: Sequence[Proposal]) -> bool:
    """Returns whether each block in `found` is a prefix of the block in `whole` for the same outcome."""
    by_outcome = {guess.outcome: guess for guess in whole}
    return list(found) == [first(by_outcome[guess.outcome], len(guess.tokens)) for guess in found]


# ---------------------------------------------------------------- toy models

VOCABULARY = 10
PAGE_SIZE = 4
LOGITS = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(4))


def greedy(last: int, count: int) -> tuple[int, ...]:
    """Returns the likeliest chain after a token."""
    tokens = [last]
    for _ in range(count):
        tokens.append(int(LOGITS[tokens[-1]].argmax()))
    return tuple(tokens[1:])


class SpyRunner(ToyRunner):
    """Runner that records its input, and reads all pages of every row."""

    def __init__(self, logits: Tensor = LOGITS) -> None:
        super().__init__(logits)
        self.fed: list[list[InputRow]] = []
        self.read: list[tuple[int, ...]] = []  # all tokens up to the end of every fed row
        self.interrupted: Callable[[], bool] = never  # as passed to the latest forward
        self.memory = TokenMemory(PAGE_SIZE)

    def forward(
        self, rows: Sequence[InputRow], copies: Sequence[PageCopy] = (), interrupted: Callable[[], bool] = never
    ) -> ForwardOutput:
        self.interrupted = interrupted
        self.fed.append(list(rows))
        self.memory.copy(copies)
        for row in rows:
            self.memory.write(row.tokens, row.start, row.pages)
        whole = [self.memory.read(row.end, row.pages) for row in rows]
        self.read += whole
        return ForwardOutput(self.logits(rows, whole), self.hidden(rows))

    def logits(self, rows: Sequence[InputRow], whole: list[tuple[int, ...]]) -> Tensor:
        """Returns the last token's logits; `whole` contains all tokens of each row."""
        return super().forward(rows).logits

    def hidden(self, rows: Sequence[InputRow]) -> Tensor:
        """Returns the token itself as the state of each wanted place."""
        return torch.tensor([[token] for row in rows for token in row.tokens[-row.logits :]])


class PrefixRunner(SpyRunner):
    """Runner whose output depends on every earlier token, so any cache fault shows."""

    def __init__(self, scale: float = 2.0) -> None:
        super().__init__()
        self.scale = scale

    def logits(self, rows: Sequence[InputRow], whole: list[tuple[int, ...]]) -> Tensor:
        wanted = [(tokens, end) for row, tokens in zip(rows, whole, strict=True) for end in range(1 - row.logits, 1)]
        return torch.stack([self.after(tokens[: len(tokens) + end]) for tokens, end in wanted])

    def after(self, tokens: Sequence[int]) -> Tensor:
        drawn = random.Random(str(tuple(tokens)))
        return self.scale * torch.tensor([drawn.gauss(0, 1) for _ in range(VOCABULARY)])


MASK = VOCABULARY  # an id outside all texts


class MaskRunner(SpyRunner):
    """Runner for mask tokens: the nth mask after a real token predicts the nth further token."""

    def __init__(self) -> None:
        super().__init__()
        self.masks_read = 0  # masks in the cache before a row's own tokens

    def logits(self, rows: Sequence[InputRow], whole: list[tuple[int, ...]]) -> Tensor:
        found = []
        for row, tokens in zip(rows, whole, strict=True):
            self.masks_read += tokens[: row.start].count(MASK)
            for end in range(row.end - row.logits + 1, row.end + 1):
                known = [token for token in tokens[:end] if token != MASK]
                found.append(LOGITS[(known[-1] + tokens[:end].count(MASK)) % VOCABULARY])
        return torch.stack(found)


class Following:
    """Recurrent head over the same logits table, so blocks equal those of one forward pass per token.

    A state is the token after which its logits were read.
    """

    def __init__(self, width: int = 3) -> None:
        self.width = width
        self.asked: list[list[int]] = []  # states by call

    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        self.asked.append(states[:, 0].tolist())
        return ForwardOutput(self.logits(tokens), torch.tensor(tokens).unsqueeze(1))

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return LOGITS[torch.tensor(tokens)]


class Trusting(Calibration):
    """Calibration for a perfect draft: the target's draw is the log probability plus the full noise."""

    def weights(self, kind: DraftKind) -> Any:
        return np.array((1.0, 1.0, -9.0, 0.0))


def a_method(
    runner: SpyRunner,
    kept: Sequence[int] = range(VOCABULARY),
    pages: int = 64,
    clock: Callable[[], float] = lambda: 0.0,
    masks: int = 1,
    head: Following | None = None,
    calibration: Calibration | None = None,
    **limits: Any,
) -> DraftModel:
    """Returns a method; `kept` holds the ids of the runner's columns, `masks` the tokens per forward pass."""
    return DraftModel(
        runner,
        torch.tensor(list(kept)),
        DraftCache(pages, PAGE_SIZE),
        DraftingLimits(**{"top_k": 4} | limits),
        clock,
        masks=MaskTokens(MASK, masks) if masks > 1 else ONE_AT_A_TIME,
        head=head,
        calibration=calibration,
    )


# ---------------------------------------------------------------- published heads

HEAD_VOCABULARY = 96
ALL_TOKENS = range(HEAD_VOCABULARY)
TOP_K = 8
DRAFTED = 5
LOADERS: dict[str, Any] = {"medusa": load_medusa, "mlp_speculator": load_mlp_speculator, "dflash": load_dflash}


def head_method(
    kind: str,
    folder: Path,
    *,
    is_projected: bool = False,
    product: Product = projection,
    pages: int = 64,
    pass_tokens: int = 2048,
    overrides: EagleOverrides = NO_OVERRIDES,
) -> Any:
    """Returns a method with the head in a folder, for the fixtures' target; it takes float32 state rows."""
    limits = DraftingLimits(TOP_K, pass_tokens=pass_tokens)
    if kind == "eagle":
        head = loaded(folder, overrides, product=product)
        return eagle_draft_model(head, pages, PAGE_SIZE, limits, DRAFTED, lambda: 0.0, is_projected=is_projected)
    head = LOADERS[kind](folder, TARGET, torch.float32, CPU, ALL_TOKENS, product)
    sampler = DraftSampler(head.token_ids, HEAD_VOCABULARY, limits, Calibration())
    if kind == "dflash":
        return HeadDrafter(DFlashPredictor(head, sampler, is_projected), sampler, lambda: 0.0)
    return HeadDrafter(LastStatePredictor(head, sampler, LastRows(CPU, torch.float32)), sampler, lambda: 0.0)


def a_draft(kind: str, folder: Path, project: str = "drafter", **changes: Any) -> DraftPool:
    """Returns the configuration of the head in a folder, with changed method options."""
    options: Any = {kind: {"draft_probs_top_k": TOP_K} | changes, "states": {"project": project}}
    return DraftPool(method=kind, model=str(folder), **options)  # type: ignore[arg-type]


def a_setup(draft: DraftPool, target: Path = TARGET) -> DraftSetup:
    tokens = {token: str(token) for token in ALL_TOKENS}
    return DraftSetup("float32", 64, 16, tokens, str(target), states_format(draft, target))


def deployed_method(kind: str, folder: Path, project: str = "drafter", **changes: Any) -> DecodedStates:
    """Returns the registry's method, which takes encoded bfloat16 rows."""
    draft = a_draft(kind, folder, project, **changes)
    method = create_method(draft, a_setup(draft))
    assert isinstance(method, DecodedStates)
    return method


def least_memory(monkeypatch: pytest.MonkeyPatch, create: Callable[[], object]) -> int:
    """Returns the fewest free bytes with which a method with a cache of automatic size can be created."""
    fits = 1 << 24
    too_few = 0
    while fits - too_few > 1:
        free = (fits + too_few) // 2
        monkeypatch.setattr(memory, "free_bytes", lambda device, free=free: free)
        try:
            create()
            fits = free
        except ModelError:
            too_few = free
    return fits


def encoded(rows: Tensor, method: DecodedStates) -> bytes:
    """Returns state rows in their wire encoding."""
    return encode_rows(rows, method.states_format.dtype).numpy().tobytes()


def decided(known: Case, next_token: str = "next_token") -> tuple[int, ...]:
    """Returns the fixture's prompt and the token after it."""
    return (*known["input_ids"].tolist(), int(known[next_token if next_token in known else "anchor"]))


def drafted(method: Any, want: WantedBlock, rows: Any, at: int = 0) -> Proposal:
    """Opens a session, passes state rows from position `at` on, drafts, and closes the session."""
    method.open(replace(want.open, tokens=want.tokens))
    method.states(want.open.session, at, rows)
    (proposal,) = method.draft([want.request])
    method.close([want.open.session])
    return proposal
