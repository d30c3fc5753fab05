"""Tests the arithmetic of verdicts; names in brackets are equivalent cases in other systems' test suites.

Statistical tests have a false-alarm rate of 1e-6 per change of their seeds.
"""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from actors.sampling.acceptance import BlockDecision, DrawAddress, match
from actors.sampling.gumbel import Purpose, key, uniform_scalar
from protos.draft_tree import NO_TREE, DraftTree, SparseProbs
from protos.messages import Acceptance, Sampling
from tests.sampling_reference import accept, draw, process

COUPLED, REJECTION = Acceptance
FALSE_ALARM = 1e-6


def peaks(*tokens: int, vocabulary: int = 10) -> Tensor:
    """Returns logits with the given top tokens."""
    logits = torch.zeros(len(tokens), vocabulary)
    logits[range(len(tokens)), tokens] = 5.0
    return logits


def log_probs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64).log()


def sparse(*rows: dict[int, int]) -> SparseProbs:
    return SparseProbs(tuple(tuple(row) for row in rows), tuple(tuple(row.values()) for row in rows))


def accept_chain(
    rule: Acceptance,
    greedy: bool,
    logits: Tensor,
    draft: tuple[int, ...],
    draft_probs: SparseProbs | None,
    at: DrawAddress,
) -> tuple[int, int]:
    """Returns the number of accepted tokens of a chain, and the next token."""
    decision = accept(rule, greedy, logits, DraftTree.chain(draft, draft_probs), at)
    assert decision.path == tuple(range(len(decision.path)))
    return len(decision.path), decision.next_token


def draw_chain(logits: Tensor, at: DrawAddress) -> list[int]:
    """Returns the target's tokens at consecutive places."""
    return draw(logits, DraftTree.chain((0,) * (len(logits) - 1)), at)


def at(seed: int, position: int = 3) -> DrawAddress:
    return DrawAddress(seed, 0, position)


def p_value(counts: Counter[int], probs: list[float]) -> float:
    total = sum(counts.values())
    possible = [token for token, p in enumerate(probs) if p > 0]
    assert set(counts) <= set(possible)
    return float(chisquare([counts[t] for t in possible], [probs[t] * total for t in possible]).pvalue)


# ---------------------------------------------------------------- greedy


@pytest.mark.parametrize("rule", list(Acceptance))
@pytest.mark.parametrize(
    ("own", "draft", "expected"),
    [
        ((1, 2, 3, 4), (1, 2, 3), (3, 4)),  # test_perfect_match
        ((1, 5, 3, 4), (1, 2, 3), (1, 5)),  # test_early_mismatch
        ((9, 2, 3, 4), (1, 2, 3), (0, 9)),  # first mismatch
        ((1, 5, 6, 7), (1, 2, 3), (1, 5)),  # test_multiple_mismatches
        ((1, 2), (1,), (1, 2)),  # test_single_token_sequence
        ((8,), (), (0, 8)),  # test_empty_sequence
    ],
)
def test_greedy_accepts_the_target_s_own_tokens(rule, own, draft, expected):
    """The result is the same with and without draft_probs, under either rule."""
    probs = sparse(*({token: 1, 9: 1} for token in draft)) if draft else None
    for draft_probs in (None, probs):
        assert accept_chain(rule, True, peaks(*own), draft, draft_probs, at(1)) == expected


# ---------------------------------------------------------------- coupled


def test_coupled_accepts_exactly_the_targets_own_draws():
    """The output is a prefix of the target's own draws for any draft."""
    logits = torch.randn(4, 10, generator=torch.Generator().manual_seed(1))
    for seed in range(50):
        own = draw_chain(logits, at(seed))
        for wrong in range(4):
            draft = tuple(own[:3]) if wrong == 3 else (*own[:wrong], (own[wrong] + 1) % 10, *own[wrong + 1 : 3])
            assert accept_chain(COUPLED, False, logits, draft, None, at(seed)) == (wrong, own[wrong])


def test_a_draw_depends_on_its_own_position_alone():
    """Draws do not depend on the position within a block, so the output does not depend on the schedule."""
    logits = torch.randn(5, 10, generator=torch.Generator().manual_seed(2))
    for seed in range(20):
        one_by_one = [draw_chain(logits[i : i + 1], at(seed, 3 + i))[0] for i in range(5)]
        assert draw_chain(logits, at(seed)) == one_by_one
    assert len({tuple(draw_chain(logits, DrawAddress(1, choice, 3))) for choice in range(8)}) > 4, (
        "n = 8 gives other texts"
    )


# ---------------------------------------------------------------- rejection sampling


def first_tokens(logits: Tensor, draft_row: dict[int, int] | None, drafts: list[int]) -> tuple[Counter[int], int]:
    """Returns the first decided tokens and the number of accepted drafts, with one seed per draft."""
    counts: Counter[int] = Counter()
    stood = 0
    for seed, token in enumerate(drafts):
        probs = sparse(draft_row) if draft_row else None
        accepted, new = accept_chain(REJECTION, False, logits, (token,), probs, at(seed))
        stood += accepted
        counts[token if accepted else new] += 1
    return counts, stood


def test_rejection_sampling_keeps_the_targets_distribution_under_a_truncated_draft():
    """The draft lacks two tokens and overrates others, and acceptance must correct both."""
    probs = [0.4, 0.1, 0.3, 0.15, 0.05]
    draft_row = {0: 1, 1: 4, 2: 3}
    drafts = torch.multinomial(
        torch.tensor([1.0, 4.0, 3.0]), 6000, replacement=True, generator=torch.Generator().manual_seed(3)
    ).tolist()
    counts, stood = first_tokens(log_probs(probs, probs), draft_row, drafts)
    assert p_value(counts, probs) > FALSE_ALARM
    overlap = sum(min(probs[t], w / 8) for t, w in draft_row.items())
    assert p_value(Counter({0: stood, 1: 6000 - stood}), [overlap, 1 - overlap]) > FALSE_ALARM


def test_rejection_sampling_keeps_the_targets_distribution_under_a_point_mass():
    """Without draft_probs, a token is accepted with its own probability, and never replaces itself."""
    probs = [0.5, 0.3, 0.2]
    counts, stood = first_tokens(log_probs(probs, probs), None, [1] * 5000)
    assert p_value(counts, probs) > FALSE_ALARM
    assert stood == counts[1]


def test_the_bonus_token_follows_the_last_position():
    probs = [0.5, 0.3, 0.2]
    logits = log_probs([0.0, 0.0, 1.0], probs)
    decided = [accept_chain(REJECTION, False, logits, (2,), None, at(seed)) for seed in range(4000)]
    assert {accepted for accepted, _ in decided} == {1}
    assert p_value(Counter(new for _, new in decided), probs) > FALSE_ALARM


def test_nothing_after_a_rejection_is_accepted():
    """Position 0 is always rejected; position 1 alone would always be accepted."""
    logits = log_probs([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0])
    decided = [accept_chain(REJECTION, False, logits, (2, 2), None, at(seed)) for seed in range(100)]
    assert {accepted for accepted, _ in decided} == {0}
    assert {new for _, new in decided} == {0, 1}


def test_a_token_that_the_target_excludes_is_rejected_and_never_recovered():
    """A drafter without the mask proposes the token, whose target logit is -inf."""
    logits = process(log_probs([0.25] * 4, [0.25] * 4), Sampling(top_k=2), (), DraftTree.chain((3,)))
    for seed in range(200):
        accepted, new = accept_chain(REJECTION, False, logits, (3,), sparse({3: 1, 0: 1}), at(seed))
        assert accepted == 0
        assert new in {0, 1}


def test_a_token_likelier_under_the_target_is_always_accepted():
    logits = log_probs([0.5, 0.5], [0.5, 0.5])
    for seed in range(200):
        assert accept_chain(REJECTION, False, logits, (1,), sparse({0: 1, 1: 1}), at(seed))[0] == 1
        assert accept_chain(REJECTION, False, logits, (1,), sparse({0: 3, 1: 1}), at(seed))[0] == 1


@given(
    st.lists(st.integers(0, 8), min_size=4, max_size=4).filter(any),
    st.lists(st.integers(0, 8), min_size=4, max_size=4).filter(any),
    st.integers(0, 2**64 - 1),
)
def test_a_recovered_token_has_positive_residual(target, drafted, seed):
    """A replacement that the drafter already had its full share of would be counted twice."""
    total = sum(target)
    draft_total = sum(drafted)
    logits = log_probs(*[[weight / total for weight in target]] * 2)
    for token, weight in enumerate(drafted):
        if weight == 0:
            continue
        accepted, new = accept_chain(REJECTION, False, logits, (token,), sparse(dict(enumerate(drafted))), at(seed))
        if accepted == 0:
            assert target[new] * draft_total > drafted[new] * total


def test_acceptance_noise_is_the_addressed_one():
    """A token is accepted exactly while noise x draft probability is below the target's probability."""
    seed = 11
    position = 3
    noise = uniform_scalar(key(seed, 0, position, Purpose.ACCEPT))
    for target_prob, accepted in ((noise * 1.001, 1), (noise * 0.999, 0)):
        logits = log_probs(*[[target_prob, 1 - target_prob]] * 2)
        assert accept_chain(REJECTION, False, logits, (0,), None, at(seed, position))[0] == accepted


def test_a_rejection_where_rounding_leaves_no_residual_draws_from_the_target(monkeypatch):
    """With equal distributions, a rejection is a rounding error, and the residual is empty."""
    monkeypatch.setattr("tests.sampling_reference.uniform_scalar", lambda _: 1.0)
    probs = [0.5, 0.25, 0.25]
    logits = log_probs(probs, probs)
    equal = sparse({0: 2, 1: 1, 2: 1})
    decided = [accept_chain(REJECTION, False, logits, (0,), equal, at(seed)) for seed in range(2000)]
    assert {accepted for accepted, _ in decided} == {0}
    assert p_value(Counter(new for _, new in decided), probs) > FALSE_ALARM


# ---------------------------------------------------------------- vocabulary edges


@pytest.mark.parametrize("rule", list(Acceptance))
@pytest.mark.parametrize("vocabulary", [100, 8193])
def test_the_last_token_of_the_vocabulary_can_be_drawn_recovered_and_accepted(rule, vocabulary):
    """[test_sample_recovered_tokens_vocab_boundary]: blocked kernels may skip the tail of the vocabulary."""
    last = vocabulary - 1
    logits = torch.full((2, vocabulary), -torch.inf)
    logits[:, last] = 0.0
    assert accept_chain(rule, False, logits, (last,), None, at(1)) == (1, last)
    assert accept_chain(rule, False, logits, (0,), sparse({0: 1}), at(1)) == (0, last)
    assert accept_chain(rule, False, logits[:1], (), None, at(1)) == (0, last)


@pytest.mark.parametrize("rule", list(Acceptance))
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf], ids=str)
def test_a_model_that_computes_nonsense_still_gives_tokens_of_the_vocabulary(rule, value):
    """[test_all_nan_target_logits_in_range]: an id out of range would crash the next forward pass and the replica."""
    logits = torch.full((2, 10), value)
    _, new = accept_chain(rule, False, logits, (3,), None, at(1))
    assert 0 <= new < 10


@pytest.mark.parametrize("rule", list(Acceptance))
@pytest.mark.parametrize(
    ("sampling", "size"), [(Sampling(top_k=5), 5), (Sampling(top_p=0.5), 4), (Sampling(top_k=1), 1)]
)
def test_decided_tokens_stay_in_the_allowed_set_though_margins_are_tiny(rule, sampling, size):
    """[test_top_k, test_top_p]: this covers accepted, recovered and bonus tokens."""
    raw = torch.zeros(3, 8) - torch.arange(8) * 1e-5
    logits = process(raw, sampling, (), DraftTree.chain((0, 7)))
    seen: set[int] = set()
    for seed in range(300):
        accepted, new = accept_chain(rule, False, logits, (0, 7), sparse({0: 1, 7: 1}, {7: 1, 0: 1}), at(seed))
        seen |= {*(0, 7)[:accepted], new}
    assert seen == set(range(size))


# ---------------------------------------------------------------- trees

TREE = DraftTree((5, 6, 3, 6, 2), (-1, 0, -1, 2, 0))  # paths 5 6, 5 2 and 3 6


@pytest.mark.parametrize(
    ("own", "expected"),  # the target's own token after the prefix and after each node
    [
        ([5, 6, 7, 8, 9, 1], BlockDecision((0, 1), 7)),  # main path
        ([5, 2, 7, 8, 9, 1], BlockDecision((0, 4), 1)),  # second child
        ([5, 1, 7, 8, 9, 1], BlockDecision((0,), 1)),  # neither
        ([3, 6, 7, 6, 9, 1], BlockDecision((2, 3), 9)),  # the other branch
        ([3, 6, 7, 8, 9, 1], BlockDecision((2,), 8)),  # part of the other branch
        ([2, 6, 7, 8, 9, 1], BlockDecision((), 2)),  # a token elsewhere in the tree
    ],
)
def test_a_tree_is_walked_down_to_the_target_s_own_child(own, expected):
    assert match(own, TREE) == expected


def test_a_duplicate_sibling_changes_nothing():
    assert match([5, 6, 7, 9], DraftTree((5, 6, 5), (-1, 0, -1))) == BlockDecision((0, 1), 7)


def test_tokens_after_a_node_use_the_noise_of_their_position():
    """The order of a tree's nodes has no effect."""
    logits = torch.randn(1 + len(TREE), 9, generator=torch.Generator().manual_seed(3))
    for seed in range(20):
        own = draw(logits, TREE, at(seed))
        for node, path in enumerate(TREE.paths):
            alone = logits[[0, *[1 + passed for passed in path]]]
            assert own[1 + node] == draw_chain(alone, at(seed))[-1]


def test_a_tree_decides_like_the_chain_of_its_accepted_path():
    """Other nodes have no effect: right tokens are accepted anywhere in the tree, and no others."""
    logits = torch.randn(1, 9, generator=torch.Generator().manual_seed(4))
    for seed in range(20):
        (right,) = draw(logits, NO_TREE, at(seed))
        wrong = (right + 1) % 9
        rows = torch.randn(3, 9, generator=torch.Generator().manual_seed(seed))
        tree = DraftTree((wrong, right), (-1, -1))
        found = accept(COUPLED, False, torch.cat([logits, rows[:2]]), tree, at(seed))
        chain = accept(COUPLED, False, torch.cat([logits, rows[1:2]]), DraftTree.chain((right,)), at(seed))
        assert (found.path, found.next_token) == ((1,), chain.next_token)


def test_rejection_sampling_refuses_a_tree():
    with pytest.raises(AssertionError, match="chains"):
        accept(REJECTION, False, torch.zeros(6, 9), TREE, at(1))
