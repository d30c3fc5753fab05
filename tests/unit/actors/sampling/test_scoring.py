"""Log probabilities of tokens, beside the logits."""

import math

import pytest
import torch

from actors.sampling.scoring import score


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


def test_more_rows_than_are_worked_on_at_once_are_scored_the_same(monkeypatch):
    logits = torch.randn(9, 6, generator=torch.Generator().manual_seed(4))
    whole = score(logits, [1] * 9, [3] * 9)
    monkeypatch.setattr("actors.sampling.scoring.ROWS_AT_ONCE", 2)
    assert score(logits, [1] * 9, [3] * 9) == whole


def test_more_likeliest_tokens_than_there_are_is_all_of_them():
    (found,) = score(torch.zeros(1, 4), [2], [20])
    assert sorted(found.top_ids) == [0, 1, 2, 3]
    assert found.logprob == pytest.approx(-math.log(4))


def test_nothing_is_scored_where_nothing_is_asked():
    assert score(torch.zeros(0, 4), [], []) == []
