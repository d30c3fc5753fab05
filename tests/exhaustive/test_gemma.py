"""Compares greedy answers of Gemma 3 270M, served over Ray, gRPC and HTTP, with transformers' `generate`.

Five of six layers have a sliding window of 512 tokens. Prompts are shorter than the window, just short enough for the
answer to cross it, or longer. Some share a prefix of more than 512 tokens. Eight sessions share a cache too small for
all of them, so some are preempted. Drafts are n-grams, as chains and as trees.

* float32: every token equals `generate`'s, and log probabilities agree within a tolerance.
* bfloat16: rounding depends on batch shapes, so near-ties may resolve differently. The test first measures how far
  transformers' own logit gaps move between `generate` and one uncached forward. An answer may differ from `generate`
  only at a gap within that distance, and each later token must be as close to transformers' best continuation. The
  test counts and prints near-ties.

Not part of the default suite: `make test-exhaustive`. Skipped if the package registry lacks the weights.
"""

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
import torch
from openai.types import Completion
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from serve_app.api.logprobs import token_text
from serve_app.api.text import TextCodec
from tests.exhaustive.gemma3 import Unavailable, prepare_gemma3
from tests.exhaustive.shaped_target import CHAIN, TREE, verified
from tests.integration.serving import Served, built_by, demo_served

WINDOW = 512
PUBLISHED = {  # config.json of google/gemma-3-270m
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "hidden_size": 640,
    "intermediate_size": 2048,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "attention_bias": False,
    "use_bidirectional_attention": False,
    "tie_word_embeddings": True,
    "sliding_window": WINDOW,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 3,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
    },
    "eos_token_id": 1,
    "bos_token_id": 2,
    "pad_token_id": 0,
}
CONTEXT = 1024
AT_ONCE = 8
PAGES = 66  # of 16 tokens: room for two prompts of ACROSS, but not for their answers
CACHE_GIB = {"float32": PAGES * 16 * 36_864 / 2**30, "bfloat16": PAGES * 16 * 18_432 / 2**30}
SHAPES = {"chain": CHAIN, "tree": TREE}  # draft tokens
ULPS = 3  # upper limit of a near-tie in bfloat16, even if transformers' own gaps move further
TOLERANCE = 2e-4  # for log probabilities in float32
CANDIDATES = 16  # top tokens whose logits are stored


def price_list(goods: str, count: int) -> str:
    lines = [f"{at}. The {goods} number {at} costs {at * 3 % 17} dollars." for at in range(1, count + 1)]
    return f"A list of {goods}s:\n" + "\n".join(lines) + "\n"


CITIES = ["Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Tokyo", "Quito", "Dublin", "Berlin"]
PEOPLE = ["Anna", "Ben", "Clara", "David", "Emma", "Frank", "Greta", "Henry"]
LINES = [
    f"{at}. {PEOPLE[at % 8]} lives in {CITIES[at % 10]} and is {20 + at * 7 % 50} years old." for at in range(1, 37)
]
DIRECTORY = "A directory of people:\n" + "\n".join(LINES) + "\n\n"


@dataclass(frozen=True)
class Prompt:
    text: str
    answer: int  # tokens per answer


BEYOND = [  # more than 512 tokens, with a common prefix
    Prompt(DIRECTORY + "The same directory again:\n1. ", 32),
    Prompt(DIRECTORY + "The directory from number 9 on:\n" + "\n".join(LINES[8:10]) + "\n", 32),
    Prompt(DIRECTORY + "From the end:\n" + "\n".join(LINES[35:32:-1]) + "\n", 32),
    Prompt(DIRECTORY + "Names only:\n1. Ben\n2. Clara\n3. David\n4.", 32),
    Prompt(DIRECTORY + "Who lives in Paris?\n", 32),
]
ACROSS = [  # the answer crosses the window
    Prompt(price_list("apple", 33), 96),
    Prompt(price_list("chair", 32), 64),
    Prompt(price_list("ticket", 33), 64),
    Prompt(price_list("yellow lamp", 31), 48),
]
LONG = [Prompt(price_list("book", 50), 32)]
SHORT = [
    Prompt("The capital of France is", 20),
    Prompt("Day 1: Monday\nDay 2: Tuesday\nDay 3:", 20),
    Prompt("1, 2, 3, 4, 5, 6, 7, 8,", 20),
    Prompt("The quick brown fox jumps over the lazy dog. The quick brown fox", 20),
    Prompt("def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n", 20),
    Prompt("red, green, blue, red, green, blue, red,", 20),
    Prompt("Once upon a time there was a king who had", 20),
    Prompt("A: How are you?\nB: I am fine.\nA: How are you?\nB:", 20),
    Prompt("<ul>\n<li>one</li>\n<li>two</li>\n<li>three</li>\n", 20),
    Prompt("The sea is blue. The sky is blue. The", 20),
]
# The rest of BEYOND starts after the first has been prefilled; pairs of ACROSS outgrow the cache.
PROMPTS = [
    *(BEYOND[0], *SHORT[:7], *BEYOND[1:], SHORT[7]),
    *(ACROSS[0], ACROSS[1], SHORT[8], ACROSS[2], ACROSS[3], SHORT[9], LONG[0]),
]
PROBES = [ACROSS[1], BEYOND[4], *SHORT]  # measure transformers' own rounding


@dataclass(frozen=True)
class Expected:
    """Answer of `generate` with log probabilities and top logits."""

    ids: list[int]
    scores: list[float]  # log probabilities
    logits: list[dict[int, float]]  # of the top tokens at each position, best first

    def gap(self, place: int) -> float:
        """Returns the gap between the two best logits at a position."""
        best, second, *_ = self.logits[place].values()
        return best - second


@dataclass(frozen=True)
class Rounding:
    """Rounding differences between transformers' `generate` and one uncached forward over the same texts."""

    ulps: float  # largest change of the gap between the two best logits
    error: float  # mean difference of log probabilities
    tokens: int
    flips: int  # tokens where the uncached forward prefers another


class Reference:
    """Gemma 3 in transformers, in the test's process."""

    def __init__(self, served: Served) -> None:
        folder = served.config.model.target
        self.dtype = served.config.model.dtype
        self.codec = TextCodec.load(Path(folder), served.config.server)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self.dtype))
        self.model.eval()
        pieces = enumerate(self.codec.tokenizer.convert_ids_to_tokens(range(self.codec.vocabulary)))
        # Excludes byte tokens, which duplicate characters with their own token, such as "1".
        self._ids = {
            token_text(self.codec.token_bytes(token)): token for token, piece in pieces if not piece.startswith("<0x")
        }

    def compute(self) -> "tuple[list[Expected], Rounding]":
        torch.set_num_threads(1)  # of this thread
        answers = {prompt: self.answer(prompt) for prompt in PROMPTS}
        return list(answers.values()), self.rounding({prompt: answers[prompt] for prompt in PROBES})

    @torch.inference_mode()
    def answer(self, prompt: Prompt) -> Expected:
        ids = torch.tensor([self.codec.encode(prompt.text)])
        output = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=prompt.answer,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answer: list[int] = output.sequences[0, ids.shape[1] :].tolist()
        logits = torch.cat(output.logits).float()
        top = logits.topk(CANDIDATES)
        scores = torch.log_softmax(logits, -1)[range(len(answer)), answer]
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Expected(answer, scores.tolist(), [dict(zip(*pair, strict=True)) for pair in pairs])

    def rounding(self, answers: Mapping[Prompt, Expected]) -> Rounding:
        changes, errors, flips = [], [], 0
        for prompt, expected in answers.items():
            logits = self.logits(prompt, expected.ids)
            scores = torch.log_softmax(logits, -1)
            for place, token in enumerate(expected.ids):
                best, second, *_ = expected.logits[place]
                gap = float(logits[place, best] - logits[place, second])
                changes.append(abs(gap - expected.gap(place)) / ulp(expected.logits[place][best]))
                errors.append(abs(float(scores[place, token]) - expected.scores[place]))
                flips += int(logits[place].argmax()) != token
        return Rounding(max(changes), fmean(errors), len(errors), flips)

    @torch.inference_mode()
    def logits(self, prompt: Prompt, answer: Sequence[int]) -> torch.Tensor:
        """Returns the logits that predict each token of an answer, (tokens, vocabulary), from one uncached forward."""
        ids = torch.tensor([[*self.codec.encode(prompt.text), *answer[:-1]]])
        logits: torch.Tensor = self.model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
        return logits

    def check(self, prompt: Prompt, expected: Expected, answer: Completion, near_tie: float) -> "Comparison":
        """Asserts that an answer equals `generate`'s; in bfloat16 it may differ at near-ties."""
        (choice,) = answer.choices
        ids = [self._ids[text] for text in choice.logprobs.tokens or []]
        assert choice.text == self.codec.tokenizer.decode(ids), "the text does not consist of these tokens"
        equal = next(
            (place for place, pair in enumerate(zip(ids, expected.ids, strict=False)) if pair[0] != pair[1]),
            min(len(ids), len(expected.ids)),
        )
        scores = zip(choice.logprobs.token_logprobs or [], expected.scores[:equal], strict=False)
        errors = [abs(served - own) for served, own in scores if served is not None]
        assert len(errors) == equal
        if ids == expected.ids:
            return Comparison(equal, errors, [])
        where = f"{prompt.text[-60:]!r}, token {equal}"
        assert self.dtype == "bfloat16", f"{where}: {ids[equal:]} instead of {expected.ids[equal:]}"
        assert equal < min(len(ids), len(expected.ids)), f"{where}: one answer is a prefix of the other"
        candidates = expected.logits[equal]
        best = candidates[expected.ids[equal]]
        margins = [(best - candidates.get(ids[equal], -math.inf)) / ulp(best)]
        assert margins[0] <= near_tie, f"{where}: {ids[equal]}, which generate has {margins[0]} units below its best"
        logits = self.logits(prompt, ids)
        for place in range(equal, len(ids)):
            best = float(logits[place].max())
            behind = (best - float(logits[place, ids[place]])) / ulp(best)
            assert behind <= near_tie, f"{where}: token {place} after it is {behind} units below the best"
            margins += [behind] if place > equal and behind else []
        return Comparison(equal, errors, margins)


@dataclass(frozen=True)
class Comparison:
    """Comparison of one served answer with `generate`'s."""

    equal: int  # tokens before the first difference
    errors: list[float]  # differences of their log probabilities
    margins: list[float]  # gaps of differently resolved near-ties, in ulps; empty if all tokens are equal


def ulp(logit: float) -> float:
    """Returns one unit in the last place of a bfloat16 logit (8 significant bits)."""
    return float(2.0 ** (math.floor(math.log2(abs(logit))) - 7))


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return prepare_gemma3()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """Serves Gemma with the reference loop, which drafts for every session in every round."""
    settings = (
        f"model.target={folder}",
        f"model.dtype={request.param}",
        f"model.max_context={CONTEXT}",
        f"target.cache_per_rank.gib={CACHE_GIB[request.param]}",
        f"target.max_sessions={AT_ONCE}",
        "target.max_step_tokens=256",
        "target.step_timeout_s=300",
        "draft={method: ngram, resources: {num_cpus: 0.3}}",
        "speculation.schedule=lock_step",
        f"speculation.draft_tokens={max(SHAPES.values())}",
    )
    with built_by("tests.exhaustive.shaped_target:build"), demo_served(*settings) as served:
        yield served


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Iterator["Future[tuple[list[Expected], Rounding]]"]:
    """Computes the reference while the first answers are served."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(reference.compute)


def metrics(served: Served) -> Counter[str]:
    """Returns the samples of `/metrics`, summed over labels."""
    samples: Counter[str] = Counter()
    text = httpx.get(f"{served.url}/metrics", trust_env=False, timeout=60).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] += sample.value  # type: ignore[assignment]
    return samples


async def answers(served: Served, draft_tokens: int) -> list[Completion]:
    places = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: Prompt) -> Completion:
        async with places:
            return await client.completions.create(
                model=served.config.model.name,
                prompt=prompt.text,
                max_tokens=prompt.answer,
                temperature=0.0,
                logprobs=0,
                extra_body={"speculation": {"draft_tokens": draft_tokens}, "skip_special_tokens": False},
            )

    async with served.async_client.with_options(timeout=1800) as client:
        return list(await asyncio.gather(*(one(prompt) for prompt in PROMPTS)))


def test_the_checkpoint_has_the_published_configuration(folder: Path) -> None:
    config: Mapping[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    assert {name: config[name] for name in PUBLISHED} == PUBLISHED
    assert config["rms_norm_eps"] == pytest.approx(1e-6)


def test_prompts_lie_on_both_sides_of_the_window_and_need_it(reference: Reference) -> None:
    lengths = {prompt.text: len(reference.codec.encode(prompt.text)) for prompt in PROMPTS}
    assert len(lengths) == 20
    assert all(lengths[prompt.text] > WINDOW + 16 for prompt in (*BEYOND, *LONG))
    assert all(lengths[prompt.text] < WINDOW < lengths[prompt.text] + prompt.answer for prompt in ACROSS)
    config = reference.model.config
    within = reference.logits(BEYOND[0], [0])
    config.sliding_window = CONTEXT
    try:
        without = reference.logits(BEYOND[0], [0])
    finally:
        config.sliding_window = WINDOW
    assert float((within - without).abs().max()) > 0.1, "the sliding window has no effect on this prompt"


@pytest.mark.parametrize("shape", SHAPES)
async def test_greedy_answers_equal_generate(
    served: Served, reference: Reference, expected: "Future[tuple[list[Expected], Rounding]]", shape: str
) -> None:
    before = await asyncio.to_thread(metrics, served)
    blocks_before = await asyncio.to_thread(verified, served)
    start = time.monotonic()
    completions = await answers(served, SHAPES[shape])
    seconds = time.monotonic() - start
    blocks = await asyncio.to_thread(verified, served) - blocks_before
    counts = await asyncio.to_thread(metrics, served) - before
    preemptions = counts["vllm:num_preemptions_total"]
    own, rounding = await asyncio.wrap_future(expected)
    near_tie = min(rounding.ulps, ULPS)
    comparisons = [reference.check(*each, near_tie) for each in zip(PROMPTS, own, completions, strict=True)]
    equal = sum(not comparison.margins for comparison in comparisons)
    errors = [error for comparison in comparisons for error in comparison.errors]
    margins = sorted(margin for comparison in comparisons for margin in comparison.margins)
    usages = [answer.usage for answer in completions if answer.usage is not None]
    ends = [usage.prompt_tokens + comparison.equal for usage, comparison in zip(usages, comparisons, strict=True)]
    beyond = [
        min(end - WINDOW, comparison.equal) for end, comparison in zip(ends, comparisons, strict=True) if end > WINDOW
    ]
    hits = [each.prompt_tokens_details.cached_tokens or 0 for each in usages if each.prompt_tokens_details]
    details = [each.completion_tokens_details for each in usages if each.completion_tokens_details]
    accepted = sum(each.accepted_prediction_tokens or 0 for each in details)
    print(
        f"\n{reference.dtype}, {shape}, {seconds:.0f} s: {equal} of {len(PROMPTS)} answers equal;"
        f" {len(errors)} of {sum(len(each.ids) for each in own)} tokens equal before any difference, {sum(beyond)} of"
        f" them in {len(beyond)} answers beyond the window; {len(margins)} near-ties resolved differently, units in the"
        f" last place: {margins}; log probabilities differ by {fmean(errors):.1e}, at most {max(errors):.1e}; smallest"
        f" gap of generate {min(each.gap(place) for each in own for place in range(len(each.ids))):.1e}; {rounding};"
        f" {accepted} draft tokens accepted, blocks {dict(blocks)}; cached prompt tokens {hits}; {preemptions:.0f}"
        " preemptions",
        flush=True,
    )
    if reference.dtype == "float32":
        assert max(errors) < TOLERANCE
    else:
        assert equal > len(PROMPTS) / 2, "too many answers differ to be near-ties"
        assert fmean(errors) < 2 * rounding.error, "log probabilities differ more than transformers' own do"
    assert len(beyond) >= len(PROMPTS) / 4
    assert accepted > 0
    assert blocks["several accepted"] > 0
    assert blocks["trees"] == 0 if shape == "chain" else blocks["trees"] > 0
    assert blocks["chains of several"] > 0 if shape == "chain" else blocks["accepted off the trunk"] > 0
    assert sum(hit >= WINDOW for hit in hits) >= 2, "too few prompts reused a prefix longer than the window"
    assert counts["vllm:prefix_cache_hits_total"] == sum(hits)
    assert preemptions > 0, "nothing was preempted"
