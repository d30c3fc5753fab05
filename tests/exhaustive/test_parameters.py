"""Speculation changes no token of a seeded text, for every parameter and every pair of parameters, over HTTP.

Drafts are chains of several tokens, and trees; the test checks that the target verified branches. Each pair of
parameters uses one prompt in rotation, and each single parameter uses all prompts. `-k "logit_bias"` runs the pairs
with one parameter.

Not part of the default suite: `make test-exhaustive`. Batch shapes change rounding, so texts may diverge at a near-tie.
The transformers model checks a different answer token by token. The test counts near-ties, and fails if no near-tie
explains a difference.
"""

import asyncio
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai.types import Completion

from serve_app.demo_data import BENCH_PROMPTS
from tests.exhaustive.plain_model import PlainModel
from tests.exhaustive.shaped_target import CHAIN, TREE, verified
from tests.integration.serving import Served, built_by, demo_served

MODEL = "SmolLM2-135M-Instruct"
MAX_TOKENS = 20
AT_ONCE = 8
SHAPES = {"chain": CHAIN, "tree": TREE}  # draft tokens
PROMPTS = [json.loads(line)["prompt"] for line in BENCH_PROMPTS.read_text().splitlines()][:3]
TOLERANCE = 1e-3  # for a log probability
NEAR_TIE = 1e-3  # difference between two logits
MAX_TIE_SHARE = 0.1  # share of the answers in a comparison
PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 20},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "frequency_penalty": {"frequency_penalty": 0.8},
    "presence_penalty": {"presence_penalty": 0.8},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "logit_bias": {"logit_bias": {"28": 3.0, "30": -100.0, "338": 2.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(6000))},
    "bad_words": {"bad_words": ["the", "and", "of the"]},
    "min_tokens": {"min_tokens": 12},
    "stop": {"stop": ["the", ", and", "zzz"]},
    "stop_token_ids": {"stop_token_ids": [28, 30]},
    "include_stop_str_in_output": {"include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False},
    "spaces_between_special_tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": False},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "truncation_side": {"truncate_prompt_tokens": 5, "truncation_side": "right"},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 3},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "n": {"n": 2},
    "ignore_eos": {"ignore_eos": True},
    "cache_salt": {"cache_salt": "mine"},
    "priority": {"priority": 3},
    "choice": {"structured_outputs": {"choice": ["yes, at once", "no, never", "perhaps, if it rains"]}},
    "regex": {"structured_outputs": {"regex": "[A-Z][a-z]{2,9}( [a-z]{2,9}){6,9}\\."}},
}
REFUSED = {frozenset({"ignore_eos", form}) for form in ("choice", "regex")}  # contradictory pairs


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Serves in lock step, which drafts for every session in every round."""
    longest = f"speculation.draft_tokens={max(SHAPES.values())}"
    settings = ("speculation.schedule=lock_step", "draft.resources.background=false", longest)
    with built_by("tests.exhaustive.shaped_target:build"), demo_served(*settings) as served:
        yield served


async def answered(served: Served, fields: list[dict[str, Any]], nodes: int) -> list[Completion]:
    """Sends all requests concurrently, up to the session limit."""
    places = asyncio.Semaphore(AT_ONCE)

    async def one(asked: dict[str, Any]) -> Completion:
        extra = asked | {"speculation": {"draft_tokens": nodes}}
        async with places:
            return await client.completions.create(model=MODEL, prompt=asked["prompt"], extra_body=extra)

    async with served.async_client as client:
        return list(await asyncio.gather(*(one(asked) for asked in fields)))


@dataclass(frozen=True)
class Said:
    """Choice of an answer."""

    text: str
    ended: str | None
    ended_by: int | str | None
    tokens: tuple[str, ...]  # without the prompt


def said(answer: Completion, echoed: int) -> list[Said]:
    """Returns the choices without the prompt tokens that precede them."""
    found = []
    for choice in answer.choices:
        ended_by = choice.model_extra["stop_reason"]
        tokens = tuple((choice.logprobs.tokens or [])[echoed:])
        found.append(Said(choice.text, choice.finish_reason, ended_by, tokens))
    return found


def furthest_score(one: Completion, other: Completion) -> float:
    """Returns the largest difference between log probabilities of common tokens."""
    apart = [0.0]
    for mine, theirs in zip(one.choices, other.choices, strict=True):
        if mine.logprobs.tokens == theirs.logprobs.tokens:
            scores = zip(mine.logprobs.token_logprobs or [], theirs.logprobs.token_logprobs or [], strict=True)
            assert len(mine.logprobs.tokens or []) == len(mine.logprobs.token_logprobs or [])
            apart += [abs(a - b) for a, b in scores if a is not None and b is not None]  # the first has none
    return max(apart)


def judged(plain_model: PlainModel, asked: dict[str, Any], plain: Completion, found: Completion) -> list[float]:
    """Returns the logit error that explains each differing choice; infinite if no near-tie does."""
    generations = plain_model.generations(asked)
    echoed = len(generations[0].prompt) if asked.get("echo") else 0
    margins = []
    for generation, one, other in zip(generations, said(plain, echoed), said(found, echoed), strict=True):
        if one == other:
            continue
        if one.tokens == other.tokens:  # equal tokens but another text or finish reason
            margins.append(math.inf)
            continue
        margins.append(max(plain_model.widest_margin(generation, each.tokens) for each in (one, other)))
    return margins


def requests_of(first: str) -> list[dict[str, Any]]:
    """Returns requests with the parameter alone, and with each later parameter."""
    base = {"model": MODEL, "temperature": 0.8, "seed": 11, "max_tokens": MAX_TOKENS, "logprobs": 0}
    names = list(PARAMETERS)
    others = [name for name in names[names.index(first) + 1 :] if frozenset({first, name}) not in REFUSED]
    alone = [base | PARAMETERS[first] | {"prompt": prompt} for prompt in PROMPTS]
    turns = itertools.cycle(PROMPTS)
    return alone + [base | PARAMETERS[first] | PARAMETERS[name] | {"prompt": next(turns)} for name in others]


@pytest.mark.parametrize("first", PARAMETERS)
async def test_each_pair_of_parameters_gives_the_text_of_plain_decoding(
    served: Served, plain_model: PlainModel, first: str
) -> None:
    fields = requests_of(first)
    plain = await answered(served, fields, 0)
    for shape, nodes in SHAPES.items():
        before = await asyncio.to_thread(verified, served)
        found = await answered(served, fields, nodes)
        blocks = await asyncio.to_thread(verified, served) - before
        judgements = {
            describe(asked): margins
            for asked, one, other in zip(fields, plain, found, strict=True)
            if (margins := judged(plain_model, asked, one, other))
        }
        apart = max(furthest_score(one, other) for one, other in zip(plain, found, strict=True))
        tokens = accepted(found)
        of_all = f"{len(judgements)} of {len(fields)} answers differ by near-ties: {judgements}"
        print(f"{first}, {shape}: {of_all}; {tokens} accepted of {dict(blocks)}; scores within {apart:.1e}", flush=True)
        wrong = {asked: margins for asked, margins in judgements.items() if max(margins) >= NEAR_TIE}
        assert not wrong, f"{shape}: no near-tie explains {len(wrong)} of {len(fields)}: {wrong}"
        assert len(judgements) <= max(1, MAX_TIE_SHARE * len(fields)), f"{shape}: so many are no accident: {judgements}"
        assert apart <= TOLERANCE, f"{shape}: the same tokens have other log probabilities"
        assert tokens > 0, f"{shape}: no draft token was accepted, so this showed nothing"
        assert blocks["trees"] == 0 if shape == "chain" else blocks["trees"] > 0, blocks
        assert shape == "tree" or blocks["chains of several"] > 0, blocks


def accepted(answers: list[Completion]) -> int:
    """Returns the number of accepted draft tokens in all answers."""
    details = [answer.usage.completion_tokens_details for answer in answers if answer.usage]
    return sum(each.accepted_prediction_tokens or 0 for each in details if each)


def describe(asked: dict[str, Any]) -> str:
    """Formats the request without its long fields."""
    return str({name: value for name, value in asked.items() if name not in ("allowed_token_ids", "model", "logprobs")})


@pytest.fixture(scope="module")
def plain_model(served: Served) -> PlainModel:
    return PlainModel(served.config)


@pytest.mark.parametrize("nodes", [0, *SHAPES.values()])
@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.3, "logit_bias": {"28": 3.0}, "top_k": 20}], ids=str)
async def test_log_probabilities_are_those_of_plain_hugging_face(
    served: Served, plain_model: PlainModel, changes: dict[str, Any], nodes: int
) -> None:
    """Compares the scores of prompt and answer with those of unprocessed logits."""
    base = {"temperature": 0.9, "seed": 5, "max_tokens": MAX_TOKENS, "ignore_eos": True, "skip_special_tokens": False}
    asked = base | changes | {"model": MODEL, "echo": True, "logprobs": 4}
    answers = await answered(served, [asked | {"prompt": prompt} for prompt in PROMPTS], nodes)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        compare_scores(plain_model, prompt, answer)
    assert (accepted(answers) > 0) is (nodes > 0), "with drafts some token was accepted, or this showed nothing of them"


def compare_scores(plain_model: PlainModel, prompt: str, answer: Completion) -> None:
    (choice,) = answer.choices
    ids = plain_model.ids(choice.logprobs.tokens or [])
    prompt_ids = plain_model.tokenizer(prompt).input_ids
    assert ids[: len(prompt_ids)] == prompt_ids
    assert plain_model.tokenizer.decode(ids) == choice.text, "the text is these tokens and no others"
    expected = plain_model.log_probs(ids)
    own = (choice.logprobs.token_logprobs or [])[1:]
    assert len(own) == len(prompt_ids) - 1 + MAX_TOKENS
    assert own == pytest.approx([float(expected[at, token]) for at, token in enumerate(ids[1:])], abs=TOLERANCE)
    for at, likeliest in enumerate((choice.logprobs.top_logprobs or [])[1:]):
        top = [float(each) for each in expected[at].topk(4).values]
        assert sorted(likeliest.values(), reverse=True)[:4] == pytest.approx(top, abs=TOLERANCE)
