"""Tests the number of target steps per answer, given the correct predictions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.learning import SessionScore, score


@pytest.mark.parametrize(
    ("agreements", "draft_tokens", "verifies"),
    [
        ("", 4, 0),
        ("n", 4, 1),
        ("y", 4, 1),
        ("yyyyy", 4, 1),  # four accepted tokens and the target's own
        ("yyyyyy", 4, 2),
        ("ynyny", 4, 3),
        ("yyy", 1, 2),
    ],
)
def test_a_block_ends_at_its_first_wrong_token(agreements: str, draft_tokens: int, verifies: int) -> None:
    right = [letter == "y" for letter in agreements]
    assert score(right, draft_tokens) == SessionScore(len(right), sum(right), verifies)


def test_further_tokens_count_from_their_forward() -> None:
    agreements = [True, False, True, True, False, False]
    further = [[True, False, False, True, True, False]]  # whether the head is right, by position
    # Two tokens from the forward pass at 0 and its head, the target's own, two from the pass at 3, the target's own.
    assert score(agreements, 2, further) == SessionScore(6, 3, 2)
    # The forward pass at 2 adds a third token, and the next block begins at 4.
    assert score(agreements, 3, further) == SessionScore(6, 3, 3)
    assert score(agreements, 2, [[False] * 6]).verifies == 4


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 6))
def test_a_head_that_agrees_with_the_draft_changes_nothing(agreements: list[bool], draft_tokens: int) -> None:
    further = [[*agreements[distance:], *[False] * distance][: len(agreements)] for distance in (1, 2)]
    assert score(agreements, draft_tokens, further) == score(agreements, draft_tokens)
