"""Tests the formats of log probabilities."""

import math

from protos.messages import TokenScore
from serve_app.api.logprobs import ScoredToken, chat_logprobs, completion_logprobs, prompt_logprobs

BYTES = {1: b"a", 2: b"bc", 3: "\N{SNOWMAN}".encode(), 4: b"a", 5: b" \xf0\x9f", 6: b"\x98", 7: b"\x80"}
SCORED = [
    ScoredToken(2, TokenScore(-0.5, 1, (2, 3, 1), (-0.5, -1.0, -2.0))),
    ScoredToken(3, TokenScore(-3.0, 4, (1, 2, 4), (-0.25, -1.5, -2.5))),
]


def bytes_of(token: int) -> bytes:
    return BYTES[token]


def test_chat_logprobs_have_tokens_bytes_and_alternatives() -> None:
    found = chat_logprobs(SCORED, 2, bytes_of).model_dump()
    assert found == {
        "content": (
            {
                "token": "bc",
                "logprob": -0.5,
                "bytes": (98, 99),
                "top_logprobs": (
                    {"token": "bc", "logprob": -0.5, "bytes": (98, 99)},
                    {"token": "\N{SNOWMAN}", "logprob": -1.0, "bytes": (226, 152, 131)},
                ),
            },
            {
                "token": "\N{SNOWMAN}",
                "logprob": -3.0,
                "bytes": (226, 152, 131),
                "top_logprobs": (
                    {"token": "a", "logprob": -0.25, "bytes": (97,)},
                    {"token": "bc", "logprob": -1.5, "bytes": (98, 99)},
                ),
            },
        ),
        "refusal": None,
    }


def test_completion_logprobs_have_offsets_and_include_the_sampled_token() -> None:
    found = completion_logprobs([ScoredToken(1, None), *SCORED], 1, bytes_of, offset=5).model_dump()
    assert found == {
        "text_offset": (5, 6, 8),
        "token_logprobs": (None, -0.5, -3.0),
        "tokens": ("a", "bc", "\N{SNOWMAN}"),
        "top_logprobs": (None, {"bc": -0.5}, {"\N{SNOWMAN}": -3.0, "a": -0.25}),
    }


def test_the_likelier_of_two_alternatives_with_the_same_text_is_kept() -> None:
    assert completion_logprobs(SCORED[1:], 3, bytes_of).top_logprobs[0] == {"\N{SNOWMAN}": -3.0, "a": -0.25, "bc": -1.5}


FACE = [ScoredToken(token, TokenScore(-0.5, 1, (6, 7), (-1.0, -2.0))) for token in (5, 6, 7)]


def test_the_bytes_of_partial_characters_join_to_the_text() -> None:
    content = chat_logprobs(FACE, 2, bytes_of).content
    assert b"".join(bytes(one.bytes) for one in content).decode() == " \U0001f600"
    assert [one.token for one in content] == [r"bytes: \xf0\x9f", r"bytes:\x98", r"bytes:\x80"]
    assert [bytes(one.bytes) for one in content[0].top_logprobs] == [b"\x98", b"\x80"]


def test_a_character_counts_once_in_offsets_and_its_parts_are_distinct() -> None:
    found = completion_logprobs([*FACE, ScoredToken(1, None)], 2, bytes_of)
    assert found.text_offset == (0, 2, 2, 2)
    assert found.top_logprobs[0] == {r"bytes: \xf0\x9f": -0.5, r"bytes:\x98": -1.0, r"bytes:\x80": -2.0}


def test_prompt_logprobs_begin_at_the_second_token() -> None:
    found = prompt_logprobs((9, 2, 3), [scored.score for scored in SCORED if scored.score], 1, bytes_of)
    assert found[0] is None
    assert [{token: (one.logprob, one.rank) for token, one in each.items()} for each in found[1:] if each] == [
        {2: (-0.5, 1)},
        {3: (-3.0, 4), 1: (-0.25, 1)},
    ]


def test_infinite_logprobs_are_replaced_by_finite_ones() -> None:
    for value in (-math.inf, math.nan):
        (found,) = completion_logprobs([ScoredToken(1, TokenScore(value, 1))], 0, bytes_of).token_logprobs
        assert found == -9999.0
