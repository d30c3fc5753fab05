"""Gemma 3 270M with its published weights, served over Ray, gRPC and HTTP: greedy answers are those of `generate`.

Five of its six layers attend to the last 512 tokens. Prompts lie before that window's end, across it and far beyond it;
some begin alike and find each other's pages. Eight sessions at once share a cache that is too small for them, so some
lose their pages and are read again. Drafts come from n-grams, as chains and as trees.

* float32: an answer may leave the text of `generate` only where transformers' two best logits nearly tie. Log
  probabilities are transformers' own.
* bfloat16: rounding depends on batch shapes. With a cache and without one, transformers itself has the two best logits
  up to 2.5 units in the last place further apart or closer. So an answer may leave the text of `generate` where they
  are at most three units apart. After that, every token must be that close to the best one after the answer so far.

Not part of the default suite: `make test-exhaustive`. Skipped where the package registry does not have the weights.
"""

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from openai.types import Completion
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from serve_app.http.text import TextCodec
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
CONTEXT = 1280
AT_ONCE = 8
# Room for 96 pages of 16 tokens, as eight sessions may want 150: 18 layers, keys and values of 256 numbers.
CACHE_GIB = {"float32": 96 * 16 * 36_864 / 2**30, "bfloat16": 96 * 16 * 18_432 / 2**30}
SHAPES = {"chain": CHAIN, "tree": TREE}  # draft tokens
NEAR_TIE = 1e-3  # of logits in float32
ULPS = 3  # of logits in bfloat16
TOLERANCE = 1e-3  # of log probabilities in float32
MOST_TIES = 0.1  # of the answers in float32


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
    answer: int  # tokens


BEYOND = [  # of more than 512 tokens, which begin alike
    Prompt(DIRECTORY + "The same directory again:\n1. ", 32),
    Prompt(DIRECTORY + "The directory from number 9 on:\n" + "\n".join(LINES[8:10]) + "\n", 32),
    Prompt(DIRECTORY + "From the end:\n" + "\n".join(LINES[35:32:-1]) + "\n", 32),
    Prompt(DIRECTORY + "Names only:\n1. Ben\n2. Clara\n3. David\n4.", 32),
    Prompt(DIRECTORY + "Who lives in Paris?\n", 32),
]
ACROSS = [  # the window ends within the answer
    Prompt(price_list("apple", 33), 96),
    Prompt(price_list("chair", 32), 64),
    Prompt(price_list("ticket", 33), 40),
    Prompt(price_list("yellow lamp", 31), 40),
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
# In turn, so that steps mix long prompts, which are read in chunks, with answers that have begun.
PROMPTS = [
    *(BEYOND[0], SHORT[0], ACROSS[0], SHORT[1], ACROSS[1], SHORT[2], ACROSS[2], SHORT[3], LONG[0], BEYOND[1]),
    *(SHORT[4], BEYOND[2], ACROSS[3], SHORT[5], BEYOND[3], SHORT[6], SHORT[7], BEYOND[4], SHORT[8], SHORT[9]),
]


@dataclass(frozen=True)
class Expected:
    """An answer of `generate`."""

    ids: list[int]
    scores: list[float]  # log probabilities
    leads: list[float]  # of the best logit over the second best
    bests: list[float]  # the best logits


class Reference:
    """Transformers' own Gemma 3, in this process."""

    def __init__(self, served: Served) -> None:
        folder = served.config.model.target
        self.dtype = served.config.model.dtype
        self.codec = TextCodec.load(folder, served.config.server)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, self.dtype))
        self.model.eval()
        pieces = enumerate(self.codec.tokenizer.convert_ids_to_tokens(range(self.codec.vocabulary)))
        # Bytes stand for characters that are no tokens: those of "1" or a line's end are not what a model writes.
        self._ids = {self.codec.token_text(token): token for token, piece in pieces if not piece.startswith("<0x")}

    def answers(self) -> list[Expected]:
        torch.set_num_threads(1)  # of this thread
        return [self.answer(prompt) for prompt in PROMPTS]

    @torch.inference_mode()
    def answer(self, prompt: Prompt) -> Expected:
        ids = torch.tensor([self.codec.encode(prompt.text)])
        found = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=prompt.answer,
            output_logits=True,
            return_dict_in_generate=True,
        )
        answer: list[int] = found.sequences[0, ids.shape[1] :].tolist()
        logits = torch.cat(found.logits).float()
        top = logits.topk(2).values
        scores = torch.log_softmax(logits, -1)[range(len(answer)), answer]
        return Expected(answer, scores.tolist(), (top[:, 0] - top[:, 1]).tolist(), top[:, 0].tolist())

    @torch.inference_mode()
    def logits(self, prompt: Prompt, answer: Sequence[int]) -> torch.Tensor:
        """Returns what precedes each token of an answer, (tokens, vocabulary), from one pass without a cache."""
        ids = torch.tensor([[*self.codec.encode(prompt.text), *answer[:-1]]])
        logits: torch.Tensor = self.model(ids, use_cache=False, logits_to_keep=len(answer)).logits[0].float()
        return logits

    def bound(self, best: float) -> float:
        """Returns how far two logits may be apart to be decided by rounding, the better one given."""
        return NEAR_TIE if self.dtype == "float32" else ULPS * 2.0 ** (math.floor(math.log2(abs(best))) - 7)

    def check(self, prompt: Prompt, expected: Expected, answer: Completion) -> "Verdict":
        """Fails where an answer's tokens are neither those of `generate` nor as good as they are."""
        (choice,) = answer.choices
        assert choice.logprobs is not None
        ids = [self._ids[text] for text in choice.logprobs.tokens or []]
        assert choice.text == self.codec.tokenizer.decode(ids), "the text is these tokens and no others"
        alike = next(
            (at for at, pair in enumerate(zip(ids, expected.ids, strict=False)) if pair[0] != pair[1]),
            min(len(ids), len(expected.ids)),
        )
        scores = zip(choice.logprobs.token_logprobs or [], expected.scores[:alike], strict=False)
        apart = max((abs(mine - theirs) for mine, theirs in scores if mine is not None), default=0.0)
        if ids == expected.ids:
            return Verdict(alike, [], apart)
        where = f"{prompt.text[-60:]!r}, token {alike}"
        assert alike < min(len(ids), len(expected.ids)), f"{where}: one ends where the other goes on"
        lead = expected.leads[alike]
        assert lead <= self.bound(expected.bests[alike]), f"{where}: another token, though the best one leads by {lead}"
        margins = [lead]
        logits = self.logits(prompt, ids)
        for at in range(alike, len(ids)):
            best = float(logits[at].max())
            behind = best - float(logits[at, ids[at]])
            assert behind <= self.bound(best), f"{where}: token {at} of another text is {behind} behind the best"
            margins += [behind] if behind else []
        return Verdict(alike, margins, apart)


@dataclass(frozen=True)
class Verdict:
    """What one answer has in common with the expected one."""

    alike: int  # tokens
    margins: list[float]  # of logits, where the answer has another token than the best; empty: it is the expected one
    apart: float  # log probabilities of tokens that are alike, at most


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return prepare_gemma3()
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def served(request: pytest.FixtureRequest, folder: Path) -> Iterator[Served]:
    """Every session is drafted for in every round, whether it pays on this machine or not."""
    settings = (
        f"model.target={folder}",
        f"model.dtype={request.param}",
        f"model.max_context={CONTEXT}",
        f"target.cache_per_rank.gib={CACHE_GIB[request.param]}",
        f"target.max_sessions={AT_ONCE}",
        "target.max_step_tokens=256",
        "target.step_timeout_s=300",
        "draft={method: prompt_lookup, resources: {num_cpus: 0.3}}",
        "speculation.pacing=lock_step",
        f"speculation.max_draft_tokens={max(SHAPES.values())}",
    )
    with built_by("tests.exhaustive.shaped_target:build"), demo_served(*settings) as served:
        yield served


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served)


@pytest.fixture(scope="module")
def expected(reference: Reference) -> Iterator["Future[list[Expected]]"]:
    """Computed while the first answers are served."""
    with ThreadPoolExecutor(1) as thread:
        yield thread.submit(reference.answers)


async def answers(served: Served, draft_tokens: int) -> list[Completion]:
    client = served.async_client.with_options(timeout=1800)
    places = asyncio.Semaphore(AT_ONCE)

    async def one(prompt: Prompt) -> Completion:
        async with places:
            return await client.completions.create(
                model=served.config.model.name,
                prompt=prompt.text,
                max_tokens=prompt.answer,
                temperature=0.0,
                logprobs=0,
                extra_body={"speculation": {"max_draft_tokens": draft_tokens}, "skip_special_tokens": False},
            )

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
    assert float((within - without).abs().max()) > 0.1, "the window is what this is about"


@pytest.mark.parametrize("shape", SHAPES)
async def test_greedy_text_equals_generate(
    served: Served, reference: Reference, expected: "Future[list[Expected]]", shape: str
) -> None:
    [before] = await asyncio.to_thread(served.inspect, "Target")
    blocks_before = await asyncio.to_thread(verified, served)
    found = await answers(served, SHAPES[shape])
    blocks = await asyncio.to_thread(verified, served) - blocks_before
    [after] = await asyncio.to_thread(served.inspect, "Target")
    preempted = after["preempted"] - before["preempted"]
    texts = await asyncio.wrap_future(expected)
    verdicts = [reference.check(*each) for each in zip(PROMPTS, texts, found, strict=True)]
    equal = sum(not verdict.margins for verdict in verdicts)
    apart = max(verdict.apart for verdict in verdicts)
    tokens = sum(len(each.ids) for each in texts)
    alike = sum(verdict.alike for verdict in verdicts)
    usages = [answer.usage for answer in found if answer.usage is not None]
    cached = sum(each.prompt_tokens_details.cached_tokens or 0 for each in usages if each.prompt_tokens_details)
    details = [each.completion_tokens_details for each in usages if each.completion_tokens_details]
    accepted = sum(each.accepted_prediction_tokens or 0 for each in details)
    print(
        f"\n{reference.dtype}, {shape}: {equal} of {len(PROMPTS)} answers equal, {alike} of {tokens} tokens before any"
        f" difference, margins {[verdict.margins for verdict in verdicts if verdict.margins]}, log probabilities within"
        f" {apart:.1e}; {accepted} draft tokens accepted of {dict(blocks)}; {cached} prompt tokens cached; {preempted}"
        " preemptions",
        flush=True,
    )
    if reference.dtype == "float32":
        assert equal >= (1 - MOST_TIES) * len(PROMPTS), "so many near-ties are no accident"
        assert apart < TOLERANCE
    assert accepted > 0
    assert blocks["several accepted"] > 0
    assert blocks["trees"] == 0 if shape == "chain" else blocks["trees"] > 0
    assert blocks["chains of several"] > 0 if shape == "chain" else blocks["accepted off the trunk"] > 0
    assert cached >= WINDOW, "prompts that begin alike share pages, also beyond the window"
    assert preempted > 0, "the cache was large enough for all"
