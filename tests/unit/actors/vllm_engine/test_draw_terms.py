"""What vLLM's workers are told of a session comes to the decisions of the project's own engine."""

import torch

from actors.sampling.reference import DrawAddress
from actors.sampling.rejection_sampler import PendingBlock, decide
from actors.vllm_engine.draw_terms import DrawTerms
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Open, Sampling

SAMPLING = Sampling(temperature=0.7, top_k=5, frequency_penalty=0.5)
REQUEST = Open("a", 2, (1, 2, 3, 4), 3, 20, (), SAMPLING, 1 << 60, 4, 9, Acceptance.COUPLED, 5)


def test_they_travel_in_a_requests_extra_arguments() -> None:
    terms = DrawTerms.of(REQUEST)
    assert terms == DrawTerms(SAMPLING, 1 << 60, 4, 3)
    assert DrawTerms.from_extra_args(terms.extra_args()) == terms


def test_a_request_of_vllms_own_has_none() -> None:
    assert DrawTerms.from_extra_args(None) is None
    assert DrawTerms.from_extra_args({"other": 1}) is None


def test_blocks_are_those_of_the_own_engine() -> None:
    """The client's prompt ends at 3: the token after it was committed elsewhere, and penalties count it."""
    block = DrawTerms.of(REQUEST).block([1, 2, 3, 4, 5], [6, 7])
    assert block == PendingBlock(
        Acceptance.COUPLED, SAMPLING, DraftTree.chain((6, 7)), [4, 5], DrawAddress(1 << 60, 4, 5)
    )
    logits = torch.randn(3, 10, generator=torch.Generator().manual_seed(0))
    assert decide([block], logits)[0].next_token < 10


def test_only_penalties_look_at_the_text() -> None:
    free = DrawTerms(Sampling(), 1, 0, 3)
    assert free.block([1, 2, 3, 4, 5], []).generated == ()
