"""Faults under a fitted EAGLE-3 head in the whole product: Ray, gRPC, HTTP, and processes that are killed.

The head knows the answers to `PROMPTS`. What it has accepted of each before anything happened is measured first, on the
same server, and after each fault it has to be accepted as before.
"""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from serve_app.cli.demo import demo_config
from serve_app.operations.ray_cluster import recordings
from tests.exhaustive.fitted_head import fitted_head
from tests.integration.serving import Served, demo_served
from tests.integration.test_serving import assert_nothing_left, eventually

MODEL = "SmolLM2-135M-Instruct"
PREAMBLE = (
    "You are asked a question by a child of ten years who likes animals, the sea, and long walks with a dog named Rex."
    " Answer in a friendly tone, in a few short sentences, and do not use difficult words."
)
PROMPTS = tuple(
    f"{PREAMBLE} {question}"
    for question in (
        "Why is the sky blue?",
        "How do bees make honey?",
        "What is a volcano?",
        "Who built the pyramids?",
    )
)
FILLERS = tuple(f"Tell me something about the number {number}, please. " * 16 for number in range(4))
ANSWER = 80
BLOCK = 2
HEAD_CONTEXT = 256  # positions that the head takes
PAGE_SIZE = 16
WELL = 0.5  # share that a head which knows the answers has accepted, at the least
AS_BEFORE = 0.1  # rounds that are cut differently ask the head about other places


@dataclass(frozen=True)
class Answered:
    """One answer, and what its verification came to."""

    text: str
    prompt_tokens: int
    tokens: int
    accepted: int
    rejected: int

    @property
    def acceptance(self) -> float:
        return overall([self])

    @property
    def fed_if_cold(self) -> int:
        """Known tokens that the target has to be fed once, if nothing of the prompt was found in its cache."""
        return self.prompt_tokens + self.tokens - 1 - self.accepted


def overall(answers: list[Answered]) -> float:
    accepted = sum(answer.accepted for answer in answers)
    return accepted / max(1, accepted + sum(answer.rejected for answer in answers))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = Path(demo_config().model.target)
    return fitted_head(target, PROMPTS, ANSWER, tmp_path_factory.mktemp("fitted"))


@pytest.fixture(scope="module")
def served(head: Path) -> Iterator[Served]:
    """Room for 640 tokens in the cache, of which a session may have 512."""
    draft = f"method: eagle, model: {head}, eagle: {{max_positions: {HEAD_CONTEXT}}}"
    with demo_served(
        f"draft={{{draft}, replicas: {{min: 2, max: 2}}, resources: {{num_cpus: 0.3}}}}",
        "model.max_context=512",
        "target.cache_per_rank.gib=0.0285",
        "speculation.schedule=lock_step",
        f"speculation.draft_tokens={BLOCK}",
    ) as served:
        yield served
        assert_nothing_left(served)


@pytest.fixture(scope="module")
def usual(served: Served) -> dict[str, Answered]:
    """Each prompt for the first time, one at a time."""
    found = {prompt: asyncio.run(answer(served, prompt)) for prompt in PROMPTS}
    shares = {prompt[len(PREAMBLE) :]: round(one.acceptance, 2) for prompt, one in found.items()}
    print(f"\naccepted before anything happened: {shares}")
    assert overall([*found.values()]) > WELL, "the head has not learned the answers, so this would show nothing"
    return found


async def answer(served: Served, prompt: str, begun: asyncio.Event | None = None, tokens: int = ANSWER) -> Answered:
    """`begun` is set once a few tokens are there."""
    text = ""
    chunks = 0
    usage = None
    async for chunk in await served.async_client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    ):
        usage = chunk.usage or usage
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        chunks += 1
        if begun is not None and chunks > 6:
            begun.set()
    assert usage is not None
    details = usage.completion_tokens_details
    assert details is not None
    accepted = details.accepted_prediction_tokens or 0
    return Answered(
        text, usage.prompt_tokens, usage.completion_tokens, accepted, details.rejected_prediction_tokens or 0
    )


def known_tokens(served: Served) -> int:
    """Counts committed tokens that the target was fed again."""
    (target,) = served.inspect("Target")
    return int(target["known_tokens"])


async def test_the_successor_of_a_killed_drafter_drafts_within_two_rounds_and_nothing_is_computed_again(
    served: Served, usual: dict[str, Answered]
) -> None:
    """Two answers at once, one for each drafter: that of the killed one is the last that its successor meets."""
    pair = PROMPTS[:2]
    for _ in range(2):
        for prompt in pair:
            await answer(served, prompt)  # then their prompts are in the cache
        pids = {replica["pid"] for replica in await asyncio.to_thread(served.inspect, "Drafter")}
        fed_before = await asyncio.to_thread(known_tokens, served)
        begun = {prompt: asyncio.Event() for prompt in pair}
        running = [asyncio.create_task(answer(served, prompt, event)) for prompt, event in begun.items()]
        await asyncio.gather(*(event.wait() for event in begun.values()))
        killed = pids.pop()
        os.kill(killed, signal.SIGKILL)
        killed_at = time.time()
        answers = await asyncio.gather(*running)
        fed = await asyncio.to_thread(known_tokens, served) - fed_before
        rounds, met_at = await asyncio.to_thread(_takeover, served, pids.pop())
        print(f"\nverdicts before the successor's first block: {rounds}; accepted {overall(answers):.2f}")
        assert met_at > killed_at, "the killed one had no session"
        assert rounds <= 2
        assert [one.text for one in answers] == [usual[prompt].text for prompt in pair]
        assert overall(answers) == pytest.approx(overall([usual[prompt] for prompt in pair]), abs=AS_BEFORE)
        assert fed == sum(one.fed_if_cold - _on_pages(one.prompt_tokens - 1) for one in answers), "each token once"
        await asyncio.to_thread(eventually, partial(_has_two, served, killed), "there are two drafters again", 180)
    again = [await answer(served, prompt) for prompt in PROMPTS]
    assert overall(again) == pytest.approx(overall([*usual.values()]), abs=AS_BEFORE)


def _on_pages(tokens: int) -> int:
    """Returns how many of the tokens fill whole pages."""
    return tokens // PAGE_SIZE * PAGE_SIZE


def _has_two(served: Served, killed: int) -> bool:
    return len({replica["pid"] for replica in served.inspect("Drafter")} - {killed}) == 2


def _takeover(served: Served, pid: int) -> tuple[int, float]:
    """Returns the verdicts before the first block of the last session that a drafter met, and when it met it."""
    (actor,) = [actor for actor in recordings(served.application) if actor.name == f"drafter {pid}"]
    events = actor.recording.events
    met = {name: event for event in reversed(events) for name in event.sessions}
    session = max(met, key=lambda name: met[name].order)
    mine = [event.name for event in events if session in event.sessions]
    return mine[: mine.index("sent")].count("verdict"), met[session].at_s + actor.recording.wall_offset_s


def test_after_prefix_hits_whole_and_partial_as_much_is_accepted(served: Served, usual: dict[str, Answered]) -> None:
    """Infers the length of the prefix hit from what the target was fed."""

    def asked(prompt: str) -> tuple[Answered, int]:
        before = known_tokens(served)
        found = asyncio.run(answer(served, prompt))
        return found, found.fed_if_cold - (known_tokens(served) - before)

    first, second = PROMPTS[:2]
    asked(first)
    whole, found_whole = asked(first)
    for filler in FILLERS:
        asked(filler)
    cold, found_cold = asked(second)
    partial_hit, found_partial = asked(first)
    print(f"\naccepted: cold {cold.acceptance:.2f}, partial {partial_hit.acceptance:.2f}, whole {whole.acceptance:.2f}")
    assert found_whole == _on_pages(whole.prompt_tokens - 1)
    assert 0 <= found_cold < found_partial < found_whole
    assert _is_as(whole, usual[first])
    assert _is_as(cold, usual[second])
    assert _is_as(partial_hit, usual[first])


def _is_as(found: Answered, before: Answered) -> bool:
    assert found.text == before.text
    return abs(found.acceptance - before.acceptance) <= AS_BEFORE


async def test_preempted_sessions_are_accepted_as_before(served: Served, usual: dict[str, Answered]) -> None:
    """Four of twice the length, which have no room together; of what the head does not know less is accepted."""
    alone = [await answer(served, prompt, tokens=2 * ANSWER) for prompt in PROMPTS]
    (before,) = await asyncio.to_thread(served.inspect, "Target")
    together = await asyncio.gather(*(answer(served, prompt, tokens=2 * ANSWER) for prompt in PROMPTS))
    (after,) = await asyncio.to_thread(served.inspect, "Target")
    print(f"\n{after['preempted']} preempted; accepted: alone {overall(alone):.2f}, together {overall(together):.2f}")
    assert after["preempted"] > before["preempted"]
    assert [one.text for one in together] == [one.text for one in alone]
    assert overall(together) == pytest.approx(overall(alone), abs=AS_BEFORE)
    again = [await answer(served, prompt) for prompt in PROMPTS]
    assert overall(again) == pytest.approx(overall([*usual.values()]), abs=AS_BEFORE)


async def test_a_session_beyond_the_heads_context_goes_on_plainly_beside_others(
    served: Served, usual: dict[str, Answered]
) -> None:
    """One is longer from its beginning, and one grows beyond."""
    longer = "Count with me: " + " ".join(str(number) for number in range(100, 180))
    first, *others = PROMPTS
    grown = HEAD_CONTEXT
    found = await asyncio.gather(
        answer(served, longer), answer(served, first, tokens=grown), *(answer(served, prompt) for prompt in others)
    )
    beyond, growing, *beside = found
    assert beyond.prompt_tokens > HEAD_CONTEXT
    assert (beyond.tokens, beyond.accepted, beyond.rejected) == (ANSWER, 0, 0)
    assert 0 < growing.accepted < HEAD_CONTEXT - growing.prompt_tokens
    assert growing.tokens == grown
    assert growing.text.startswith(usual[first].text)
    assert overall(beside) == pytest.approx(overall([usual[prompt] for prompt in others]), abs=AS_BEFORE)
    drafters = await asyncio.to_thread(served.inspect, "Drafter")
    assert len(drafters) == 2
    again = await answer(served, first)
    assert again.acceptance == pytest.approx(usual[first].acceptance, abs=AS_BEFORE)
