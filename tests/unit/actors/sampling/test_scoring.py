"""Tests log probabilities of tokens, and the smallest logit error that would change a decision."""

import math

import pytest
import torch
from torch import Tensor

from actors.sampling.acceptance import DrawAddress
from actors.sampling.gumbel import Purpose, gumbel
from actors.sampling.logits_processors import chain_of
from actors.sampling.scoring import margin, score
from protos.draft_tree import NO_TREE
from protos.messages import Sampling
from tests.sampling_reference import draw, process
from tests.unit.actors.sampling.processor_opens import opened


def test_a_score_is_the_log_softmax_of_the_logits_as_they_are():
    logits = 4 * torch.randn(5, 30, generator=torch.Generator().manual_seed(3))
    tokens = [3, 0, 29, 7, 7]
    expected = torch.log_softmax(logits, dim=-1)
    for row, (token, found) in enumerate(zip(tokens, score(logits, tokens, [2, 0, 4, 1, 3]), strict=True)):
        assert found.logprob == pytest.approx(float(expected[row, token]), abs=1e-6)
        assert found.rank == 1 + int((expected[row] > expected[row, token]).sum())
        top = expected[row].topk(len(found.top_ids))
        assert found.top_ids == tuple(top.indices.tolist())
        assert found.top_logprobs == pytest.approx(tuple(top.values.tolist()), abs=1e-6)
    assert [len(found.top_ids) for found in score(logits, tokens, [2, 0, 4, 1, 3])] == [2, 0, 4, 1, 3]


def test_more_rows_than_are_worked_on_at_once_are_scored_the_same():
    logits = torch.randn(500, 6, generator=torch.Generator().manual_seed(4))
    assert score(logits, [1] * 500, [3] * 500) == [score(row.unsqueeze(0), [1], [3])[0] for row in logits]


def test_more_likeliest_tokens_than_there_are_is_all_of_them():
    (found,) = score(torch.zeros(1, 4), [2], [20])
    assert sorted(found.top_ids) == [0, 1, 2, 3]
    assert found.logprob == pytest.approx(-math.log(4))


def test_nothing_is_scored_without_a_request():
    assert score(torch.zeros(0, 4), [], []) == []


# ---------------------------------------------------------------- near ties

AT = DrawAddress(seed=3, choice=0, position=9)
GREEDY = Sampling(temperature=0.0)


def decided(logits: Tensor, sampling: Sampling, at: DrawAddress) -> int:
    """Returns the reference's decision."""
    processed = process(logits.unsqueeze(0), sampling, ())
    return int(processed[0].argmax()) if sampling.greedy else draw(processed, NO_TREE, at)[0]


def test_greedy_it_is_the_difference_of_logits():
    logits = torch.tensor([1.0, 4.0, 3.25])
    assert [margin(logits, GREEDY, None, AT, rival) for rival in range(3)] == [3.0, 0.0, 0.75]


def test_penalties_count():
    sampling = Sampling(temperature=0.0, frequency_penalty=1.0)
    chain = chain_of(opened(sampling))
    chain.follow((0, 1))
    assert margin(torch.tensor([1.0, 4.0, 3.5]), sampling, chain, AT, 1) == pytest.approx(0.5)


def test_sampled_it_is_the_difference_with_the_noise_in_logits():
    logits = torch.randn(20, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(temperature=0.5)
    noisy = logits + 0.5 * gumbel(AT.key(0, Purpose.DRAW), torch.arange(20))
    for rival in range(20):
        assert margin(logits, sampling, None, AT, rival) == pytest.approx(float(noisy.max() - noisy[rival]))


@pytest.mark.parametrize(
    ("logits", "sampling", "distance"),
    [
        ([2.0, 1.0, 0.9], Sampling(temperature=1.0, top_k=2), 0.1),
        ([math.log(share) for share in (0.5, 0.31, 0.19)], Sampling(temperature=1.0, top_p=0.8), math.log(0.81 / 0.8)),
    ],
    ids=["top_k", "top_p"],
)
def test_a_token_beyond_an_edge_is_as_far_as_the_edge(logits, sampling, distance):
    """The third token has enough noise to win, but lies beyond the edge.

    With top_p, two tokens already slightly exceed the limit, and the distance equals the logarithm of the excess.
    """
    row = torch.tensor(logits)
    at = next(at for seed in range(99) if decided(row, Sampling(temperature=1.0), at := DrawAddress(seed, 0, 0)) == 2)
    assert margin(row, sampling, None, at, 2) == pytest.approx(distance, abs=1e-6)


def test_the_leading_token_may_be_excluded_instead_of_overtaken():
    """The second token wins by its noise but is at the edge of min_p itself."""
    logits = torch.tensor([2.0, 1.01])
    sampling = Sampling(temperature=1.0, min_p=math.exp(-1.0))
    at = next(at for seed in range(999) if lead(logits, at := DrawAddress(seed, 0, 0)) > 3)
    assert margin(logits, sampling, None, at, 0) == pytest.approx(0.01, abs=1e-5)


def lead(logits: Tensor, at: DrawAddress) -> float:
    noisy = logits + gumbel(at.key(0, Purpose.DRAW), torch.arange(2))
    return float(noisy[1] - noisy[0])


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(temperature=0.8),
        Sampling(temperature=0.8, top_k=5),
        Sampling(temperature=1.2, top_p=0.7),
        Sampling(temperature=0.7, min_p=0.1),
        Sampling(temperature=1.0, top_k=12, top_p=0.8, min_p=0.02),
    ],
    ids=str,
)
def test_a_logit_error_changes_only_decisions_within_that_error(sampling):
    """An honest target's decisions differ only by rounding, and its margins must reflect this."""
    generator = torch.Generator().manual_seed(11)
    error = 0.05
    changed = 0
    for seed in range(1500):
        at = DrawAddress(seed, 0, 0)
        logits = 2 * torch.randn(30, generator=generator)
        wrong = logits + error * (torch.rand(30, generator=generator) - 0.5)
        own, rival = decided(logits, sampling, at), decided(wrong, sampling, at)
        assert margin(logits, sampling, None, at, own) == 0.0
        if own != rival:
            changed += 1
            assert margin(logits, sampling, None, at, rival) <= 1.5 * error
    assert changed > 5, "nothing changed, so this showed nothing"


def test_another_token_is_far_as_a_rule():
    """A fault replaces the right token by an arbitrary one, which is rarely close."""
    generator = torch.Generator().manual_seed(12)
    sampling = Sampling(temperature=0.8, top_p=0.9)
    found = [
        margin(2 * torch.randn(30, generator=generator), sampling, None, DrawAddress(seed, 0, 0), seed % 30)
        for seed in range(500)
    ]
    assert sum(one > 0.5 for one in found) > 400


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8, top_k=3, top_p=0.9, min_p=0.1)], ids=str)
def test_a_model_that_computes_nonsense_is_no_reason_to_fail(sampling, nonsense):
    assert 0 <= margin(torch.full((9,), nonsense), sampling, None, AT, 4) < math.inf


def test_no_temperature_is_too_small():
    sampling = Sampling(temperature=1e-6, top_p=0.9)
    assert margin(torch.tensor([60.0, 10.0]), sampling, None, AT, 1) == pytest.approx(50, abs=1e-3)
