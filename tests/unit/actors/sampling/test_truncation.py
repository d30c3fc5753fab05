"""Tests the conversion of logits to a request's distribution at each position of a draft."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.sampling.truncation import Filters, restrict
from protos.draft_tree import DraftTree
from protos.messages import Sampling
from tests.sampling_reference import process
from tests.unit.trees import trees

VOCABULARY = 12
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=5)
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.0]),
    top_k=st.integers(0, VOCABULARY + 1),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
)


def some_logits(positions: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(positions, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def allowed(logits: torch.Tensor, sampling: Sampling) -> list[int]:
    """Returns the allowed token ids of one position."""
    return torch.isfinite(process(logits.unsqueeze(0), sampling, ())[0]).nonzero().flatten().tolist()


@given(SAMPLINGS, TOKENS, trees(VOCABULARY) | TOKENS.map(lambda tokens: DraftTree.chain(tuple(tokens))))
def test_every_node_of_a_tree_is_processed_as_after_its_own_path(sampling, generated, tree):
    """Speculation must not change a distribution: a node sees its path, and nothing after or beside it."""
    logits = some_logits(len(tree) + 1)
    together = process(logits, sampling, generated, tree)
    for node, path in enumerate(tree.paths):
        after = [*generated, *[tree.tokens[passed] for passed in path]]
        alone = process(logits[node + 1 : node + 2], sampling, after)
        assert torch.equal(together[node + 1], alone[0])


def test_frequency_penalty_grows_along_the_draft():
    """Repetition inside the block costs a token its lead, as in vLLM's test_frequency_penalties."""
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 1] = 3.0
    logits[:, 5] = 0.5
    sampling = Sampling(temperature=0.0, frequency_penalty=1.0)
    own = process(logits, sampling, (1,), DraftTree.chain((1, 1, 1))).argmax(dim=-1)
    assert own.tolist() == [1, 1, 5, 5]


def test_presence_penalty_counts_once():
    row = process(torch.zeros(1, VOCABULARY), Sampling(presence_penalty=1.5), (3, 3, 3))[0]
    assert float(row.max() - row[3]) == 1.5
    assert row.unique().numel() == 2


@given(SAMPLINGS, st.integers(0, 50))
def test_the_likeliest_token_is_always_allowed(sampling, seed):
    sampling = replace(sampling, frequency_penalty=0.0, presence_penalty=0.0)
    logits = some_logits(1, seed)[0]
    assert int(logits.argmax()) in allowed(logits, sampling)


@pytest.mark.parametrize("top_k", [1, 5, 11])
def test_exactly_k_stay_though_margins_are_tiny_or_none(top_k):
    """A tie at the edge must not admit extra tokens; the lower id stays on every device."""
    tiny = 1.0 + torch.arange(VOCABULARY) * 1e-6
    assert allowed(tiny, Sampling(top_k=top_k)) == list(range(VOCABULARY - top_k, VOCABULARY))
    assert allowed(torch.ones(VOCABULARY), Sampling(top_k=top_k)) == list(range(top_k))


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.8, 4), (0.9, 4), (1.0, 4), (1e-6, 1)])
def test_top_p_keeps_the_smallest_set_that_reaches_it_and_ties(top_p, kept):
    logits = torch.full((VOCABULARY,), -math.inf)
    logits[:4] = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert allowed(logits, Sampling(top_p=top_p)) == list(range(kept))


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.55), Sampling(top_k=3), Sampling(top_k=1500)], ids=repr)
def test_in_a_large_vocabulary_a_positions_set_does_not_depend_on_the_others(sampling):
    """One difficult position moves the whole batch from the fast path to the slow path.

    Ties at the edge, common in bfloat16, must resolve equally on both; otherwise a draft would change the
    distribution of earlier tokens.
    """
    logits = torch.full((2, 2000), -20.0)
    logits[0, :5] = torch.tensor([0.4, 0.1, 0.1, 0.1, 0.1]).log()
    logits[1] = 0.0  # flat: more candidates than the fast path considers
    together = process(logits, sampling, (), DraftTree.chain((0,)))
    alone = process(logits[:1], sampling, ())
    assert torch.equal(together[0], alone[0])


@pytest.mark.parametrize("vocabulary", [10, 2000])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_model_that_computes_nonsense_ends_nothing(vocabulary, value):
    for sampling in (Sampling(top_p=0.5), Sampling(top_k=5), Sampling(min_p=0.1)):
        assert process(torch.full((2, vocabulary), value), sampling, (), DraftTree.chain((0,))).shape == (2, vocabulary)


def test_min_p_is_relative_to_the_likeliest():
    logits = torch.full((VOCABULARY,), -math.inf)
    logits[:3] = torch.tensor([0.6, 0.3, 0.1]).log()
    assert allowed(logits, Sampling(min_p=0.4)) == [0, 1]
    assert allowed(logits, Sampling(min_p=1.0)) == [0]


def test_top_k_comes_before_top_p_and_temperature_before_both():
    logits = torch.full((VOCABULARY,), -math.inf)
    logits[:3] = torch.tensor([0.4, 0.3, 0.3]).log()
    assert allowed(logits, Sampling(top_k=2, top_p=0.5)) == [0], "0.4 of the remaining 0.7 is more than half"
    assert allowed(logits, Sampling(temperature=0.05, top_p=0.9)) == [0]


def test_temperature_scales_and_greedy_does_not():
    logits = some_logits(1)
    scaled = process(logits, Sampling(temperature=0.5), ())
    assert torch.allclose(torch.softmax(scaled, -1), torch.softmax(2 * logits, -1))
    assert torch.equal(process(logits, Sampling(temperature=0.0, top_k=1), ()), logits)


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-39, 1e-45])
def test_a_temperature_near_zero_is_nearly_greedy(temperature):
    """HTTP accepts such temperatures; infinite logits would tie, define no distribution, and crash the drafter."""
    logits = some_logits(1).abs() + 1
    row = process(logits, Sampling(temperature=temperature), ())[0]
    probs = torch.softmax(row, dim=-1)
    assert float(probs[int(logits.argmax())]) == 1.0
    assert torch.isfinite(row).any()


def test_half_precision_logits_are_processed_in_float32():
    assert process(some_logits(1).bfloat16(), Sampling(), ()).dtype == torch.float32


@pytest.mark.parametrize(
    "sampling", [Sampling(top_k=2), Sampling(top_k=6, top_p=0.8), Sampling(top_p=0.6), Sampling(min_p=0.3)], ids=repr
)
def test_sufficient_candidates_contain_all_remaining_tokens(sampling):
    """A step draws only among the candidates. Peaked rows need few candidates, and flat rows need all of them.

    Coarse logits tie, even at the edges.
    """
    scales = torch.tensor([0.01, 0.1, 1.0, 4.0, 16.0]).repeat(8).unsqueeze(1)
    logits = (2 * scales * torch.randn(40, 5000, generator=torch.Generator().manual_seed(4))).round() / 2
    filters = Filters.of([sampling] * len(logits), logits.device)
    exact = restrict(logits, filters, exhaustive=True)
    assert exact.candidates is None
    assert exact.is_exact.all()
    quick = restrict(logits, filters)
    torch.testing.assert_close(quick.logits[quick.is_exact], exact.logits[quick.is_exact])
    assert quick.candidates.shape[1] < 5000
    for row, candidates, is_exact in zip(exact.logits, quick.candidates, quick.is_exact, strict=True):
        left = set(row.isfinite().nonzero().flatten().tolist())
        assert not is_exact or left <= set(candidates.tolist())
    assert quick.is_exact.any()
    assert not quick.is_exact.all(), "some rows need more: else this showed nothing of them"
