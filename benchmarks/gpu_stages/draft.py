"""Stage D: blocks of a draft model of 1B parameters, by products; eager, and with graphs of forwards or of chains."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from actors.attention.batch import never
from actors.attention.select_backend import attention_shape, choose_attention
from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.sampling import DraftingLimits
from actors.drafters.products import Products, choose_products
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, Recording
from actors.models.decoder import ForwardOutput, decoder_for
from cluster.errors import ModelError
from cluster.page_allocator import PageCopy
from gpu_stages.results import OUT_OF_TIME, Emit, Result, Setting, Unmeasured
from gpu_stages.steps import (
    CAPTURED,
    EAGER,
    NOT_PADDED,
    PAGE_SIZE,
    alternating_ms,
    capturable,
    capture_on,
    copy_bandwidth,
    launches,
    sized_model,
    weight_bytes,
)
from protos.messages import DraftRequest, Open
from protos.prefix import Prefix

WEIGHT_BITS = {"int8": 8, "fp8": 8, "int4": 4}
QUANTIZATIONS = ("none", *WEIGHT_BITS)
SECONDS_EACH = 3.0  # for one block length
CHAINED = "one graph"


@dataclass(frozen=True)
class Sizes:
    """Measured blocks."""

    model: str
    vocabulary: int
    context: int
    sessions: tuple[int, ...]
    draft_tokens: tuple[int, ...]
    repeats: int


FULL = Sizes("1b", 128_256, 512, (1, 8, 32), (1, 3, 5, 8), 20)
TINY = Sizes("tiny", 500, 20, (1, 3), (1, 3), 2)


@dataclass(frozen=True)
class DraftPass(Result):
    """Medians of a pass that drafts one block per session.

    A captured pass replays one graph per forward. With one graph, a pass replays one for the first forward and one for
    the rest of the block.
    """

    quantization: str
    mode: str
    sessions: int
    draft_tokens: int
    pass_ms: float
    token_ms: float  # pass_ms / draft_tokens
    floor_ms: float  # of a token: all weights read once at copy bandwidth


@dataclass(frozen=True)
class PassLaunches(Result):
    """Launches of a pass with the last measured products; see `Launches`."""

    mode: str
    sessions: int
    draft_tokens: int
    calls: int
    kernels: int | None


class ForwardRunner:
    """Offers only a runner's forwards, so that each draft token takes one, and is chosen on the host."""

    def __init__(self, runner: ModelRunner) -> None:
        self.vocabulary = runner.vocabulary
        self._runner = runner

    def forward(
        self, rows: Sequence[InputRow], copies: Sequence[PageCopy] = (), interrupted: Callable[[], bool] = never
    ) -> ForwardOutput:
        return self._runner.forward(rows, copies, interrupted)


def products_of(quantization: str, device: torch.device) -> Products | str:
    """Returns the products of a quantization, or why they are not supported on this device."""
    try:
        return choose_products(quantization, "bfloat16", device)
    except ModelError as error:
        return str(error)


def run(setting: Setting, emit: Emit) -> None:
    sizes = TINY if setting.is_tiny else FULL
    supported = {}
    for quantization in QUANTIZATIONS:
        products = products_of(quantization, setting.device)
        if isinstance(products, str):
            emit(Unmeasured(quantization, products))
        else:
            supported[quantization] = products
    for quantization, products in supported.items():
        passes = measure(quantization, products, sizes, setting, emit)
        if quantization == [*supported][-1]:  # passes are slower after the profiler has run
            for (mode, count, length), run_pass in passes.items():
                counted = launches(run_pass, setting.device)
                emit(PassLaunches(mode, count, length, counted.calls, counted.kernels))


def summary(results: Sequence[Result]) -> str:
    passes = [one for one in results if isinstance(one, DraftPass) and one.sessions == 1 and one.draft_tokens == 3]
    return "; ".join(f"{one.mode}, {one.quantization}: {one.token_ms:.2f} ms a token" for one in passes)


Passes = dict[tuple[str, int, int], Callable[[], object]]
"""Passes by mode, number of sessions and number of tokens."""


def measure(quantization: str, products: Products, sizes: Sizes, setting: Setting, emit: Emit) -> Passes:
    """Measures all block lengths with one kind of products; returns the passes."""
    device = setting.device
    model = sized_model(sizes.model, sizes.vocabulary, device, products.dtype)
    bits = WEIGHT_BITS.get(quantization, 8 * model.dtype.itemsize)
    floor_ms = 1e3 * weight_bytes(model) * bits / (8 * model.dtype.itemsize) / copy_bandwidth(device)
    attention, _ = choose_attention(attention_shape(model, PAGE_SIZE), device, sizes.context)
    padded = capturable(attention, device)
    decoder = decoder_for(model, products.product)
    each = -(-(sizes.context + max(sizes.draft_tokens) + 1) // PAGE_SIZE)
    pages = (1 + max(sizes.sessions)) * each
    token_ids = torch.arange(sizes.vocabulary, device=device)
    limits = DraftingLimits(top_k=64)
    eager = ModelRunner(model, pages, PAGE_SIZE, attention, decoder, is_checked=True)
    drafts = {EAGER: DraftModel(eager, token_ids, DraftCache(pages, PAGE_SIZE), limits)}
    if padded is None:
        emit(Unmeasured(f"captured passes, {quantization}", NOT_PADDED.format(attention.name)))
    else:
        buckets = Buckets.for_sessions(max(sizes.sessions), each * PAGE_SIZE, PAGE_SIZE, attention)
        for mode in (CAPTURED, CHAINED):
            recording = Recording(buckets, capture_on(device))
            runner = ModelRunner(model, pages, PAGE_SIZE, padded, decoder, is_checked=True, recording=recording)
            kind = ForwardRunner(runner) if mode == CAPTURED else runner
            drafts[mode] = DraftModel(kind, token_ids, DraftCache(pages, PAGE_SIZE), limits)
    opens = [session(sizes, row) for row in range(max(sizes.sessions))]
    for draft in drafts.values():
        for opened in opens:
            draft.open(opened)
            draft.draft([request(opened, 1)])  # reads the prompt
    passes: Passes = {}
    for count in sizes.sessions:
        for length in sizes.draft_tokens:
            if not setting.has_time(0 if setting.is_tiny else SECONDS_EACH):
                emit(Unmeasured(f"{quantization}, {count} sessions, {length} tokens, and all after it", OUT_OF_TIME))
                return passes
            requests = [request(opened, length) for opened in opens[:count]]
            sides = {mode: partial(draft.draft, requests) for mode, draft in drafts.items()}
            for mode, pass_ms in alternating_ms(sides, sizes.repeats).items():
                passes[mode, count, length] = sides[mode]
                emit(
                    DraftPass(
                        quantization,
                        mode,
                        count,
                        length,
                        pass_ms,
                        pass_ms / length,
                        floor_ms,
                    )
                )
    return passes


def session(sizes: Sizes, row: int) -> Open:
    drawn = random.Random(row)
    text = tuple(drawn.randrange(sizes.vocabulary) for _ in range(sizes.context))
    return Open.measured(f"drafted {row}", text, sizes.context + 100, max(sizes.draft_tokens))


def request(opened: Open, length: int) -> DraftRequest:
    """Returns a request for a block of `length` tokens, without a probability threshold."""
    prefix_hash = Prefix(opened.hash_key, opened.tokens).hash
    return DraftRequest(opened.session, opened.attempt, len(opened.tokens), prefix_hash, length)
