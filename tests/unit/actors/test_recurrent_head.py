"""A recurrent head: what it computes, what a block of its tokens looks like, and which files are refused."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from actors.cache import FeedRow
from actors.methods.draft_cache import DraftCache
from actors.methods.draft_model import DraftingLimits, DraftModel
from actors.methods.recurrent_head import FILE, load_recurrent_head
from actors.noise import Purpose, gumbel_argmax, key
from actors.runner import ModelRunner
from cluster.drafting import Proposal, Want
from cluster.errors import ModelError
from protos.messages import Acceptance
from tests.unit.actors.drafting import DRAWN, LOGITS, PAGE_SIZE, VOCABULARY, SpyRunner, a_want, after_checks, never
from tests.unit.cluster.samples import GREEDY

HIDDEN, WIDE = 8, 12
SIZES: dict[str, Any] = {"hidden_size": HIDDEN, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


# ---------------------------------------------------------------- what it computes


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


@torch.inference_mode()
def test_each_state_is_made_of_the_one_before_and_of_the_token_that_was_taken(tmp_path: Path) -> None:
    """Against the formula, over transformers' own hidden states; rows may leave, and the others go on."""
    weights, model = some_weights(), a_model()
    save_file(weights, tmp_path / FILE)
    head = load_recurrent_head(tmp_path, a_model(), width=3)
    assert head is not None
    runner = ModelRunner(a_model(), 8, 4, decoder=head)
    rows = [FeedRow((1, 2, 3), 0, 1, (0,)), FeedRow((4, 5), 0, 1, (1,)), FeedRow((6,), 0, 1, (2,))]
    states = torch.cat([model.model(torch.tensor([row.tokens])).last_hidden_state[0, -1:] for row in rows])
    torch.testing.assert_close(runner.forward(rows), model.lm_head(states), atol=1e-5, rtol=1e-5)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), weights[name], model.config.rms_norm_eps)

    for kept, taken in (([0, 2], [9, 11]), ([1], [13])):
        embedded = model.model.embed_tokens(torch.tensor(taken))
        inputs = torch.cat((norm(states[kept], "state_norm.weight"), norm(embedded, "token_norm.weight")), -1)
        gate, up = (inputs @ weights["gate_up.weight"].T).chunk(2, -1)
        states = states[kept] + (F.silu(gate) * up) @ weights["down.weight"].T
        torch.testing.assert_close(head.after(kept, taken), model.lm_head(states), atol=1e-4, rtol=1e-4)


def test_a_folder_without_a_head_has_none(tmp_path: Path) -> None:
    assert load_recurrent_head(tmp_path, a_model(), width=3) is None


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
        load_recurrent_head(tmp_path, a_model(), width=3)


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_file(some_weights(), tmp_path / FILE)
    with pytest.raises(ModelError, match="Llama kind, not Gemma2ForCausalLM"):
        load_recurrent_head(tmp_path, Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, head_dim=4)), width=3)


# ---------------------------------------------------------------- blocks


class Following:
    """Further tokens by the same table of logits, so that blocks are those of a forward for each token."""

    def __init__(self, width: int = 3) -> None:
        self.width = width
        self.asked: list[list[int]] = []  # places, of each call

    def after(self, places: Sequence[int], tokens: Sequence[int]) -> Tensor:
        self.asked.append(list(places))
        return LOGITS[torch.tensor(tokens)]


def a_method(runner: SpyRunner, further: Following | None, **limits: Any) -> DraftModel:
    limits = {"top_k": 4, "min_confidence": 0.0} | limits
    cache = DraftCache(64, PAGE_SIZE)
    return DraftModel(runner, torch.arange(VOCABULARY), cache, DraftingLimits(**limits), lambda: 0.0, further=further)


@pytest.mark.parametrize(("length", "forwards"), [(1, 1), (3, 1), (4, 2), (7, 3)])
@pytest.mark.parametrize("acceptance", list(Acceptance))
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_blocks_are_those_of_a_forward_each_in_fewer_forwards(length, forwards, acceptance, sampling):
    """Under every rule: the tokens drawn are what the head goes on from, and what their draft_probs are given."""
    want = a_want((1, 2), length, sampling=sampling, acceptance=acceptance)
    runner = SpyRunner()
    assert a_method(runner, Following()).propose([want], never) == a_method(SpyRunner(), None).propose([want], never)
    assert len(runner.fed) == forwards


def test_coupled_further_tokens_are_drawn_with_the_noise_of_their_positions():
    want = a_want((1, 2), 3, sampling=DRAWN, seed=5)
    (proposal,) = a_method(SpyRunner(), Following()).propose([want], never)
    before = (2, *proposal.tokens)
    for at, token in enumerate(proposal.tokens):
        assert token == gumbel_argmax(LOGITS[before[at]], key(5, 0, 2 + at, Purpose.DRAW))


def test_who_is_done_leaves_and_the_others_are_found_at_their_places():
    wants = [a_want((1,), 1, "a"), a_want((2,), 3, "b"), a_want((3,), 2, "c"), a_want((4,), 3, "d")]
    further = Following()
    proposals = a_method(SpyRunner(), further).propose(wants, never)
    assert proposals == a_method(SpyRunner(), None).propose(wants, never)
    assert further.asked == [[1, 2, 3], [0, 2]]


def test_what_is_not_read_to_its_end_yet_is_not_gone_on_from():
    further = Following()
    wants = [a_want((1,) * 9, session="long"), a_want((2, 3), session="short")]
    (long, short) = a_method(SpyRunner(), further, pass_tokens=8).propose(wants, never)
    assert (len(long.tokens), len(short.tokens)) == (0, 3)
    assert further.asked == [[0], [0]]


def test_doubt_ends_a_block_at_any_of_its_tokens():
    want = a_want((1,), 3)
    for confidence in (0.0, 0.1, 0.3, 1.0):
        found = [
            a_method(SpyRunner(), further, min_confidence=confidence).propose([want], never)
            for further in (None, Following())
        ]
        assert found[0] == found[1]


def test_blocks_ahead_are_whole_after_one_forward_more_than_the_reading():
    runner = SpyRunner()
    guesses = a_method(runner, Following()).propose([ahead(a_want((1, 2), 3))], after_checks(2))
    assert len(runner.fed) == 2
    assert {len(guess.tokens) for guess in guesses} == {3}


# ---------------------------------------------------------------- second thoughts


class Mistaken(Following):
    """Likes best what the model likes least."""

    def after(self, places: Sequence[int], tokens: Sequence[int]) -> Tensor:
        return -super().after(places, tokens)


def ahead(want: Want) -> Want:
    return replace(want, unverified=(5, 6))


def firsts(guesses: Sequence[Proposal], count: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """By outcome, the first tokens of its block."""
    return {guess.outcome: guess.tokens[:count] for guess in guesses}


def test_while_there_is_time_forwards_name_anew_what_the_head_named():
    """One token of each block a forward, so that an interruption leaves whole blocks, the better the later it comes."""
    want = ahead(a_want((1, 2), 3))
    by_model = a_method(SpyRunner(), None).propose([want], never)
    hasty = a_method(SpyRunner(), Mistaken()).propose([want], after_checks(2))
    assert {len(guess.tokens) for guess in hasty} == {3}
    assert firsts(hasty, 1) == firsts(by_model, 1)
    assert not firsts(hasty, 2).items() & firsts(by_model, 2).items()
    runner = SpyRunner()
    assert a_method(runner, Mistaken()).propose([want], never) == by_model
    assert max(len(row.tokens) for rows in runner.fed[1:] for row in rows) == 1, "guesses are never fed"


def test_whoever_waits_for_a_block_does_not_wait_for_second_thoughts():
    runner = SpyRunner()
    (block,) = a_method(runner, Mistaken()).propose([a_want((1, 2), 3)], never)
    assert len(runner.fed) == 1
    assert block.tokens[1] == int(LOGITS[block.tokens[0]].argmin())


def test_under_ratio_there_are_none():
    """A prefix has one continuation there: which version of a block is used says nothing about its tokens."""
    want = a_want((1, 2), 3, sampling=DRAWN, acceptance=Acceptance.RATIO)
    guesses = a_method(SpyRunner(), Mistaken()).propose([ahead(want)], never)
    for guess in guesses:
        tokens = (*want.tokens, *guess.outcome)
        later = replace(want, tokens=tokens, prefix_hash=guess.prefix_hash)
        (block,) = a_method(SpyRunner(), Mistaken()).propose([later], never)
        assert replace(guess, outcome=()) == block
    assert len(guesses) > 1
