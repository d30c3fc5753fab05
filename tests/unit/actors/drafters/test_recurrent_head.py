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
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from actors.compute.kv_cache import InputRow
from actors.drafters.model import sampling
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import GUESS_TOKENS, GUESSED, DraftModel
from actors.drafters.model.recurrent_head import FILE, RecurrentHead, load_recurrent_head
from actors.drafters.model.sampling import DraftingLimits
from actors.engine.runner import ModelRunner
from actors.models.decoder import ForwardOutput, decoder_for
from actors.sampling.gumbel import Purpose, gumbel_argmax, key
from cluster.drafting.lookahead import AHEAD_ROWS
from cluster.drafting.requests import Proposal
from cluster.errors import ModelError
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting import DRAWN, LOGITS, PAGE_SIZE, VOCABULARY, SpyRunner, a_want, never
from tests.unit.actors.drafters.drafting_requests import Want, propose
from tests.unit.cluster.samples import GREEDY, KEY

HIDDEN = 8
WIDE = 12
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


def head_in(folder: Path, model: PreTrainedModel) -> RecurrentHead | None:
    return load_recurrent_head(folder, model, decoder_for(model), width=3)


@torch.inference_mode()
def test_each_state_is_made_of_the_one_before_and_of_the_token_that_was_taken(tmp_path: Path) -> None:
    """Compares with the formula over transformers' hidden states, also after rows have left."""
    weights = some_weights()
    model = a_model()
    save_file(weights, tmp_path / FILE)
    head = head_in(tmp_path, a_model())
    assert head is not None
    runner = ModelRunner(a_model(), 8, 4)
    rows = [InputRow((1, 2, 3), 0, 1, (0,)), InputRow((4, 5), 0, 1, (1,)), InputRow((6,), 0, 1, (2,))]
    states = torch.cat([model.model(torch.tensor([row.tokens])).last_hidden_state[0, -1:] for row in rows])
    logits, found, _ = runner.forward(rows)
    torch.testing.assert_close(logits, model.lm_head(states), atol=1e-5, rtol=1e-5)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (HIDDEN,), weights[name], model.config.rms_norm_eps)

    for kept, taken in (([0, 2], [9, 11]), ([1], [13])):
        embedded = model.model.embed_tokens(torch.tensor(taken))
        inputs = torch.cat((norm(states[kept], "state_norm.weight"), norm(embedded, "token_norm.weight")), -1)
        gate, up = (inputs @ weights["gate_up.weight"].T).chunk(2, -1)
        states = states[kept] + (F.silu(gate) * up) @ weights["down.weight"].T
        assert found is not None
        logits, found, _ = head.predict_next(found[kept], taken)
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
    with pytest.raises(ModelError, match="Llama kind, not Gemma2ForCausalLM"):
        head_in(tmp_path, Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, head_dim=4)))


# ---------------------------------------------------------------- blocks


class Following:
    """Further tokens by the same table of logits, so that blocks are those of a forward for each token.

    A state is the token that its logits were read after.
    """

    def __init__(self, width: int = 3) -> None:
        self.width = width
        self.asked: list[list[int]] = []  # states, of each call

    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        self.asked.append(states[:, 0].tolist())
        return ForwardOutput(LOGITS[torch.tensor(tokens)], torch.tensor(tokens).unsqueeze(1))


def a_method(runner: SpyRunner, head: type[Following] | None, **limits: Any) -> DraftModel:
    return with_head(runner, head() if head else None, **limits)


def with_head(runner: SpyRunner, further: Following | None, **limits: Any) -> DraftModel:
    limits = {"top_k": 4} | limits
    cache = DraftCache(64, PAGE_SIZE)

    def clock() -> float:
        return float(len(runner.fed))

    return DraftModel(runner, torch.arange(VOCABULARY), cache, DraftingLimits(**limits), clock, head=further)


def within(want: Want, forwards: int) -> Want:
    """The same, if there is time for so many forwards."""
    return replace(want, until=float(forwards))


@pytest.mark.parametrize(("length", "forwards"), [(1, 1), (3, 1), (4, 2), (7, 3)])
@pytest.mark.parametrize("acceptance", list(Acceptance))
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_blocks_are_those_of_a_forward_each_in_fewer_forwards(length, forwards, acceptance, sampling):
    """The head continues from drawn tokens, and their draft_probs match, under every rule."""
    want = a_want((1, 2), length, sampling=sampling, acceptance=acceptance)
    runner = SpyRunner()
    assert propose(a_method(runner, Following), [want], never) == propose(a_method(SpyRunner(), None), [want], never)
    assert len(runner.fed) == forwards


def test_coupled_further_tokens_are_drawn_with_the_noise_of_their_positions(monkeypatch):
    monkeypatch.setattr(sampling, "SAMPLED", (1.0, 1.0, -9.0, 0.0))  # what a draft is worth that is never wrong
    want = a_want((1, 2), 3, sampling=DRAWN, seed=5)
    (proposal,) = propose(a_method(SpyRunner(), Following), [want], never)
    before = (2, *proposal.tokens)
    for at, token in enumerate(proposal.tokens):
        assert token == gumbel_argmax(LOGITS[before[at]], key(5, 0, 2 + at, Purpose.DRAW))


def test_who_is_done_leaves_and_the_others_go_on_from_their_own_states():
    wants = [a_want((1,), 1, "a"), a_want((2,), 3, "b"), a_want((3,), 2, "c"), a_want((4,), 3, "d")]
    runner = SpyRunner()
    further = Following()
    proposals = propose(with_head(runner, further), wants, never)
    assert proposals == propose(a_method(SpyRunner(), None), wants, never)
    assert further.asked == [[2, 3, 4], [proposals[1].tokens[0], proposals[3].tokens[0]]]


def test_what_is_not_read_to_its_end_yet_is_not_gone_on_from():
    runner = SpyRunner()
    further = Following()
    wants = [a_want((1,) * 9, session="long"), a_want((2, 3), session="short")]
    (long, short) = propose(with_head(runner, further, pass_tokens=8), wants, never)
    assert (len(long.tokens), len(short.tokens)) == (0, 3)
    assert further.asked == [[3], [short.tokens[0]]]


def test_doubt_ends_a_block_at_any_of_its_tokens():
    want = a_want((1,), 3)
    for confidence in (0.0, 0.1, 0.3, 1.0):
        methods = [a_method(SpyRunner(), head, min_confidence=confidence) for head in (None, Following)]
        found = [propose(method, [want], never) for method in methods]
        assert found[0] == found[1]


def test_blocks_ahead_are_whole_after_one_forward_more_than_the_reading():
    runner = SpyRunner()
    guesses = propose(a_method(runner, Following), [within(ahead(a_want((1, 2), 3)), 2)], never)
    assert len(runner.fed) == 2
    assert {len(guess.tokens) for guess in guesses[:AHEAD_ROWS]} == {3}
    assert {len(guess.tokens) for guess in guesses[AHEAD_ROWS:]} == {GUESS_TOKENS}, "less likely, and named by the head"


# ---------------------------------------------------------------- second thoughts


class Mistaken(Following):
    """Likes best what the model likes least."""

    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        output = super().predict_next(states, tokens)
        return output._replace(logits=-output.logits)


def ahead(want: Want) -> Want:
    return replace(want, unverified=DraftTree.chain((5, 6)))


def firsts(guesses: Sequence[Proposal], count: int) -> dict[tuple[int, ...], tuple[int, ...]]:
    """Returns the first tokens of each outcome's block."""
    return {guess.outcome: guess.tokens[:count] for guess in guesses}


def test_while_there_is_time_forwards_name_anew_what_the_head_named():
    """One token of each block a forward, so that an interruption leaves whole blocks, the better the later it comes."""
    want = ahead(a_want((1, 2), 3))
    by_model = propose(a_method(SpyRunner(), None), [want], never)
    hasty = propose(a_method(SpyRunner(), Mistaken), [within(want, 2)], never)[:AHEAD_ROWS]
    assert {len(guess.tokens) for guess in hasty} == {3}
    assert firsts(hasty, 1).items() <= firsts(by_model, 1).items()
    assert not firsts(hasty, 2).items() & firsts(by_model, 2).items()
    runner = SpyRunner()
    assert {*by_model} <= {*propose(a_method(runner, Mistaken), [want], never)}
    assert max(len(row.tokens) for rows in runner.fed[1:] for row in rows) == 1, "guesses are never fed"


def test_whoever_waits_for_a_block_does_not_wait_for_second_thoughts():
    runner = SpyRunner()
    (block,) = propose(a_method(runner, Mistaken), [a_want((1, 2), 3)], never)
    assert len(runner.fed) == 1
    assert block.tokens[1] == int(LOGITS[block.tokens[0]].argmin())


def test_under_ratio_there_are_none():
    """A prefix has one continuation there: which version of a block is used says nothing about its tokens."""
    want = a_want((1, 2), 3, sampling=DRAWN, acceptance=Acceptance.REJECTION)
    guesses = propose(a_method(SpyRunner(), Mistaken), [ahead(want)], never)
    for guess in guesses:
        tokens = (*want.tokens, *guess.outcome)
        later = replace(want, tokens=tokens, prefix_hash=guess.prefix_hash)
        (block,) = propose(a_method(SpyRunner(), Mistaken), [later], never)
        assert replace(guess, outcome=()) == block
    assert len(guesses) > 1


# ---------------------------------------------------------------- first thoughts


def test_the_head_names_blocks_for_all_outcomes_before_the_model_names_any():
    """Blocks start after an outcome's last token, although no forward has read it."""
    runner = SpyRunner()
    want = ahead(a_want((1, 2), 3))
    guesses = propose(a_method(runner, Following), [within(want, 1)], never)
    assert len(runner.fed) == 1, "the block under verification was read, and nothing else"
    assert len(guesses) > 8
    for guess in guesses:
        later = replace(want, tokens=(1, 2, *guess.outcome), prefix_hash=guess.prefix_hash, unverified=None)
        (block,) = propose(a_method(SpyRunner(), None), [replace(later, max_tokens=GUESS_TOKENS)], never)
        assert replace(guess, outcome=()) == block


def test_of_many_outcomes_the_likeliest_are_named():
    wants = [within(ahead(a_want((1, 2, i), 3, session=str(i))), 1) for i in range(4)]
    guesses = propose(a_method(SpyRunner(), Following), wants, never)
    assert len(guesses) == GUESSED
    assert len({guess.session for guess in guesses}) == 4


def test_under_ratio_the_model_names_all_first_tokens():
    """A prefix must keep its continuation, whoever had time for what."""
    want = within(ahead(a_want((1, 2), 3, sampling=DRAWN, acceptance=Acceptance.REJECTION)), 1)
    assert propose(a_method(SpyRunner(), Following), [want], never) == []


@pytest.mark.parametrize("steps", range(GUESS_TOKENS + 1))
def test_whatever_is_wanted_for_sure_interrupts_the_head_too(steps):
    runner = SpyRunner()
    further = Following()
    want = ahead(a_want((1, 2), 3))
    guesses = propose(with_head(runner, further), [want], lambda: len(further.asked) == steps and bool(runner.fed))
    assert len(further.asked) == steps
    assert {len(guess.tokens) for guess in guesses} == ({steps} if steps else set())


def test_thoughts_are_told_early_and_better_ones_after_them():
    told: list[list[Proposal]] = []
    want = ahead(a_want((1, 2), 3))
    last = propose(a_method(SpyRunner(), Mistaken), [want], never, told.append)
    assert len(told) > 2
    assert told[-1] == last
    by_model = firsts(last, 1)
    right = [sum(by_model[outcome] == first for outcome, first in firsts(guesses, 1).items()) for guesses in told]
    assert right == sorted(right)
    assert right[0] < right[-1] == len(by_model)


# ---------------------------------------------------------------- at once


@pytest.mark.parametrize("outcome", [(1,), (5, 2), (5, 6, 3)], ids=["none stands", "one stands", "all stand"])
def test_after_a_verdict_that_was_not_guessed_the_head_names_a_block_without_a_forward(outcome):
    """It has the state that the last token was decided after: the block under verification was read meanwhile."""
    runner = SpyRunner()
    want = a_want((1, 2), 3)
    method = a_method(runner, Following)
    propose(method, [within(ahead(want), 1)], never)
    read = len(runner.fed)
    later = after(want, *outcome)
    (block,) = propose(method, [later], never)
    assert len(runner.fed) == read
    (by_model,) = propose(a_method(SpyRunner(), None), [replace(later, max_tokens=GUESS_TOKENS)], never)
    assert block == replace(by_model, is_at_once=True)
    (ahead_again,) = [replace(later, unverified=block.tree)]
    propose(method, [within(ahead_again, len(runner.fed) + 1)], never)
    assert runner.read[-1] == (*later.tokens, *block.tokens), "the forward that was saved is made up for"


def test_after_an_accepted_token_beside_the_first_too():
    runner = SpyRunner()
    want = replace(a_want((1, 2), 3), shape=Shape.TREE)
    method = a_method(runner, Following)
    propose(method, [within(replace(ahead(want), unverified=DraftTree((5, 6, 7, 8), (-1, 0, -1, -1))), 1)], never)
    read = len(runner.fed)
    later = replace(after(want, 8, 3), shape=Shape.CHAIN)
    (block,) = propose(method, [later], never)
    assert len(runner.fed) == read
    (by_model,) = propose(a_method(SpyRunner(), None), [replace(later, max_tokens=GUESS_TOKENS)], never)
    assert block == replace(by_model, is_at_once=True)


def test_what_was_not_read_in_time_is_read_after_the_verdict():
    runner = SpyRunner()
    want = a_want((1, 2), 3)
    method = a_method(runner, Following)
    propose(method, [ahead(want)], lambda: True)
    (block,) = propose(method, [after(want, 5, 2)], never)
    assert len(runner.fed) == 1
    assert len(block.tokens) == 3


def test_where_one_session_needs_a_forward_all_have_it():
    runner = SpyRunner()
    want = a_want((1, 2), 3)
    other = a_want((3, 4), 3, session="new")
    method = a_method(runner, Following)
    propose(method, [within(ahead(want), 1)], never)
    blocks = propose(method, [after(want, 5, 2), other], never)
    assert {len(block.tokens) for block in blocks} == {3}
    assert not any(block.is_at_once for block in blocks)


def test_what_was_read_is_of_no_use_where_the_same_block_is_wanted_again():
    """Simulates a broken stream: no token has been committed since."""
    runner = SpyRunner()
    want = a_want((1, 2), 3)
    method = a_method(runner, Mistaken)
    propose(method, [within(ahead(want), 1)], never)
    (block,) = propose(method, [want], never)
    assert block.tokens[0] == int(LOGITS[2].argmax())


def test_under_ratio_nothing_is_named_at_once():
    runner = SpyRunner()
    want = a_want((1, 2), 3, sampling=DRAWN, acceptance=Acceptance.REJECTION)
    method = a_method(runner, Following)
    propose(method, [within(ahead(want), 1)], never)
    read = len(runner.fed)
    propose(method, [after(want, 5, 2)], never)
    assert len(runner.fed) == read + 1


def after(want: Want, *tokens: int) -> Want:
    """The want for a block once the verdict has brought these."""
    whole = (*want.tokens, *tokens)
    return replace(want, tokens=whole, prefix_hash=Prefix(KEY, whole).hash, unverified=None)


class BrokenFurther(Following):
    """Predicts nothing finite."""

    def predict_next(self, states: Tensor, tokens: Sequence[int]) -> ForwardOutput:
        output = super().predict_next(states, tokens)
        return output._replace(logits=torch.full_like(output.logits, torch.nan))


@pytest.mark.parametrize("shape", Shape)
def test_a_head_whose_logits_are_not_finite_leaves_what_the_model_drafted(shape):
    want = replace(a_want((1, 2), 3), shape=shape)
    method = with_head(SpyRunner(), BrokenFurther())
    (block,) = propose(method, [want], never)
    (alone,) = propose(a_method(SpyRunner(), None), [want], never)
    assert block.tokens[:1] == alone.tokens[:1]
    ahead = replace(want, max_tokens=want.open.draft_tokens, unverified=block.tree)
    assert all(guess.tokens for guess in propose(method, [ahead], never))
    after = (*want.tokens, block.tokens[0], 4)
    (next_block,) = propose(method, [replace(want, tokens=after, prefix_hash=Prefix(KEY, after).hash)], never)
    assert next_block.tokens
