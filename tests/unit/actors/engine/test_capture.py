"""Captured hidden states equal those of transformers, whichever pages hold the cache."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from actors.compute.hidden_states import CaptureSpec, StateCapture, decode_rows
from actors.compute.kv_cache import InputRow
from actors.engine.executor import StepExecutor
from actors.engine.memory import state_bytes
from actors.engine.runner import ModelRunner
from actors.models.checkpoint import load
from cluster.errors import ModelError
from cluster.page_allocator import PageCopy, SlotMove
from cluster.verification.step import Row, StateRead, StepPlan, slots_of
from protos.draft_tree import DraftTree
from protos.messages import StateDtype, StatesFormat
from tests.unit.actors.groups import at_once, threads
from tests.unit.actors.models.test_sharding import a_model
from tests.unit.actors.tiny_models import MODELS, VOCABULARY, jittered, tokens_of
from tests.unit.cluster.samples import an_open

PAGE_SIZE = 4
PAGES = 32
CPU = torch.device("cpu")
LAYERS = (0, 2, 3)  # of three layers: embeddings, a middle state, and the normalized final state
HIDDEN = 32
TOLERANCE = 0.02  # relative to a row's norm; bfloat16 keeps eight bits per element
A = (3, 9, 1, 12, 20)
B = (0, 14, 2, 7, 21)


class Captured:
    """transformers model and capturing runner with the same weights."""

    def __init__(self, name: str, spec: CaptureSpec | None = None) -> None:
        torch.manual_seed(6)
        self.layers = spec.layers if spec is not None else LAYERS
        self.layout = spec.format if spec is not None else StatesFormat(len(LAYERS) * HIDDEN, StateDtype.BFLOAT16)
        self.model: Any = jittered(MODELS[name]())
        self.model.set_attn_implementation("eager")
        wanted = spec or CaptureSpec(LAYERS, self.layout)
        capture = StateCapture(wanted, PAGES, PAGE_SIZE, CPU, wanted.projection_on(CPU))
        self.runner, self.without = (self.new_runner(name, each) for each in (capture, None))

    def new_runner(self, name: str, capture: StateCapture | None) -> ModelRunner:
        twin = MODELS[name]()
        twin.load_state_dict(self.model.state_dict())
        return ModelRunner(twin, PAGES, PAGE_SIZE, capture=capture)

    @torch.inference_mode()
    def expected(self, tokens: tuple[int, ...]) -> Tensor:
        """Returns transformers' states of the whole text, without a cache."""
        found = self.model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
        return torch.cat([found.hidden_states[layer][0] for layer in self.layers], dim=-1)

    def read(self, positions: Sequence[int], pages: Sequence[int]) -> Tensor:
        return decode_rows(self.runner.read_states(slots_of(positions, pages, PAGE_SIZE)), self.layout)

    def check(self, tokens: tuple[int, ...], pages: Sequence[int], first: int = 0) -> None:
        found = self.read(range(first, len(tokens)), pages)
        close_to(found, self.expected(tokens)[first:])


def close_to(found: Tensor, expected: Tensor) -> None:
    error = (found - expected).norm(dim=-1)
    assert bool((error < TOLERANCE * expected.norm(dim=-1)).all()), "these are other states"


@pytest.fixture(scope="module", params=MODELS)
def captured(request: pytest.FixtureRequest) -> Captured:
    """The last architecture runs the model's own code; the others run the lean decoder."""
    return Captured(request.param)


def row(pages: tuple[int, ...], tokens: tuple[int, ...], start: int, logits: int, **more: Any) -> InputRow:
    return InputRow(tokens, start, logits, pages[: -(-(start + len(tokens)) // PAGE_SIZE)], **more)


def test_a_prompt_in_chunks_beside_another_session(captured):
    """All fed positions are captured, including those without logits, and single tokens, which some CPUs pad."""
    a = tokens_of(1, 14)
    b = tokens_of(2, 9)
    captured.runner.forward([row(A, a[:9], 0, 0), row(B, b[:8], 0, 1)])
    captured.runner.forward([row(A, a[9:13], 9, 0), row(B, b[8:], 8, 1)])
    captured.runner.forward([row(A, a[13:], 13, 1)])
    captured.check(a, A)
    captured.check(b, B)


def test_rolled_back_slots_are_overwritten(captured):
    right = tokens_of(3, 12)
    captured.runner.forward([row(A, right[:7] + tokens_of(4, 5), 0, 6)])
    captured.runner.forward([row(A, right[7:], 7, 1)])
    captured.check(right, A)


def test_nodes_of_a_tree_each_have_the_states_of_their_own_path_also_once_moved(captured):
    decided = tokens_of(5, 6)
    tree = DraftTree((1, 2, 3, 4, 5), (-1, -1, 1, 1, 3))
    captured.runner.forward([row(A, decided[:-1], 0, 0)])
    captured.runner.forward([row(A, decided[-1:] + tree.tokens, 5, 6, parents=tree.parents)])
    path = (1, 3, 4)
    text = decided + tuple(tree.tokens[node] for node in path)
    at = [*range(6), *[6 + node for node in path]]
    close_to(captured.read(at, A), captured.expected(text))
    slots = slots_of(range(6, 11), A, PAGE_SIZE)
    moves = [SlotMove(slots[node], slots[step]) for step, node in enumerate(path)]
    further = tokens_of(6, 2)
    captured.runner.forward([row(A, further, 9, 1)], moves=moves)
    captured.check(text + further, A)


def test_pages_of_another_session_and_copies_of_them_hold_its_states(captured):
    prompt = tokens_of(7, 2 * PAGE_SIZE + 3)
    captured.runner.forward([row(A, prompt, 0, 0)])
    tail = tokens_of(8, 3)
    fork = (A[0], A[1], B[2], B[3])  # two shared pages and a copied third page
    captured.runner.forward([row(fork, tail, len(prompt), 1)], [PageCopy(A[2], B[2])])
    captured.check(prompt + tail, fork)
    captured.check(prompt, A)


def test_nothing_else_of_a_forward_changes_by_capturing(captured):
    """Nothing is captured unless requested."""
    rows = [row(A, tokens_of(9, 10), 0, 4)]
    plain = captured.without.forward(rows)
    assert torch.equal(captured.runner.forward(rows).logits, plain.logits)
    assert plain.streams is None


def halves(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Returns a projection of two states to one, loaded on a device."""
    assert device == CPU
    return lambda streams: (streams[:, :HIDDEN] + streams[:, HIDDEN:]) / 2


@pytest.mark.parametrize("dtype", StateDtype)
def test_a_projection_at_the_source_makes_one_row_of_several_streams(dtype):
    found = Captured("llama", CaptureSpec((1, 3), StatesFormat(HIDDEN, dtype), halves))
    tokens = tokens_of(10, 9)
    found.runner.forward([row(A, tokens, 0, 0)])
    expected = halves(CPU)(found.expected(tokens))
    read = found.read(range(9), A)
    tolerance = 0.06 if dtype is StateDtype.FLOAT8 else TOLERANCE
    assert bool(((read - expected).norm(dim=-1) < tolerance * expected.norm(dim=-1)).all())


def test_a_projection_of_another_width_is_a_fault_that_shows_at_once():
    found = Captured("llama", CaptureSpec((1, 3), StatesFormat(HIDDEN + 1, StateDtype.BFLOAT16), halves))
    with pytest.raises(AssertionError, match="32 wide, not 33"):
        found.runner.forward([row(A, (1, 2), 0, 0)])


@pytest.mark.parametrize("layers", [(4,), (-1, 2), (2, 1), (1, 1), ()])
def test_layers_missing_from_the_model_are_refused(layers):
    """A wrong layer would run but lose almost all acceptance."""
    capture = StateCapture(CaptureSpec(layers, StatesFormat(HIDDEN, StateDtype.BFLOAT16)), PAGES, PAGE_SIZE, CPU)
    model: PreTrainedModel = MODELS["llama"]()
    with pytest.raises(ModelError, match=r"from 0 \(embeddings\) to 3"):
        ModelRunner(model, PAGES, PAGE_SIZE, capture=capture)


def test_states_are_counted_into_the_size_of_a_page():
    spec = CaptureSpec(LAYERS, StatesFormat(96, StateDtype.FLOAT8))
    assert state_bytes(spec, page_size=16) == 16 * 100
    assert state_bytes(None, page_size=16) == 0


def test_a_step_returns_requested_states_along_the_path_and_pages_are_readable_without_one():
    """The cases include rows without wanted states."""
    found = Captured("llama")
    executor = StepExecutor(found.runner, VOCABULARY)
    prompt = tokens_of(11, 6)
    opens = (an_open("a", tokens=prompt), an_open("b", tokens=prompt))
    whole = tuple(slots_of(range(6), A, PAGE_SIZE))
    rows = (Row("a", prompt, 0, True, A[:2], state_slots=whole), Row("b", prompt, 0, True, B[:2]))
    first, other = executor.step(StepPlan((), opens, rows))
    close_to(decode_rows(first.states, found.layout), found.expected(prompt))
    assert other.states == b""
    decided = first.next_token
    (plain,) = executor.step(StepPlan((), (), (Row("b", (decided,), 6, True, B[:2]),)))
    tree = DraftTree(((plain.next_token + 1) % VOCABULARY, plain.next_token), (-1, -1))
    fed = (decided, *tree.tokens)
    at = tuple(slots_of(range(4, 9), A, PAGE_SIZE))  # from two cached positions before the tree to its end
    (outcome,) = executor.step(StepPlan((), (), (Row("a", fed, 6, True, A[:3], tree, at),)))
    assert outcome.path == (1,)
    text = (*prompt, decided, plain.next_token)
    close_to(decode_rows(outcome.states, found.layout), found.expected(text)[4:])
    read = executor.read(StateRead("a", 2, tuple(slots_of(range(2, 6), A, PAGE_SIZE))))
    assert isinstance(read, bytes)
    close_to(decode_rows(read, found.layout), found.expected(prompt)[2:])


@pytest.mark.parametrize("kind", ["llama", "olmo2"])
def test_the_leading_rank_of_several_captures_whole_streams_and_the_others_none(tmp_path, kind):
    """The test covers both decoders; states are whole on each rank, and norms are not split."""
    model = a_model(kind)
    model.save_pretrained(tmp_path)
    layout = StatesFormat(2 * 48, StateDtype.BFLOAT16)
    spec = CaptureSpec((1, 2), layout)
    tokens = tuple(range(3, 12))

    def forward(rank: int, share: PreTrainedModel) -> bytes | None:
        capture = StateCapture(spec, PAGES, PAGE_SIZE, CPU) if rank == 0 else None
        runner = ModelRunner(share, PAGES, PAGE_SIZE, capture=capture, ranks=3)
        runner.forward([row(A, tokens, 0, 1)])
        return runner.read_states(slots_of(range(9), A, PAGE_SIZE)) if capture is not None else None

    shares = [load(tmp_path, "float32", CPU, group).model for group in threads(3)]
    leading, *others = at_once([partial(forward, rank, share) for rank, share in enumerate(shares)])
    assert others == [None, None]
    assert leading is not None
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    close_to(decode_rows(leading, layout), torch.cat([expected[1][0], expected[2][0]], dim=-1))


def test_without_stored_states_only_the_latest_forward_is_readable_and_pages_stay_small():
    spec = CaptureSpec(LAYERS, StatesFormat(len(LAYERS) * HIDDEN, StateDtype.BFLOAT16), is_kept=False)
    assert state_bytes(spec, page_size=16) == 0
    found = Captured("llama", spec)
    a = tokens_of(12, 9)
    found.runner.forward([row(A, a[:5], 0, 0)])
    found.runner.forward([row(B, a, 0, 1), row(A, a[5:], 5, 1)], [PageCopy(A[0], B[4])])
    found.check(a, B)
    close_to(found.read(range(5, 9), A), found.expected(a)[5:])
    with pytest.raises(KeyError):
        found.read([4], A)
