"""Tests drafting with a model: fed tokens, proposals, and the inputs that a proposal may depend on.

`test_methods.py` covers behavior common to all methods.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from actors.sampling.acceptance import DrawAddress
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling, Shape, TokenRules
from tests.sampling_reference import draw, process
from tests.unit.actors.drafters.drafting import (
    COUPLED,
    DRAWN,
    LOGITS,
    PAGE_SIZE,
    REJECTION,
    RULES,
    SAMPLINGS,
    VOCABULARY,
    Following,
    MaskRunner,
    SpyRunner,
    Trusting,
    a_method,
    block_of,
    greedy,
    propose,
    wanted_block,
)
from tests.unit.cluster.samples import GREEDY

ACCEPTANCES = pytest.mark.parametrize("acceptance", list(Acceptance))

# ---------------------------------------------------------------- the cache


def test_after_a_verdict_only_new_tokens_are_fed():
    """One token is fed after a rejection, and two after full acceptance, because the last draft token was not fed."""
    runner = SpyRunner()
    method = a_method(runner)
    block = block_of(method, wanted_block((1, 2)))
    assert [(row.start, len(row.tokens)) for (row,) in runner.fed] == [(0, 2), (2, 1), (3, 1)]
    all_accepted = (1, 2, *block.tokens, (block.tokens[-1] + 1) % VOCABULARY)
    block = block_of(method, wanted_block(all_accepted))
    assert (runner.fed[3][0].start, runner.fed[3][0].tokens) == (4, all_accepted[4:])
    one_accepted = (*all_accepted, block.tokens[0], (block.tokens[1] + 1) % VOCABULARY)
    block_of(method, wanted_block(one_accepted))
    assert (runner.fed[6][0].start, runner.fed[6][0].tokens) == (7, one_accepted[7:])


def test_a_reopened_session_with_other_tokens_feeds_from_where_they_differ():
    runner = SpyRunner()
    method = a_method(runner)
    block_of(method, wanted_block((1, 2, 3), 1))
    assert block_of(method, wanted_block((1, 7), 1)).tokens == greedy(7, 1)
    assert (runner.fed[1][0].start, runner.fed[1][0].tokens) == (1, (7,))
    block_of(method, wanted_block((1, 7), 1))
    assert runner.fed[2][0].tokens == (7,), "a full hit still computes one token"


@pytest.mark.parametrize(
    ("options", "rows"),
    [({}, [4, 3, 2]), ({"masks": 3}, [4]), ({"head": Following()}, [4])],
    ids=["model", "masks", "head"],
)
def test_sessions_are_drafted_together_and_leave_as_their_blocks_end(options, rows):
    runner = MaskRunner() if "masks" in options else SpyRunner()
    wants = [
        wanted_block((1,), 1, "a"),
        wanted_block((2,), 3, "b"),
        wanted_block((3,), 2, "c"),
        wanted_block((4,), 3, "d"),
    ]
    proposals = propose(a_method(runner, **options), wants)
    assert [len(fed) for fed in runner.fed] == rows
    assert [len(proposal.tokens) for proposal in proposals] == [1, 3, 2, 3]
    if "head" in options:
        assert options["head"].asked == [[2, 3, 4], [proposals[1].tokens[0], proposals[3].tokens[0]]]


def test_a_session_that_finds_no_page_gets_no_block_and_others_do():
    """All sessions are busy, so the one with the most tokens to read gets no block in this pass."""
    method = a_method(SpyRunner(), pages=3)
    wants = [wanted_block((1,) * 7, session="a"), wanted_block((2, 3), session="b"), wanted_block((4,), session="c")]
    assert [block.tokens for block in propose(method, wants)] == [(), greedy(3, 3), greedy(4, 3)]
    method.close(["a"])
    assert block_of(method, wants[2]).tokens == greedy(4, 3)


@pytest.mark.parametrize(
    ("masks", "length", "drafted"),
    [(1, 3, 3), (1, 5, 3), (1, 6, 2), (1, 7, 1), (1, 8, 0), (1, 20, 0), (3, 5, 3), (3, 6, 2), (3, 7, 1), (3, 8, 0)],
)
def test_a_block_ends_at_the_model_s_positions(masks, length, drafted):
    """The token at the last position predicts one more token: 7 positions reach a text of 8 tokens."""
    runner = MaskRunner() if masks > 1 else SpyRunner()
    method = a_method(runner, max_positions=7, masks=masks)
    block, other = propose(method, [wanted_block((1,) * length), wanted_block((4,), session="short")])
    assert len(block.tokens) == drafted
    assert len(other.tokens) == 3, "a short session beside a long one gets its block"
    assert max(row.end for rows in runner.fed for row in rows) <= 7


def test_a_session_that_outgrows_the_model_s_positions_gets_no_more_blocks():
    method = a_method(SpyRunner(), max_positions=6)
    want = wanted_block((1, 2))
    sizes = []
    while len(want.tokens) < 10:
        block = block_of(method, want)
        if block.tokens:
            propose(method, [want.under(block.tree, max_tokens=3)])
        sizes.append(len(block.tokens))
        want = want.after(7)
    assert sizes == [3, 3, 3, 2, 1, 0, 0, 0]
    method.close(["s"])
    assert method.is_idle


def test_a_prompt_that_another_session_has_decided_is_not_fed_again():
    """Sessions share whole pages of decided tokens, but never drafts, which may be wrong."""
    runner = SpyRunner()
    method = a_method(runner)
    prompt = tuple(i % VOCABULARY for i in range(2 * PAGE_SIZE + 2))
    block_of(method, wanted_block(prompt, 3 * PAGE_SIZE, "a"))
    fed = len(runner.fed)
    block = block_of(method, wanted_block(prompt, session="b"))
    (row,) = runner.fed[fed]
    assert (row.start, row.tokens) == (2 * PAGE_SIZE, prompt[2 * PAGE_SIZE :])
    assert block.tokens == greedy(prompt[-1], 3)
    drafted = runner.read[fed - 1]  # all cached tokens of a, including drafts
    block_of(method, wanted_block((*drafted, 1), session="c"))
    assert runner.fed[-3][0].start == 2 * PAGE_SIZE


@pytest.mark.parametrize("head", [False, True], ids=["model", "head"])
def test_a_long_prompt_is_read_over_several_passes_and_delays_no_other_session(head):
    runner = SpyRunner()
    method = a_method(runner, pass_tokens=8, head=Following() if head else None)
    wants = [wanted_block((1,) * 15 + (2,), session="long"), wanted_block((2, 3), session="short")]
    blocks = [[block.tokens for block in propose(method, wants)] for _ in range(3)]
    assert blocks == [[(), greedy(3, 3)], [(), greedy(3, 3)], [greedy(2, 3), greedy(3, 3)]]
    assert max(sum(len(row.tokens) for row in rows) for rows in runner.fed) <= 8


# ---------------------------------------------------------------- proposals


@pytest.mark.parametrize("head", [False, True], ids=["model", "head"])
def test_coupled_drafts_are_the_targets_draws_when_the_models_agree(head):
    """Both use the same noise; a wrong seed, choice or position would reduce acceptance but not correctness."""
    for seed in range(20):
        method = a_method(SpyRunner(), head=Following() if head else None, calibration=Trusting())
        block = block_of(method, wanted_block((1, 2, 3), 4, sampling=DRAWN, seed=seed, choice=seed % 3))
        before = torch.tensor([3, *block.tokens])
        own = draw(LOGITS[before], DraftTree.chain(block.tokens), DrawAddress(seed, seed % 3, 3))
        assert tuple(own[:4]) == block.tokens


def test_penalties_count_generated_and_drafted_tokens_but_not_the_prompt():
    """The drafter applies the target's penalties; otherwise the target would reject its drafts."""
    sampling = Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0)
    block = block_of(a_method(SpyRunner()), wanted_block((1, 2, 2), 5, prompt_len=2, sampling=sampling))
    generated = [2]
    for token in block.tokens:
        assert token == int(process(LOGITS[[generated[-1]]], sampling, generated)[0].argmax())
        generated.append(token)
    assert len(set(block.tokens)) > 1


@ACCEPTANCES
@SAMPLINGS
def test_masked_ids_are_never_proposed_and_carry_no_weight(acceptance, sampling):
    """Masked ids are missing in the target's vocabulary, even if the draft model prefers them."""
    liked = LOGITS.clone()
    liked[:, [3, 9]] = 50.0
    kept = [0, 1, 2, 4, 5, 6, 7, 8]
    for seed in range(30):
        want = wanted_block((1,), 4, sampling=sampling, seed=seed, acceptance=acceptance)
        block = block_of(a_method(SpyRunner(liked[:, kept]), kept, top_k=10), want)
        assert not {3, 9} & set(block.tokens)
        if block.tree.probs is not None:
            rows = zip(block.tree.probs.token_ids, block.tree.probs.weights, strict=True)
            assert all(not {3, 9} & {i for i, w in zip(*row, strict=True) if w} for row in rows)


@pytest.mark.parametrize("masks", [1, 3])
@pytest.mark.parametrize(("acceptance", "sampling"), [(COUPLED, DRAWN), (COUPLED, GREEDY), (REJECTION, GREEDY)])
def test_doubt_ends_a_block_early_but_never_before_its_first_token(acceptance, sampling, masks):
    def method(**limits: Any) -> Any:
        return a_method(MaskRunner() if masks > 1 else SpyRunner(), masks=masks, **limits)

    want = wanted_block((1,), 5, sampling=sampling, acceptance=acceptance)
    block = block_of(method(min_confidence=1.0), want)
    assert block.tokens == block_of(method(), want).tokens[:1]
    assert block.tree.probs is None
    under = want.under((5, 6))
    assert {len(guess.tokens) for guess in propose(method(min_confidence=1.0), [under])} == {4}, "nobody waits for them"
    doubted = propose(method(), [replace(under, least_chance=0.3)])
    assert {guess.outcome for guess in doubted} <= {guess.outcome for guess in propose(method(), [under])}


def test_with_rejection_sampling_doubt_shortens_no_block():
    """Dropping a drawn token because of its value would bias the text."""
    for seed in range(30):
        want = wanted_block((1,), 4, sampling=DRAWN, seed=seed, acceptance=REJECTION)
        assert len(block_of(a_method(SpyRunner(), min_confidence=0.9), want).tokens) == 4


@ACCEPTANCES
@SAMPLINGS
def test_a_text_with_tokens_that_are_never_proposed_can_be_penalized(acceptance, sampling):
    """The target may choose ids beyond the draft's vocabulary, and penalties must not index them."""
    penalized = replace(sampling, presence_penalty=2.0)
    want = wanted_block((1, 9, 9), 3, prompt_len=1, sampling=penalized, acceptance=acceptance)
    block = block_of(a_method(SpyRunner(LOGITS[:, :5]), range(5)), want)
    assert len(block.tokens) == 3
    assert max(block.tokens) < 5


def test_draft_probs_have_the_agreed_width_even_when_less_is_allowed():
    """A request's smaller top_k leaves fewer entries, and padding must have no weight."""
    block = block_of(a_method(SpyRunner()), wanted_block((1,), 2, sampling=Sampling(top_k=2), acceptance=REJECTION))
    for ids, weights in zip(block.tree.probs.token_ids, block.tree.probs.weights, strict=True):
        assert len(ids) == len(weights) == 4
        assert [weight > 0 for weight in weights] == [True, True, False, False]
        assert max(weights) < 1 << 16


# ---------------------------------------------------------------- extreme numbers


@pytest.mark.parametrize("temperature", [1e-39, 1e-300], ids=["subnormal in float32", "zero in float32"])
@ACCEPTANCES
def test_a_temperature_near_zero_does_not_end_the_drafter(acceptance, temperature):
    """A single such request must not end the drafting loop."""
    want = wanted_block((1,), 3, sampling=Sampling(temperature=temperature), acceptance=acceptance)
    assert block_of(a_method(SpyRunner()), want).tokens == greedy(1, 3)


def broken_after(token: int, value: float = torch.nan) -> SpyRunner:
    """Returns a model with nonfinite logits after one token."""
    table = LOGITS.clone()
    table[token, 3] = value
    return SpyRunner(table)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@RULES
def test_nothing_is_proposed_after_nonfinite_logits(acceptance, sampling, value, caplog):
    """This includes sessions whose rules allow only finite logits; other sessions of the pass continue."""
    rules = {"sampling": sampling, "acceptance": acceptance}
    wants = [
        wanted_block((1, 2), session="bad", **rules),
        wanted_block((1, 2), session="ruled", rules=TokenRules(allowed=(0, 1)), **rules),
        wanted_block((1, 2), session="tree", shape=Shape.TREE),
        wanted_block((5,), 1, session="good", **rules),
    ]
    *bad, good = propose(a_method(broken_after(2, value)), wants)
    assert [block.tree for block in bad] == [NO_TREE] * 3
    assert good == block_of(a_method(SpyRunner()), wants[3])
    assert caplog.text.count("NaN or infinite") == 1


@RULES
def test_a_block_ends_where_its_logits_are_not_finite(acceptance, sampling):
    want = wanted_block((1,), 3, sampling=sampling, acceptance=acceptance)
    whole = block_of(a_method(SpyRunner()), want)
    assert block_of(a_method(broken_after(whole.tokens[0])), want).tree == whole.tree.first(1)


# ---------------------------------------------------------------- trees


@SAMPLINGS
def test_a_tree_continues_siblings_as_the_model_would(sampling):
    """A node's children include the model's top token; branches share the forward passes of a chain."""
    deep = 0
    for seed in range(12):
        want = wanted_block((1, 2), 8, sampling=sampling, seed=seed)
        runner = SpyRunner()
        method = a_method(runner)
        tree = block_of(method, replace(want, shape=Shape.TREE)).tree
        branches = [path for path in tree.paths if tree.tokens[path[0]] != tree.main_path[0] and len(path) > 1]
        for path in branches:
            tokens = tuple(tree.tokens[node] for node in path)
            later = wanted_block((1, 2, *tokens[:-1]), 1, sampling=sampling, seed=seed)
            assert block_of(a_method(SpyRunner()), later).tokens[0] in tree.children(path[-2])
            deep += 1
        plain = SpyRunner()
        block_of(a_method(plain), want)
        assert len(runner.fed) <= len(plain.fed), "no forward is made for branches alone"
        method.close(["s"])
        assert method.is_idle
    assert deep > 3
