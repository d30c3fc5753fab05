"""Steps padded to few shapes: they always fit, waste little, and what was asked for does not change."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.buckets import ROWS, TOKENS_EACH, Bucket, bucket_for, padded
from actors.cache import FeedRow
from actors.runner import ModelRunner
from tests.unit.actors.tiny_models import MODELS, jittered, tokens_of

PAGE_SIZE, SPARE = 4, 31
steps = st.lists(st.integers(1, 12), min_size=1, max_size=70)


def some_rows(counts: list[int]) -> list[FeedRow]:
    return [FeedRow((1,) * count, 0, count, (index,)) for index, count in enumerate(counts)]


@given(steps)
def test_a_padded_step_has_exactly_the_shape_of_its_bucket(counts):
    rows = some_rows(counts)
    bucket = bucket_for(rows)
    if bucket is None:
        return
    filled = padded(rows, bucket, SPARE, PAGE_SIZE)
    assert filled[: len(rows)] == rows
    assert Bucket(len(filled), sum(len(row.tokens) for row in filled)) == bucket
    for row in filled[len(rows) :]:
        assert (row.start, row.logits, set(row.pages)) == (0, 0, {SPARE})
        assert len(row.pages) * PAGE_SIZE >= len(row.tokens) > 0


@given(st.integers(1, ROWS[-1]), st.sampled_from([1, 5]))
def test_even_steps_waste_less_than_half(count, each):
    """Single tokens, and blocks of four with the token before them: what most steps are."""
    bucket = bucket_for(some_rows([each] * count))
    assert bucket is not None
    assert bucket.tokens <= 2 * count * each


def test_shapes_that_are_buckets_are_not_padded_and_large_steps_have_none():
    assert bucket_for(some_rows([5] * 8)) == Bucket(8, 40)
    assert bucket_for(some_rows([1])) == Bucket(1, 1)
    assert bucket_for(some_rows([512])) is None
    assert bucket_for(some_rows([1] * 65)) is None


def test_there_are_few_buckets():
    """Each is a graph, and each graph takes memory."""
    assert len(ROWS) * len(TOKENS_EACH) <= 64


def test_padding_changes_no_logits():
    torch.manual_seed(3)
    runner = ModelRunner(jittered(MODELS["llama"]()), 32, PAGE_SIZE)
    a, b, c = tokens_of(1, 9), tokens_of(2, 6), tokens_of(3, 4)
    rows = [FeedRow(a, 0, 2, (3, 1, 2)), FeedRow(b, 0, 6, (5, 4)), FeedRow(c, 0, 1, (0,))]
    bucket = bucket_for(rows)
    assert bucket == Bucket(4, 20)
    expected = runner.forward(rows)
    found = runner.forward(padded(rows, bucket, SPARE, PAGE_SIZE))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
