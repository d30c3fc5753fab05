"""Tests a deployment of the demo pair with two vLLM targets on real Ray and HTTP, with `generate` as the reference."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from serve_app.cli.demo import demo_config
from serve_app.demo_data import BENCH_PROMPTS
from tests.integration.serving import Reference, Served, demo_served

MODEL = "SmolLM2-135M-Instruct"
PROMPTS = 20
NEW_TOKENS = 24
STREAMED = 64
VLLM = (
    "target.engine=vllm",
    "target.vllm={enforce_eager: true}",
    "target.cache_per_rank.gib=0.5",
    "target.replicas={min: 2, max: 2}",
    "target.resources_per_rank.num_cpus=0.3",
    "speculation.draft_tokens=4",
    "draft.resources.background=false",  # two targets occupy both cores, so a background drafter would never run
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    if not Path(demo_config().model.target).is_dir():
        pytest.skip("the demo's target model is not there; run `make models`")
    with demo_served(*VLLM) as served:
        yield served
        for deployment in ("Router", "Drafter", "Target"):
            eventually(lambda d=deployment: all(r["idle"] for r in served.inspect(d)), f"{deployment} holds nothing")


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served.config.model.target)


def eventually(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.2)


def bench_prompts() -> list[str]:
    return [json.loads(line)["prompt"] for line in BENCH_PROMPTS.read_text().splitlines()][:PROMPTS]


def ask(served: Served, prompt: str, **options: object) -> str:
    options = {"temperature": 0.0, "max_tokens": NEW_TOKENS, **options}
    answer = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        **options,  # type: ignore[call-overload]
    )
    return str(answer.choices[0].message.content)


def stream_and_disturb(served: Served, prompt: str, after: int, disturbance: Callable[[], None]) -> str:
    """Returns the whole answer; runs a disturbance after the given number of chunks."""
    pieces: list[str] = []
    answer = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": prompt}],
        max_tokens=STREAMED,
        temperature=0,
        stream=True,
    )
    for event in answer:
        if piece := event.choices[0].delta.content:
            pieces.append(piece)
            if len(pieces) == after:
                disturbance()
    assert len(pieces) > after, "the answer was over before anything had happened"
    return "".join(pieces)


def test_greedy_text_equals_plain_generate_with_drafts(served: Served, reference: Reference) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda prompt: ask(served, prompt), bench_prompts()))
    for prompt, text in zip(bench_prompts(), texts, strict=True):
        reference.assert_greedy(prompt, NEW_TOKENS, text)
    assert sum(replica["accepted_tokens"] for replica in served.inspect("Target")) > 0


def test_structured_output_follows_its_schema_and_scores_are_returned(served: Served) -> None:
    properties = {"city": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["city"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    text = ask(served, "Name the capital of France as JSON.", max_tokens=60, response_format=form)
    assert set(json.loads(text)) == {"city"}
    answer = served.client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Say yes."}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    extra_results = answer.choices[0].logprobs
    assert all(place.logprob <= 0 and len(place.top_logprobs) == 2 for place in extra_results.content or ())


def test_results_that_vllm_cannot_return_are_refused_by_name(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs"):
        ask(served, "Say yes.", extra_body={"prompt_logprobs": 1})


def test_a_drafter_killed_in_mid_stream_changes_no_token(served: Served, reference: Reference) -> None:
    (before,) = [replica["pid"] for replica in served.inspect("Drafter")]
    text = stream_and_disturb(served, bench_prompts()[1], 5, lambda: os.kill(before, signal.SIGKILL))
    reference.assert_greedy(bench_prompts()[1], STREAMED, text)
    eventually(lambda: [r["pid"] for r in served.inspect("Drafter")] not in ([], [before]), "there is another drafter")


def test_a_target_killed_in_mid_stream_loses_and_repeats_no_token(served: Served, reference: Reference) -> None:
    def kill_busy_process() -> None:
        (busy,) = [replica["pid"] for replica in served.inspect("Target") if not replica["idle"]]
        os.kill(busy, signal.SIGKILL)

    text = stream_and_disturb(served, bench_prompts()[3], 5, kill_busy_process)
    reference.assert_greedy(bench_prompts()[3], STREAMED, text)
    eventually(lambda: len(served.inspect("Target")) == 2, "Serve has replaced the replica", 240)
