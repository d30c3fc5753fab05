"""vLLM's scheduled and sampled tokens as rows and outcomes."""

import pytest

from actors.vllm_engine.coupled_sampler import fed_row, outcome_of
from cluster.verification.step import Outcome, Row
from protos.draft_tree import NO_TREE, DraftTree

DECIDED = (1, 2, 3, 4, 5)
DRAFT = DraftTree.chain((8, 9))
PLANNED = Row("a", (5, 8, 9), 4, decide=True, pages=(), draft=DRAFT)


def test_a_row_as_planned() -> None:
    assert fed_row(PLANNED, DECIDED, start=4, scheduled=3, drafted=2) == PLANNED


def test_a_draft_that_was_cut() -> None:
    row = fed_row(PLANNED, DECIDED, start=4, scheduled=2, drafted=1)
    assert (row.tokens, row.draft, row.decide) == ((5, 8), DRAFT.first(1), True)


def test_a_piece_of_a_prompt_decides_nothing() -> None:
    row = fed_row(PLANNED, DECIDED, start=0, scheduled=3, drafted=0)
    assert (row.tokens, row.start, row.draft, row.decide) == ((1, 2, 3), 0, NO_TREE, False)
    assert outcome_of(row, []) is None


def test_the_last_piece_of_a_prompt_decides() -> None:
    row = fed_row(PLANNED, DECIDED, start=3, scheduled=2, drafted=0)
    assert (row.tokens, row.decide) == ((4, 5), True)


def test_a_draft_is_fed_at_the_end_of_the_text_or_not_at_all() -> None:
    with pytest.raises(AssertionError, match="in the middle"):
        fed_row(PLANNED, DECIDED, start=2, scheduled=3, drafted=1)
    with pytest.raises(AssertionError, match="5 are decided"):
        fed_row(PLANNED, DECIDED, start=4, scheduled=2, drafted=0)


STATEFUL = Row("a", (5, 8, 9), 4, decide=True, pages=(0, 1), draft=DRAFT, state_slots=(2, 3, 4, 5, 6))


def test_states_are_wanted_of_what_was_fed() -> None:
    assert fed_row(STATEFUL, DECIDED, start=4, scheduled=3, drafted=2) == STATEFUL
    cut = fed_row(STATEFUL, DECIDED, start=3, scheduled=3, drafted=1)
    assert (cut.state_slots, cut.states_from, cut.states_along((0,))) == ((2, 3, 4, 5), 2, [2, 3, 4, 5])
    plain = fed_row(STATEFUL, DECIDED, start=4, scheduled=1, drafted=0)
    assert (plain.state_slots, plain.states_from) == ((2, 3, 4), 2)


def test_a_piece_of_a_prompt_has_no_verdict_for_states_to_ride_with() -> None:
    assert fed_row(STATEFUL, DECIDED, start=0, scheduled=3, drafted=0).state_slots == ()


@pytest.mark.parametrize(("sampled", "path"), [([8, 9, 7], (0, 1)), ([8, 7], (0,)), ([7], ())])
def test_what_was_sampled_says_how_much_of_the_draft_stands(sampled: list[int], path: tuple[int, ...]) -> None:
    assert outcome_of(PLANNED, sampled) == Outcome("a", path, 7)


@pytest.mark.parametrize("sampled", [[], [8, 9, 7, 6]])
def test_a_number_of_tokens_that_cannot_be_is_a_fault(sampled: list[int]) -> None:
    with pytest.raises(AssertionError, match="returned for a draft of 2"):
        outcome_of(PLANNED, sampled)


def test_tokens_that_nobody_drafted_do_not_stand() -> None:
    with pytest.raises(AssertionError, match="not drafted"):
        outcome_of(PLANNED, [7, 7])
