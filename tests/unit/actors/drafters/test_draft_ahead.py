"""Drafting for what a verdict may bring: which outcomes, what is fed for them, and that a right guess is as good as
a block drafted after the verdict."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from actors.attention.batch import Interrupted
from actors.compute.kv_cache import InputRow
from actors.drafters.model.draft_model import DraftModel
from cluster.drafting.lookahead import AHEAD_ROWS, OUTCOMES, ROWS_EACH
from cluster.drafting.requests import Proposal
from cluster.drafting.trees import Choices, accepted_chance, continuations, rejections
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Shape
from protos.prefix import Prefix
from tests.unit.actors.drafters.drafting import (
    DRAWN,
    LOGITS,
    VOCABULARY,
    PrefixRunner,
    SpyRunner,
    a_method,
    a_want,
    after_checks,
    never,
)
from tests.unit.actors.drafters.drafting_requests import Want, propose
from tests.unit.cluster.samples import GREEDY, KEY

COUPLED, REJECTION = Acceptance
RULES = pytest.mark.parametrize(
    ("acceptance", "sampling"),
    [(COUPLED, GREEDY), (COUPLED, DRAWN), (REJECTION, DRAWN)],
    ids=["greedy", "coupled", "rejection"],
)
PREFIX = (1, 2, 3)
PREFIXES = [(1, 2, last) for last in range(6)]


def ahead_of(want: Want, proposal: Proposal) -> Want:
    """The want for what may come of a block."""
    return replace(want, max_tokens=want.open.draft_tokens, unverified=proposal.tree)


def after(want: Want, *tokens: int) -> Want:
    """The want for a block once the verdict has brought these."""
    whole = (*want.tokens, *tokens)
    return replace(want, tokens=whole, prefix_hash=Prefix(KEY, whole).hash)


def drafted_ahead(
    method: DraftModel, want: Want, interrupted: Callable[[], bool] = never
) -> tuple[Proposal, list[Proposal]]:
    """The block for a want, and those for what may come of it."""
    (block,) = propose(method, [want], never)
    return block, propose(method, [ahead_of(want, block)], interrupted)


# ---------------------------------------------------------------- outcomes

AT_BLOCK = (Choices((5, 1), (0.7, 0.3)), Choices((6, 2, 3), (0.5, 0.4, 0.1)))
AT_END = Choices((7, 8), (0.9, 0.1))


def test_outcomes_are_every_place_to_stop_at_with_every_other_choice():
    found = rejections(DraftTree.chain((5, 6)), AT_BLOCK)
    assert [outcome for outcome, _ in found] == [(1,), (5, 2), (5, 3)]
    assert [chance for _, chance in found] == pytest.approx([0.3, 0.28, 0.07])
    accepted = accepted_chance((5, 6), AT_BLOCK)
    assert accepted == pytest.approx(0.35)
    found = continuations((5, 6), accepted, AT_END)
    assert [outcome for outcome, _ in found] == [(5, 6, 7), (5, 6, 8)]
    assert [chance for _, chance in found] == pytest.approx([0.315, 0.035])


def test_of_a_block_of_unknown_origin_only_what_follows_it_is_guessed():
    assert rejections(DraftTree.chain((5, 6)), ()) == []
    assert accepted_chance((5, 6), ()) == 1.0


def test_behind_a_token_that_was_not_among_the_choices_nothing_is_likely():
    known = (Choices((1,), (0.6,)), AT_BLOCK[1])
    assert rejections(DraftTree.chain((5, 6)), known) == [((1,), 0.6), ((5, 2), 0.0), ((5, 3), 0.0)]
    assert accepted_chance((5, 6), known) == 0.0


# ---------------------------------------------------------------- which are drafted for


@RULES
def test_each_likely_outcome_gets_one_block_at_its_own_address(acceptance, sampling):
    lengths: set[int] = set()
    for prefix in PREFIXES:
        want = a_want(prefix, 3, sampling=sampling, acceptance=acceptance)
        block, guesses = drafted_ahead(a_method(PrefixRunner(scale=3.0)), want)
        assert 1 < len({guess.outcome for guess in guesses}) == len(guesses) <= 2 * OUTCOMES
        for guess in guesses:
            *stands, new = guess.outcome
            assert tuple(stands) == block.tokens[: len(stands)]
            assert len(stands) == 3 or new != block.tokens[len(stands)], "that would be one more accepted"
            assert guess.base_len == len(prefix) + len(guess.outcome)
            assert guess.prefix_hash == Prefix(KEY, (*prefix, *guess.outcome)).hash
            assert len(guess.tokens) == want.open.draft_tokens
        lengths |= {len(guess.outcome) for guess in guesses}
    assert lengths == {1, 2, 3, 4}, "after each rejection, and after none"


def test_what_is_hardly_likely_is_not_drafted_for():
    """A model that is sure of itself: one block, for full acceptance."""
    want = a_want(PREFIX, 3)
    block, guesses = drafted_ahead(a_method(SpyRunner(20 * LOGITS)), want)
    (best,) = guesses
    assert best.outcome[:-1] == block.tokens


@pytest.mark.parametrize("sessions", [3, 6])
def test_sessions_share_each_forward_and_get_what_they_would_get_alone(sessions):
    runner = PrefixRunner(scale=1.0)
    method = a_method(runner, pages=256)
    wants = [a_want((4, i), session=f"s{i}") for i in range(sessions)]
    blocks = propose(method, wants, never)
    begun = len(runner.fed)
    guesses = propose(method, [ahead_of(want, block) for want, block in zip(wants, blocks, strict=True)], never)
    assert {len(rows) for rows in runner.fed[begun:-1]} == {max(AHEAD_ROWS, ROWS_EACH * sessions)}
    for want in wants:
        _, alone = drafted_ahead(a_method(PrefixRunner(scale=1.0)), want)
        assert [guess for guess in guesses if guess.session == want.open.session] == alone


def test_nothing_is_drafted_past_the_end():
    sizes: set[tuple[int, int]] = set()
    for prefix in PREFIXES:
        _, guesses = drafted_ahead(a_method(PrefixRunner(scale=1.0)), a_want(prefix, 3, max_len=8))
        sizes |= {(len(guess.outcome), len(guess.tokens)) for guess in guesses}
    assert sizes == {(1, 3), (2, 2), (3, 1)}, "an outcome ends where it leaves room for no block"


@RULES
def test_blocks_ahead_are_no_longer_than_was_asked_for(acceptance, sampling):
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    for asked in (0, 2):
        method = a_method(PrefixRunner(scale=1.0))
        (block,) = propose(method, [want], never)
        guesses = propose(method, [replace(ahead_of(want, block), max_tokens=asked)], never)
        assert {len(guess.tokens) for guess in guesses} == ({asked} if asked else set())


def test_nothing_is_drafted_behind_a_stop_id():
    """The session would be over; but other outcomes are."""
    want = a_want(PREFIX, 3)
    block, guesses = drafted_ahead(a_method(PrefixRunner(scale=1.0)), want)
    stop = guesses[0].outcome[-1]
    ending = a_want(PREFIX, 3, stop_ids=(stop,))
    same, others = drafted_ahead(a_method(PrefixRunner(scale=1.0)), ending)
    assert same == block
    assert others
    assert stop not in {guess.outcome[-1] for guess in others}


@RULES
def test_a_block_that_this_model_did_not_draft_is_read_and_guessed_on_from(acceptance, sampling):
    """It was looked up in the text: what the model would rather have at its places is found while it is read."""
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    block, guesses = drafted_ahead(a_method(PrefixRunner(scale=1.0)), want)
    looked_up = replace(want, max_tokens=4, unverified=block.tree)
    runner = PrefixRunner(scale=1.0)
    found = propose(a_method(runner), [looked_up], never)
    likeliest = guesses[: max(OUTCOMES, len(found))]
    assert found == likeliest, "as if it had drafted the block itself, but all outcomes are chosen from at once"
    assert len(runner.fed[0]) == 1 < len(runner.fed[1])


def test_of_a_block_whose_end_is_anothers_the_beginning_is_known_and_the_rest_is_read():
    """Simulates a merge: tokens of the other method keep the probabilities that it gave."""
    runner = SpyRunner()
    method = a_method(runner)
    want = a_want((1, 2), 3)
    (own,) = propose(method, [want], never)
    other = next(token for token in range(VOCABULARY) if token not in own.tokens)
    main_path = (own.tokens[0], other)
    under_way = replace(want, unverified=DraftTree.chain(main_path))
    request = replace(under_way.ahead, chances=(own.chances[0], own.chances[0] * 0.9))
    runner.fed.clear()
    found = method.draft_ahead([request], never)
    (reading,) = [row for row in runner.fed[0] if (row.start, row.tokens) == (3, (other,))]
    assert reading.logits == 1, "what may come in the place of its tokens is known"
    outcomes = [proposal.outcome for proposal in found]
    assert any(outcome[:2] == main_path and len(outcome) == 3 for outcome in outcomes)
    assert any(len(outcome) == 1 for outcome in outcomes)
    assert (own.tokens[0], own.tokens[1]) in outcomes, "the model's own token comes if the other's is rejected"


def test_a_block_of_which_the_model_could_only_read_the_end_is_guessed_on_from_there():
    """All before it is cached, the logits are gone."""
    method = a_method(PrefixRunner())
    propose(method, [a_want((*PREFIX, 3), 1)], never)
    guesses = propose(method, [replace(a_want(PREFIX, 3), unverified=DraftTree.chain((7, 7)))], never)
    assert {guess.outcome[:1] for guess in guesses} == {(7,)}, "nothing else is known for its first place"


# ---------------------------------------------------------------- a right guess


@RULES
def test_the_block_for_a_right_guess_is_what_would_have_been_drafted_after_the_verdict(acceptance, sampling):
    """The same tokens and the same draft_probs: under ratio anything else would bias the text."""
    for seed in range(5):
        want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance, seed=seed)
        _, guesses = drafted_ahead(a_method(PrefixRunner(scale=1.0)), want)
        for guess in guesses:
            (block,) = propose(
                a_method(PrefixRunner(scale=1.0)), [replace(after(want, *guess.outcome), max_tokens=4)], never
            )
            assert replace(guess, outcome=()) == block


@RULES
def test_a_miss_leaves_nothing_behind_that_shows(acceptance, sampling):
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    method = a_method(PrefixRunner(scale=1.0))
    block, guesses = drafted_ahead(method, want)
    guessed = {guess.outcome[1] for guess in guesses if len(guess.outcome) > 1}
    missed = after(want, block.tokens[0], min({*range(VOCABULARY)} - guessed))
    (found,) = propose(method, [missed], never)
    (fresh,) = propose(a_method(PrefixRunner(scale=1.0)), [missed], never)
    assert found == fresh


# ---------------------------------------------------------------- what is fed


@RULES
def test_branches_are_fed_only_what_is_new(acceptance, sampling):
    """The end of the block once, for what may come after it; each outcome's own last token and its drafts."""
    runner = PrefixRunner(scale=1.0)
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    block, guesses = drafted_ahead(a_method(runner), want)
    fed = [(row.start, row.tokens) for rows in runner.fed[3:] for row in rows]
    due = [(5, block.tokens[-1:])]
    for guess in guesses:
        path = (guess.outcome[-1], *guess.tokens[:-1])
        due += [(guess.base_len - 1 + step, (token,)) for step, token in enumerate(path)]
    assert sorted(fed) == sorted(due)


@RULES
def test_outcomes_that_are_known_do_not_wait_for_the_end_of_the_block_to_be_read(acceptance, sampling):
    runner = PrefixRunner(scale=1.0)
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    _, guesses = drafted_ahead(a_method(runner), want, after_checks(1))
    (rows,) = runner.fed[3:]
    assert {len(guess.tokens) for guess in guesses} == {1}
    assert {len(guess.outcome) for guess in guesses} <= {1, 2, 3}, "each has another token in the place of one"
    assert len(guesses) >= len(rows) - 1 > 1, "all but the root's"


@RULES
def test_after_hit_upon_hit_nothing_was_fed_twice(acceptance, sampling):
    """The branch that guessed right goes on, and drafting ahead with it."""
    runner = PrefixRunner(scale=1.0)
    method = a_method(runner)
    want = a_want((1, 2, 3, 4, 5), 3, sampling=sampling, acceptance=acceptance)
    _, guesses = drafted_ahead(method, want)
    for pick in (0, -1, 2, 1):
        hit = guesses[pick]
        want = after(want, *hit.outcome)
        guesses = propose(method, [ahead_of(want, hit)], never)
        assert {guess.outcome[:-1] for guess in guesses} <= {hit.tokens[:n] for n in range(len(hit.tokens) + 1)}
        assert len(guesses) > 1
    assert len(set(runner.read)) == len(runner.read)
    method.close(["s"])
    assert method.is_idle


# ---------------------------------------------------------------- interruption


def first(guess: Proposal, tokens: int) -> Proposal:
    """Returns the part of a block that exists after this many passes."""
    return replace(guess, tree=guess.tree.first(tokens))


def are_beginnings(found: list[Proposal], whole: list[Proposal]) -> bool:
    """Returns whether each of `found` is a prefix of the block of `whole` for its outcome."""
    by_outcome = {guess.outcome: guess for guess in whole}
    return found == [first(by_outcome[guess.outcome], len(guess.tokens)) for guess in found]


@RULES
@pytest.mark.parametrize("passes", [0, 1, 2])
def test_an_interruption_returns_what_there_is(acceptance, sampling, passes):
    """Holds under rejection sampling too, because the interruption does not depend on a block's own tokens."""
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    _, whole = drafted_ahead(a_method(PrefixRunner(scale=1.0)), want)
    runner = PrefixRunner(scale=1.0)
    _, found = drafted_ahead(a_method(runner), want, after_checks(passes))
    assert are_beginnings(found, whole)
    assert max((len(guess.tokens) for guess in found), default=0) == passes
    assert len(runner.fed) == 3 + passes


class Ticking:
    """A clock on which every look takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@RULES
def test_what_would_come_after_the_verdict_is_not_begun_and_the_likelier_outcomes_get_further(acceptance, sampling):
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    block, whole = drafted_ahead(a_method(PrefixRunner(scale=1.0)), want)
    tokens = []
    for until in range(60):
        clock = Ticking()
        method = a_method(PrefixRunner(scale=1.0), clock=clock)
        propose(method, [want], never)
        found = propose(method, [replace(ahead_of(want, block), until=clock.now + until)], never)
        assert are_beginnings(found, whole)
        tokens.append(sum(len(guess.tokens) for guess in found))
        if acceptance is REJECTION:  # by the outcome alone; those after all of the block are begun later
            for is_last in (False, True):
                lengths = [len(guess.tokens) for guess in found if (len(guess.outcome) == 4) == is_last]
                assert lengths == sorted(lengths, reverse=True)
    assert tokens == sorted(tokens)
    assert tokens[0] == 0
    assert found == whole, "there was time enough at last"


@RULES
def test_a_verdict_that_is_due_ends_nobody_elses_drafting_ahead(acceptance, sampling):
    """The steps of several targets end at different times."""
    due, other = (
        a_want(PREFIX, 3, session=name, sampling=sampling, acceptance=acceptance) for name in ("due", "other")
    )
    _, whole = drafted_ahead(a_method(PrefixRunner(scale=1.0)), other)
    clock = Ticking()
    method = a_method(PrefixRunner(scale=1.0), clock=clock)
    blocks = {block.session: block for block in propose(method, [due, other], never)}
    wants = [replace(ahead_of(due, blocks["due"]), until=clock.now), ahead_of(other, blocks["other"])]
    found = propose(method, wants, never)
    assert [guess for guess in found if guess.session == "other"] == whole
    assert {guess.session for guess in found if guess.tokens} == {"other"}


@RULES
def test_after_a_step_without_drafts_there_is_a_block_for_each_likely_token(acceptance, sampling):
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    going_on = replace(want, max_tokens=want.open.draft_tokens, unverified=NO_TREE)
    guesses = propose(a_method(PrefixRunner(scale=1.0)), [going_on], never)
    assert {len(guess.outcome) for guess in guesses} == {1}
    assert len(guesses) == len({guess.outcome for guess in guesses}) > 1
    for guess in guesses:
        (block,) = propose(
            a_method(PrefixRunner(scale=1.0)),
            [replace(after(want, *guess.outcome), max_tokens=want.open.draft_tokens)],
            never,
        )
        assert replace(guess, outcome=()) == block


@RULES
def test_an_interrupted_session_drafts_on_as_if_nothing_had_been(acceptance, sampling):
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    method = a_method(PrefixRunner(scale=1.0))
    block, _ = drafted_ahead(method, want, after_checks(1))
    further = replace(after(want, *block.tokens, 9), max_tokens=4)
    (fresh,) = propose(a_method(PrefixRunner(scale=1.0)), [further], never)
    assert propose(method, [further], never) == [fresh]


def test_blocks_that_are_wanted_for_sure_are_never_interrupted():
    (block,) = propose(a_method(PrefixRunner()), [a_want(PREFIX, 3)], lambda: True)
    assert len(block.tokens) == 3


# ---------------------------------------------------------------- given up within a forward


class GivingUp(PrefixRunner):
    """Gives forwards up when it has copied and written, as a model does that is interrupted at a later layer."""

    def logits(self, rows: Sequence[InputRow], whole: list[tuple[int, ...]]) -> Tensor:
        if self.interrupted():
            raise Interrupted
        return super().logits(rows, whole)


@RULES
@pytest.mark.parametrize("forwards", range(4))
def test_a_forward_that_was_given_up_leaves_nothing(acceptance, sampling, forwards):
    """Earlier drafts stay, and later requests give the same blocks as without it."""
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    method = a_method(GivingUp(scale=1.0))
    block, guesses = drafted_ahead(method, want, after_checks(2 * forwards + 1))
    _, before = drafted_ahead(a_method(PrefixRunner(scale=1.0)), want, after_checks(forwards))
    assert guesses == before
    for last in (block.tokens[-1], 9):
        further = replace(after(want, *block.tokens[:-1], last), max_tokens=4)
        (fresh,) = propose(a_method(PrefixRunner(scale=1.0)), [further], never)
        assert propose(method, [further], never) == [fresh]
    method.close(["s"])
    assert method.is_idle


# ---------------------------------------------------------------- told early


@RULES
def test_what_was_drafted_so_far_is_told_after_each_forward(acceptance, sampling):
    """Sends only final blocks under rejection sampling, because the first version to arrive counts."""
    want = a_want(PREFIX, 3, sampling=sampling, acceptance=acceptance)
    told: list[list[Proposal]] = []
    method = a_method(runner := PrefixRunner(scale=1.0))
    (block,) = propose(method, [want], never)
    read = len(runner.fed)
    last = propose(method, [ahead_of(want, block)], never, told.append)
    assert len(told) == len(runner.fed) - read
    assert {guess.prefix_hash for guess in told[-1]} == {guess.prefix_hash for guess in last}
    for guesses in told:
        assert are_beginnings(guesses, last)
        if acceptance is REJECTION:
            assert all(guess in last for guess in guesses)


# ---------------------------------------------------------------- a small pool


@RULES
@pytest.mark.parametrize("pages", range(3, 12))
def test_a_pool_too_small_for_all_branches_gives_fewer_blocks_and_no_wrong_ones(acceptance, sampling, pages):
    rules = {"sampling": sampling, "acceptance": acceptance}
    wants = {name: a_want((6, 5, i), 3, name, max_len=12, **rules) for i, name in enumerate(("a", "b"))}
    method = a_method(PrefixRunner(scale=1.0), pages=pages)
    for _ in range(4):
        blocks = [block for block in propose(method, [*wants.values()], never) if block.tokens]
        assert blocks, "there is always room for one"
        for guess in propose(method, [ahead_of(wants[block.session], block) for block in blocks], never):
            verdict = after(wants[guess.session], *guess.outcome)
            (fresh,) = propose(
                a_method(PrefixRunner(scale=1.0)), [replace(verdict, max_tokens=len(guess.tokens))], never
            )
            assert replace(guess, outcome=()) == fresh
        wants |= {block.session: after(wants[block.session], block.tokens[0]) for block in blocks}
    method.close([*wants])
    assert method.is_idle


def test_a_session_whose_pages_went_to_others_is_not_drafted_ahead_for():
    """Its block's choices are remembered, but its tokens are no longer cached."""
    method = a_method(PrefixRunner(scale=1.0), pages=3)
    lost = a_want((1, 2, 3, 4, 5), 2, session="lost")
    (block,) = propose(method, [lost], never)
    other = a_want((9,) * 9, 2, session="other")
    (others,) = propose(method, [other], never)
    guesses = propose(method, [ahead_of(other, others), ahead_of(lost, block)], never)
    assert {guess.session for guess in guesses} <= {"other"}
    method.close(["lost", "other"])
    assert method.is_idle


# ---------------------------------------------------------------- trees under verification


def branching_ahead(want: Want, method: DraftModel) -> tuple[Proposal, list[Proposal]]:
    (block,) = propose(method, [want], never)
    return block, propose(method, [ahead_of(want, block)], never)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_what_follows_a_token_beside_the_first_is_guessed_and_never_that_it_is_rejected(sampling):
    accepted: set[tuple[int, ...]] = set()
    for prefix in PREFIXES:
        want = replace(a_want(prefix, 3, sampling=sampling), shape=Shape.TREE)
        block, guesses = branching_ahead(want, a_method(PrefixRunner(scale=1.0)))
        outcomes = {guess.outcome for guess in guesses}
        siblings = block.tree.off_main_path
        assert not set(siblings) & outcomes
        accepted |= {outcome for outcome in outcomes if outcome[:-1] in siblings}
    assert accepted


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN])
def test_the_block_for_a_right_guess_after_a_token_beside_the_first_is_what_would_have_been_drafted(sampling):
    """Tokens as an undisturbed model drafts them; the runner's memory checks every page that is read."""
    seen = 0
    for prefix in PREFIXES:
        want = replace(a_want(prefix, 4, sampling=sampling), shape=Shape.TREE)
        method = a_method(PrefixRunner(scale=1.0))
        block, guesses = branching_ahead(want, method)
        for guess in [guess for guess in guesses if guess.outcome[0] in block.tree.children(-1)[1:]]:
            later = replace(after(want, *guess.outcome), shape=Shape.CHAIN)
            (fresh,) = propose(a_method(PrefixRunner(scale=1.0)), [later], never)
            main_path = guess.tree.main_path
            assert (guess.base_len, guess.prefix_hash, main_path) == (
                fresh.base_len,
                fresh.prefix_hash,
                fresh.tokens[: len(main_path)],
            )
            seen += 1
        method.close(["s"])
        assert method.is_idle
    assert seen > 3


@RULES
@pytest.mark.parametrize("token", range(VOCABULARY))
def test_nonfinite_logits_after_any_token_end_blocks_ahead_there_and_nothing_else(acceptance, sampling, token):
    """Whichever place of the step under way they are at, or of a block that is drafted for what comes of it."""
    table = LOGITS.clone()
    table[token, 3] = torch.nan
    for shape in Shape if acceptance is COUPLED else (Shape.CHAIN,):
        want = replace(a_want((1, 2), 3, sampling=sampling, acceptance=acceptance), shape=shape)
        (block,) = propose(a_method(SpyRunner()), [want], never)
        for guess in propose(a_method(SpyRunner(table)), [ahead_of(want, block)], never):
            assert guess.tokens
            before = (*want.tokens, *guess.outcome)
            assert before[-1] != token
            assert all(guess.tree.tokens[parent] != token for parent in guess.tree.parents if parent >= 0), (
                "nothing is known of what follows it"
            )
