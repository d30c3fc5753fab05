"""Tests a whole deployment over HTTP: router, drafter and target processes return the target's own text."""

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import ray
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families

from actors.learning.examples import ExampleStore
from actors.learning.versions import VersionFolder
from actors.models.checkpoint import checkpoint_fingerprint
from cluster.learning import Example
from serve_app.app import APPLICATION
from serve_app.operations.ray_cluster import broadcast, cost_model, deployed, recordings
from serve_app.status import replicas_table
from tests.integration.serving import Reference, Served, demo_served

PROMPTS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the factorial of a number.",
    "List five fruits that are yellow.",
    "Rewrite this sentence politely: give me the report now.",
)

PATIENCE_S = 60.0  # maximum time until a draft; the controller may pause speculation for seconds


LEARNING = {"min_examples": 60, "min_sessions": 2, "epochs": 1000, "resources": {"num_cpus": 0}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serves two target replicas, so that one can fail, and a trainer, which has no examples at first.

    Afterwards asserts that no actor has leftovers.
    """
    ranks = "target.resources_per_rank.num_cpus=0.3"
    learning = f"draft.learning={json.dumps(LEARNING | {'folder': str(tmp_path_factory.mktemp('learning'))})}"
    with demo_served("target.replicas={min: 2, max: 2}", ranks, "speculation.draft_tokens=4", learning) as served:
        yield served
        assert_nothing_left(served)


@pytest.fixture(scope="module")
def reference(served: Served) -> Reference:
    return Reference(served.config.model.target)


def eventually(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.2)


def assert_nothing_left(served: Served) -> None:
    for deployment in ("Router", "Drafter", "Target"):
        eventually(lambda d=deployment: all(r["idle"] for r in served.inspect(d)), f"{deployment} holds nothing")


def complete(served: Served, prompt: str, max_tokens: int = 32, **options: object) -> ChatCompletion:
    options = {"temperature": 0.0, **options}
    answer: ChatCompletion = served.client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        **options,  # type: ignore[call-overload]
    )
    return answer


def ask(served: Served, prompt: str, max_tokens: int = 32, **options: object) -> str:
    return str(complete(served, prompt, max_tokens, **options).choices[0].message.content)


def predictions(answer: ChatCompletion) -> tuple[int, int]:
    """Returns the numbers of accepted and rejected draft tokens."""
    details = answer.usage.completion_tokens_details
    return details.accepted_prediction_tokens or 0, details.rejected_prediction_tokens or 0


async def ask_all(served: Served, prompts: tuple[str, ...], max_tokens: int) -> list[str]:
    async def one(prompt: str) -> str:
        answer = await client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            temperature=0,
        )
        return str(answer.choices[0].message.content)

    async with served.async_client as client:
        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def test_greedy_text_equals_generate(served: Served, reference: Reference) -> None:
    alone = [ask(served, prompt) for prompt in PROMPTS]
    together = await ask_all(served, PROMPTS, 32)
    for prompt, first, second in zip(PROMPTS, alone, together, strict=True):
        reference.assert_greedy(prompt, 32, first)
        reference.assert_greedy(prompt, 32, second)


def test_a_seed_fixes_the_text_with_any_speculation(served: Served) -> None:
    """The test repeats the request until drafts are accepted, because speculation may pause on a busy machine."""

    def answer(**speculation: object) -> ChatCompletion:
        extra = {"extra_body": {"speculation": speculation}} if speculation else {}
        return complete(served, PROMPTS[0], temperature=0.8, seed=1234, **extra)

    plain = answer(draft_tokens=0)
    assert predictions(plain) == (0, 0)
    accepted = 0
    deadline = time.monotonic() + PATIENCE_S
    while not accepted and time.monotonic() < deadline:
        for speculation in ({}, {"draft_tokens": 1}, {"draft_tokens": 4, "acceptance": "coupled"}):
            drafted = answer(**speculation)
            assert drafted.choices[0].message.content == plain.choices[0].message.content
            accepted += predictions(drafted)[0]
    assert accepted, "no draft token was ever accepted, so this showed nothing"


def test_an_answer_has_one_request_id_and_the_requested_id(served: Served) -> None:
    """Serve's proxy also sets request ids, on requests and on answers."""
    body = {"model": served.config.model.name, "prompt": "Hello", "max_tokens": 1, "request_id": "job-7"}
    for headers in ({}, {"X-Request-Id": "job-8"}):
        answer = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers, timeout=120, trust_env=False)
        (name,) = answer.headers.get_list("X-Request-Id")
        assert name == headers.get("X-Request-Id", name)
        assert answer.json()["id"] == "cmpl-job-7"


def test_proxy_errors_have_openais_form(served: Served) -> None:
    """A client can set Serve's timeout; the proxy then answers in place of the router."""
    waits = {"x-request-timeout-seconds": "0.5"}
    with pytest.raises(openai.APIStatusError) as failure:
        served.client.completions.create(
            model=served.config.model.name, prompt="Hello", max_tokens=900, extra_headers=waits
        )
    assert failure.value.status_code == 408
    assert failure.value.code == "request_timeout"
    assert "timed out after 0.5s" in failure.value.message


def test_ranks_drafter_target_and_router_are_separate_processes(served: Served) -> None:
    """Ray sets each worker's process title to its actor's name."""
    ranks = [pid for replica in served.inspect("Target") for pid in replica["rank_pids"]]
    replicas = {name: [r["pid"] for r in served.inspect(name)] for name in ("Router", "Drafter", "Target")}
    pids = [*ranks, *(pid for pids in replicas.values() for pid in pids)]
    assert [len(ranks), *(len(pids) for pids in replicas.values())] == [2, 1, 1, 2]
    assert len({*pids, os.getpid()}) == len(pids) + 1
    for name, expected in {"Rank": ranks, **replicas}.items():
        for pid in expected:
            assert name in Path(f"/proc/{pid}/cmdline").read_text()


async def test_fifty_cancelled_requests_leave_nothing_behind(served: Served) -> None:
    async def begin_and_cancel(index: int) -> None:
        stream = await client.completions.create(
            model="SmolLM2-135M-Instruct", prompt=f"Chapter {index}.", max_tokens=400, stream=True, temperature=0
        )
        async for _ in stream:
            break
        await stream.close()

    async with served.async_client as client:
        for _ in range(5):
            await asyncio.gather(*(begin_and_cancel(i) for i in range(10)))
    await asyncio.to_thread(assert_nothing_left, served)


def _stream_and_disturb(
    served: Served, prompt: str, max_tokens: int, disturbances: dict[int, Callable[[], None]]
) -> str:
    """Streams an answer, and calls each function after the given number of chunks."""
    stream = served.client.chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    pieces: list[str] = []
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            pieces.append(chunk.choices[0].delta.content)
            if len(pieces) in disturbances:
                disturbances[len(pieces)]()
    assert len(pieces) >= max(disturbances), "the answer was over before everything had happened"
    return "".join(pieces)


def test_a_killed_drafter_changes_no_token(served: Served, reference: Reference) -> None:
    (before,) = [r["pid"] for r in served.inspect("Drafter")]
    text = _stream_and_disturb(served, PROMPTS[1], 64, {5: lambda: os.kill(before, signal.SIGKILL)})
    reference.assert_greedy(PROMPTS[1], 64, text)

    def replaced() -> bool:
        return [r["pid"] for r in served.inspect("Drafter")] not in ([], [before])

    eventually(replaced, "Serve has replaced the drafter", 120)
    eventually(lambda: _accepts(served), "the new drafter's blocks are accepted")


def _accepts(served: Served) -> bool:
    accepted, _ = predictions(complete(served, PROMPTS[1]))
    return accepted > 0


def test_a_stopped_and_resumed_target_commits_nothing(served: Served, reference: Reference) -> None:
    """The stream moves to the other replica; verdicts of the resumed replica are void."""
    stopped: list[int] = []

    def stop_the_busy_one() -> None:
        (busy,) = [r["pid"] for r in served.inspect("Target") if not r["idle"]]
        os.kill(busy, signal.SIGSTOP)
        stopped.append(busy)

    def resume_process() -> None:
        os.kill(stopped[0], signal.SIGCONT)

    text = _stream_and_disturb(served, PROMPTS[1], 64, {5: stop_the_busy_one, 15: resume_process})
    reference.assert_greedy(PROMPTS[1], 64, text)
    eventually(lambda: len(served.inspect("Target")) == 2, "both replicas answer again", 120)


def test_a_killed_rank_changes_no_token(served: Served, reference: Reference) -> None:
    def kill_the_busy_rank() -> None:
        (busy,) = [r for r in served.inspect("Target") if not r["idle"]]
        os.kill(busy["rank_pids"][0], signal.SIGKILL)

    text = _stream_and_disturb(served, PROMPTS[3], 64, {5: kill_the_busy_rank})
    reference.assert_greedy(PROMPTS[3], 64, text)  # a later test awaits the replacement replica


def test_a_killed_trainer_promotes_nothing_and_the_next_one_continues(served: Served, reference: Reference) -> None:
    learning = served.config.draft.learning
    assert learning is not None
    store = ExampleStore.of(learning)
    chosen = random.Random(1)
    texts = [tuple(chosen.randrange(10_000) for _ in range(24)) for _ in range(80)]
    target = checkpoint_fingerprint(Path(served.config.model.target).expanduser())
    store.add([Example(text[:8], text[8:]) for text in texts], target)

    def trainer() -> dict[str, Any]:
        return next(iter(served.inspect("Trainer")), {"progress": None, "pid": None})

    def steps() -> int:
        progress = trainer()["progress"]
        return progress["step"] if progress else 0

    eventually(lambda: steps() > 1, "it trains, and has saved its first step")
    before = trainer()["pid"]
    text = _stream_and_disturb(served, PROMPTS[2], 64, {5: lambda: os.kill(before, signal.SIGKILL)})
    reference.assert_greedy(PROMPTS[2], 64, text)
    eventually(lambda: trainer()["pid"] != before and steps() > 0, "the next one trains", 120)
    reference.assert_greedy(PROMPTS[0], 32, ask(served, PROMPTS[0]))
    assert trainer()["counts"] == {"killed": 1}
    metrics = text_string_to_metric_families(httpx.get(f"{served.url}/metrics", trust_env=False).text)
    trainings = [sample for family in metrics for sample in family.samples if sample.name.endswith("_trainings_total")]
    assert [(sample.labels["outcome"], sample.value) for sample in trainings] == [("killed", 1.0)]
    lines = serve_log()
    assert len([line for line in lines if "a trainer was killed during a training" in line]) == 1
    assert [line for line in lines if "training continues after step" in line]
    assert VersionFolder(Path(learning.folder)).history() == []
    store.forget()  # ends the training
    store.close()
    eventually(lambda: steps() == 0, "it no longer trains")


def serve_log() -> list[str]:
    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs" / "serve"
    return [line for file in folder.glob("*.log") for line in file.read_text(errors="replace").splitlines()]


def test_replicas_report_their_costs(served: Served) -> None:
    assert ask(served, PROMPTS[0])
    costs = cost_model(served.inspect("Target"), served.inspect("Drafter"), recordings(APPLICATION))
    assert costs.target.seconds(1, 1) > 0
    assert costs.draft.seconds(1, 1) > 0
    assert costs.non_speculative_s(1) > 0
    assert costs.hop_s > 0


def test_replica_counters_are_exported(served: Served) -> None:
    """The test reads `slipstream status` and scrapes each node's metrics port, as Prometheus does."""
    assert ask(served, PROMPTS[0])
    rows = replicas_table(served.inspect("Target"), served.inspect("Drafter")).columns
    shown = dict(zip(rows[0].cells, rows[1].cells, strict=True))
    assert shown["desyncs"] == "0"
    assert 0 < float(str(shown["target idle"])) < 1
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    expected = {
        ("Target", "ray_slipstream_target_seconds_total", "step"),
        ("Drafter", "ray_slipstream_drafting_passes_total", "asked"),
    }

    def exposed() -> set[tuple[str | None, ...]]:
        families = text_string_to_metric_families(httpx.get(url, trust_env=False).text)
        samples = [sample for family in families for sample in family.samples]
        return {(s.labels.get("deployment"), s.name, s.labels.get("cause")) for s in samples if s.value > 0}

    eventually(lambda: expected <= exposed(), "the replicas' counters are exposed")


def test_draining_finishes_running_requests_and_refuses_new_ones(served: Served) -> None:
    """This test comes last, because the router accepts no requests afterwards."""
    eventually(lambda: len(served.inspect("Target")) == 2, "Serve has replaced the replica of the killed rank", 120)
    refused: list[openai.APIStatusError] = []

    def drain() -> None:
        broadcast(deployed("Router", APPLICATION), "drain")
        with pytest.raises(openai.InternalServerError) as failure:
            ask(served, PROMPTS[0])
        refused.append(failure.value)

    assert _stream_and_disturb(served, PROMPTS[1], 48, {5: drain})
    assert (refused[0].status_code, refused[0].code) == (503, "draining")
    assert "retry-after" in refused[0].response.headers
