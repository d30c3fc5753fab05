"""Drafting with a model: what is fed, what is proposed, and what a proposal may depend on."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from actors.drafters.model import sampling
from actors.sampling.filters import process
from actors.sampling.reference import DrawAddress, draw
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Sampling, Shape, TokenRules
from tests.unit.actors.drafters.drafting import (
    DRAWN,
    LOGITS,
    PAGE_SIZE,
    VOCABULARY,
    PrefixRunner,
    SpyRunner,
    a_method,
    a_want,
    never,
)
from tests.unit.actors.drafters.drafting_requests import propose
from tests.unit.cluster.samples import GREEDY

COUPLED, REJECTION = Acceptance


def greedy(last: int, count: int) -> tuple[int, ...]:
    tokens = [last]
    for _ in range(count):
        tokens.append(int(LOGITS[tokens[-1]].argmax()))
    return tuple(tokens[1:])


# ---------------------------------------------------------------- the cache


def test_after_a_verdict_only_what_is_new_is_fed():
    """One token after a rejection; two after full acceptance, for the last draft token was never fed."""
    runner = SpyRunner()
    method = a_method(runner)
    (first,) = propose(method, [a_want((1, 2))], never)
    assert [(row.start, len(row.tokens)) for (row,) in runner.fed] == [(0, 2), (2, 1), (3, 1)]
    bonus = (first.tokens[-1] + 1) % VOCABULARY
    all_accepted = (1, 2, *first.tokens, bonus)
    (second,) = propose(method, [a_want(all_accepted)], never)
    assert (runner.fed[3][0].start, runner.fed[3][0].tokens) == (4, all_accepted[4:])
    one_accepted = (*all_accepted, second.tokens[0], (second.tokens[1] + 1) % VOCABULARY)
    (third,) = propose(method, [a_want(one_accepted)], never)
    assert (runner.fed[6][0].start, runner.fed[6][0].tokens) == (7, one_accepted[7:])
    assert third.tokens == greedy(one_accepted[-1], 3), "and what is left in the cache does not show"


def test_a_reopened_session_with_other_tokens_feeds_from_where_they_differ():
    runner = SpyRunner()
    method = a_method(runner)
    propose(method, [a_want((1, 2, 3), max_tokens=1)], never)
    (proposal,) = propose(method, [a_want((1, 7), max_tokens=1)], never)
    assert (runner.fed[1][0].start, runner.fed[1][0].tokens) == (1, (7,))
    assert proposal.tokens == greedy(7, 1)
    propose(method, [a_want((1, 7), max_tokens=1)], never)
    assert runner.fed[2][0].tokens == (7,), "a full hit still computes one token"


def test_sessions_are_drafted_together_and_leave_as_their_blocks_end():
    runner = SpyRunner()
    wants = [a_want((1,), 1, "a"), a_want((2, 3), 3, "b"), a_want((4,), 2, "c")]
    proposals = propose(a_method(runner), wants, never)
    assert [len(rows) for rows in runner.fed] == [3, 2, 1]
    assert [p.tokens for p in proposals] == [greedy(1, 1), greedy(3, 3), greedy(4, 2)]
    assert [(p.session, p.base_len, p.prefix_hash) for p in proposals] == [
        (want.open.session, len(want.tokens), want.prefix_hash) for want in wants
    ]


def test_pages_come_back_on_close_and_unknown_sessions_are_ignored():
    runner = SpyRunner()
    method = a_method(runner, pages=2)
    propose(method, [a_want((1,), session="a"), a_want((2,), session="b")], never)
    method.close(["a", "unknown"])
    method.close(["a"])
    (proposal,) = propose(method, [a_want((5, 6), session="c")], never)
    assert proposal.tokens == greedy(6, 3), "another session's tokens in the page do not show"
    fed = len(runner.fed)
    propose(method, [a_want((2, *greedy(2, 2)), session="b")], never)
    assert runner.fed[fed][0].start == 2, "there was room for c without forgetting b"
    method.close(["b", "c"])
    assert method.is_idle


def test_a_session_that_was_forgotten_for_want_of_pages_begins_anew_and_drafts_the_same():
    runner = PrefixRunner()
    method = a_method(runner, pages=3)
    text = {"a": (1, 2, 3), "b": (4, 5, 6)}
    for _ in range(6):
        for name in text:
            (proposal,) = propose(method, [a_want(text[name], session=name)], never)
            (fresh,) = propose(a_method(PrefixRunner()), [a_want(text[name], session=name)], never)
            assert proposal == fresh
            text[name] = (*text[name], proposal.tokens[0])
    assert [rows[0].start for rows in runner.fed].count(0) > 2, "nobody was forgotten, so this showed nothing"
    method.close(list(text))
    assert method.is_idle


def test_what_finds_no_page_at_all_goes_without_and_the_others_are_drafted():
    """All are busy: who has most to read goes without this time."""
    method = a_method(SpyRunner(), pages=3)
    wants = [a_want((1,) * 7, session="a"), a_want((2, 3), session="b"), a_want((4,), session="c")]
    proposals = propose(method, wants, never)
    assert [p.tokens for p in proposals] == [(), greedy(3, 3), greedy(4, 3)]
    method.close(["a"])
    (again,) = propose(method, [wants[2]], never)
    assert again.tokens == greedy(4, 3)


@pytest.mark.parametrize(("length", "drafted"), [(3, 3), (5, 3), (6, 2), (7, 1), (8, 0), (20, 0)])
def test_a_block_ends_at_the_model_s_positions(length, drafted):
    """The token at the last position predicts one more: 7 positions reach a text of 8 tokens."""
    runner = SpyRunner()
    method = a_method(runner, max_positions=7)
    short = a_want((4,), session="short")
    (proposal, other) = propose(method, [a_want((1,) * length), short], never)
    assert proposal.tokens == greedy(1, drafted)
    assert other.tokens == greedy(4, 3), "a short session beside a long one gets its block"
    assert max(row.end for rows in runner.fed for row in rows) <= 7


def test_a_session_that_outgrows_the_model_s_positions_gets_no_more_blocks():
    method = a_method(SpyRunner(), max_positions=6)
    text = (1, 2)
    sizes = []
    while len(text) < 10:
        (proposal,) = propose(method, [a_want(text)], never)
        ahead = replace(a_want(text), unverified=proposal.tree)
        if proposal.tokens:
            propose(method, [ahead], never)
        sizes.append(len(proposal.tokens))
        text = (*text, 7)
    assert sizes == [3, 3, 3, 2, 1, 0, 0, 0]
    method.close(["s"])
    assert method.is_idle


def test_a_prompt_that_another_session_has_decided_is_not_fed_again():
    """Whole pages of it: drafts are never shared, for they may be wrong."""
    runner = SpyRunner()
    method = a_method(runner)
    prompt = tuple(i % VOCABULARY for i in range(2 * PAGE_SIZE + 2))
    propose(method, [a_want(prompt, 3 * PAGE_SIZE, "a")], never)
    fed = len(runner.fed)
    (proposal,) = propose(method, [a_want(prompt, session="b")], never)
    (row,) = runner.fed[fed]
    assert (row.start, row.tokens) == (2 * PAGE_SIZE, prompt[2 * PAGE_SIZE :])
    assert proposal.tokens == greedy(prompt[-1], 3)
    drafted = runner.read[fed - 1]  # all that a has cached, drafts too
    propose(method, [a_want((*drafted, 1), session="c")], never)
    assert runner.fed[-3][0].start == 2 * PAGE_SIZE


# ---------------------------------------------------------------- what is proposed


def test_coupled_drafts_are_the_targets_draws_when_the_models_agree(monkeypatch):
    """Same noise at the same address: any slip in seed, choice or position costs acceptance, not correctness."""
    monkeypatch.setattr(sampling, "SAMPLED", (1.0, 1.0, -9.0, 0.0))  # what a draft is worth that is never wrong
    for seed in range(20):
        want = a_want((1, 2, 3), 4, sampling=DRAWN, seed=seed, choice=seed % 3)
        (proposal,) = propose(a_method(SpyRunner()), [want], never)
        before = torch.tensor([3, *proposal.tokens])
        own = draw(LOGITS[before], DraftTree.chain(proposal.tokens), DrawAddress(seed, seed % 3, 3))
        assert tuple(own[:4]) == proposal.tokens


def test_processing_sees_what_was_generated_and_drafted_but_not_the_prompt():
    """The drafter penalises as the target will: otherwise its drafts are rejected one after another."""
    sampling = Sampling(temperature=0.0, presence_penalty=2.0, frequency_penalty=1.0)
    want = a_want((1, 2, 2), 5, prompt_len=2, sampling=sampling)
    (proposal,) = propose(a_method(SpyRunner()), [want], never)
    generated = [2]
    for token in proposal.tokens:
        row = process(LOGITS[[[1, 2, *generated][-1]]], sampling, generated)[0]
        assert token == int(row.argmax())
        generated.append(token)
    assert len(set(proposal.tokens)) > 1


@pytest.mark.parametrize("acceptance", list(Acceptance))
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_masked_ids_are_never_proposed_and_carry_no_weight(acceptance, sampling):
    """Ids that the target lacks, however much the draft model likes them."""
    liked = LOGITS.clone()
    liked[:, [3, 9]] = 50.0
    kept = [0, 1, 2, 4, 5, 6, 7, 8]
    for seed in range(30):
        want = a_want((1,), 4, sampling=sampling, seed=seed, acceptance=acceptance)
        (proposal,) = propose(a_method(SpyRunner(liked[:, kept]), kept, top_k=10), [want], never)
        assert not {3, 9} & set(proposal.tokens)
        if proposal.tree.probs is not None:
            rows = zip(proposal.tree.probs.token_ids, proposal.tree.probs.weights, strict=True)
            assert all(not {3, 9} & {i for i, w in zip(*row, strict=True) if w} for row in rows)


@pytest.mark.parametrize(("acceptance", "sampling"), [(COUPLED, DRAWN), (COUPLED, GREEDY), (REJECTION, GREEDY)])
def test_doubt_ends_a_block_early_but_never_before_its_first_token(acceptance, sampling):
    want = a_want((1,), 5, sampling=sampling, acceptance=acceptance)
    (proposal,) = propose(a_method(SpyRunner(), min_confidence=1.0), [want], never)
    assert len(proposal.tokens) == 1
    assert proposal.tree.probs is None
    under_way = replace(want, unverified=DraftTree.chain((5, 6)))
    ahead = propose(a_method(SpyRunner(), min_confidence=1.0), [under_way], never)
    assert {len(block.tokens) for block in ahead} == {4}, "nobody waits for them"
    doubted = propose(a_method(SpyRunner()), [replace(under_way, least_chance=0.3)], never)
    patient = propose(a_method(SpyRunner()), [under_way], never)
    assert {block.outcome for block in doubted} <= {block.outcome for block in patient}


@pytest.mark.parametrize("unverified", [None, NO_TREE, DraftTree.chain((5, 6))])
@pytest.mark.parametrize(("acceptance", "sampling"), [(COUPLED, DRAWN), (COUPLED, GREEDY), (REJECTION, GREEDY)])
def test_tokens_that_are_not_worth_their_verification_are_not_sent(acceptance, sampling, unverified):
    want = a_want((1,), 5, sampling=sampling, acceptance=acceptance)
    want = replace(want, unverified=unverified)
    lengths = [
        sum(len(block.tokens) for block in propose(a_method(SpyRunner()), [replace(want, least_chance=least)], never))
        for least in (0.0, 0.1, 0.3, 1.0)
    ]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] > 0 == lengths[-1]


def test_under_ratio_no_token_is_left_out_for_what_it_is():
    want = replace(a_want((1,), 5, sampling=DRAWN, acceptance=REJECTION), least_chance=1.0)
    (proposal,) = propose(a_method(SpyRunner(), min_confidence=1.0), [want], never)
    assert len(proposal.tokens) == 5


@pytest.mark.parametrize("acceptance", list(Acceptance))
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_text_with_tokens_that_are_never_proposed_can_be_penalised(acceptance, sampling):
    """The target may decide for ids above all that this draft knows: its penalties must not be looked up there."""
    penalised = replace(sampling, presence_penalty=2.0)
    want = a_want((1, 9, 9), 3, prompt_len=1, sampling=penalised, acceptance=acceptance)
    (proposal,) = propose(a_method(SpyRunner(LOGITS[:, :5]), range(5)), [want], never)
    assert len(proposal.tokens) == 3
    assert max(proposal.tokens) < 5


# ---------------------------------------------------------------- ratio's conditions


def ratio_proposal(tokens: tuple[int, ...], max_tokens: int, seed: int, **limits: Any) -> Any:
    want = a_want(tokens, max_tokens, sampling=DRAWN, seed=seed, acceptance=REJECTION)
    (proposal,) = propose(a_method(SpyRunner(), **limits), [want], never)
    return proposal


def test_under_ratio_a_blocks_tokens_depend_on_its_prefix_alone():
    """Redrafted, longer, shorter, or begun one token later: the same tokens and draft_probs, or which of several
    blocks is used would say something about their tokens, and the text would be biased."""
    for seed in range(20):
        whole = ratio_proposal((1, 2), 4, seed)
        assert ratio_proposal((1, 2), 4, seed) == whole
        shorter = ratio_proposal((1, 2), 2, seed)
        assert (shorter.tokens, shorter.tree.probs.weights) == (whole.tokens[:2], whole.tree.probs.weights[:2])
        later = ratio_proposal((1, 2, whole.tokens[0]), 3, seed)
        assert (later.tokens, later.tree.probs.token_ids) == (whole.tokens[1:], whole.tree.probs.token_ids[1:])
    assert len({ratio_proposal((1, 2), 4, seed).tokens for seed in range(20)}) > 5, "but the seed matters"


def test_under_ratio_the_length_never_depends_on_the_tokens():
    """Neither doubt nor a stop id shortens a block: dropping a drawn token for its value biases the text."""
    lengths = {len(ratio_proposal((1,), 4, seed, min_confidence=0.9).tokens) for seed in range(30)}
    assert lengths == {4}


def test_under_ratio_tokens_follow_the_draft_probs_that_are_sent():
    """Truncated and rounded first, drawn then: what is sent is no approximation. False alarm: 1e-6."""
    counts: Counter[int] = Counter()
    for seed in range(3000):
        proposal = ratio_proposal((1,), 1, seed)
        counts[proposal.tokens[0]] += 1
    (ids,) = proposal.tree.probs.token_ids
    (weights,) = proposal.tree.probs.weights
    assert len(ids) == 4
    assert set(counts) <= set(ids)
    expected = [3000 * weight / sum(weights) for weight in weights]
    assert chisquare([counts[token] for token in ids], expected).pvalue > 1e-6
    probs = torch.softmax(LOGITS[1], -1)[list(ids)]
    assert torch.allclose(torch.tensor(weights) / sum(weights), probs / probs.sum(), atol=1e-4)


def test_under_ratio_rows_have_the_agreed_width_even_when_less_is_allowed():
    """A request's own top_k below the drafter's leaves fewer entries: padding must carry no weight."""
    want = a_want((1,), 2, sampling=Sampling(top_k=2), acceptance=REJECTION)
    (proposal,) = propose(a_method(SpyRunner(), top_k=4), [want], never)
    for ids, weights in zip(proposal.tree.probs.token_ids, proposal.tree.probs.weights, strict=True):
        assert len(ids) == len(weights) == 4
        assert [weight > 0 for weight in weights] == [True, True, False, False]
        assert max(weights) < 1 << 16


@pytest.mark.parametrize("acceptance", list(Acceptance))
def test_a_temperature_near_zero_does_not_end_the_drafter(acceptance):
    """One such request used to end the drafting loop, on one drafter after another."""
    want = a_want((1,), 3, sampling=Sampling(temperature=1e-39), acceptance=acceptance)
    (proposal,) = propose(a_method(SpyRunner()), [want], never)
    assert proposal.tokens == greedy(1, 3)


def test_a_long_prompt_is_read_over_several_passes_and_keeps_nobody_waiting():
    runner = SpyRunner()
    method = a_method(runner, pass_tokens=8)
    long = a_want((1,) * 15 + (2,), session="long")
    short = a_want((2, 3), session="short")
    proposals = [propose(method, [long, short], never) for _ in range(3)]
    assert [[p.tokens for p in round_] for round_ in proposals] == [
        [(), greedy(3, 3)],
        [(), greedy(3, 3)],
        [greedy(2, 3), greedy(3, 3)],
    ]
    assert max(sum(len(row.tokens) for row in rows) for rows in runner.fed) <= 8


def broken_after(token: int, value: float = torch.nan) -> SpyRunner:
    """Its logits after one token are not finite."""
    table = LOGITS.clone()
    table[token, 3] = value
    return SpyRunner(table)


RULES = [(COUPLED, GREEDY), (COUPLED, DRAWN), (REJECTION, DRAWN)]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(("acceptance", "sampling"), RULES)
def test_nothing_is_proposed_after_nonfinite_logits(acceptance, sampling, value, caplog):
    """Not even by a session whose rules allow tokens that the model has logits for; others go on, also in its pass."""
    method = a_method(broken_after(2, value))
    rules = TokenRules(allowed=(0, 1))
    wants = [
        a_want((1, 2), session="bad", sampling=sampling, acceptance=acceptance),
        a_want((1, 2), session="ruled", sampling=sampling, acceptance=acceptance, rules=rules),
        a_want((1, 2), session="tree", sampling=GREEDY),
        a_want((5,), 1, session="good", sampling=sampling, acceptance=acceptance),
    ]
    wants[2] = replace(wants[2], shape=Shape.TREE)
    *bad, good = propose(method, wants, never)
    assert [proposal.tree for proposal in bad] == [NO_TREE] * 3
    assert good == propose(a_method(SpyRunner()), wants[3:], never)[0]
    assert caplog.text.count("NaN or infinite") == 1


@pytest.mark.parametrize(("acceptance", "sampling"), RULES)
def test_a_block_ends_where_its_logits_are_not_finite(acceptance, sampling):
    want = a_want((1,), 3, sampling=sampling, acceptance=acceptance)
    (whole,) = propose(a_method(SpyRunner()), [want], never)
    first = whole.tokens[0]
    (cut,) = propose(a_method(broken_after(first)), [want], never)
    assert cut.tree == whole.tree.first(1)


# ---------------------------------------------------------------- trees


def test_a_block_is_a_tree_where_it_may_and_has_no_more_tokens_than_were_asked_for():
    want = a_want((1, 2), 3)
    (plain,) = propose(a_method(SpyRunner()), [want], never)
    (block,) = propose(a_method(SpyRunner()), [replace(want, shape=Shape.TREE)], never)
    assert plain.tree.is_chain
    likeliest = LOGITS[2].softmax(-1).topk(4)
    first = block.tree.children(-1)
    assert first == tuple(likeliest.indices.tolist())[: len(first)]
    assert block.tree.main_path == plain.tokens[: len(block.tree.main_path)]
    assert len(first) > 1
    assert len(block.tree) == 3


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_tree_goes_on_from_tokens_beside_its_main_path_as_the_model_would(sampling):
    """A node with children has the model's favorite among them; branches share the forwards of a chain."""
    deep = 0
    for seed in range(12):
        want = a_want((1, 2), 8, sampling=sampling, seed=seed)
        runner = SpyRunner()
        method = a_method(runner)
        (block,) = propose(method, [replace(want, shape=Shape.TREE)], never)
        tree = block.tree
        branches = [path for path in tree.paths if tree.tokens[path[0]] != tree.main_path[0] and len(path) > 1]
        for path in branches:
            tokens = tuple(tree.tokens[node] for node in path)
            later = a_want((1, 2, *tokens[:-1]), 1, sampling=sampling, seed=seed, prompt_len=2)
            (fresh,) = propose(a_method(SpyRunner()), [later], never)
            assert fresh.tokens[0] in tree.children(path[-2])
            deep += 1
        plain = SpyRunner()
        propose(a_method(plain), [want], never)
        assert len(runner.fed) <= len(plain.fed), "no forward is made for limbs alone"
        method.close(["s"])
        assert method.is_idle
    assert deep > 3
