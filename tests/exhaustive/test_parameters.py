"""Every parameter, and each pair of them, on the real pair through HTTP: speculation changes no token of a seeded text.

Not part of the default suite: `make test-exhaustive`. Batch shapes change rounding, so a text may leave another at a
near-tie; the few that do are counted.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from openai.types import Completion
from transformers import AutoModelForCausalLM, AutoTokenizer

from serve_app.demo_data import BENCH_PROMPTS
from tests.integration.serving import Served, demo_served

MODEL = "SmolLM2-135M-Instruct"
MAX_TOKENS = 20
AT_ONCE = 8
SHAPES = {"chain": 1, "tree": 8}  # draft tokens: one node is a chain, several are a tree
PROMPTS = [json.loads(line)["prompt"] for line in BENCH_PROMPTS.read_text().splitlines()][:2]
TOLERANCE = 1e-3  # of a log probability
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
    with demo_served() as served:
        yield served


async def answered(served: Served, fields: list[dict[str, Any]], nodes: int) -> list[Completion]:
    """All at once, as far as there are places."""
    client = served.async_client
    places = asyncio.Semaphore(AT_ONCE)

    async def one(asked: dict[str, Any]) -> Completion:
        extra = asked | {"speculation": {"max_draft_tokens": nodes}}
        async with places:
            return await client.completions.create(model=MODEL, prompt=extra.pop("prompt"), extra_body=extra)

    return list(await asyncio.gather(*(one(asked) for asked in fields)))


def said(answer: Completion) -> list[tuple[str, str | None, list[str]]]:
    """Of each choice: its text, how it ended, and the tokens."""
    return [
        (choice.text, choice.finish_reason, list(choice.logprobs.tokens or []))
        if choice.logprobs
        else (choice.text, choice.finish_reason, [])
        for choice in answer.choices
    ]


@pytest.mark.parametrize("first", PARAMETERS)
async def test_each_pair_of_parameters_gives_the_text_of_plain_decoding(served: Served, first: str) -> None:
    names = list(PARAMETERS)
    pairs = [(first, second) for second in names[names.index(first) :]]
    base = {"temperature": 0.8, "seed": 11, "max_tokens": MAX_TOKENS, "logprobs": 0}
    fields = [
        base | PARAMETERS[one] | PARAMETERS[other] | {"prompt": prompt}
        for (one, other), prompt in itertools.product(pairs, PROMPTS)
    ]
    plain = await answered(served, fields, 0)
    accepted = 0
    for shape, nodes in SHAPES.items():
        found = await answered(served, fields, nodes)
        different = [
            {name: value for name, value in asked.items() if name != "allowed_token_ids"}
            for asked, one, other in zip(fields, plain, found, strict=True)
            if said(one) != said(other)
        ]
        assert not different, f"{shape}: {len(different)} of {len(fields)} differ: {different[:3]}"
        details = [answer.usage.completion_tokens_details for answer in found if answer.usage]
        accepted += sum(each.accepted_prediction_tokens or 0 for each in details if each)
    assert accepted > 0, "nothing was speculated, so this showed nothing"


class Plain:
    """Plain Hugging Face, one forward over a whole text."""

    def __init__(self, folder: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def log_probs(self, ids: list[int]) -> torch.Tensor:
        """After each token, (tokens, vocabulary)."""
        return torch.log_softmax(self._model(torch.tensor([ids])).logits[0].double(), dim=-1)


@pytest.fixture(scope="module")
def plain(served: Served) -> Plain:
    return Plain(served.config.model.target)


@pytest.mark.parametrize("nodes", [0, *SHAPES.values()])
@pytest.mark.parametrize("changes", [{}, {"repetition_penalty": 1.3, "logit_bias": {"28": 3.0}, "top_k": 20}], ids=str)
async def test_log_probabilities_are_those_of_plain_hugging_face(
    served: Served, plain: Plain, changes: dict[str, Any], nodes: int
) -> None:
    """Of prompt and answer, by the logits as they are, whatever parameters made of them."""
    base = {"temperature": 0.9, "seed": 5, "max_tokens": MAX_TOKENS, "ignore_eos": True, "skip_special_tokens": False}
    asked = base | changes | {"echo": True, "logprobs": 4, "prompt": PROMPTS[0]}
    (answer,) = await answered(served, [asked], nodes)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    prompt = plain.tokenizer(PROMPTS[0]).input_ids
    tokens = choice.logprobs.tokens or []
    ids = plain.tokenizer(choice.text).input_ids
    assert [plain.tokenizer.decode([each]) for each in ids] == tokens, "the text is these tokens and no others"
    expected = plain.log_probs(ids)
    own = (choice.logprobs.token_logprobs or [])[1:]
    assert len(own) == len(prompt) - 1 + MAX_TOKENS
    assert own == pytest.approx([float(expected[at, token]) for at, token in enumerate(ids[1:])], abs=TOLERANCE)
    for at, likeliest in enumerate((choice.logprobs.top_logprobs or [])[1:]):
        top = [float(each) for each in expected[at].topk(4).values]
        assert sorted(likeliest.values(), reverse=True)[:4] == pytest.approx(top, abs=TOLERANCE)
