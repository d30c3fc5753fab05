"""Load on a real cluster of several nodes under random blows: no failed request, no changed token, nothing left over.

Not part of the default suite: `make chaos`. Requests may fail whose router was killed, and no others.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.schema import ServeApplicationSchema
from rich.console import Console

from cluster.config import SlipstreamConfig
from serve_app.app import APPLICATION
from serve_app.cli.demo_models import demo_config
from serve_app.operations import deploying
from serve_app.operations.local import checked_port, serving
from tests.chaos.blows import KINDS, Scene, grpc_ports
from tests.chaos.load import Answer, Load, Request
from tests.chaos.recovery import Blow, Sizes, Stream, table
from tests.exhaustive.small_target import make_small_target
from tests.integration.serving import EXACT, Reference, Served
from tests.integration.test_serving import assert_nothing_left, eventually

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 400
GREEDY: dict[str, object] = {"temperature": 0.0}
TOPICS = ("rivers", "trains", "bread", "the moon")
REQUESTS = [Request(f"Explain to a child something about {topic}.", GREEDY) for topic in TOPICS] + [
    Request(f"Tell me a story about {topic}.", {"temperature": 0.8, "seed": seed}) for seed, topic in enumerate(TOPICS)
]
WANTED = {"Target": 3, "Drafter": 2, "Router": 2}
NODES = 2  # beside the head, which runs no model
ALONE = {"object_store_memory": 80 << 20}
LOOK_S = 0.25  # between two looks at who runs
SETTLED_S = 300  # models take long to load where everything is started anew at once
WHERE = "labels: {models: 'yes'}"
POOLS = (
    f"target.resources_per_rank={{num_cpus: 0.1, {WHERE}}}",
    "target.cache_per_rank.gib=0.1",
    f"target.replicas={{min: {WANTED['Target']}, max: {WANTED['Target']}}}",
    "draft={method: prompt_lookup, model: null, "
    f"replicas: {{min: {WANTED['Drafter']}, max: {WANTED['Drafter']}}}, resources: {{num_cpus: 0.1, {WHERE}}}}}",
    f"model.served_name={MODEL}",
    "model.max_context=1024",
    f"server.routers={WANTED['Router']}",
    "server.target_wait_s=300",
)


@dataclass
class Chaos:
    """What is to happen, from the command line."""

    minutes: float
    every_s: float
    kinds: Sequence[str]
    seed: int


@pytest.fixture(scope="module")
def chaos(request: pytest.FixtureRequest) -> Chaos:
    option = request.config.getoption
    kinds = [kind.strip() for kind in option("--kinds").split(",") if kind.strip()] or list(KINDS)
    assert set(kinds) <= set(KINDS), f"kinds of blows are {', '.join(KINDS)}"
    seed = option("--chaos-seed")
    return Chaos(option("--minutes"), option("--every"), kinds, random.randrange(2**32) if seed is None else seed)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **ALONE})
    for _ in range(NODES):
        add_node(made)
    yield made
    made.shutdown()


def add_node(cluster: Cluster) -> None:
    cluster.add_node(wait=False, num_cpus=4, labels={"models": "yes"}, **ALONE)


@pytest.fixture(scope="module")
def served(
    nodes: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    target = make_small_target(tmp_path_factory.mktemp("target"), Path(demo_config([]).model.target))
    port = f"server.port={checked_port('127.0.0.1', 0)}"
    ranks = f"target.tensor_parallel={request.config.getoption('--ranks')}"
    pacing = f"speculation.pacing={request.config.getoption('--pacing')}"
    config = demo_config([*EXACT, f"model.target={target}", *POOLS, port, ranks, pacing])
    application_schema = deploying.application_schema

    def with_telling_routers(config: SlipstreamConfig, name: str, route_prefix: str = "/") -> ServeApplicationSchema:
        schema = application_schema(config, name, route_prefix)
        return schema.model_copy(update={"import_path": "tests.chaos.telling_router:build"})

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(deploying, "application_schema", with_telling_routers)
        with serving(config, Console(quiet=True), address=nodes.address) as url:
            yield Served(url, config)


def sizes() -> Sizes:
    status = serve.status().applications[APPLICATION].deployments
    at_s = time.monotonic()
    return Sizes(at_s, {name: status[name].replica_states.get("RUNNING", 0) for name in WANTED})


def are_all_running() -> bool:
    status = serve.status().applications[APPLICATION].deployments
    return all(dict(status[name].replica_states) == {"RUNNING": count} for name, count in WANTED.items())


def undisturbed(served: Served) -> list[str]:
    """What each request is answered with; the greedy ones as the reference has it."""
    load = Load(served.url, MODEL, TOKENS, REQUESTS)
    asyncio.run(load.run(rounds=2))
    assert [answer.error for answer in load.answers if answer.error] == []
    reference = Reference(served.config.model.target)
    texts = []
    for index, request in enumerate(REQUESTS):
        (text,) = {answer.text for answer in load.answers if answer.request == index}
        if request.sampling is GREEDY:
            reference.assert_greedy(request.prompt, TOKENS, text)
        texts.append(text)
    return texts


def strike(scene: Scene, chaos: Chaos, blows: list[Blow], seen: list[Sizes]) -> None:
    """Blow after blow until time is up, and then whatever still is to follow them."""
    began = time.monotonic()
    until = began + 60 * chaos.minutes
    next_s = began + chaos.every_s
    while (now := time.monotonic()) < until or scene.later:
        scene.do_what_is_due(now)
        seen.append(sizes())
        if next_s <= now < until:
            kind = scene.rng.choice(chaos.kinds)
            if (blow := KINDS[kind](scene)) is not None:
                blows.append(blow)
                print(f"{now - began:6.1f} s  {blow.kind}: {blow.struck}", flush=True)
            next_s = now + scene.rng.uniform(0.3, 1.7) * chaos.every_s
        time.sleep(LOOK_S)


def under_blows(load: Load, scene: Scene, chaos: Chaos, blows: list[Blow], seen: list[Sizes]) -> None:
    """The load is in a thread of its own: Ray starts nodes in the main one only."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, load.run())
        try:
            strike(scene, chaos, blows, seen)
            eventually(are_all_running, "all replicas run again", SETTLED_S)
            seen.append(sizes())
        finally:
            load.stop()
        running.result()


def is_excused(answer: Answer, scene: Scene) -> bool:
    """Whether its router was killed meanwhile; one that had not begun to answer does not say which it was."""
    hits = scene.routers_hit
    times = [at for pid, ats in hits.items() for at in ats if answer.router in {None, pid}]
    return any(answer.began_s <= at <= answer.ended_s for at in times)


def test_chaos(nodes: Cluster, served: Served, chaos: Chaos, request: pytest.FixtureRequest) -> None:
    eventually(are_all_running, "all replicas run", seconds=SETTLED_S)
    texts = undisturbed(served)
    scene = Scene(nodes, lambda: add_node(nodes), random.Random(chaos.seed))
    print(f"\n{chaos}")
    load = Load(served.url, MODEL, TOKENS, REQUESTS)
    blows: list[Blow] = []
    seen: list[Sizes] = []
    under_blows(load, scene, chaos, blows, seen)

    failed = [answer for answer in load.answers if answer.error is not None]
    excused = [answer for answer in failed if is_excused(answer, scene)]
    lines = table(blows, [Stream(one.began_s, one.came_s) for one in load.answers], seen, WANTED)
    print("\n".join(lines))
    print(f"{len(load.answers)} requests under {len(blows)} blows; {len(excused)} failed with their routers")
    if file := request.config.getoption("--table"):
        Path(file).write_text("\n".join(lines) + "\n")
    assert [answer for answer in failed if answer not in excused] == []
    wrong = Counter(
        (answer.request, answer.finish)
        for answer in load.answers
        if not answer.error and answer.text != texts[answer.request]
    )
    assert not wrong
    assert all(answer.error or answer.finish for answer in load.answers)
    assert all(texts[answer.request].startswith(answer.text) for answer in excused)
    nothing_is_left(served, scene)


def nothing_is_left(served: Served, scene: Scene) -> None:
    """Once idle: no session, page or stream beyond those that an idle deployment has, and no process."""
    assert_nothing_left(served)
    counts = {role: len(scene.processes(role)) for role in (*WANTED, "Rank")}
    assert counts == {**WANTED, "Rank": WANTED["Target"] * served.config.target.tensor_parallel}
    for target in served.inspect("Target"):
        assert target["sessions"] == target["queued"] == 0
    links = WANTED["Router"] * (WANTED["Target"] + WANTED["Drafter"])
    eventually(lambda: streams() == links, f"there are {links} streams", seconds=60)


def streams() -> int:
    """Connections to targets and drafters, seen from who dialled; idle drafters have none to targets."""
    ports = grpc_ports()
    found = psutil.net_connections("tcp")
    return sum(one.status == psutil.CONN_ESTABLISHED and bool(one.raddr) and one.raddr.port in ports for one in found)
