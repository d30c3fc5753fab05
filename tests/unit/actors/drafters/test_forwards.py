"""Tests forward passes of a draft model with mask tokens, and with an LM head over frequent tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from actors.drafters.model.forwards import (
    FILE,
    ONE_AT_A_TIME,
    MaskTokens,
    read_frequent_tokens,
    read_mask_tokens,
    reduce_head,
)
from cluster.errors import ModelError
from protos.messages import Acceptance
from tests.unit.actors.drafters.drafting import (
    LOGITS,
    MASK,
    SAMPLINGS,
    VOCABULARY,
    MaskRunner,
    a_method,
    after_checks,
    block_of,
    propose,
    wanted_block,
)
from tests.unit.cluster.samples import GREEDY


def named(last: int, count: int) -> tuple[int, ...]:
    """Returns the model's greedy tokens after this token, three per forward pass."""
    tokens = [last]
    while len(tokens) <= count:
        known = tokens[-1]
        tokens += [int(LOGITS[(known + at) % VOCABULARY].argmax()) for at in range(3)]
    return tuple(tokens[1 : count + 1])


@pytest.mark.parametrize(("length", "forwards"), [(1, 1), (2, 1), (3, 1), (4, 2), (7, 3)])
def test_a_block_takes_a_forward_for_each_group_of_its_tokens(length, forwards):
    runner = MaskRunner()
    assert block_of(a_method(runner, masks=3), wanted_block((1, 2), length)).tokens == named(2, length)
    assert len(runner.fed) == forwards


def test_masks_are_fed_for_missing_tokens_and_then_dropped():
    """Tokens predicted by masks have not been fed, so the next forward pass feeds them."""
    runner = MaskRunner()
    method = a_method(runner, masks=3)
    block = block_of(method, wanted_block((1, 2), 5))
    (one,), (two,) = runner.fed
    assert (one.start, one.tokens, one.logits) == (0, (1, 2, MASK, MASK), 3)
    assert (two.start, two.tokens, two.logits) == (2, (*block.tokens[:3], MASK), 2)
    all_accepted = (1, 2, *block.tokens, 7)
    assert block_of(method, wanted_block(all_accepted, 2)).tokens == named(7, 2)
    assert (runner.fed[2][0].start, runner.fed[2][0].tokens) == (5, (*all_accepted[5:], MASK))
    assert runner.masks_read == 0, "no mask was left where a token belongs"


def test_a_long_prompt_leaves_masks_no_room_and_the_block_is_drafted_all_the_same():
    runner = MaskRunner()
    block = block_of(a_method(runner, masks=3, pass_tokens=4), wanted_block((1, 2, 3, 4), 3))
    assert [row.tokens for (row,) in runner.fed] == [(1, 2, 3, 4), (block.tokens[0], MASK)]
    assert block.tokens == (int(LOGITS[4].argmax()), *named(int(LOGITS[4].argmax()), 2))


@pytest.mark.parametrize("acceptance", list(Acceptance))
@SAMPLINGS
def test_blocks_ahead_are_whole_after_one_forward_more_than_the_reading(acceptance, sampling):
    runner = MaskRunner()
    want = wanted_block((1, 2), sampling=sampling, acceptance=acceptance).under((5, 6), max_tokens=3)
    guesses = propose(a_method(runner, masks=3), [want], after_checks(2))
    assert len(runner.fed) == 2
    assert len(guesses) > 1
    assert {len(guess.tokens) for guess in guesses} == {3}
    if sampling is GREEDY:
        assert all(guess.tokens == named(guess.outcome[-1], 3) for guess in guesses)
    assert runner.masks_read == 0


# ---------------------------------------------------------------- checkpoint configuration


def a_config(**extra: Any) -> LlamaConfig:
    return LlamaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, **extra)


@pytest.mark.parametrize(
    ("extra", "masks"),
    [
        *(({key: 0}, MaskTokens(0, 5)) for key in ("pard_token", "ptd_token_id", "mask_token_id")),
        ({"pard_token": 31, "tokens_per_forward": 4}, MaskTokens(31, 4)),
        ({}, ONE_AT_A_TIME),
    ],
)
def test_a_checkpoint_names_its_mask_token_and_maybe_how_many_tokens_it_predicts(extra, masks):
    assert read_mask_tokens(a_config(**extra), longest=5) == masks


def test_without_a_mask_token_nothing_is_fed_after_the_text():
    assert ONE_AT_A_TIME.after(5) == ()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        *(({"pard_token": token}, "expected an id from 0 to 31") for token in (32, "<mask>", -1)),
        *(({"pard_token": 1, "tokens_per_forward": width}, "tokens_per_forward") for width in (0, "four")),
    ],
)
def test_invalid_mask_tokens_are_refused(extra, named):
    with pytest.raises(ModelError, match=named):
        read_mask_tokens(a_config(**extra), longest=5)


# ---------------------------------------------------------------- frequent tokens


def a_model(tied: bool) -> LlamaForCausalLM:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=tied,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_a_reduced_head_keeps_the_logits_in_id_order(tied: bool) -> None:
    model = a_model(tied)
    ids = torch.tensor([1, 4, 9])
    tokens = torch.tensor([[5, 15, 2]])
    whole = model(tokens).logits
    reduce_head(model, ids)
    torch.testing.assert_close(model(tokens).logits, whole[..., ids])


@torch.inference_mode()
def test_a_bias_moves_with_its_tokens() -> None:
    model = a_model(tied=False)
    ids = torch.tensor([3, 7])
    model.set_output_embeddings(nn.Linear(8, 16, bias=True))
    whole = model(torch.tensor([[5]])).logits
    reduce_head(model, ids)
    torch.testing.assert_close(model(torch.tensor([[5]])).logits, whole[..., ids])


def test_a_tied_embedding_is_left_whole() -> None:
    """Tokens that are never proposed may still be fed."""
    model = a_model(tied=True)
    before = model.get_input_embeddings().weight.clone()
    reduce_head(model, torch.tensor([0, 3]))
    torch.testing.assert_close(model.get_input_embeddings().weight, before)
    assert model(torch.tensor([[5, 15]])).logits.shape == (1, 2, 2)


def test_a_head_that_is_no_matrix_is_refused() -> None:
    model = a_model(tied=False)
    model.set_output_embeddings(nn.Identity())
    with pytest.raises(ModelError, match="linear head to be reduced, not Identity"):
        reduce_head(model, torch.tensor([0]))


@pytest.mark.parametrize("content", [[], [16], [-1], ["a"], {"ids": [1]}])
def test_a_wrong_file_is_refused(tmp_path: Path, content: object) -> None:
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(ModelError, match=FILE):
        read_frequent_tokens(tmp_path, 16)


def test_no_file_means_the_whole_head(tmp_path: Path) -> None:
    assert read_frequent_tokens(tmp_path, 16) is None
