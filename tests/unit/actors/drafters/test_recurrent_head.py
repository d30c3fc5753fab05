"""Tests a recurrent head: its computation, its blocks, and refused files."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from actors.compute.kv_cache import InputRow
from actors.drafters.model.recurrent_head import FILE, RecurrentHead, load_recurrent_head
from actors.engine.runner import ModelRunner
from cluster.drafting.requests import Proposal
from cluster.errors import ModelError
from protos.draft_tree import DraftTree
from protos.messages import Shape
from tests.unit.actors.drafters.drafting import (
    DRAWN,
    LOGITS,
    REJECTION,
    Following,
    SpyRunner,
    WantedBlock,
    a_method,
    block_of,
    first,
    propose,
    wanted_block,
)

HIDDEN = 8
WIDE = 12
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


# ---------------------------------------------------------------- computation


def some_weights(**changes: Tensor) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(5)
    return {
        "state_norm.weight": torch.rand(HIDDEN, generator=drawn) + 0.5,
        "token_norm.weight": torch.rand(HIDDEN, generator=drawn) + 0.5,
        "gate_up.weight": torch.randn(2 * WIDE, 2 * HIDDEN, generator=drawn),
        "down.weight": torch.randn(HIDDEN, WIDE, generator=drawn),
    } | changes


def a_model() -> LlamaForCausalLM:
    torch.manual_seed(2)
    return LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).eval()


def head_in(folder: Path, model: PreTrainedModel) -> RecurrentHead | None:
    return load_recurrent_head(folder, model, width=3)


@torch.inference_mode()
def test_each_state_depends_on_the_previous_state_and_token(tmp_path: Path) -> None:
    """The test compares with the formula over transformers' hidden states, also after rows were removed."""
    weights = some_weights()
    model = a_model()
    save_file(weights, tmp_path / FILE)
    head = head_in(tmp_path, a_model())
    assert head is not None
    runner = ModelRunner(a_model(), 8, 4)
    rows = [InputRow((1, 2, 3), 0, 1, (0,)), InputRow((4, 5), 0, 1, (1,)), InputRow((6,), 0, 1, (2,))]
    states = torch.cat([model.model(torch.tensor([row.tokens])).last_hidden_state[0, -1:] for row in rows])
    logits, found, *_ = runner.forward(rows)
    torch.testing.assert_close(logits, model.lm_head(states), atol=1e-5, rtol=1e-5)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), weights[name], model.config.rms_norm_eps)

    for kept, taken in (([0, 2], [9, 11]), ([1], [13])):
        embedded = model.model.embed_tokens(torch.tensor(taken))
        inputs = torch.cat((norm(states[kept], "state_norm.weight"), norm(embedded, "token_norm.weight")), -1)
        gate, up = (inputs @ weights["gate_up.weight"].T).chunk(2, -1)
        states = states[kept] + (F.silu(gate) * up) @ weights["down.weight"].T
        logits, found, *_ = head.predict_next(found[kept], taken)
        torch.testing.assert_close(found, states, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(logits, model.lm_head(states), atol=1e-4, rtol=1e-4)


def test_a_folder_without_a_head_has_none(tmp_path: Path) -> None:
    assert head_in(tmp_path, a_model()) is None


@pytest.mark.parametrize(
    "weights",
    [
        some_weights(**{"gate_up.weight": torch.zeros(2 * WIDE, HIDDEN)}),
        some_weights(**{"state_norm.weight": torch.zeros(HIDDEN + 1)}),
        some_weights(extra=torch.zeros(1)),
        {"down.weight": torch.zeros(HIDDEN, WIDE)},
    ],
    ids=["inputs", "norm", "too much", "too little"],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    save_file(weights, tmp_path / FILE)
    with pytest.raises(ModelError, match=r"expected .* for d = 8"):
        head_in(tmp_path, a_model())


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_file(some_weights(), tmp_path / FILE)
    with pytest.raises(ModelError, match="Llama architecture, not Gemma2ForCausalLM"):
        head_in(tmp_path, Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, head_dim=4)))


# ---------------------------------------------------------------- blocks


def with_head(runner: SpyRunner, head: Following | None = None) -> Any:
    """Returns a method with a clock that counts its forward passes."""
    return a_method(runner, clock=lambda: float(len(runner.fed)), head=head or Following())


def ahead(want: WantedBlock, forwards: float = float("inf")) -> WantedBlock:
    """Returns the lookahead blocks for a step over 5 6, with time for the given number of forward passes."""
    return want.under((5, 6), max_tokens=want.max_tokens, until=forwards)


def by_model(want: WantedBlock) -> Proposal:
    return block_of(a_method(SpyRunner()), want)


@pytest.fixture
def alone() -> int:
    """Returns the number of tokens that the head predicts before a forward pass has read the outcome."""
    (size,) = {len(guess.tokens) for guess in propose(with_head(SpyRunner()), [ahead(wanted_block((1, 2)), 1)])}
    return size


@pytest.mark.parametrize(("length", "forwards"), [(1, 1), (3, 1), (4, 2), (7, 3)])
def test_blocks_take_fewer_forwards(length, forwards):
    runner = SpyRunner()
    want = wanted_block((1, 2), length)
    assert block_of(with_head(runner), want) == by_model(want)
    assert len(runner.fed) == forwards


def test_doubt_ends_a_block_at_any_of_its_tokens():
    want = wanted_block((1,), 3)
    sizes = set()
    for confidence in (0.0, 0.1, 0.3, 1.0):
        block, model_block = (
            block_of(a_method(SpyRunner(), head=head, min_confidence=confidence), want) for head in (Following(), None)
        )
        assert block == model_block
        sizes.add(len(block.tokens))
    assert len(sizes) > 1


def test_blocks_ahead_are_whole_after_one_forward_more_than_the_reading(alone):
    """This holds for the likeliest outcomes; only the head predicts the first tokens of the others."""
    runner = SpyRunner()
    guesses = propose(with_head(runner), [ahead(wanted_block((1, 2)), 2)])
    assert len(runner.fed) == 2
    sizes = [len(guess.tokens) for guess in guesses]
    assert sizes == sorted(sizes, reverse=True)
    assert set(sizes) == {3, alone}


# ---------------------------------------------------------------- predictions that forwards replace


class LeastLikelyHead(Following):
    """Head that prefers the model's least likely token."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return -super().logits(tokens)


class Broken(Following):
    """Head with nonfinite predictions."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return torch.full_like(super().logits(tokens), torch.nan)


def firsts(guesses: Sequence[Proposal], count: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Returns the first tokens of each outcome's block."""
    return {guess.outcome: guess.tokens[:count] for guess in guesses}


def test_forwards_replace_head_predictions_while_time_permits():
    """Each forward pass replaces one token per block, so an interruption leaves whole blocks, better if later."""
    want = wanted_block((1, 2))
    own = propose(a_method(SpyRunner()), [ahead(want)])
    early_guesses = [
        guess
        for guess in propose(with_head(SpyRunner(), LeastLikelyHead()), [ahead(want, 2)])
        if len(guess.tokens) == 3
    ]
    assert len(early_guesses) > 3
    assert firsts(early_guesses, 1).items() <= firsts(own, 1).items()
    assert not firsts(early_guesses, 2).items() & firsts(own, 2).items()
    runner = SpyRunner()
    assert {*own} <= {*propose(with_head(runner, LeastLikelyHead()), [ahead(want)])}
    assert max(len(row.tokens) for rows in runner.fed[1:] for row in rows) == 1, "guesses are never fed"


def test_a_block_that_is_waited_for_is_not_improved():
    runner = SpyRunner()
    block = block_of(with_head(runner, LeastLikelyHead()), wanted_block((1, 2)))
    assert len(runner.fed) == 1
    assert block.tokens[1] == int(LOGITS[block.tokens[0]].argmin())


def test_with_rejection_sampling_no_prediction_is_replaced():
    """Under rejection sampling, a prefix has one continuation, independent of the version of a block."""
    want = wanted_block((1, 2), sampling=DRAWN, acceptance=REJECTION)
    guesses = propose(with_head(SpyRunner(), LeastLikelyHead()), [ahead(want)])
    for guess in guesses:
        later = block_of(with_head(SpyRunner(), LeastLikelyHead()), want.after(*guess.outcome))
        assert replace(guess, outcome=()) == later
    assert len(guesses) > 1


# ---------------------------------------------------------------- predictions before any forward


def test_the_head_predicts_blocks_for_all_outcomes_before_the_model_does(alone):
    """A block may start from an outcome's last token that no forward pass has processed yet."""
    runner = SpyRunner()
    want = wanted_block((1, 2))
    guesses = propose(with_head(runner), [ahead(want, 1)])
    assert len(runner.fed) == 1, "the block under verification was read, and nothing else"
    assert len(guesses) > 8
    for guess in guesses:
        assert replace(guess, outcome=()) == by_model(want.after(*guess.outcome, max_tokens=alone))


def test_the_likeliest_outcomes_are_served_first():
    """The limit on outcomes is independent of the number of sessions."""
    counts = []
    for sessions in (4, 8):
        wants = [ahead(wanted_block((1, 2, i), session=str(i)), 1) for i in range(sessions)]
        guesses = propose(with_head(SpyRunner()), wants)
        counts.append(len(guesses))
        everything = [guess for want in wants for guess in propose(with_head(SpyRunner()), [want])]
        chances = sorted((guess.chance for guess in everything), reverse=True)
        assert sorted((guess.chance for guess in guesses), reverse=True) == pytest.approx(chances[: len(guesses)])
        assert len({guess.session for guess in guesses}) >= 4
    assert counts[0] == counts[1] < len(everything)


def test_with_rejection_sampling_the_model_predicts_all_first_tokens():
    """A prefix must keep its continuation, regardless of the available time."""
    want = wanted_block((1, 2), sampling=DRAWN, acceptance=REJECTION)
    assert propose(with_head(SpyRunner()), [ahead(want, 1)]) == []


def test_a_block_that_is_wanted_now_interrupts_the_head_too(alone):
    for steps in range(alone + 1):
        runner = SpyRunner()
        head = Following()

        def interrupted(head: Following = head, runner: SpyRunner = runner, steps: int = steps) -> bool:
            return len(head.asked) == steps and bool(runner.fed)

        guesses = propose(with_head(runner, head), [ahead(wanted_block((1, 2)))], interrupted)
        assert len(head.asked) == steps
        assert {len(guess.tokens) for guess in guesses} == ({steps} if steps else set())


def test_predictions_are_sent_early_and_better_ones_after_them():
    sent: list[list[Proposal]] = []
    last = propose(with_head(SpyRunner(), LeastLikelyHead()), [ahead(wanted_block((1, 2)))], early=sent.append)
    assert len(sent) > 2
    assert sent[-1] == last
    final = firsts(last, 1)
    right = [sum(final[outcome] == first for outcome, first in firsts(guesses, 1).items()) for guesses in sent]
    assert right == sorted(right)
    assert right[0] < right[-1] == len(final)


# ---------------------------------------------------------------- blocks without a forward


@pytest.mark.parametrize(
    ("under", "outcome"),
    [((5, 6), (1,)), ((5, 6), (5, 2)), ((5, 6), (5, 6, 3)), (DraftTree((5, 6, 7, 8), (-1, 0, -1, -1)), (8, 3))],
    ids=["none accepted", "one accepted", "all accepted", "a token beside the main path"],
)
def test_after_a_verdict_that_was_not_foreseen_the_head_makes_a_block_without_a_forward(under, outcome, alone):
    """The head has the state before the last token, because the drafter read the block during its verification."""
    runner = SpyRunner()
    shape = Shape.TREE if isinstance(under, DraftTree) else Shape.CHAIN
    want = wanted_block((1, 2), shape=shape)
    method = with_head(runner)
    propose(method, [want.under(under, max_tokens=3, until=1.0)])
    read = len(runner.fed)
    later = want.after(*outcome, shape=Shape.CHAIN)
    block = block_of(method, later)
    assert len(runner.fed) == read
    assert block == replace(by_model(replace(later, max_tokens=alone)), is_at_once=True)
    propose(method, [later.under(block.tree, max_tokens=3, until=len(runner.fed) + 1.0)])
    assert runner.read[-1] == (*later.tokens, *block.tokens), "the forward that was saved is made up for"


def test_an_unread_block_is_read_after_the_verdict():
    runner = SpyRunner()
    want = wanted_block((1, 2))
    method = with_head(runner)
    propose(method, [ahead(want)], lambda: True)
    assert len(block_of(method, want.after(5, 2)).tokens) == 3
    assert len(runner.fed) == 1


@pytest.mark.parametrize("rule", ["another session needs one", "rejection sampling"])
def test_a_forward_is_made_where_one_session_needs_it(rule):
    runner = SpyRunner()
    changes = {"sampling": DRAWN, "acceptance": REJECTION} if rule == "rejection sampling" else {}
    want = wanted_block((1, 2), **changes)
    method = with_head(runner)
    propose(method, [ahead(want, 1)])
    read = len(runner.fed)
    wants = [want.after(5, 2)] if changes else [want.after(5, 2), wanted_block((3, 4), session="new")]
    blocks = propose(method, wants)
    assert len(runner.fed) == read + 1
    assert {len(block.tokens) for block in blocks} == {3}
    assert not any(block.is_at_once for block in blocks)


def test_reading_a_block_does_not_help_to_draft_it_again():
    """The test simulates a broken stream; no token has been committed since."""
    want = wanted_block((1, 2))
    method = with_head(SpyRunner(), LeastLikelyHead())
    propose(method, [ahead(want, 1)])
    assert block_of(method, want).tokens[0] == int(LOGITS[2].argmax())


@pytest.mark.parametrize("shape", Shape)
def test_a_head_whose_logits_are_not_finite_leaves_what_the_model_drafted(shape):
    want = wanted_block((1, 2), shape=shape)
    method = with_head(SpyRunner(), Broken())
    block = block_of(method, want)
    assert first(block, 1) == first(by_model(want), 1)
    assert all(guess.tokens for guess in propose(method, [want.under(block.tree)]))
    assert block_of(method, want.after(block.tokens[0], 4)).tokens
