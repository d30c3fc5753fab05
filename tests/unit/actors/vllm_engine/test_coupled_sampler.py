"""vLLM's workers reach the same decisions as the project's own engine."""

import pickle

import pytest
import torch

from actors.sampling.processors import MAKERS, chain_of
from actors.sampling.reference import DrawAddress
from actors.sampling.rejection_sampler import PendingBlock, decide
from actors.sampling.scoring import decided_scores, margin
from actors.vllm_engine.coupled_sampler import ExtraResults, SessionDraws, decide_all, extra_args, request_in
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Open, Sampling, Scoring, TokenRules

SAMPLING = Sampling(temperature=0.7, top_k=5, frequency_penalty=0.5)
PLAIN = Open("a", 2, (1, 2, 3, 4), 3, 20, (), Sampling(), 1 << 60, 4, 9, Acceptance.COUPLED, 5)
PENALISED = Open("p", 2, (1, 2, 3, 4), 3, 20, (), SAMPLING, 1 << 60, 4, 9, Acceptance.COUPLED, 5)
BIASED = Open(
    "b", 1, (1, 2), 2, 20, (), SAMPLING, 7, 0, 9, Acceptance.COUPLED, 5, rules=TokenRules(logit_bias=((6, 100.0),))
)


def noted(text: list[int], asked: list[tuple[int, int]]):
    def between(begin: int, end: int) -> list[int]:
        asked.append((begin, end))
        return text[begin:end]

    return between


def test_an_open_travels_in_a_requests_extra_arguments_between_processes():
    for request in (PLAIN, PENALISED, BIASED):
        assert request_in(pickle.loads(pickle.dumps(extra_args(request)))) == request


def test_a_request_of_vllms_own_has_none():
    assert request_in(None) is None
    assert request_in({"other": 1}) is None


def test_a_block_is_the_own_engines():
    block = SessionDraws.of(PLAIN, MAKERS).block(5, noted([1, 2, 3, 4, 5], []), [6, 7])
    address = DrawAddress(1 << 60, 4, 5)
    assert block == PendingBlock(Acceptance.COUPLED, PLAIN.sampling, DraftTree.chain((6, 7)), None, address)


def test_only_what_is_new_is_looked_at_and_only_where_a_rule_needs_it():
    """The client's prompt ends at 3: the token after it was committed elsewhere, and penalties count it."""
    asked: list[tuple[int, int]] = []
    session = SessionDraws.of(PENALISED, MAKERS)
    for text in ([1, 2, 3, 4], [1, 2, 3, 4, 5, 6]):
        session.block(len(text), noted(text, asked), [])
    SessionDraws.of(PLAIN, MAKERS).block(5, noted([], asked), [])
    assert asked == [(3, 4), (4, 6)]


@pytest.mark.parametrize("request_", [PENALISED, BIASED], ids=["penalised", "biased"])
def test_decisions_are_those_of_the_own_engine(request_: Open):
    text = [*request_.tokens, 5, 5, 5]
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    session = SessionDraws.of(request_, MAKERS)
    (found,), _ = decide_all([session], [session.block(len(text), noted(text, []), [6, 7])], logits)
    chain = chain_of(request_)
    assert chain is not None
    chain.follow(text)
    at = DrawAddress(request_.seed, request_.choice, len(text))
    own = PendingBlock(Acceptance.COUPLED, request_.sampling, DraftTree.chain((6, 7)), chain, at)
    assert [found] == decide([own], logits)
    if request_ is BIASED:
        assert found.path == (0,), "6 is all but certain, and 7 is not after it"


def test_scores_and_margins_are_told_of_who_asks_for_them_alone():
    scored = Open("s", 1, (1,), 1, 9, (), Sampling(), 3, 0, 9, Acceptance.COUPLED, 5, scoring=Scoring(top=2))
    audit = Open("u", 1, (1,), 1, 9, (), Sampling(), 4, 0, 9, Acceptance.COUPLED, 0, audit=True, rival=8)
    sessions = [SessionDraws.of(request, MAKERS) for request in (PLAIN, scored, audit)]
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
