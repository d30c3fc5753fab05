"""Compares the paged cache and its attention with the same models in transformers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor
from transformers import (
    DogeConfig,
    DogeForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from actors.attention.batch import Interrupted
from actors.attention.sdpa_gather import SdpaGatherPlan
from actors.compute.kv_cache import InputRow, PagedCache
from actors.engine.runner import ModelRunner, profile_steps
from cluster.errors import ModelError
from cluster.page_allocator import PageCopy, SlotMove
from tests.unit.actors.tiny_models import MODELS, SIZES, WINDOW, tokens_of, twins
from tests.unit.trees import grown

PAGE_SIZE = 4
SESSION_PAGES = 160
SESSIONS = 5
PAGES = SESSION_PAGES * SESSIONS


def scattered() -> list[tuple[int, ...]]:
    """Returns pages for several sessions, shuffled and interleaved."""
    shuffled = torch.randperm(PAGES, generator=torch.Generator().manual_seed(0)).tolist()
    return [tuple(shuffled[i::SESSIONS]) for i in range(SESSIONS)]


TABLES = scattered()


def row(table: tuple[int, ...], tokens: tuple[int, ...], start: int, logits: int) -> InputRow:
    """Returns a row with the minimum number of pages, so reads beyond them fail."""
    return InputRow(tokens, start, logits, table[: -(-(start + len(tokens)) // PAGE_SIZE)])


class Plain:
    """transformers model without a cache, one sequence at a time, and our runner with the same weights."""

    def __init__(self, make: Callable[[], PreTrainedModel]) -> None:
        self.model, twin = twins(make, seed=3)
        self.model.set_attn_implementation("eager")
        self.runner = ModelRunner(twin, PAGES, PAGE_SIZE)

    @torch.inference_mode()
    def logits(self, tokens: tuple[int, ...], last: int) -> Tensor:
        found: Tensor = self.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return found[len(tokens) - last :]


@pytest.fixture(scope="module", params=MODELS)
def plain(request: pytest.FixtureRequest) -> Plain:
    return Plain(MODELS[request.param])


def check(
    plain: Plain,
    rows: list[InputRow],
    whole: list[tuple[int, ...]],
    copies: Sequence[PageCopy] = (),
    moves: Sequence[SlotMove] = (),
) -> None:
    """Asserts that the rows' logits equal those of uncached forward passes over the whole sequences."""
    expected = [plain.logits(tokens, row.logits) for row, tokens in zip(rows, whole, strict=True) if row.logits]
    torch.testing.assert_close(
        plain.runner.forward(rows, copies, moves=moves).logits, torch.cat(expected), atol=1e-4, rtol=1e-4
    )


def test_mixed_rows_in_one_forward_give_plain_logits(plain):
    """Rows are a prompt chunk, a block to verify, a single token and a whole prompt, in various orders and depths."""
    a = tokens_of(1, 14)
    b = tokens_of(2, 11)
    c = tokens_of(3, 9)
    d = tokens_of(4, 6)
    at_a, at_b, at_c, at_d, _ = TABLES
    check(plain, [row(at_a, a[:5], 0, 0), row(at_b, b[:7], 0, 1), row(at_c, c[:8], 0, 2)], [a[:5], b[:7], c[:8]])
    check(
        plain,
        [row(at_a, a[5:9], 5, 0), row(at_b, b[7:], 7, 4), row(at_c, c[8:], 8, 1), row(at_d, d, 0, 6)],
        [a[:9], b, c, d],
    )
    check(plain, [row(at_a, a[9:], 9, 5)], [a])


def test_rows_and_contexts_of_all_sizes_in_one_forward_give_plain_logits(plain):
    """Short and long rows over short and long contexts, of equal and unequal lengths, form several groups."""
    whole = [tokens_of(20 + at, length) for at, length in enumerate((552, 543, 156, 149, 29))]
    fed = [1, 32, 3, 32, 29]
    begins = [len(tokens) - count for tokens, count in zip(whole, fed, strict=True)]
    parts = list(zip(TABLES, whole, begins, strict=True))
    plain.runner.forward([row(table, tokens[:begin], 0, 0) for table, tokens, begin in parts if begin])
    rows = [row(table, tokens[begin:], begin, min(3, len(tokens) - begin)) for table, tokens, begin in parts]
    plan = SdpaGatherPlan(rows, PagedCache(PAGES, PAGE_SIZE, {}, torch.float32, torch.device("cpu")))
    plan.place([torch.tensor(part, dtype=torch.int64) for part in plan.integers])
    assert len(plan.groups) > 2, "they are attended together: this showed nothing"
    check(plain, rows, whole)


@pytest.mark.parametrize(
    ("table", "length", "chunk"),
    [(TABLES[0], 90, 16), (tuple(range(8, 20)), 21, 15), (tuple(range(20, 8, -1)), 21, 15)],
    ids=["scattered", "neighbouring", "backwards"],
)
def test_a_prompt_fed_in_chunks_gives_plain_logits(plain, table, length, chunk):
    """A single session on consecutive pages is read without gathering."""
    tokens = tokens_of(30, length)
    last = (length - 1) // chunk * chunk
    for begin in range(0, last, chunk):
        plain.runner.forward([row(table, tokens[begin : begin + chunk], begin, 0)])
    check(plain, [row(table, tokens[last:], last, length - last)], [tokens])


def test_a_rollback_leaves_no_trace(plain):
    """Rejected tokens are overwritten or masked, and a shorter sequence on reused pages sees no old tokens."""
    right = tokens_of(5, 12)
    wrong = tokens_of(6, 6)
    table = TABLES[0]
    plain.runner.forward([row(table, right[:6] + wrong, 0, 1)])
    check(plain, [row(table, right[6:8], 6, 2)], [right[:8]])
    check(plain, [row(table, right[8:], 8, 4)], [right])
    other = tokens_of(7, 3)
    check(plain, [row(table, other, 0, 3)], [other])


def test_a_tree_equals_its_separate_paths_and_leaves_only_the_accepted_one(plain):
    """Random trees run next to another row; the accepted path moves into place, and the text continues."""
    for seed in range(4):
        tree = grown(Random(seed), 7, 50)
        decided = tokens_of(40 + seed, 10 + seed)
        other = tokens_of(60 + seed, 9)
        at, beside, *_ = TABLES
        base = len(decided)
        plain.runner.forward([row(at, decided[:-1], 0, 0), row(beside, other[:7], 0, 0)])
        fed = replace(row(at, decided[-1:] + tree.tokens, base - 1, 1 + len(tree)), parents=tree.parents)
        found = plain.runner.forward([fed, row(beside, other[7:], 7, 2)]).logits
        paths = [tuple(tree.tokens[node] for node in path) for path in tree.paths]
        alone = [plain.logits(decided + path, 1) for path in ((), *paths)]
        torch.testing.assert_close(found, torch.cat([*alone, plain.logits(other, 2)]), atol=1e-4, rtol=1e-4)
        kept = max(tree.paths, key=lambda path: (len(path), path))
        slots = [at[(base + step) // PAGE_SIZE] * PAGE_SIZE + (base + step) % PAGE_SIZE for step in range(len(tree))]
        moves = [SlotMove(slots[node], slots[step]) for step, node in enumerate(kept) if node != step]
        assert moves, "the path lay where it belongs: this showed nothing"
        text = decided + tuple(tree.tokens[node] for node in kept)
        further = tokens_of(80 + seed, 3)
        check(plain, [row(at, further, len(text), 3)], [text + further], moves=moves)


def test_an_obsolete_forward_stops_at_the_next_layer(plain):
    """Later rows overwrite its cached tokens."""
    wrong = tokens_of(8, 12)
    right = tokens_of(9, 9)
    answers = iter((False, True))
    with pytest.raises(Interrupted):
        plain.runner.forward([row(TABLES[0], wrong, 0, 1)], interrupted=lambda: next(answers))
    assert next(answers, None) is None, "two layers have asked"
    check(plain, [row(TABLES[0], right, 0, 9)], [right])


def test_sessions_that_share_pages_and_part_give_plain_logits(plain):
    """The sessions share the pages of a prompt computed once; all but one copy the page where they diverge."""
    prompt = tokens_of(11, 3 * PAGE_SIZE + 2)
    first = TABLES[0][:5]
    second = TABLES[1][:5]
    third = TABLES[2][:5]
    plain.runner.forward([row(first, prompt, 0, 0)])
    forks = [(*first[:3], *table[3:]) for table in (first, second, third)]
    copies = tuple(PageCopy(first[3], table[3]) for table in forks[1:])
    tails = [tokens_of(12 + i, 2 + i) for i in range(3)]
    rows = [row(table, tail, len(prompt), len(tail)) for table, tail in zip(forks, tails, strict=True)]
    check(plain, rows, [prompt + tail for tail in tails], copies)
    again = [row(table, (7,), len(prompt + tail), 1) for table, tail in zip(forks, tails, strict=True)]
    check(plain, again, [(*prompt, *tail, 7) for tail in tails])


def test_single_tokens_beyond_the_window_see_the_window_only(plain):
    """The fast path for single tokens needs a mask only after a window has moved."""
    tokens = tokens_of(8, 3 * WINDOW)
    table = TABLES[1]
    plain.runner.forward([row(table, tokens[:2], 0, 0)])
    for position in range(2, len(tokens)):
        check(plain, [row(table, (tokens[position],), position, 1)], [tokens[: position + 1]])


def test_single_tokens_of_equal_and_unequal_contexts_give_plain_logits(plain):
    """Single tokens need a mask only for unequal contexts."""
    whole = [tokens_of(40, 9), tokens_of(41, 9), tokens_of(42, 6)]
    plain.runner.forward([row(table, tokens[:-1], 0, 0) for table, tokens in zip(TABLES, whole, strict=False)])
    for count in (2, 3):
        rows = [row(TABLES[i], whole[i][-1:], len(whole[i]) - 1, 1) for i in range(count)]
        check(plain, rows, whole[:count])


REFUSED: dict[str, Callable[[], PreTrainedModel]] = {
    "keys that are dropped": lambda: DogeForCausalLM(DogeConfig(**SIZES, keep_window_size=16)),
    "chunked layers": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, layer_types=["chunked_attention", "full_attention", "full_attention"])
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_run_wrongly_is_refused(name):
    """The model would run but give wrong text."""
    model = REFUSED[name]()
    with pytest.raises(ModelError, match=type(model).__name__):
        ModelRunner(model, PAGES, PAGE_SIZE)


@pytest.mark.parametrize("sessions", [1, 8])
def test_costs_are_measured_with_up_to_as_many_rows_as_there_are_sessions(sessions, monkeypatch):
    model, _ = twins(MODELS["llama"], seed=3)
    runner = ModelRunner(model, PAGES, PAGE_SIZE)
    forward = runner.forward
    counts = set()

    def counted(rows, **options):
        counts.add(len(rows))
        return forward(rows, **options)

    monkeypatch.setattr(runner, "forward", counted)
    cost = profile_steps(runner, PAGE_SIZE, PAGES, sessions)
    assert max(counts) == sessions
    assert [tokens for tokens, _ in cost.by_tokens][-1] > sessions, "longer rows are measured, as prompts have them"
