"""Tests drafting ahead with a model: the outcomes drafted for, the fed tokens, and interruptions.

`test_methods.py` covers behavior common to all methods.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actors.attention.batch import Interrupted
from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_model import DraftModel
from cluster.drafting.requests import Proposal
from cluster.drafting.trees import Choices, accepted_chance, continuations, rejections
from protos.draft_tree import DraftTree
from protos.messages import Shape, TokenRules
from tests.unit.actors.drafters.drafting import (
    COUPLED,
    DRAWN,
    LOGITS,
    REJECTION,
    RULES,
    SAMPLINGS,
    VOCABULARY,
    PrefixRunner,
    SpyRunner,
    WantedBlock,
    a_method,
    after_checks,
    are_beginnings,
    block_of,
    never,
    propose,
    wanted_block,
)

PREFIX = (1, 2, 3)
PREFIXES = [(1, 2, last) for last in range(6)]


def new_method(**options: object) -> DraftModel:
    return a_method(PrefixRunner(scale=1.0), **options)


def drafted_ahead(
    method: DraftModel, want: WantedBlock, interrupted: Callable[[], bool] = never
) -> tuple[Proposal, list[Proposal]]:
    """Returns the block for a request, and the lookahead blocks for its outcomes."""
    block = block_of(method, want)
    return block, propose(method, [want.under(block.tree)], interrupted)


# ---------------------------------------------------------------- outcomes

AT_BLOCK = (Choices((5, 1), (0.7, 0.3)), Choices((6, 2, 3), (0.5, 0.4, 0.1)))
AT_END = Choices((7, 8), (0.9, 0.1))


def test_outcomes_are_all_rejections_and_continuations():
    found = rejections(DraftTree.chain((5, 6)), AT_BLOCK)
    assert [outcome for outcome, _ in found] == [(1,), (5, 2), (5, 3)]
    assert [chance for _, chance in found] == pytest.approx([0.3, 0.28, 0.07])
    accepted = accepted_chance((5, 6), AT_BLOCK)
    assert accepted == pytest.approx(0.35)
    found = continuations((5, 6), accepted, AT_END)
    assert [outcome for outcome, _ in found] == [(5, 6, 7), (5, 6, 8)]
    assert [chance for _, chance in found] == pytest.approx([0.315, 0.035])


def test_only_the_continuation_of_a_foreign_block_is_guessed():
    assert rejections(DraftTree.chain((5, 6)), ()) == []
    assert accepted_chance((5, 6), ()) == 1.0


def test_nothing_is_likely_after_a_token_outside_the_choices():
    known = (Choices((1,), (0.6,)), AT_BLOCK[1])
    assert rejections(DraftTree.chain((5, 6)), known) == [((1,), 0.6), ((5, 2), 0.0), ((5, 3), 0.0)]
    assert accepted_chance((5, 6), known) == 0.0


# ---------------------------------------------------------------- choice of outcomes


@RULES
def test_each_likely_outcome_gets_a_whole_block(acceptance, sampling):
    """Outcomes are each possible rejection and full acceptance, up to a limit."""
    lengths: set[int] = set()
    for prefix in PREFIXES:
        want = wanted_block(prefix, sampling=sampling, acceptance=acceptance)
        _, guesses = drafted_ahead(a_method(PrefixRunner(scale=3.0)), want)
        assert 1 < len(guesses) < 4 * VOCABULARY // 2
        assert {len(guess.tokens) for guess in guesses} == {want.open.draft_tokens}
        lengths |= {len(guess.outcome) for guess in guesses}
    assert lengths == {1, 2, 3, 4}


def test_an_unlikely_outcome_is_not_drafted_for():
    """A confident model drafts one block, for full acceptance."""
    block, guesses = drafted_ahead(a_method(SpyRunner(20 * LOGITS)), wanted_block(PREFIX))
    (best,) = guesses
    assert best.outcome[:-1] == block.tokens


def test_more_sessions_share_wider_forwards():
    """All forward passes except the last are full, and each session has at least one or two rows in them."""
    widths = []
    for sessions in (3, 30):
        runner = PrefixRunner(scale=1.0)
        method = a_method(runner, pages=2048)
        wants = [wanted_block((4, i), session=f"s{i}") for i in range(sessions)]
        blocks = propose(method, wants)
        begun = len(runner.fed)
        propose(method, [want.under(block.tree) for want, block in zip(wants, blocks, strict=True)])
        (width,) = {len(rows) for rows in runner.fed[begun:-1]}
        widths.append(width)
    assert 3 < widths[0] < 30 < widths[1] < 300


def test_nothing_is_drafted_past_the_end():
    sizes: set[tuple[int, int]] = set()
    for prefix in PREFIXES:
        _, guesses = drafted_ahead(new_method(), wanted_block(prefix, max_len=8))
        sizes |= {(len(guess.outcome), len(guess.tokens)) for guess in guesses}
    assert sizes == {(1, 3), (2, 2), (3, 1)}, "an outcome ends where it leaves room for no block"


def test_nothing_is_drafted_behind_a_stop_id():
    """That outcome ends the session; other outcomes get blocks."""
    block, guesses = drafted_ahead(new_method(), wanted_block(PREFIX))
    stop = guesses[0].outcome[-1]
    same, others = drafted_ahead(new_method(), wanted_block(PREFIX, stop_ids=(stop,)))
    assert same == block
    assert others
    assert stop not in {guess.outcome[-1] for guess in others}


@RULES
def test_a_block_that_this_model_did_not_draft_is_read_and_guessed_on_from(acceptance, sampling):
    """The block comes from a lookup; reading it yields the model's alternatives at its positions."""
    want = wanted_block(PREFIX, sampling=sampling, acceptance=acceptance)
    block, guesses = drafted_ahead(new_method(), want)
    runner = PrefixRunner(scale=1.0)
    found = propose(a_method(runner), [want.under(block.tree)])
    assert found == guesses[: len(found)], "as if it had drafted the block itself, but chosen from all outcomes at once"
    assert len(found) >= len(guesses) // 2 > 1
    assert len(runner.fed[0]) == 1 < len(runner.fed[1])


def test_only_the_foreign_end_of_a_block_is_read():
    """The test simulates a merge; the other method's tokens keep their probabilities."""
    runner = SpyRunner()
    method = a_method(runner)
    want = wanted_block((1, 2))
    own = block_of(method, want)
    other = next(token for token in range(VOCABULARY) if token not in own.tokens)
    main_path = (own.tokens[0], other)
    request = want.under(main_path, max_tokens=3, chances=(own.chances[0], own.chances[0] * 0.9)).ahead
    runner.fed.clear()
    outcomes = [guess.outcome for guess in method.draft_ahead([request], never)]
    (reading,) = [row for row in runner.fed[0] if (row.start, row.tokens) == (3, (other,))]
    assert reading.logits == 1, "what may come in the place of its tokens is known"
    assert any(outcome[:2] == main_path and len(outcome) == 3 for outcome in outcomes)
    assert any(len(outcome) == 1 for outcome in outcomes)
    assert (own.tokens[0], own.tokens[1]) in outcomes, "the model's own token comes if the other's is rejected"


def test_a_block_is_extended_from_the_readable_end():
    """The earlier tokens are cached, but their logits are gone."""
    method = a_method(PrefixRunner())
    block_of(method, wanted_block((*PREFIX, 3), 1))
    guesses = propose(method, [wanted_block(PREFIX).under((7, 7), max_tokens=3)])
    assert {guess.outcome[:1] for guess in guesses} == {(7,)}, "nothing else is known for its first place"


# ---------------------------------------------------------------- fed tokens


@RULES
def test_branches_are_fed_only_what_is_new(acceptance, sampling):
    """The block's last token is fed once for all outcomes; each outcome adds its own last token and drafts."""
    runner = PrefixRunner(scale=1.0)
    block, guesses = drafted_ahead(a_method(runner), wanted_block(PREFIX, sampling=sampling, acceptance=acceptance))
    fed = [(row.start, row.tokens) for rows in runner.fed[3:] for row in rows]
    due = [(5, block.tokens[-1:])]
    for guess in guesses:
        path = (guess.outcome[-1], *guess.tokens[:-1])
        due += [(guess.base_len - 1 + step, (token,)) for step, token in enumerate(path)]
    assert sorted(fed) == sorted(due)


@RULES
def test_known_outcomes_do_not_wait_for_reading_the_block(acceptance, sampling):
    runner = PrefixRunner(scale=1.0)
    want = wanted_block(PREFIX, sampling=sampling, acceptance=acceptance)
    _, guesses = drafted_ahead(a_method(runner), want, after_checks(1))
    (rows,) = runner.fed[3:]
    assert {len(guess.tokens) for guess in guesses} == {1}
    assert {len(guess.outcome) for guess in guesses} <= {1, 2, 3}, "each has another token in the place of one"
    assert len(guesses) >= len(rows) - 1 > 1, "all but the root's"


@RULES
def test_consecutive_hits_feed_no_token_twice(acceptance, sampling):
    """The right branch continues, and lookahead drafting continues from it."""
    runner = PrefixRunner(scale=1.0)
    method = a_method(runner)
    want = wanted_block((1, 2, 3, 4, 5), sampling=sampling, acceptance=acceptance)
    _, guesses = drafted_ahead(method, want)
    for pick in (0, -1, 2, 1):
        hit = guesses[pick]
        want = want.after(*hit.outcome)
        guesses = propose(method, [want.under(hit.tree)])
        assert {guess.outcome[:-1] for guess in guesses} <= {hit.tokens[:n] for n in range(len(hit.tokens) + 1)}
        assert len(guesses) > 1
    assert len(set(runner.read)) == len(runner.read)
    method.close(["s"])
    assert method.is_idle


# ---------------------------------------------------------------- interruption


@RULES
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_an_interruption_ends_after_the_forward_under_way(acceptance, sampling, passes):
    """This also holds under rejection sampling, because the interruption does not depend on a block's own tokens."""
    runner = PrefixRunner(scale=1.0)
    want = wanted_block(PREFIX, sampling=sampling, acceptance=acceptance)
    _, found = drafted_ahead(a_method(runner), want, after_checks(passes))
    assert max((len(guess.tokens) for guess in found), default=0) == passes
    assert len(runner.fed) == 3 + passes


class Ticking:
    """Clock that advances one second per reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@RULES
def test_a_forward_that_would_end_after_the_verdict_is_not_begun(acceptance, sampling):
    """Likelier outcomes get longer blocks."""
    want = wanted_block(PREFIX, sampling=sampling, acceptance=acceptance)
    _, whole = drafted_ahead(new_method(), want)
    tokens = []
    for until in range(0, 60, 3):
        clock = Ticking()
        method = new_method(clock=clock)
        block = block_of(method, want)
        found = propose(method, [want.under(block.tree, until=clock.now + until)])
        assert are_beginnings(found, whole)
        tokens.append(sum(len(guess.tokens) for guess in found))
        if acceptance is REJECTION:  # depends only on the outcome; blocks after full acceptance start later
            for is_last in (False, True):
                lengths = [len(guess.tokens) for guess in found if (len(guess.outcome) == 4) == is_last]
                assert lengths == sorted(lengths, reverse=True)
    assert tokens == sorted(tokens)
    assert tokens[0] == 0
    assert found == whole, "there was time enough at last"


@RULES
def test_a_verdict_that_is_due_ends_no_other_sessions_drafting_ahead(acceptance, sampling):
    """The steps of several targets end at different times."""
    due, other = (
        wanted_block(PREFIX, session=name, sampling=sampling, acceptance=acceptance) for name in ("due", "other")
    )
    _, whole = drafted_ahead(new_method(), other)
    clock = Ticking()
    method = new_method(clock=clock)
    blocks = propose(method, [due, other])
    found = propose(method, [due.under(blocks[0].tree, until=clock.now), other.under(blocks[1].tree)])
    assert [guess for guess in found if guess.session == "other"] == whole
    assert {guess.session for guess in found if guess.tokens} == {"other"}


def test_blocks_that_are_wanted_now_are_never_interrupted():
    (block,) = propose(a_method(PrefixRunner()), [wanted_block(PREFIX)], lambda: True)
    assert len(block.tokens) == 3


class InterruptedRunner(PrefixRunner):
    """Runner that interrupts forward passes after writing the cache, like a model interrupted at a later layer."""

    def logits(self, rows: Sequence[InputRow], whole: list[tuple[int, ...]]) -> Tensor:
        if self.interrupted():
            raise Interrupted
        return super().logits(rows, whole)


@RULES
@pytest.mark.parametrize("forwards", range(4))
def test_an_interrupted_forward_leaves_nothing(acceptance, sampling, forwards):
    """Earlier drafts stay, and later requests give the same blocks as without the interruption."""
    want = wanted_block(PREFIX, sampling=sampling, acceptance=acceptance)
    method = a_method(InterruptedRunner(scale=1.0))
    block, guesses = drafted_ahead(method, want, after_checks(2 * forwards + 1))
    assert guesses == drafted_ahead(new_method(), want, after_checks(forwards))[1]
    for last in (block.tokens[-1], 9):
        further = want.after(*block.tokens[:-1], last, max_tokens=4)
        assert block_of(method, further) == block_of(new_method(), further)
    method.close(["s"])
    assert method.is_idle


@RULES
def test_blocks_so_far_are_reported_after_each_forward(acceptance, sampling):
    """Rejection sampling sends only final blocks, because the first version to arrive counts."""
    want = wanted_block(PREFIX, sampling=sampling, acceptance=acceptance)
    reports: list[list[Proposal]] = []
    method = a_method(runner := PrefixRunner(scale=1.0))
    block = block_of(method, want)
    read = len(runner.fed)
    last = propose(method, [want.under(block.tree)], early=reports.append)
    assert len(reports) == len(runner.fed) - read
    assert {guess.prefix_hash for guess in reports[-1]} == {guess.prefix_hash for guess in last}
    for guesses in reports:
        assert are_beginnings(guesses, last)
        if acceptance is REJECTION:
            assert all(guess in last for guess in guesses)


# ---------------------------------------------------------------- a small pool


@RULES
@pytest.mark.parametrize("pages", range(3, 12, 2))
def test_a_pool_too_small_for_all_branches_gives_fewer_blocks_and_no_wrong_ones(acceptance, sampling, pages):
    rules = {"sampling": sampling, "acceptance": acceptance}
    wants = {name: wanted_block((6, 5, i), 3, name, max_len=12, **rules) for i, name in enumerate(("a", "b"))}
    method = new_method(pages=pages)
    for _ in range(4):
        blocks = [block for block in propose(method, [*wants.values()]) if block.tokens]
        assert blocks, "there is always room for one"
        for guess in propose(method, [wants[block.session].under(block.tree) for block in blocks]):
            later = wants[guess.session].after(*guess.outcome, max_tokens=len(guess.tokens))
            assert replace(guess, outcome=()) == block_of(new_method(), later)
        wants |= {block.session: wants[block.session].after(block.tokens[0]) for block in blocks}
    method.close([*wants])
    assert method.is_idle


def test_a_session_that_lost_its_pages_gets_no_lookahead():
    """The choices for its block remain, but its tokens are no longer cached."""
    method = new_method(pages=3)
    wants = [wanted_block((9,) * 9, 2, session="other"), wanted_block((1, 2, 3, 4, 5), 2, session="lost")]
    lost, other = (block_of(method, want) for want in reversed(wants))
    guesses = propose(method, [want.under(block.tree) for want, block in zip(wants, (other, lost), strict=True)])
    assert {guess.session for guess in guesses} <= {"other"}
    method.close(["lost", "other"])
    assert method.is_idle


# ---------------------------------------------------------------- trees under verification


@SAMPLINGS
def test_continuations_of_siblings_are_guessed_correctly(sampling):
    """No outcome assumes its rejection. Tokens equal those of an undisturbed model, and every read page is checked."""
    seen = 0
    for prefix in PREFIXES:
        want = wanted_block(prefix, 4, sampling=sampling, shape=Shape.TREE)
        method = new_method()
        block, guesses = drafted_ahead(method, want)
        siblings = block.tree.off_main_path
        assert not set(siblings) & {guess.outcome for guess in guesses}
        for guess in [guess for guess in guesses if guess.outcome[0] in block.tree.children(-1)[1:]]:
            assert guess.outcome[:-1] in siblings
            later = block_of(new_method(), want.after(*guess.outcome, shape=Shape.CHAIN))
            main_path = guess.tree.main_path
            assert (guess.base_len, guess.prefix_hash) == (later.base_len, later.prefix_hash)
            assert main_path == later.tokens[: len(main_path)]
            seen += 1
        method.close(["s"])
        assert method.is_idle
    assert seen > 3


@RULES
@pytest.mark.parametrize("token", range(VOCABULARY))
def test_nonfinite_logits_after_any_token_end_blocks_ahead_there_and_nothing_else(acceptance, sampling, token):
    """The token may be in the running step, or in a block for one of its outcomes."""
    table = LOGITS.clone()
    table[token, 3] = torch.nan
    for shape in Shape if acceptance is COUPLED else (Shape.CHAIN,):
        want = wanted_block((1, 2), sampling=sampling, acceptance=acceptance, shape=shape)
        block = block_of(a_method(SpyRunner()), want)
        for guess in propose(a_method(SpyRunner(table)), [want.under(block.tree)]):
            assert guess.tokens
            assert (*want.tokens, *guess.outcome)[-1] != token
            assert all(guess.tree.tokens[parent] != token for parent in guess.tree.parents if parent >= 0), (
                "nothing is known of what follows it"
            )


def test_rules_that_leave_none_of_the_draft_s_tokens_keep_chances_finite():
    """One NaN would also disorder the outcomes of other sessions."""
    want = wanted_block(PREFIX, sampling=DRAWN, acceptance=REJECTION, rules=TokenRules(allowed=(8, 9)))
    guesses = propose(a_method(SpyRunner(LOGITS[:, :5]), range(5)), [want.under((8, 9))])
    assert guesses
    assert all(0 <= guess.chance <= 1 for guess in guesses)
