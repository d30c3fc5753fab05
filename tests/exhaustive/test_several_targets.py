"""Two real targets, SmolLM2 and Gemma 3, share the drafters of a Ray cluster of several nodes.

The drafters hold the demo's draft: SmolLM2's tokens, translated for Gemma. Skipped if the package registry lacks
Gemma's weights.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import yaml
from openai import OpenAI
from ray.cluster_utils import Cluster

from cluster.config import SlipstreamConfig, load_config
from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config
from serve_app.operations.local import checked_port
from serve_app.operations.ray_cluster import connected
from tests.exhaustive.gemma3 import Unavailable, prepare_gemma3
from tests.exhaustive.test_any_cluster import STORE_BYTES, slipstream
from tests.integration.serving import Served, greedy_texts
from tests.integration.test_serving import eventually

SMOLLM2, GEMMA = "smollm2", "google/gemma-3-270m"
PROMPTS = ("The capital of France is", "def fibonacci(n):\n\treturn", "Once upon a time", "1, 2, 3, 4,")
TOKENS = 48
AT_ONCE = 3  # sessions of each model: two drafters serve one model, three serve both
GROWN_S = 240  # limit for the pool to grow under load


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Starts a head with routers, one node for targets and one for drafters."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for pool in ("target", "draft"):
        cluster.add_node(num_cpus=3, labels={"pool": pool}, object_store_memory=STORE_BYTES)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SlipstreamConfig:
    try:
        gemma = prepare_gemma3()
    except Unavailable as error:
        pytest.skip(str(error))
    demo = demo_config([])
    always = {"schedule": "lock_step", "draft_tokens": 5}
    target = {"resources_per_rank": {"num_cpus": 1, "threads": 1, "labels": {"pool": "target"}}, "max_sessions": 8}
    sizes = {"dtype": "float32", "max_context": 512}
    content = {
        "models": {
            "smollm2": {"model": {"target": demo.model.target, **sizes}, "target": target, "speculation": always},
            "gemma": {
                "model": {"target": str(gemma), "served_name": GEMMA, **sizes},
                "target": target,
                "speculation": always,
            },
        },
        "draft": {
            "model": demo.draft.model,
            "tokenizer": demo.model.target,
            "draft_model": {"quantization": "int8"},
            "max_sessions": 4,
            "replicas": {"min": 1, "max": 4, "up_delay_s": 1, "down_delay_s": 10},
            "resources": {"num_cpus": 0.25, "threads": 1, "labels": {"pool": "draft"}},
        },
        "server": {"port": checked_port("127.0.0.1", 0), "target_wait_s": 300},  # a target restarts while others stream
    }
    path = tmp_path_factory.mktemp("several") / "several.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return load_config(path)


@pytest.fixture(scope="module")
def served(cluster: Cluster, config: SlipstreamConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("up") / "config.yaml"
    path.write_text(yaml.safe_dump(config.given(), sort_keys=False))
    put_up = slipstream(cluster, "up", path)
    assert put_up.returncode == 0, put_up.stderr
    with connected(cluster.address):
        yield Served(f"http://127.0.0.1:{config.server.port}", config, APPLICATION)


@pytest.fixture(scope="module")
def expected(config: SlipstreamConfig) -> dict[str, dict[str, str]]:
    """Each model's own greedy continuations."""
    return {one.name: greedy_texts(one.config.model.target, PROMPTS, TOKENS) for one in config.served}


def stream(client: OpenAI, model: str, prompt: str) -> tuple[str, float]:
    """Returns a greedy completion and the longest gap between its events, in seconds."""
    options: Any = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
    text, longest, last = "", 0.0, time.monotonic()
    for chunk in client.completions.create(model=model, prompt=prompt, stream=True, **options):
        text += "".join(choice.text for choice in chunk.choices)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return text, longest


class Load:
    """Streams that run one after the other until the block ends, `AT_ONCE` for each model, all checked for equality."""

    def __init__(self, served: Served, models: Sequence[str], expected: dict[str, dict[str, str]]) -> None:
        self._served = served
        self._models = models
        self._expected = expected
        self._has_ended = Event()
        self._pool = ThreadPoolExecutor(AT_ONCE * len(models))
        self._running: list[Future[list[float]]] = []

    def __enter__(self) -> "Load":
        self._running = [
            self._pool.submit(self._repeat, model, PROMPTS[at]) for model in self._models for at in range(AT_ONCE)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        self._pool.shutdown()

    def gaps_s(self) -> list[float]:
        """Returns each stream's longest gap, in seconds; raises what a stream raised."""
        return [gap for one in self._running for gap in one.result()]

    def _repeat(self, model: str, prompt: str) -> list[float]:
        gaps = []
        while not self._has_ended.is_set():
            text, gap = stream(self._served.client, model, prompt)
            assert text == self._expected[model][prompt]
            gaps.append(gap)
        return gaps


def accepted(served: Served, deployment: str) -> int:
    return sum(one["accepted_tokens"] for one in served.inspect(deployment))


def drafters(served: Served) -> int:
    return len(served.inspect("Drafter"))


def test_the_client_lists_and_uses_both(served: Served, expected: dict[str, dict[str, str]]) -> None:
    assert [card.id for card in served.client.models.list().data] == [SMOLLM2, GEMMA]
    for model, texts in expected.items():
        for prompt, text in texts.items():
            assert stream(served.client, model, prompt)[0] == text
    assert accepted(served, "Target-smollm2") > TOKENS
    assert accepted(served, "Target-gemma") > TOKENS


def test_the_pool_follows_the_sum_of_both(served: Served, expected: dict[str, dict[str, str]]) -> None:
    with Load(served, [SMOLLM2], expected) as one:
        eventually(lambda: drafters(served) == 2, "one model has two drafters", seconds=GROWN_S)
    with Load(served, [SMOLLM2, GEMMA], expected) as both:
        eventually(lambda: drafters(served) == 3, "both models have three drafters", seconds=GROWN_S)
    assert one.gaps_s()
    assert both.gaps_s()
    eventually(lambda: drafters(served) == 1, "one drafter is left", seconds=GROWN_S)


def test_streams_do_not_notice_the_death_of_the_other_target(
    served: Served, expected: dict[str, dict[str, str]]
) -> None:
    with Load(served, [SMOLLM2], expected) as load:
        (lost,) = served.inspect("Target-gemma")
        os.kill(lost["pid"], signal.SIGKILL)
        text, _ = stream(served.client, GEMMA, PROMPTS[0])  # waits for the new target
        assert text == expected[GEMMA][PROMPTS[0]]
        (found,) = served.inspect("Target-gemma")
        assert found["pid"] != lost["pid"]
    gaps = load.gaps_s()
    print(f"{len(gaps)} streams of the other model; longest gap {max(gaps):.2f} s")
    assert len(gaps) > AT_ONCE
