"""With invariant numerics, a token's logits are the same bits in every composition of steps."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from actors.attention.invariant import invariant_attention
from actors.attention.select_backend import attention_shape
from actors.compute.kv_cache import InputRow
from actors.compute.linear import GPU_TILE, InvariantProducts, TiledProjection, projection
from actors.engine.invariance import InvarianceCheck
from actors.engine.runner import ModelRunner
from actors.engine.static_step import Buckets, Recording
from actors.models.decoder import ForwardOutput, decoder_for
from cluster.page_allocator import SlotMove
from tests.unit.actors.attention.triton_interpreter import interpreted_paged
from tests.unit.actors.captures import CountedCapture

PAGE_SIZE = 16
LENGTHS = (9, 250, 620)  # tokens per text
PAGES_EACH = 41  # pages for a text and the tree after it
PAGES = 2 * PAGES_EACH * len(LENGTHS)
VOCABULARY = 128
WRONG = 1  # token of rejected nodes


def a_model(dtype: torch.dtype) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).to(dtype).eval()
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data = (torch.randn(weight.shape) / weight.shape[1] ** 0.5).to(dtype)
    return model


class Texts:
    """A random model, texts, and the logits of each text computed alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        model = a_model(dtype)
        shape = attention_shape(model, PAGE_SIZE)
        decoder = decoder_for(model, InvariantProducts())
        self.runner = ModelRunner(model, PAGES, PAGE_SIZE, invariant_attention(shape), decoder, is_checked=True)
        rng = Random(0)
        self.tokens = [tuple(rng.randrange(2, VOCABULARY) for _ in range(length)) for length in LENGTHS]
        self.tables = [tuple(range(at * PAGES_EACH, (at + 1) * PAGES_EACH)) for at in range(len(LENGTHS))]
        self.logits = [self._alone(tokens, table) for tokens, table in zip(self.tokens, self.tables, strict=True)]

    def _alone(self, tokens: tuple[int, ...], table: tuple[int, ...]) -> Tensor:
        """Computes a text in one row, except its last tokens, which are computed one by one."""
        end = len(tokens) - 5
        parts = [self.runner.forward([row(tokens[:end], 0, table)]).logits]
        parts += [self.runner.forward([row(tokens[at : at + 1], at, table)]).logits for at in range(end, len(tokens))]
        return torch.cat(parts)


def row(tokens: tuple[int, ...], start: int, table: tuple[int, ...], parents: tuple[int, ...] = ()) -> InputRow:
    return InputRow(tokens, start, len(tokens), table[: -(-(start + len(tokens)) // PAGE_SIZE)], parents)


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def texts(request: pytest.FixtureRequest) -> Texts:
    return Texts(request.param)


# Rows of one step: the index of the text, the number of tokens, and whether they are every second node of a tree.
PARTS = st.lists(
    st.tuples(st.integers(0, len(LENGTHS) - 1), st.integers(1, 9) | st.integers(1, 400), st.booleans()),
    min_size=1,
    max_size=3,
    unique_by=lambda part: part[0],
)


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(PARTS, min_size=1, max_size=12),
    shared=st.tuples(*(st.integers(0, (length - 1) // PAGE_SIZE) for length in LENGTHS)),
    others=st.integers(0, 40),
    seed=st.integers(0, 3),
)
def test_logits_are_the_same_bits_in_every_composition_of_steps(texts, steps, shared, others, seed):
    """Texts share pages with the texts computed alone (prefix hits), and then have scattered pages of their own."""
    pages = list(range(PAGES // 2, PAGES))
    Random(seed).shuffle(pages)
    tables = [
        (*alone[:count], *pages[at :: len(LENGTHS)])
        for at, (alone, count) in enumerate(zip(texts.tables, shared, strict=True))
    ]
    fed = [count * PAGE_SIZE for count in shared]
    moves: list[SlotMove] = []
    for parts in [*steps, [(at, length, False) for at, length in enumerate(LENGTHS)]]:
        rows = []
        for at, count, is_tree in parts:
            tokens = texts.tokens[at][fed[at] : fed[at] + count]
            if is_tree:
                tokens = tokens[:6]
                nodes = tuple(node for token in tokens for node in (WRONG, token))
                parents = tuple(parent for depth in range(len(tokens)) for parent in 2 * (2 * depth - 1,))
                rows.append(row(nodes, fed[at], tables[at], parents))
            else:
                rows.append(row(tokens, fed[at], tables[at]))
        computed = [one for one in rows if one.tokens]
        if not computed:
            continue
        fillers = [InputRow((WRONG,), at, 0, texts.tables[2]) for at in range(620, 620 + others % 30)]
        output = texts.runner.forward([*fillers, *computed], moves=moves).logits
        parted = iter(output.split([one.logits for one in computed]))
        moves = []
        for (at, _, _), one in zip(parts, rows, strict=True):
            if not one.tokens:
                continue
            logits = next(parted)
            if one.parents:
                logits = logits[1::2]
                slots = [one.pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE for slot in one.slots]
                moves += [SlotMove(slots[2 * depth + 1], slots[depth]) for depth in range(len(logits))]
            assert torch.equal(logits, texts.logits[at][fed[at] : fed[at] + len(logits)])
            fed[at] += len(logits)
    assert fed == list(LENGTHS)


def a_check(runner: ModelRunner) -> InvarianceCheck:
    return InvarianceCheck(runner, PAGE_SIZE, PAGES, 1024, trees=True)


def test_the_check_at_load_accepts_this_model(texts):
    assert a_check(texts.runner).fault() == ""


class _RoundsByRows(ModelRunner):
    """Changes logits in the last bit in steps of several rows, or with trees."""

    def __init__(self, runner: ModelRunner, trees: bool) -> None:
        self._runner = runner
        self._trees = trees
        self.vocabulary = runner.vocabulary

    def forward(self, rows: list[InputRow]) -> ForwardOutput:
        output = self._runner.forward(rows)
        is_changed = any(one.parents for one in rows) if self._trees else len(rows) > len(LENGTHS)
        return output._replace(logits=torch.nextafter(output.logits, torch.tensor(torch.inf))) if is_changed else output


@pytest.mark.parametrize("trees", [False, True])
def test_the_check_at_load_finds_a_change_in_the_last_bit(texts, trees):
    fault = a_check(_RoundsByRows(texts.runner, trees)).fault()
    assert fault == f"logits differ in a {'tree' if trees else 'block with other rows'} after 601 tokens"


class _Overwrites(ModelRunner):
    """Returns the logits of all steps in the same memory, as captured steps do."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._memory = torch.empty(0)
        self.vocabulary = runner.vocabulary

    def forward(self, rows: list[InputRow]) -> ForwardOutput:
        output = self._runner.forward(rows)
        if len(self._memory) < len(output.logits):
            self._memory = torch.empty_like(output.logits)
        return output._replace(logits=self._memory[: len(output.logits)].copy_(output.logits))


def test_the_check_at_load_copies_what_the_next_step_overwrites(texts):
    assert a_check(_Overwrites(texts.runner)).fault() == ""


def test_the_check_at_load_needs_room(texts):
    assert "too small" in InvarianceCheck(texts.runner, PAGE_SIZE, 5, 1024, trees=True).fault()


def test_captured_steps_of_fixed_tiles_pass_the_check_for_chains():
    """As on a GPU, with Triton's interpreter."""

    def product(weight: Tensor, bias: Tensor | None) -> TiledProjection:
        return TiledProjection(projection(weight, bias), GPU_TILE, pads=True)

    attention = interpreted_paged()
    buckets = Buckets.for_sessions(4, 96, PAGE_SIZE, attention, GPU_TILE)
    assert buckets.tokens == (GPU_TILE,)
    capture = CountedCapture()
    model = a_model(torch.bfloat16)
    runner = ModelRunner(
        model,
        48,
        PAGE_SIZE,
        attention,
        decoder_for(model, product),
        is_checked=True,
        recording=Recording(buckets, capture),
    )
    assert InvarianceCheck(runner, PAGE_SIZE, 48, 96, trees=False).fault() == ""
    assert capture.captures == len(buckets.shapes)
