"""A load that needs twice the cache: the pool keeps to its budget, every request finishes with its own text.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
from collections.abc import Iterator

import pytest

from tests.integration.serving import Reference, Served, demo_served
from tests.integration.test_serving import assert_nothing_left

MODEL = "SmolLM2-135M-Instruct"
BUDGET_GIB = 0.05
NEW_TOKENS = 120
ANIMALS = [
    "cat",
    "dog",
    "horse",
    "cow",
    "pig",
    "hen",
    "duck",
    "goose",
    "sheep",
    "goat",
    "mouse",
    "rat",
    "fox",
    "wolf",
    "bear",
    "deer",
]
PROMPTS = [f"Tell me a long story about a {animal} that wants to see the sea." for animal in ANIMALS]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with demo_served(f"target.cache_per_rank.gib={BUDGET_GIB}", "model.max_context=512") as served:
        yield served
        assert_nothing_left(served)


async def test_a_load_of_twice_the_cache_finishes_within_it(served: Served) -> None:
    [before] = await asyncio.to_thread(served.inspect, "Target")
    reference = Reference(served.config.model.target)
    page_size = served.config.target.cache_per_rank.page_size
    lengths = [len(reference.prompt_ids(prompt)) + NEW_TOKENS for prompt in PROMPTS]
    needed = sum(-(-length // page_size) for length in lengths)
    assert needed >= 2 * before["pages"]["total"], "the load is too small to show anything"

    async def one(prompt: str) -> str:
        answer = await served.async_client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=NEW_TOKENS,
            temperature=0.0,
        )
        return str(answer.choices[0].message.content)

    answers = asyncio.gather(*(one(prompt) for prompt in PROMPTS))
    most = 0
    while not answers.done():
        [now] = await asyncio.to_thread(served.inspect, "Target")
        most = max(most, now["pages"]["held"])
        await asyncio.sleep(0.05)
    [after] = await asyncio.to_thread(served.inspect, "Target")
    print(
        f"\n{needed} pages needed, {before['pages']['total']} in the pool, {most} held at most, "
        f"{after['preempted']} preemptions"
    )
    assert 0 < most <= before["pages"]["total"]
    assert after["preempted"] > 0
    for prompt, text in zip(PROMPTS, await answers, strict=True):
        reference.assert_greedy(prompt, NEW_TOKENS, text)
