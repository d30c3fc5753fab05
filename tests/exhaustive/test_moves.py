"""Planned moves on real Ray under load: scale-down, a rolling update, a drained node; no failure, no changed token.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from openai import OpenAIError
from ray import serve
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2
from ray.serve.context import _get_global_client
from rich.console import Console

from cluster.config import SlipstreamConfig
from serve_app.app import APPLICATION
from serve_app.cli.demo_models import demo_config
from serve_app.operations.deploying import deploy
from serve_app.operations.local import checked_port, serving
from tests.exhaustive.small_target import make_small_target
from tests.integration.serving import EXACT, Reference, Served
from tests.integration.test_serving import assert_nothing_left, eventually

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 200
TOPICS = ("rivers", "trains", "bread", "the moon")
GREEDY: dict[str, object] = {"temperature": 0.0}
Request = tuple[str, dict[str, object]]  # a prompt, and how its answer is sampled
REQUESTS: list[Request] = [(f"Explain to a child something about {topic}.", GREEDY) for topic in TOPICS] + [
    (f"Tell me a story about {topic}.", {"temperature": 0.8, "seed": seed}) for seed, topic in enumerate(TOPICS)
]
POOLS = (
    "target.resources_per_rank={num_cpus: 0.1, labels: {models: 'yes'}}",
    "target.cache_per_rank.gib=0.1",
    "target.drain_s=20",
    "model.max_context=512",
    f"model.served_name={MODEL}",
    "speculation.pacing=lock_step",
    "server.drain_s=300",
)
NODES = 2  # beside the head, which runs no model
DRAIN_S = 120  # that the drained node has


@dataclass
class Load:
    """Streams without end, one after the other for each request, until told to stop."""

    texts: dict[int, Counter[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    worst_gap_s: float = 0.0
    gaps: int = 0


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    store = {"object_store_memory": 80 << 20}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **store})
    for _ in range(NODES):
        made.add_node(num_cpus=4, labels={"models": "yes"}, **store)
    yield made
    made.shutdown()


def draft(max_sessions: int) -> str:
    """Two drafters: lookups, which start within seconds and find what a small target repeats."""
    where = "resources: {num_cpus: 0.1, labels: {models: 'yes'}}"
    pool = f"method: prompt_lookup, model: null, max_sessions: {max_sessions}, replicas: {{min: 2, max: 2}}, {where}"
    return f"draft={{{pool}}}"


def config_with(target: str, replicas: int, *overrides: str, draft_sessions: int = 64) -> SlipstreamConfig:
    sizes = f"target.replicas={{min: {replicas}, max: {replicas}}}"
    return demo_config([*EXACT, f"model.target={target}", *POOLS, draft(draft_sessions), sizes, *overrides])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_small_target(tmp_path_factory.mktemp("target"), Path(demo_config([]).model.target))


@pytest.fixture(scope="module")
def served(nodes: Cluster, target: str) -> Iterator[Served]:
    config = config_with(target, 3, f"server.port={checked_port('127.0.0.1', 0)}")
    with serving(config, Console(quiet=True), address=nodes.address) as url:
        yield Served(url, config)


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> list[str]:
    """What each request is answered with, the greedy ones as the reference has it."""
    load = Load()
    asyncio.run(under_load(served, load, lambda: None))
    assert not load.errors
    reference = Reference(served.config.model.target)
    texts = [next(iter(load.texts[index])) for index in range(len(REQUESTS))]
    for (prompt, sampling), text in zip(REQUESTS, texts, strict=True):
        if sampling is GREEDY:
            reference.assert_greedy(prompt, TOKENS, text)
    return texts


async def under_load(
    served: Served, load: Load, disturb: Callable[[], None], requests: Sequence[Request] = REQUESTS
) -> None:
    """Every request again and again, at least once, until `disturb` has returned."""
    client = served.async_client
    disturbing = asyncio.create_task(asyncio.to_thread(disturb))

    async def one(index: int) -> None:
        prompt, sampling = requests[index]
        while not (disturbing.done() and index in load.texts):
            text = ""
            heard_s = None
            try:
                async for chunk in await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=TOKENS,
                    stream=True,
                    **sampling,  # type: ignore[call-overload]
                ):
                    now = time.monotonic()
                    if heard_s is not None:
                        load.worst_gap_s = max(load.worst_gap_s, now - heard_s)
                        load.gaps += 1
                    heard_s = now
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            except (OpenAIError, httpx.HTTPError) as error:
                load.errors.append(repr(error))
                return
            load.texts.setdefault(index, Counter())[text] += 1

    await asyncio.gather(*(one(index) for index in range(len(requests))), disturbing)


def are_settled(targets: int) -> bool:
    status = serve.status().applications[APPLICATION].deployments
    wanted = {"Target": targets, "Drafter": 2, "Router": 1}
    return all(dict(status[name].replica_states) == {"RUNNING": count} for name, count in wanted.items())


def handovers(served: Served) -> Counter[tuple[str, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    for router in served.inspect("Router"):
        counts.update(router["handovers"])
    return counts


def check(what: str, served: Served, undisturbed: list[str], disturb: Callable[[], None]) -> Counter[tuple[str, str]]:
    before = handovers(served)
    load = Load()
    began = time.monotonic()
    asyncio.run(under_load(served, load, disturb))
    made = handovers(served)
    counted = made - before
    print(
        f"\n{what}: {sum(found.total() for found in load.texts.values())} requests in {time.monotonic() - began:.0f} s,"
        f" handovers {dict(counted)}, worst stall {load.worst_gap_s:.2f} s"
    )
    assert not load.errors
    for index, text in enumerate(undisturbed):
        assert set(load.texts[index]) == {text}, REQUESTS[index]
    assert not any(cause == "lost" for _, cause in counted)
    return counted


def test_scale_down_a_rolling_update_and_a_drained_node(
    nodes: Cluster, target: str, served: Served, undisturbed: list[str]
) -> None:
    eventually(lambda: are_settled(3), "all replicas run", seconds=180)
    port = f"server.port={served.config.server.port}"

    def update() -> None:
        """Other values that change nothing of what is answered: every replica is replaced."""
        changed = config_with(target, 3, port, "target.max_sessions=12", draft_sessions=48)
        deploy(changed, APPLICATION)
        time.sleep(5)
        eventually(lambda: are_settled(3), "the update is done", seconds=600)

    check("rolling update of targets, drafters and router", served, undisturbed, update)

    def scale_down() -> None:
        deploy(config_with(target, 1, port, "target.max_sessions=12", draft_sessions=48), APPLICATION)
        eventually(lambda: are_settled(1), "there is one target", seconds=300)

    counted = check("scale-down of three targets to one", served, undisturbed, scale_down)
    assert counted["target", "planned"] > 0

    def drain() -> None:
        """The node on which the target runs; the others have room for it."""
        node = node_of_the_target()
        assert node is not None
        deadline_ms = int(1000 * (time.time() + DRAIN_S))
        reason = autoscaler_pb2.DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION
        accepted, why = GcsClient(address=nodes.address).drain_node(node, reason, "a test", deadline_ms)
        assert accepted, why
        eventually(
            lambda: node_of_the_target() not in (None, node) and are_settled(1),
            "the target is elsewhere",
            seconds=DRAIN_S,
        )

    routers = router_pids(served)
    counted = check("a drained node", served, undisturbed, drain)
    # A router that was on the node, too, has taken with it what it counted.
    assert counted["target", "planned"] > 0 or router_pids(served) != routers
    assert_nothing_left(served)


def router_pids(served: Served) -> set[int]:
    return {router["pid"] for router in served.inspect("Router")}


def node_of_the_target() -> str | None:
    """Hex name of the node that a running target is on; None while none runs."""
    deployments = _get_global_client().get_serve_details()["applications"][APPLICATION]["deployments"]
    replicas = deployments["Target"]["replicas"]
    return next((str(one["node_id"]) for one in replicas if one["state"] == "RUNNING"), None)
