"""Tokens drawn over vocabulary shards equal those drawn from whole logits."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.compute.collectives import Group, HostGroup, Shard
from actors.sampling.acceptance import DrawAddress, PendingBlock, decide
from actors.sampling.draws import NOT_FINITE, Draws, DrawsOnDevice, draw_tokens
from actors.sampling.gumbel import Purpose
from protos.draft_tree import NO_TREE
from protos.messages import Acceptance, Sampling
from tests.unit.actors.groups import at_once, threads

TEMPERATURES = (0.0, 1.0, 0.7, 1e-3, 1e-320, 50.0)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A few values, so that there are ties within and between shards; all are exact in every type.
finite_values = st.sampled_from((0.0, 0.0, 1.0, 1.0, 2.5, 2.5, -3.0, float("-inf")))
values = finite_values | st.sampled_from((float("inf"), float("nan")))


def blocks_of(temperatures: list[float]) -> list[PendingBlock]:
    return [
        PendingBlock(Acceptance.COUPLED, Sampling(temperature=temperature), NO_TREE, None, DrawAddress(5, 1, position))
        for position, temperature in enumerate(temperatures)
    ]


def draws_on(blocks: list[PendingBlock], padding: int) -> DrawsOnDevice:
    """Returns the draws of the positions that are not greedy, with padding as in a captured step."""
    at = [position for position, block in enumerate(blocks) if not block.sampling.greedy]
    draws = Draws(
        tuple(at),
        tuple(blocks[position].at.key(0, Purpose.DRAW) for position in at),
        tuple(blocks[position].sampling.temperature for position in at),
    )
    return DrawsOnDevice.of([torch.tensor(part) for part in draws.padded(len(at) + padding, len(blocks))])


def check(whole: Tensor, vocabulary: int, temperatures: list[float], groups: list[Group], padding: int = 0) -> None:
    """Asserts that every rank draws the tokens that a step decides from the whole logits."""
    blocks = blocks_of(temperatures)
    decisions = decide(blocks, whole[:, :vocabulary])
    expected = [decision.next_token if decision.is_finite else NOT_FINITE for decision in decisions]
    draws = draws_on(blocks, padding)
    calls = []
    for group in groups:
        shard = Shard(group, whole.shape[1])
        own = whole[:, shard.begin : shard.begin + shard.own_columns]
        calls.append(partial(draw_tokens, own[:, : max(0, vocabulary - shard.begin)], draws, shard))
    for tokens in at_once(calls):
        assert tokens.tolist() == expected


@st.composite
def steps(draw: st.DrawFn) -> tuple[Tensor, int, list[float]]:
    """Draws logits, the number of tokens that may be drawn, and a temperature for each position."""
    columns = draw(st.integers(1, 9))
    vocabulary = draw(st.integers(1, columns))
    row = st.lists(values, min_size=columns, max_size=columns)
    finite_row = st.lists(finite_values, min_size=columns, max_size=columns)
    rows = draw(st.lists(row | finite_row, min_size=1, max_size=5))
    temperatures = draw(st.lists(st.sampled_from(TEMPERATURES), min_size=len(rows), max_size=len(rows)))
    return torch.tensor(rows, dtype=draw(st.sampled_from(DTYPES))), vocabulary, temperatures


@given(steps(), st.sampled_from((1, 2, 3, 5)), st.integers(0, 2))
def test_ties_and_infinities_are_decided_as_by_whole_logits(step, ranks, padding):
    check(*step, threads(ranks), padding)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
def test_shards_of_a_large_vocabulary_draw_the_tokens_of_whole_logits(ranks, dtype):
    """The positions are computed in several slices, whose sizes depend on the number of ranks."""
    generator = torch.Generator().manual_seed(0)
    whole = (4 * torch.randn(23, 32_003, generator=generator)).to(dtype)
    check(whole, 32_000, [TEMPERATURES[row % len(TEMPERATURES)] for row in range(len(whole))], threads(ranks))


def test_the_largest_logit_of_all_shards_is_subtracted_before_scaling():
    """Scaling would round logits of a million by more than they differ."""
    whole = 1e6 + 4 * torch.randn(200, 100, generator=torch.Generator().manual_seed(0))
    check(whole, 100, [0.7] * len(whole), threads(3))


def test_ranks_with_shared_memory_draw_the_tokens_of_whole_logits(tmp_path):
    whole = torch.randn(6, 101, generator=torch.Generator().manual_seed(1))
    whole[2, 70] = torch.nan
    groups: list[Group] = [HostGroup(rank, 3, tmp_path / "shared") for rank in range(3)]
    check(whole, 100, [0.0, 1.0, 1.0, 0.7, 0.0, 1.3], groups)
