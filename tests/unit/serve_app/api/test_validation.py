"""Tests the conversion of validated requests to sessions."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from pydantic import ValidationError

from cluster.config import ServerConfig, SlipstreamConfig, validated
from cluster.errors import RequestError
from cluster.routing.ledger import Generation
from protos.messages import Acceptance, Sampling
from serve_app.api.request_schemas import GenerationRequest
from serve_app.api.validation import check_request, resolve, rules_of
from tests.unit.serve_app.api.sample_requests import chat, completion, refusal_of

CONTEXT = 32
VOCABULARY = 100
EOS_IDS = (2, 7)
MAX_TOKEN_CHARS = 6


def config(**speculation: Any) -> SlipstreamConfig:
    return validated(
        {
            "model": {"target": "models/toy", "max_context": CONTEXT},
            "draft": {"method": "ngram"},
            "speculation": {"draft_tokens": 5} | speculation,
            "server": {"max_requests": 8},
        }
    )


def resolved(
    request: GenerationRequest,
    *prompts: tuple[int, ...],
    setting: SlipstreamConfig | None = None,
    draw: Callable[[], int] | None = None,
) -> list[Generation]:
    setting = setting or config()
    check_request(request, config=setting, max_token_chars=MAX_TOKEN_CHARS)
    return resolve(
        request,
        prompts or ((1, 2, 3),),
        config=setting,
        eos_ids=EOS_IDS,
        vocabulary=VOCABULARY,
        draw=draw or count(1000).__next__,
    )


def test_defaults_of_a_minimal_request() -> None:
    (generation,) = resolved(completion())
    assert generation.prompt == (1, 2, 3)
    assert generation.max_len == 3 + 16
    assert generation.stop_ids == EOS_IDS
    assert generation.sampling == Sampling()
    assert (generation.choice, generation.draft_tokens) == (0, 5)
    assert generation.acceptance is Acceptance.COUPLED


def test_sampling_fields_are_copied() -> None:
    fields = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    penalties = {"frequency_penalty": 1.0, "presence_penalty": -1.0}
    (generation,) = resolved(completion(**fields, **penalties))
    assert generation.sampling == Sampling(**fields, **penalties)
    (unlimited,) = resolved(completion(top_k=-1))
    assert unlimited.sampling.top_k == 0


def test_each_session_draws_its_own_seeds() -> None:
    generations = resolved(completion(n=2), (1,), (2,))
    drawn = [number for g in generations for number in (g.session, g.draft_seed, g.hash_key)]
    assert len(set(drawn)) == 12
    assert [g.choice for g in generations] == [0, 1, 0, 1]
    assert [g.prompt for g in generations] == [(1,), (1,), (2,), (2,)]
    first, other, *_ = {g.seed for g in generations}
    assert first != other
    assert not {g.seed for g in generations} & {g.draft_seed for g in generations}


@pytest.mark.parametrize(("seed", "mapped"), [(7, 7), (-1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (-(2**63), 2**63)])
def test_a_seed_is_mapped_to_64_bits_and_implies_coupled_acceptance(seed: int, mapped: int) -> None:
    (generation,) = resolved(completion(seed=seed), setting=config(acceptance="rejection"))
    assert generation.seed == mapped
    assert generation.acceptance is Acceptance.COUPLED


@pytest.mark.parametrize("seed", [2**64, 2**64 + 7, -(2**63) - 1])
@pytest.mark.parametrize("request_of", [completion, chat])
def test_a_seed_of_more_than_64_bits_is_refused(request_of: Callable[..., GenerationRequest], seed: int) -> None:
    """Ignoring its upper bits would make 2**64 + 7 equal to 7."""
    with pytest.raises(ValidationError) as refused:
        request_of(seed=seed)
    assert [error["loc"] for error in refused.value.errors()] == [("seed",)]


def test_bad_words_outside_the_vocabulary_are_refused() -> None:
    with refusal_of("bad_words", r"bad_words: token id 100 is outside"):
        rules_of(completion(), 3, ((5, VOCABULARY),), VOCABULARY)


def test_a_seed_is_shared_by_all_choices() -> None:
    assert [(g.seed, g.choice) for g in resolved(completion(seed=5, n=3))] == [(5, 0), (5, 1), (5, 2)]


def test_rejection_sampling_is_refused_for_translated_drafts() -> None:
    asked = completion(speculation={"acceptance": "rejection"})
    check_request(asked, config=config(), max_token_chars=MAX_TOKEN_CHARS)
    with pytest.raises(RequestError, match="another tokenizer"):
        check_request(asked, config=config(), max_token_chars=MAX_TOKEN_CHARS, drafts_are_translated=True)


@pytest.mark.parametrize(
    ("asked", "configured", "acceptance"),
    [
        (None, "rejection", Acceptance.REJECTION),
        ("coupled", "rejection", Acceptance.COUPLED),
        ("rejection", "coupled", Acceptance.REJECTION),
    ],
)
def test_acceptance_rule_without_a_seed(asked: str | None, configured: str, acceptance: Acceptance) -> None:
    speculation = {} if asked is None else {"acceptance": asked}
    (generation,) = resolved(completion(speculation=speculation), setting=config(acceptance=configured))
    assert generation.acceptance is acceptance


@pytest.mark.parametrize("asked", [0, 3, 5])
def test_draft_tokens_up_to_the_configured_maximum(asked: int) -> None:
    (generation,) = resolved(completion(speculation={"draft_tokens": asked}))
    assert generation.draft_tokens == asked


@pytest.mark.parametrize(
    ("request_", "prompt_len", "max_len"),
    [
        (chat(), 3, CONTEXT),
        (chat(max_tokens=4), 3, 7),
        (chat(max_completion_tokens=4), 3, 7),
        (chat(max_completion_tokens=4, max_tokens=6), 3, 7),
        (completion(max_tokens=4), 3, 7),
        (completion(), CONTEXT - 1, CONTEXT),
        (completion(max_tokens=CONTEXT - 3), 3, CONTEXT),
    ],
)
def test_maximum_length(request_: GenerationRequest, prompt_len: int, max_len: int) -> None:
    (generation,) = resolved(request_, (1,) * prompt_len)
    assert generation.max_len == max_len


@pytest.mark.parametrize(
    ("request_", "prompt", "field"),
    [
        (completion(max_tokens=CONTEXT - 2), (1, 2, 3), "max_tokens"),
        (chat(max_completion_tokens=CONTEXT), (1, 2, 3), "max_completion_tokens"),
        (completion(), (1,) * CONTEXT, "prompt"),
        (chat(), (1,) * (CONTEXT + 1), "messages"),
        (completion(), (), "prompt"),
        (completion(), (1, VOCABULARY), "prompt"),
    ],
)
def test_prompts_and_limits_beyond_the_context_are_refused(
    request_: GenerationRequest, prompt: tuple[int, ...], field: str
) -> None:
    with refusal_of(field, match=field):
        resolved(request_, prompt)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (completion(prompt=["x"] * 9), "prompt"),
        (completion(prompt=["x"] * 4, n=3), "n"),
        (chat(n=9), "n"),
        (completion(max_tokens=CONTEXT), "max_tokens"),
        (chat(max_completion_tokens=CONTEXT), "max_completion_tokens"),
        (completion(prompt=["x", "x" * (CONTEXT * MAX_TOKEN_CHARS + 1)]), "prompt"),
        (chat(messages=[{"role": "user", "content": "x" * CONTEXT * 3}] * 3), "messages"),
        (completion(speculation={"draft_tokens": 6}), "speculation.draft_tokens"),
        (completion(seed=5, speculation={"acceptance": "rejection"}), "speculation.acceptance"),
    ],
)
def test_checks_that_need_no_tokens_run_before_tokenization(request_: GenerationRequest, field: str) -> None:
    with refusal_of(field, match=field):
        check_request(request_, config=config(), max_token_chars=MAX_TOKEN_CHARS)


def test_the_longest_text_that_may_fit_is_accepted() -> None:
    text = "x" * CONTEXT * MAX_TOKEN_CHARS
    check_request(completion(prompt=[text, text]), config=config(), max_token_chars=MAX_TOKEN_CHARS)


def test_sessions_per_request_are_limited() -> None:
    few = config().model_copy(update={"server": ServerConfig(max_request_sessions=3)})
    check_request(completion(n=3), config=few, max_token_chars=MAX_TOKEN_CHARS)
    with pytest.raises(RequestError, match="n: 1 prompts with n = 4 exceed the limit of 3") as caught:
        check_request(completion(n=4), config=few, max_token_chars=MAX_TOKEN_CHARS)
    assert caught.value.code == "invalid_value"


def test_more_draft_tokens_than_the_servers_limit_are_an_invalid_value() -> None:
    with pytest.raises(RequestError, match="expected at most 5, this server's limit") as caught:
        check_request(completion(speculation={"draft_tokens": 6}), config=config(), max_token_chars=MAX_TOKEN_CHARS)
    assert caught.value.code == "invalid_value"


def test_ignoring_eos_leaves_no_stop_ids() -> None:
    (generation,) = resolved(completion(ignore_eos=True))
    assert generation.stop_ids == ()


def test_earlier_field_names_are_accepted() -> None:
    request = completion(speculation={"max_draft_tokens": 2, "acceptance": "ratio"})
    assert (request.speculation.draft_tokens, request.speculation.acceptance) == (2, "rejection")
