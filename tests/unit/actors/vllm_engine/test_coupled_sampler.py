"""vLLM's workers decide like Slipstream's own engine; scheduled and sampled tokens map to rows."""

import pickle

import pytest
import torch

from actors.sampling.acceptance import DrawAddress, PendingBlock, decide
from actors.sampling.logits_processors import PROCESSOR_FACTORIES, chain_of
from actors.sampling.scoring import decided_scores, margin
from actors.vllm_engine.coupled_sampler import (
    ExtraResults,
    SessionDraws,
    decide_all,
    extra_args,
    fed_row,
    outcome_of,
    request_in,
)
from cluster.verification.step import Outcome, Row
from protos.draft_tree import NO_TREE, DraftTree
from protos.messages import Acceptance, Open, Sampling, Scoring, TokenRules

SAMPLING = Sampling(temperature=0.7, top_k=5, frequency_penalty=0.5)
PLAIN = Open("a", 2, (1, 2, 3, 4), 3, 20, (), Sampling(), 1 << 60, 4, 9, Acceptance.COUPLED, 5)
PENALIZED = Open("p", 2, (1, 2, 3, 4), 3, 20, (), SAMPLING, 1 << 60, 4, 9, Acceptance.COUPLED, 5)
BIASED = Open(
    "b", 1, (1, 2), 2, 20, (), SAMPLING, 7, 0, 9, Acceptance.COUPLED, 5, rules=TokenRules(logit_bias=((6, 100.0),))
)


def noted(text: list[int], asked: list[tuple[int, int]]):
    def between(begin: int, end: int) -> list[int]:
        asked.append((begin, end))
        return text[begin:end]

    return between


def test_an_open_travels_in_a_requests_extra_arguments_between_processes():
    for request in (PLAIN, PENALIZED, BIASED):
        assert request_in(pickle.loads(pickle.dumps(extra_args(request)))) == request


def test_a_request_of_vllms_own_has_none():
    assert request_in(None) is None
    assert request_in({"other": 1}) is None


def test_a_block_equals_that_of_the_own_engine():
    block = SessionDraws.of(PLAIN, PROCESSOR_FACTORIES).block(5, noted([1, 2, 3, 4, 5], []), [6, 7])
    address = DrawAddress(1 << 60, 4, 5)
    assert block == PendingBlock(Acceptance.COUPLED, PLAIN.sampling, DraftTree.chain((6, 7)), None, address)


def test_only_new_tokens_are_examined_and_only_for_rules_that_need_them():
    """The client's prompt ends at 3; penalties count the next token, which was committed elsewhere."""
    asked: list[tuple[int, int]] = []
    session = SessionDraws.of(PENALIZED, PROCESSOR_FACTORIES)
    for text in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        session.block(len(text), noted(text, asked), [])
    SessionDraws.of(PLAIN, PROCESSOR_FACTORIES).block(5, noted([], asked), [])
    assert asked == [(3, 4), (4, 6)]


@pytest.mark.parametrize("request_", [PENALIZED, BIASED], ids=["penalized", "biased"])
def test_decisions_equal_those_of_the_own_engine(request_: Open):
    text = [*request_.tokens, 5, 5, 5]
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    session = SessionDraws.of(request_, PROCESSOR_FACTORIES)
    (found,), _ = decide_all([session], [session.block(len(text), noted(text, []), [6, 7])], logits)
    chain = chain_of(request_)
    chain.follow(text)
    at = DrawAddress(request_.seed, request_.choice, len(text))
    own = PendingBlock(Acceptance.COUPLED, request_.sampling, DraftTree.chain((6, 7)), chain, at)
    assert [found] == decide([own], logits)
    if request_ is BIASED:
        assert found.path == (0,), "6 is all but certain, and 7 is not after it"


def test_scores_and_margins_are_returned_only_where_they_are_requested():
    scored = Open("s", 1, (1,), 1, 9, (), Sampling(), 3, 0, 9, Acceptance.COUPLED, 5, scoring=Scoring(top=2))
    audit = Open("u", 1, (1,), 1, 9, (), Sampling(), 4, 0, 9, Acceptance.COUPLED, 0, audit=True, rival=8)
    sessions = [SessionDraws.of(request, PROCESSOR_FACTORIES) for request in (PLAIN, scored, audit)]
    drafts = ([1, 2], [3], [])
    blocks = [
        session.block(len(session.request.tokens), noted([], []), draft)
        for session, draft in zip(sessions, drafts, strict=True)
    ]
    logits = torch.randn(6, 10, generator=torch.Generator().manual_seed(1))
    decisions, extra_results = decide_all(sessions, blocks, logits)
    (scores,) = decided_scores(blocks[1:2], decisions[1:2], [2], logits[3:5])
    nearness = margin(logits[5], audit.sampling, None, blocks[2].at, 8)
    assert extra_results == {"s": ExtraResults(scores=scores), "u": ExtraResults(margin=nearness)}
    assert [len(score.top_ids) for score in scores] == [2] * (len(decisions[1].path) + 1)
    assert decide_all(sessions[:1], blocks[:1], logits[:3])[1] == {}


# ---------------------------------------------------------------- rows and outcomes


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


def test_states_are_read_for_fed_tokens() -> None:
    assert fed_row(STATEFUL, DECIDED, start=4, scheduled=3, drafted=2) == STATEFUL
    cut = fed_row(STATEFUL, DECIDED, start=3, scheduled=3, drafted=1)
    assert (cut.state_slots, cut.states_from, cut.states_along((0,))) == ((2, 3, 4, 5), 2, [2, 3, 4, 5])
    plain = fed_row(STATEFUL, DECIDED, start=4, scheduled=1, drafted=0)
    assert (plain.state_slots, plain.states_from) == ((2, 3, 4), 2)


def test_a_piece_of_a_prompt_has_no_verdict_for_states_to_ride_with() -> None:
    assert fed_row(STATEFUL, DECIDED, start=0, scheduled=3, drafted=0).state_slots == ()


@pytest.mark.parametrize(("sampled", "path"), [([8, 9, 7], (0, 1)), ([8, 7], (0,)), ([7], ())])
def test_sampled_tokens_show_how_much_of_the_draft_was_accepted(sampled: list[int], path: tuple[int, ...]) -> None:
    assert outcome_of(PLANNED, sampled) == Outcome("a", path, 7)


def test_a_row_without_finite_logits_commits_nothing() -> None:
    assert outcome_of(PLANNED, [8, 9, 0], is_finite=False) == Outcome("a", (), 0, is_finite=False)
    prompt = fed_row(PLANNED, DECIDED, start=0, scheduled=3, drafted=0)
    assert outcome_of(prompt, [], is_finite=False) is None


@pytest.mark.parametrize("sampled", [[], [8, 9, 7, 6]])
def test_an_impossible_token_count_is_a_fault(sampled: list[int]) -> None:
    with pytest.raises(AssertionError, match="returned for a draft of 2"):
        outcome_of(PLANNED, sampled)


def test_accepted_tokens_must_have_been_drafted() -> None:
    with pytest.raises(AssertionError, match="not drafted"):
        outcome_of(PLANNED, [7, 7])
