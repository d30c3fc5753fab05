"""A padded, captured step computes what the exact step computes, for all rows and whatever padding holds."""

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from random import Random
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.attention import PaddedBackend
from actors.attention.padded import PaddedSdpa
from actors.attention.select_backend import PaddedChainsAndTrees
from actors.attention.varlen import Varlen
from actors.compute.capture import Capture
from actors.compute.kv_cache import InputRow
from actors.compute.linear import PlainProjection
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, Recording
from actors.models.decoder import Decoder, LlamaDecoder, decoder_for
from actors.sampling.draws import Draws
from tests.unit.actors.attention.attention_kernels import varlen
from tests.unit.actors.attention.triton_interpreter import interpreted_paged
from tests.unit.actors.captures import CountedCapture, Overwriting, StaticCapture, call_directly
from tests.unit.actors.tiny_models import MODELS, VOCABULARY, twins
from tests.unit.trees import grown

PAGE_SIZE = 4
PAGES_EACH = 16
SESSIONS = 5
PAGES = PAGES_EACH * SESSIONS
DRAWN = VOCABULARY - 3  # the last ids are padding of the LM head
BUCKETS = Buckets((1, 2, 4, 8, 16, 24), rows=SESSIONS, pages=PAGES_EACH)
PLAIN_MODELS = [name for name in MODELS if name != "gemma2"]  # gemma2 bounds its scores
LEAN_MODELS = [name for name in PLAIN_MODELS if name != "gemma3"]


@torch.inference_mode()
def poisoned(model: Any, **options: Any) -> ModelRunner:
    """Returns a runner whose whole cache is NaN, except the page of zeros."""
    runner = ModelRunner(model, PAGES, PAGE_SIZE, vocabulary=DRAWN, **options)
    for layer in range(int(model.config.num_hidden_layers)):
        pool = runner.cache.layer(layer)
        pool[: runner.cache.padding_slot] = torch.nan
        pool[runner.cache.scrap_slot :] = torch.nan
    return runner


def fused_decoder(model: Any) -> LlamaDecoder:
    return LlamaDecoder(model, PlainProjection, compile_function=call_directly)


class Twins:
    """Runners of equal models: one with exact steps, one with captured steps."""

    def __init__(
        self,
        name: str,
        capture: Capture,
        backend: PaddedBackend | None = None,
        make_decoder: Callable[[Any], Decoder] = decoder_for,
        buckets: Buckets = BUCKETS,
    ) -> None:
        model, twin = twins(MODELS[name], seed=3)
        self.exact = poisoned(model)
        self.static = poisoned(
            twin,
            attention=backend or PaddedSdpa(),
            recording=Recording(buckets, capture),
            decoder=make_decoder(twin),
        )

    def check(self, rows: Sequence[InputRow], draws: Draws) -> list[int]:
        """Asserts that both runners compute and decide a step alike; returns the drawn tokens."""
        expected = self.exact.forward(rows, draws=draws)
        found = self.static.forward(rows, draws=draws)
        torch.testing.assert_close(found.logits, expected.logits, atol=2e-4, rtol=2e-4)
        assert found.drawn is not None
        assert expected.drawn is not None
        assert found.drawn.tolist() == expected.drawn.tolist()
        return found.drawn[:, 0].tolist()


@pytest.fixture(scope="module", params=PLAIN_MODELS)
def pair(request: pytest.FixtureRequest) -> Twins:
    return Twins(request.param, Overwriting())


def tables(rng: Random) -> list[tuple[int, ...]]:
    pages = list(range(PAGES))
    rng.shuffle(pages)
    return [tuple(pages[at::SESSIONS]) for at in range(SESSIONS)]


def a_step(rng: Random, lengths: list[int], table: list[tuple[int, ...]]) -> list[InputRow]:
    """Returns a row of one token, a chain or a tree for some of the sessions, after their `lengths` tokens."""
    rows = []
    for session in rng.sample(range(SESSIONS), rng.randint(1, SESSIONS)):
        start = lengths[session]
        tree = grown(rng, rng.randint(1, 5), VOCABULARY)
        nodes = tree.tokens if rng.random() < 0.7 else ()
        parents = () if tree.is_chain or not nodes else tree.parents
        tokens = (rng.randrange(VOCABULARY), *nodes)
        pages = table[session][: -(-(start + len(tokens)) // PAGE_SIZE)]
        rows.append(InputRow(tokens, start, len(tokens), pages, parents))
        lengths[session] += 1
    return rows


def some_draws(rng: Random, rows: Sequence[InputRow]) -> Draws:
    positions = sum(row.logits for row in rows)
    sampled = sorted(rng.sample(range(positions), rng.randint(0, positions))) if rng.random() < 0.7 else []
    return Draws(
        tuple(sampled),
        tuple(rng.getrandbits(63) for _ in sampled),
        tuple(rng.choice([0.3, 1.0, 1.7]) for _ in sampled),
    )


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_padded_steps_equal_exact_steps(pair, seed):
    """Contexts of all lengths, shapes in any order, and NaN in all memory that does not belong to a row."""
    rng = Random(seed)
    table = tables(rng)
    lengths = [rng.randint(1, 40) for _ in range(SESSIONS)]
    prompts = [
        InputRow(tuple(rng.randrange(VOCABULARY) for _ in range(length)), 0, 1, pages[: -(-length // PAGE_SIZE)])
        for length, pages in zip(lengths, table, strict=True)
    ]
    pair.check(prompts, some_draws(rng, prompts))
    for _ in range(4):
        rows = a_step(rng, lengths, table)
        pair.check(rows, some_draws(rng, rows))


def test_the_cache_of_other_rows_stays_as_it_is(pair):
    rng = Random(1)
    table = tables(rng)
    first = InputRow((5, 6, 7), 0, 3, table[0][:1])
    before = pair.check([first], Draws())
    pair.check([InputRow((9,), 0, 1, table[1][:1]), InputRow((8, 3, 2), 0, 3, table[2][:1])], Draws())
    again = InputRow((7,), 2, 1, table[0][:1])
    assert pair.check([again], Draws()) == before[-1:]


def test_the_triton_kernel_serves_captured_steps():
    pair = Twins("llama", Overwriting(), interpreted_paged())
    rng = Random(5)
    table = tables(rng)
    lengths = [0] * SESSIONS
    for _ in range(6):
        rows = a_step(rng, lengths, table)
        pair.check(rows, some_draws(rng, rows))


def test_chains_and_trees_may_have_kernels_and_shapes_of_their_own():
    """The kernel for chains rejects trees."""
    counted = CountedCapture()
    backend = PaddedChainsAndTrees(Varlen(varlen), PaddedSdpa())
    buckets = Buckets.for_sessions(SESSIONS, PAGES_EACH * PAGE_SIZE, PAGE_SIZE, backend)
    pair = Twins("llama", counted, backend, buckets=buckets)
    pair.static.capture_steps()
    assert counted.captures == 4 * len(buckets.tokens)
    rng = Random(6)
    table = tables(rng)
    lengths = [0] * SESSIONS
    with_trees = set()
    for _ in range(12):
        rows = a_step(rng, lengths, table)
        pair.check(rows, some_draws(rng, rows))
        with_trees.add(any(row.parents for row in rows))
    assert with_trees == {False, True}
    assert counted.captures == 4 * len(buckets.tokens)


def test_steps_of_one_shape_are_captured_once_and_long_rows_not_at_all():
    """The largest shape is captured along with the first."""
    counted = CountedCapture()
    pair = Twins("llama", counted)
    table = tables(Random(1))
    for start in range(6):  # one token each
        pair.check([InputRow((start,), start, 1, table[0][:2])], Draws())
    assert (counted.captures, counted.repeats) == (2, 6)
    pair.check([InputRow((1,), 6, 1, table[0][:2])], Draws((0,), (3,), (1.0,)))
    pair.check([InputRow((1,), 7, 1, table[0][:2])], Draws((0,), (4,), (0.5,)))
    assert counted.captures == 3, "steps with sampled positions have shapes of their own"
    pair.check([InputRow((1,) * 25, 0, 1, table[1][:7])], Draws())
    assert counted.repeats == 8, "a prompt of 25 tokens exceeds all shapes"
    pair.static.forward([InputRow((1,), PAGE_SIZE * PAGES_EACH, 1, tuple(range(PAGES_EACH + 1)))])
    assert counted.repeats == 8, "so does a text of more pages than the context"


@pytest.mark.parametrize(("sessions", "block"), [(16, 17), (1, 25), (4, 2)])
def test_steps_in_which_all_sessions_verify_a_block_are_captured(sessions, block):
    buckets = Buckets.for_sessions(sessions, 64, PAGE_SIZE, PaddedSdpa(), verified=sessions * block)
    rows = [InputRow((1,) * block, 0, block, tuple(range(8)))] * sessions
    shape = buckets.shape(rows, Draws())
    assert shape is not None
    assert shape.tokens >= sessions * block


def test_captured_steps_share_the_memory_of_their_output():
    """Otherwise, a graph for each number of tokens would hold its own logits."""
    pair = Twins("llama", Overwriting())
    pair.static.capture_steps()
    table = tables(Random(1))
    steps = [[InputRow((3,) * count, 0, count, table[0][:3])] for count in (9, 1, 3)]
    outputs = [pair.static.forward(rows) for rows in steps]
    assert len({output.logits.data_ptr() for output in outputs}) == 1


def test_a_runner_is_freed_without_the_garbage_collector():
    """The heap that exists when serving starts is exempt from collection."""
    model, _ = twins(MODELS["llama"], seed=3)
    decoder = decoder_for(model)
    runner = poisoned(model, attention=PaddedSdpa(), recording=Recording(BUCKETS, CountedCapture()), decoder=decoder)
    runner.forward([InputRow((1, 2), 0, 2, (0,))])
    alive = weakref.ref(decoder)
    gc.disable()
    try:
        del runner, decoder
        assert alive() is None
    finally:
        gc.enable()


def test_steps_that_never_sample_need_no_shapes_for_it():
    buckets = Buckets.for_sessions(SESSIONS, PAGES_EACH * PAGE_SIZE, PAGE_SIZE, PaddedSdpa(), draws=False)
    counted = CountedCapture()
    pair = Twins("llama", counted, buckets=buckets)
    pair.static.capture_steps()
    assert counted.captures == len(buckets.tokens)


@pytest.mark.parametrize(
    ("name", "make_decoder"),
    [*((name, decoder_for) for name in LEAN_MODELS), ("llama", fused_decoder), ("qwen3", fused_decoder)],
)
def test_no_operation_of_a_captured_step_depends_on_values(name, make_decoder):
    """Other models run in transformers' code, which does more while nothing is captured; see `capture_check`."""
    pair = Twins(name, StaticCapture(), make_decoder=make_decoder)
    rng = Random(4)
    table = tables(rng)
    for rows in ([1], [2, 3], [1, 1, 1, 1, 1]):
        step = [InputRow((3,) * count, 0, count, table[at][:1]) for at, count in enumerate(rows)]
        pair.check(step, some_draws(rng, step))
        pair.check(step, Draws())


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_every_shape_can_be_captured_before_any_step(name):
    counted = CountedCapture()
    pair = Twins(name, counted)
    pair.static.capture_steps()
    assert counted.captures == 2 * len(BUCKETS.tokens)
    rng = Random(2)
    table = tables(rng)
    lengths = [0] * SESSIONS
    for _ in range(8):
        rows = a_step(rng, lengths, table)
        pair.check(rows, some_draws(rng, rows))
    assert counted.captures == 2 * len(BUCKETS.tokens)


def failing(_: object) -> Callable[[], object]:
    raise RuntimeError("out of memory")


@pytest.mark.parametrize("is_early", [True, False], ids=["before serving", "in a step"])
def test_steps_run_without_captures_if_one_fails(caplog, is_early):
    pair = Twins("llama", failing)
    if is_early:
        pair.static.capture_steps()
    pair.check([InputRow((3, 4), 0, 2, (7,))], Draws())
    assert "out of memory" in caplog.text
    assert not pair.static.is_captured
    assert pair.static.static_chain(Mock(), 1, VOCABULARY) is None


def test_after_a_failed_capture_captured_steps_are_freed_before_the_step_runs(caplog):
    """A capture may fail because memory has run out, and the eager step needs some."""
    caplog.set_level(logging.ERROR)  # a recorded warning would keep the error and its frames
    captured = []

    def capture(step: Callable[[], object]) -> Callable[[], object]:
        if captured:
            raise RuntimeError("out of memory")
        captured.append(weakref.ref(step))
        return step

    alive = []

    def observe() -> bool:
        alive.append(captured[0]() is not None)
        return False

    Twins("llama", capture).static.forward([InputRow((3, 4), 0, 2, (7,))], interrupted=observe)
    assert alive
    assert not any(alive)
