"""Several tokens in one forward: what is fed, what stays cached, and what a checkpoint says of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_cache import DraftCache
from actors.drafters.model.draft_model import DraftModel
from actors.drafters.model.forwards import ONE_AT_A_TIME, MaskTokens, read_mask_tokens
from actors.drafters.model.sampling import DraftingLimits
from cluster.errors import ModelError
from protos.draft_tree import DraftTree
from protos.messages import Acceptance
from tests.unit.actors.drafters.drafting import (
    DRAWN,
    LOGITS,
    PAGE_SIZE,
    VOCABULARY,
    SpyRunner,
    a_want,
    after_checks,
    never,
)
from tests.unit.actors.drafters.drafting_requests import propose
from tests.unit.cluster.samples import GREEDY

MASK = VOCABULARY  # an id that no text has
COUPLED, REJECTION = Acceptance


class MaskRunner(SpyRunner):
    """A mask token names what follows the last real token before it, one place further on."""

    def __init__(self) -> None:
        super().__init__()
        self.masks_read = 0  # that a row found cached before its own tokens

    def logits(self, rows: Sequence[InputRow], whole: list[tuple[int, ...]]) -> Tensor:
        found = []
        for row, tokens in zip(rows, whole, strict=True):
            self.masks_read += tokens[: row.start].count(MASK)
            for end in range(row.end - row.logits + 1, row.end + 1):
                known = [token for token in tokens[:end] if token != MASK]
                found.append(LOGITS[(known[-1] + tokens[:end].count(MASK)) % VOCABULARY])
        return torch.stack(found)


def a_method(runner: MaskRunner, width: int = 3, **limits: Any) -> DraftModel:
    limits = {"top_k": 4} | limits
    cache = DraftCache(64, PAGE_SIZE)
    masks = MaskTokens(MASK, width)
    return DraftModel(runner, torch.arange(VOCABULARY), cache, DraftingLimits(**limits), lambda: 0.0, masks)


def named(last: int, count: int, width: int = 3) -> tuple[int, ...]:
    """Returns the model's greedy tokens after this token, `width` at a time."""
    tokens = [last]
    while len(tokens) <= count:
        known = tokens[-1]
        tokens += [int(LOGITS[(known + at) % VOCABULARY].argmax()) for at in range(width)]
    return tuple(tokens[1 : count + 1])


@pytest.mark.parametrize(("length", "forwards"), [(1, 1), (2, 1), (3, 1), (4, 2), (7, 3)])
def test_a_block_takes_a_forward_for_each_group_of_its_tokens(length, forwards):
    runner = MaskRunner()
    (proposal,) = propose(a_method(runner), [a_want((1, 2), length)], never)
    assert proposal.tokens == named(2, length)
    assert len(runner.fed) == forwards


@pytest.mark.parametrize(("positions", "drafted"), [(2, 1), (3, 2), (4, 3), (5, 4), (1, 0)])
def test_masks_stay_within_the_model_s_positions(positions, drafted):
    runner = MaskRunner()
    (proposal,) = propose(a_method(runner, max_positions=positions), [a_want((1, 2), 6)], never)
    assert len(proposal.tokens) == drafted
    assert all(row.end <= positions for rows in runner.fed for row in rows)


def test_masks_are_fed_for_what_is_still_missing_and_forgotten_after():
    """Tokens named by masks were never fed themselves, so that they come with what follows."""
    runner = MaskRunner()
    method = a_method(runner)
    (first,) = propose(method, [a_want((1, 2), 5)], never)
    (one,), (two,) = runner.fed
    assert (one.start, one.tokens, one.logits) == (0, (1, 2, MASK, MASK), 3)
    assert (two.start, two.tokens, two.logits) == (2, (*first.tokens[:3], MASK), 2)
    all_accepted = (1, 2, *first.tokens, 7)
    (second,) = propose(method, [a_want(all_accepted, 2)], never)
    assert (runner.fed[2][0].start, runner.fed[2][0].tokens) == (5, (*all_accepted[5:], MASK))
    assert second.tokens == named(7, 2)
    assert runner.masks_read == 0, "no mask was left where a token belongs"


def test_what_comes_to_its_end_does_not_stop_the_others():
    runner = MaskRunner()
    wants = [a_want((1,), 1, "a"), a_want((2, 3), 4, "b"), a_want((4,), 2, "c")]
    proposals = propose(a_method(runner), wants, never)
    assert [p.tokens for p in proposals] == [named(1, 1), named(3, 4), named(4, 2)]
    assert [len(rows) for rows in runner.fed] == [3, 1]


def test_a_long_prompt_leaves_masks_no_room_and_the_block_is_drafted_all_the_same():
    runner = MaskRunner()
    (proposal,) = propose(a_method(runner, pass_tokens=4), [a_want((1, 2, 3, 4), 3)], never)
    assert [row.tokens for (row,) in runner.fed] == [(1, 2, 3, 4), (proposal.tokens[0], MASK)]
    assert proposal.tokens == (int(LOGITS[4].argmax()), *named(int(LOGITS[4].argmax()), 2))


@pytest.mark.parametrize("acceptance", list(Acceptance))
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_blocks_ahead_are_whole_after_one_forward_more_than_the_reading(acceptance, sampling):
    runner = MaskRunner()
    want = replace(a_want((1, 2), 3, sampling=sampling, acceptance=acceptance), unverified=DraftTree.chain((5, 6)))
    guesses = propose(a_method(runner), [want], after_checks(2))
    assert len(runner.fed) == 2
    assert len(guesses) > 1
    assert {len(guess.tokens) for guess in guesses} == {3}
    if sampling is GREEDY:
        assert all(guess.tokens == named(guess.outcome[-1], 3) for guess in guesses)
    assert runner.masks_read == 0


def test_doubt_cuts_a_group_and_what_was_named_after_it_is_dropped():
    (proposal,) = propose(a_method(MaskRunner(), min_confidence=1.0), [a_want((1,), 3)], never)
    assert proposal.tokens == named(1, 1)


def test_under_ratio_each_token_follows_the_draft_probs_sent_for_it():
    want = a_want((1,), 3, sampling=DRAWN, acceptance=REJECTION)
    for seed in range(20):
        seeded = replace(want, open=replace(want.open, seed=seed))
        (proposal,) = propose(a_method(MaskRunner()), [seeded], never)
        assert proposal.tree.probs is not None
        rows = zip(proposal.tokens, proposal.tree.probs.token_ids, proposal.tree.probs.weights, strict=True)
        for at, (token, ids, weights) in enumerate(rows):
            probs = torch.softmax(LOGITS[1 + at], -1)[list(ids)]
            assert token in ids
            assert torch.allclose(torch.tensor(weights) / sum(weights), probs / probs.sum(), atol=1e-4)
        shorter = replace(seeded, max_tokens=2)
        (cut,) = propose(a_method(MaskRunner()), [shorter], never)
        assert cut.tokens == proposal.tokens[:2], "a shorter block is the same block"


# ---------------------------------------------------------------- what a checkpoint says


def a_config(**extra: Any) -> LlamaConfig:
    return LlamaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, **extra)


@pytest.mark.parametrize("key", ["pard_token", "ptd_token_id", "mask_token_id"])
def test_the_mask_token_is_found_under_each_makers_name(key):
    assert read_mask_tokens(a_config(**{key: 0}), longest=5) == MaskTokens(0, 5)


def test_a_checkpoint_may_say_how_many_tokens_it_was_trained_to_name():
    assert read_mask_tokens(a_config(pard_token=31, tokens_per_forward=4), longest=9) == MaskTokens(31, 4)


def test_a_checkpoint_without_a_mask_token_names_one_at_a_time():
    assert read_mask_tokens(a_config(), longest=5) == ONE_AT_A_TIME
    assert ONE_AT_A_TIME.after(5) == ()


@pytest.mark.parametrize("extra", [{"pard_token": 32}, {"pard_token": "<mask>"}, {"pard_token": -1}])
def test_a_mask_token_that_the_model_lacks_is_refused(extra):
    with pytest.raises(ModelError, match="expected an id from 0 to 31"):
        read_mask_tokens(a_config(**extra), longest=5)


@pytest.mark.parametrize("width", [0, "four"])
def test_a_width_that_is_none_is_refused(width):
    with pytest.raises(ModelError, match="tokens_per_forward"):
        read_mask_tokens(a_config(pard_token=1, tokens_per_forward=width), longest=5)
