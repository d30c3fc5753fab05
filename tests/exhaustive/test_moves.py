"""Scale-down, rolling updates and node drains on real Ray under load fail no request and change no token.

Not part of the default suite: `make test-exhaustive`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import ray
from openai import OpenAIError
from ray import serve
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from rich.console import Console

from cluster.config import SlipstreamConfig
from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config
from serve_app.operations.deploying import deploy
from serve_app.operations.local import checked_port, serving
from serve_app.operations.node_drain import RAY_DRAIN, drain_s
from tests.exhaustive.small_target import make_small_target
from tests.integration.serving import EXACT, Reference, Served
from tests.integration.test_serving import assert_nothing_left, eventually

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 200
TOPICS = ("rivers", "trains", "bread", "the moon")
GREEDY: dict[str, object] = {"temperature": 0.0}
Request = tuple[str, dict[str, object]]  # prompt and sampling parameters
REQUESTS: list[Request] = [(f"Explain to a child something about {topic}.", GREEDY) for topic in TOPICS] + [
    (f"Tell me a story about {topic}.", {"temperature": 0.8, "seed": seed}) for seed, topic in enumerate(TOPICS)
]
POOLS = (
    "target.resources_per_rank={num_cpus: 0.1, labels: {models: 'yes'}}",
    "target.cache_per_rank.gib=0.1",
    "target.drain_s=20",
    "model.max_context=512",
    f"model.served_name={MODEL}",
    "speculation.schedule=lock_step",
    "server.drain_s=60",
)
NODES = ("one", "two")  # besides the head, which runs no model
STORE_BYTES = 80 << 20
RAY_START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--block")


@dataclass
class Load:
    """Repeats each request in its own stream until stopped."""

    texts: dict[int, Counter[str]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    worst_gap_s: float = 0.0
    gaps: int = 0


@dataclass(frozen=True)
class Nodes:
    address: str
    processes: dict[str, subprocess.Popen[bytes]]  # by node label


@contextmanager
def started_node(address: str, name: str, drain_s: int) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a node as an operator would, with a drain deadline."""
    options = {
        "--address": address,
        "--num-cpus": "4",
        "--labels": f"models=yes,name={name}",
        "--object-store-memory": str(STORE_BYTES),
        "--dashboard-agent-listen-port": "0",
    }
    words = [word for option in options.items() for word in option]
    environment = os.environ | {RAY_DRAIN: str(drain_s)}
    with subprocess.Popen([*RAY_START, *words], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def nodes(target: str) -> Iterator[Nodes]:
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args=head)
    seconds = drain_s(config_with(target, 1))
    with ExitStack() as running:
        started: dict[str, subprocess.Popen[bytes]] = {}
        client = GcsClient(address=made.address)
        for name in NODES:  # one after another: two concurrent starts may exceed Ray's start timeout
            started[name] = running.enter_context(started_node(made.address, name, seconds))
            eventually(lambda: len(client.get_all_node_info()) == 1 + len(started), f"node {name} has joined")
        yield Nodes(made.address, started)
    made.shutdown()


def draft(max_sessions: int) -> str:
    """Configures two n-gram drafters, which start within seconds and match the small target's repetitions."""
    where = "resources: {num_cpus: 0.1, labels: {models: 'yes'}}"
    pool = f"method: ngram, model: null, max_sessions: {max_sessions}, replicas: {{min: 2, max: 2}}, {where}"
    return f"draft={{{pool}}}"


def config_with(target: str, replicas: int, *overrides: str, draft_sessions: int = 64) -> SlipstreamConfig:
    sizes = f"target.replicas={{min: {replicas}, max: {replicas}}}"
    return demo_config([*EXACT, f"model.target={target}", *POOLS, draft(draft_sessions), sizes, *overrides])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_small_target(tmp_path_factory.mktemp("target"), Path(demo_config([]).model.target))


@pytest.fixture(scope="module")
def served(nodes: Nodes, target: str) -> Iterator[Served]:
    config = config_with(target, 3, f"server.port={checked_port('127.0.0.1', 0)}")
    with serving(config, Console(quiet=True), address=nodes.address) as url:
        yield Served(url, config)


@pytest.fixture(scope="module")
def undisturbed(served: Served) -> list[str]:
    """Returns the expected answer to each request; greedy answers come from the reference."""
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
    """Repeats every request, at least once, until `disturb` has returned."""
    disturbing = asyncio.create_task(asyncio.to_thread(disturb))

    async def one(index: int) -> None:
        prompt, sampling = requests[index]
        while not (disturbing.done() and index in load.texts):
            text = ""
            last_event_s = None
            try:
                async for chunk in await client.chat.completions.create(
                    model=MODEL,
                    messages=[{"role": "user", "content": prompt}],
                    max_tokens=TOKENS,
                    stream=True,
                    **sampling,  # type: ignore[call-overload]
                ):
                    now = time.monotonic()
                    if last_event_s is not None:
                        load.worst_gap_s = max(load.worst_gap_s, now - last_event_s)
                        load.gaps += 1
                    last_event_s = now
                    text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            except (OpenAIError, httpx.HTTPError) as error:
                load.errors.append(repr(error))
                return
            load.texts.setdefault(index, Counter())[text] += 1

    async with served.async_client as client:
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
    nodes: Nodes, target: str, served: Served, undisturbed: list[str]
) -> None:
    eventually(lambda: are_settled(3), "all replicas run", seconds=180)
    port = f"server.port={served.config.server.port}"

    def update() -> None:
        """Changes settings that replace every replica but leave answers unchanged."""
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
        """Sends SIGTERM to the target's node; the other node has capacity for the target."""
        name = node_of_the_target()
        assert name is not None
        process = nodes.processes[name]
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        eventually(
            lambda: node_of_the_target() not in (None, name) and are_settled(1),
            "the target is elsewhere",
            seconds=180,
        )
        moved_s = time.monotonic() - began
        eventually(lambda: process.poll() is not None, "the node has ended", seconds=180)
        print(f"\nthe target moved within {moved_s:.0f} s, the node ended within {time.monotonic() - began:.0f} s")

    routers = router_pids(served)
    counted = check("a node drained with SIGTERM", served, undisturbed, drain)
    # A router on the same node took its counters with it.
    assert counted["target", "planned"] > 0 or router_pids(served) != routers
    assert_nothing_left(served)


def router_pids(served: Served) -> set[int]:
    return {router["pid"] for router in served.inspect("Router")}


def node_of_the_target() -> str | None:
    """Returns the node name of a running target, or None if no target runs."""
    deployments = _get_global_client().get_serve_details()["applications"][APPLICATION]["deployments"]
    replicas = deployments["Target"]["replicas"]
    running = {one["node_id"] for one in replicas if one["state"] == "RUNNING"}
    return next((node["Labels"]["name"] for node in ray.nodes() if node["NodeID"] in running), None)
