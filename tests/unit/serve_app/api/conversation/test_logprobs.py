"""Tests the formats of log probabilities."""

import math

from protos.messages import TokenScore
from serve_app.api.logprobs import ScoredToken, chat_logprobs, completion_logprobs, prompt_logprobs

TEXTS = {1: "a", 2: "bc", 3: "\N{SNOWMAN}", 4: "a"}
SCORED = [
    ScoredToken(2, TokenScore(-0.5, 1, (2, 3, 1), (-0.5, -1.0, -2.0))),
    ScoredToken(3, TokenScore(-3.0, 4, (1, 2, 4), (-0.25, -1.5, -2.5))),
]


def text_of(token: int) -> str:
    return TEXTS[token]


def test_chat_logprobs_have_tokens_bytes_and_alternatives() -> None:
    found = chat_logprobs(SCORED, 2, text_of).model_dump()
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
    found = completion_logprobs([ScoredToken(1, None), *SCORED], 1, text_of, offset=5).model_dump()
    assert found == {
        "text_offset": (5, 6, 8),
        "token_logprobs": (None, -0.5, -3.0),
        "tokens": ("a", "bc", "\N{SNOWMAN}"),
        "top_logprobs": (None, {"bc": -0.5}, {"\N{SNOWMAN}": -3.0, "a": -0.25}),
    }


def test_the_likelier_of_two_alternatives_with_the_same_text_is_kept() -> None:
    assert completion_logprobs(SCORED[1:], 3, text_of).top_logprobs[0] == {"\N{SNOWMAN}": -3.0, "a": -0.25, "bc": -1.5}


def test_prompt_logprobs_begin_at_the_second_token() -> None:
    found = prompt_logprobs((9, 2, 3), [scored.score for scored in SCORED if scored.score], 1, text_of)
    assert found[0] is None
    assert [{token: (one.logprob, one.rank) for token, one in each.items()} for each in found[1:] if each] == [
        {2: (-0.5, 1)},
        {3: (-3.0, 4), 1: (-0.25, 1)},
    ]


def test_infinite_logprobs_are_replaced_by_finite_ones() -> None:
    for value in (-math.inf, math.nan):
        (found,) = completion_logprobs([ScoredToken(1, TokenScore(value, 1))], 0, text_of).token_logprobs
        assert found == -9999.0
