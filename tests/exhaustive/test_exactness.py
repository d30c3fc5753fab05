"""Tests exactness with many prompts, long answers, two concurrencies and two tensor-parallel sizes.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Iterator

import pytest
from scipy.stats import chi2_contingency

from serve_app.demo_data import BENCH_PROMPTS
from tests.integration.serving import Reference, Served, demo_served

MODEL = "SmolLM2-135M-Instruct"
MAX_TOKENS = 96
CONCURRENCIES = (1, 8)
LINES = BENCH_PROMPTS.read_text().splitlines()
DRAWS = 400
MIN_COUNT = 10
PROMPTS = [json.loads(line)["prompt"] for line in LINES][:20]


@pytest.fixture(scope="module", params=[1, 3], ids=["tensor_parallel 1", "tensor_parallel 3"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with demo_served(f"target.tensor_parallel={request.param}", "target.resources_per_rank.num_cpus=0.3") as served:
        yield served


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served.config.model.target)


async def answers(served: Served, prompts: list[str], concurrency: int, **options: object) -> list[str]:
    places = asyncio.Semaphore(concurrency)
    options = {"temperature": 0.0, "max_tokens": MAX_TOKENS, **options}

    async def one(prompt: str) -> str:
        async with places:
            answer = await client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": prompt}],
                **options,  # type: ignore[call-overload]
            )
        return str(answer.choices[0].message.content)

    async with served.async_client as client:
        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


@pytest.mark.parametrize("concurrency", CONCURRENCIES)
async def test_greedy_text_equals_plain_generate(served: Served, reference: Reference, concurrency: int) -> None:
    texts = await answers(served, PROMPTS, concurrency)
    ties = [reference.assert_greedy(p, MAX_TOKENS, text) for p, text in zip(PROMPTS, texts, strict=True)]
    print(f"\nconcurrency {concurrency}: {ties.count(0)} of {len(ties)} equal, the others but for near-ties")
    assert ties.count(0) > len(ties) / 2, "what is called a near-tie is too common to be one"


@pytest.mark.parametrize("temperature", [0.7, 1.0])
async def test_a_seed_fixes_the_text_at_any_concurrency_and_block_size(served: Served, temperature: float) -> None:
    """One node is a chain, several are a tree. The drafter calibrates its noise weight from round to round."""
    prompts = PROMPTS[:8]
    options = {"temperature": temperature, "seed": 42, "max_tokens": 48}
    plain = await answers(served, prompts, 4, extra_body={"speculation": {"draft_tokens": 0}}, **options)
    assert len(set(plain)) == len(plain)
    for concurrency, nodes in ((1, 12), (8, 12), (8, 1), (4, 2), (2, 5)):
        again = await answers(
            served, prompts, concurrency, extra_body={"speculation": {"draft_tokens": nodes}}, **options
        )
        assert again == plain, f"{nodes} nodes, {concurrency} at once"


@pytest.mark.parametrize("acceptance", ["coupled", "rejection"])
async def test_first_tokens_follow_plain_decoding(served: Served, acceptance: str) -> None:
    """Tests the homogeneity of two samples at the first and the last word; the joint false-alarm rate is 1e-4."""

    async def sample(speculation: dict[str, object]) -> list[list[str]]:
        options = {"temperature": 1.0, "max_tokens": 3, "extra_body": {"speculation": speculation}}
        return [text.split() or [""] for text in await answers(served, ["Tell me a story."] * DRAWS, 8, **options)]

    plain = await sample({"draft_tokens": 0})
    speculative = await sample({"draft_tokens": 3, "acceptance": acceptance})
    for place in (0, -1):
        assert homogeneity([w[place] for w in plain], [w[place] for w in speculative]) > 5e-5


def homogeneity(one: list[str], other: list[str]) -> float:
    """Returns the chi-square p-value that both samples have one distribution; merges values that are rare in both."""
    together = Counter(one + other)
    common = {value for value, count in together.items() if count >= MIN_COUNT}
    assert len(common) > 2, f"too few different values to compare: {together.most_common(5)}"
    counts = [Counter(value if value in common else None for value in sample) for sample in (one, other)]
    table = [[count[value] for value in sorted(set().union(*counts), key=str)] for count in counts]
    pvalue = float(chi2_contingency(table).pvalue)
    print(f"\n{len(common)} common values, p = {pvalue:.3g}")
    return pvalue
