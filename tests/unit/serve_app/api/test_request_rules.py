"""Tests the mapping of request fields to a session's rules, scoring and prompt."""

from typing import Any

import pytest

from cluster.config import validated
from protos.messages import Scoring, TokenRules
from serve_app.api.request_schemas import CompletionRequest
from serve_app.api.text import TextCodec
from serve_app.api.validation import bad_words_of, check_rules, resolve, rules_of, scoring_of, truncated
from tests.unit.serve_app.api.sample_requests import chat, completion, refusal_of

VOCABULARY = 100


def test_a_plain_request_has_neutral_rules_and_no_scoring() -> None:
    assert rules_of(completion(), 7, (), VOCABULARY) == TokenRules()
    assert scoring_of(completion(), 7) == Scoring()


def test_rules_match_the_fields_and_min_tokens_follow_the_prompt() -> None:
    request = completion(logit_bias={"5": 1.5, "07": -100}, allowed_token_ids=[9, 3, 9], min_tokens=4)
    expected = TokenRules(((5, 1.5), (7, -100.0)), (3, 9), ((1, 2),), 11)
    assert rules_of(request, 7, ((1, 2),), VOCABULARY) == expected


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {"100": 1}}, "logit_bias"),
        ({"allowed_token_ids": [3, 100]}, "allowed_token_ids"),
        ({"stop_token_ids": [2**31 - 1]}, "stop_token_ids"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused(fields: dict[str, Any], field: str) -> None:
    with refusal_of(field, "outside the vocabulary of 100"):
        rules_of(completion(**fields), 7, (), VOCABULARY)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (completion(max_tokens=3, min_tokens=4), "min_tokens"),
        (chat(max_completion_tokens=3, min_tokens=4), "min_tokens"),
        (completion(stream=True, prompt_logprobs=0), "prompt_logprobs"),
    ],
)
def test_contradictory_fields_are_refused(request_: CompletionRequest, field: str) -> None:
    with refusal_of(field):
        check_rules(request_)


def test_min_tokens_may_equal_max_tokens() -> None:
    check_rules(completion(max_tokens=4, min_tokens=4))


def test_requested_scores() -> None:
    assert scoring_of(completion(logprobs=3), 7) == Scoring(3)
    assert scoring_of(completion(logprobs=3, echo=True), 7) == Scoring(3, 3)
    assert scoring_of(completion(logprobs=3, echo=True, prompt_logprobs=5), 7) == Scoring(3, 5)
    assert scoring_of(completion(echo=True), 7) == Scoring()
    assert scoring_of(chat(logprobs=True), 7) == Scoring(0)
    assert scoring_of(chat(logprobs=True, top_logprobs=2), 7) == Scoring(2)
    assert scoring_of(chat(prompt_logprobs=0), 7) == Scoring(None, 0)


def test_too_many_prompt_logprobs_for_a_message_are_refused() -> None:
    with refusal_of("prompt_logprobs"):
        scoring_of(completion(prompt_logprobs=20), 60_000)


def test_prompt_logprobs_of_all_choices_are_limited() -> None:
    request = completion(prompt=["x"] * 2, n=2, prompt_logprobs=20)
    context = 1 << 15
    config = validated({"model": {"target": "toy", "max_context": context}, "draft": {"method": "ngram"}})
    ids = {"config": config, "eos_ids": (), "vocabulary": VOCABULARY, "draw": lambda: 1}
    most = (1 << 20) // 21 // 2  # prompt tokens, with 21 scores each in two choices
    assert len(resolve(request, [(1,) * (most - 1), (1,)], **ids)) == 4
    with refusal_of("prompt_logprobs", f"of {2 * most + 2} prompt tokens"):
        resolve(request, [(1,) * most, (1,)], **ids)


def test_bad_words_are_forbidden_with_and_without_a_leading_space(codec: TextCodec) -> None:
    words = bad_words_of(completion(bad_words=["ab", " ab", "c"]), codec)
    assert words == (
        codec.encode_plain("ab"),
        codec.encode_plain(" ab"),
        codec.encode_plain("c"),
        codec.encode_plain(" c"),
    )


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({}, (1, 2, 3, 4, 5)),
        ({"truncate_prompt_tokens": 2}, (4, 5)),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, (1, 2)),
        ({"truncate_prompt_tokens": 9}, (1, 2, 3, 4, 5)),
        ({"truncate_prompt_tokens": -1}, (2, 3, 4, 5)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 3}, (4, 5)),
    ],
)
def test_prompt_truncation(fields: dict[str, Any], kept: tuple[int, ...]) -> None:
    assert truncated(completion(**fields), (1, 2, 3, 4, 5), context=5) == kept
