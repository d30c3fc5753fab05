"""Every parameter, and each pair of them, on the real pair through HTTP: speculation changes no token of a seeded text.

Not part of the default suite: `make test-exhaustive`. Batch shapes change rounding, so a text may leave another at a
near-tie; an answer that differs is judged by the plain model, token by token, and the few near-ties are counted.
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
from tests.integration.serving import Served, demo_served

MODEL = "SmolLM2-135M-Instruct"
MAX_TOKENS = 20
AT_ONCE = 8
SHAPES = {"chain": 1, "tree": 8}  # draft tokens: one node is a chain, several are a tree
PROMPTS = [json.loads(line)["prompt"] for line in BENCH_PROMPTS.read_text().splitlines()][:2]
TOLERANCE = 1e-3  # of a log probability
NEAR_TIE = 1e-3  # of logits against each other
MOST_TIES = 0.1  # of the answers of one comparison
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
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 5},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 3},
    "n": {"n": 2},
    "ignore_eos": {"ignore_eos": True},
    "cache_salt": {"cache_salt": "mine"},
    "priority": {"priority": 3},
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Every session is drafted for in every round, whether it pays on this machine or not."""
    longest = f"speculation.max_draft_tokens={max(SHAPES.values())}"
    with demo_served("speculation.pacing=lock_step", "draft.resources.background=false", longest) as served:
        yield served


async def answered(served: Served, fields: list[dict[str, Any]], nodes: int) -> list[Completion]:
    """All at once, as far as there are places."""
    client = served.async_client
    places = asyncio.Semaphore(AT_ONCE)

    async def one(asked: dict[str, Any]) -> Completion:
        extra = asked | {"speculation": {"max_draft_tokens": nodes}}
        async with places:
            return await client.completions.create(model=MODEL, prompt=asked["prompt"], extra_body=extra)

    return list(await asyncio.gather(*(one(asked) for asked in fields)))


@dataclass(frozen=True)
class Said:
    """One choice of an answer."""

    text: str
    ended: str | None
    tokens: tuple[str, ...]  # of the answer alone


def said(answer: Completion, echoed: int) -> list[Said]:
    """Each choice, without the so many tokens of the prompt with which it begins."""
    found = []
    for choice in answer.choices:
        assert choice.logprobs is not None
        found.append(Said(choice.text, choice.finish_reason, tuple((choice.logprobs.tokens or [])[echoed:])))
    return found


def judged(plain_model: PlainModel, asked: dict[str, Any], plain: Completion, found: Completion) -> list[float]:
    """How near a tie each choice was that differs; infinite where no tie explains it."""
    generations = plain_model.generations(asked)
    echoed = len(generations[0].prompt) if asked.get("echo") else 0
    margins = []
    for generation, one, other in zip(generations, said(plain, echoed), said(found, echoed), strict=True):
        if one == other:
            continue
        if one.tokens == other.tokens:  # the same tokens, and another text or end
            margins.append(math.inf)
            continue
        margins.append(max(plain_model.widest_margin(generation, each.tokens) for each in (one, other)))
    return margins


@pytest.mark.parametrize("first", PARAMETERS)
async def test_each_pair_of_parameters_gives_the_text_of_plain_decoding(
    served: Served, plain_model: PlainModel, first: str
) -> None:
    names = list(PARAMETERS)
    pairs = [(first, second) for second in names[names.index(first) :]]
    base = {"model": MODEL, "temperature": 0.8, "seed": 11, "max_tokens": MAX_TOKENS, "logprobs": 0}
    fields = [
        base | PARAMETERS[one] | PARAMETERS[other] | {"prompt": prompt}
        for (one, other), prompt in itertools.product(pairs, PROMPTS)
    ]
    plain = await answered(served, fields, 0)
    accepted = 0
    for shape, nodes in SHAPES.items():
        found = await answered(served, fields, nodes)
        judgements = {
            describe(asked): margins
            for asked, one, other in zip(fields, plain, found, strict=True)
            if (margins := judged(plain_model, asked, one, other))
        }
        print(f"{first}, {shape}: {len(judgements)} of {len(fields)} answers differ: {judgements}")
        wrong = {asked: margins for asked, margins in judgements.items() if max(margins) >= NEAR_TIE}
        assert not wrong, f"{shape}: no near-tie explains {len(wrong)} of {len(fields)}: {wrong}"
        assert len(judgements) <= MOST_TIES * len(fields), f"{shape}: so many are no accident: {judgements}"
        details = [answer.usage.completion_tokens_details for answer in found if answer.usage]
        accepted += sum(each.accepted_prediction_tokens or 0 for each in details if each)
    assert accepted > 0, "nothing was speculated, so this showed nothing"


def describe(asked: dict[str, Any]) -> str:
    """The request, without its long fields."""
    return str({name: value for name, value in asked.items() if name not in ("allowed_token_ids", "model", "logprobs")})


@pytest.fixture(scope="module")
def plain_model(served: Served) -> PlainModel:
    return PlainModel(served.config)


@pytest.mark.parametrize("nodes", [0, *SHAPES.values()])
@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.3, "logit_bias": {"28": 3.0}, "top_k": 20}], ids=str)
async def test_log_probabilities_are_those_of_plain_hugging_face(
    served: Served, plain_model: PlainModel, changes: dict[str, Any], nodes: int
) -> None:
    """Of prompt and answer, by the logits as they are, whatever parameters made of them."""
    base = {"temperature": 0.9, "seed": 5, "max_tokens": MAX_TOKENS, "ignore_eos": True, "skip_special_tokens": False}
    asked = base | changes | {"model": MODEL, "echo": True, "logprobs": 4, "prompt": PROMPTS[0]}
    (answer,) = await answered(served, [asked], nodes)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    prompt = plain_model.tokenizer(PROMPTS[0]).input_ids
    tokens = choice.logprobs.tokens or []
    ids = plain_model.tokenizer(choice.text).input_ids
    assert [plain_model.tokenizer.decode([each]) for each in ids] == tokens, "the text is these tokens and no others"
    expected = plain_model.log_probs(ids)
    own = (choice.logprobs.token_logprobs or [])[1:]
    assert len(own) == len(prompt) - 1 + MAX_TOKENS
    assert own == pytest.approx([float(expected[at, token]) for at, token in enumerate(ids[1:])], abs=TOLERANCE)
    for at, likeliest in enumerate((choice.logprobs.top_logprobs or [])[1:]):
        top = [float(each) for each in expected[at].topk(4).values]
        assert sorted(likeliest.values(), reverse=True)[:4] == pytest.approx(top, abs=TOLERANCE)
