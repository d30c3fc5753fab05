"""Load on a real cluster of several nodes with random failures: no failed request, changed token or leaked resource.

Not part of the default suite: `make chaos`. A request may fail only if its router was killed. Every kind of failure
occurs once per round. A pool fails again only after it has recovered, so each measurement covers a single failure;
other pools may fail in the meantime. `--overlap` removes this restriction.
"""

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from ray import serve
from ray.cluster_utils import Cluster
from rich.console import Console

from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config
from serve_app.operations.local import checked_port, serving
from tests.chaos.deck import Deck
from tests.chaos.failures import KINDS, Scene, grpc_ports
from tests.chaos.load import Answer, Load, Request
from tests.chaos.recovery import Failure, Sizes, Stream, is_open, table
from tests.exhaustive.small_target import make_small_target
from tests.integration.serving import EXACT, Reference, Served, built_by
from tests.integration.test_serving import assert_nothing_left, eventually

MODEL = "SmolLM2-135M-Instruct"
TOKENS = 400
GREEDY: dict[str, object] = {"temperature": 0.0}
TOPICS = ("rivers", "trains", "bread")
REQUESTS = [Request(f"Explain to a child something about {topic}.", GREEDY) for topic in TOPICS] + [
    Request(f"Tell me a story about {topic}.", {"temperature": 0.8, "seed": seed}) for seed, topic in enumerate(TOPICS)
]
WANTED = {"Target": 2, "Drafter": 2, "Router": 2}  # one of two survives a failure
NODES = 2  # besides the head, which runs no model
ALONE = {"object_store_memory": 80 << 20}
RAY = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "180",  # a node may join while others start
}
LOOK_S = 0.5  # polling interval for running replicas
SETTLED_S = 300  # models load slowly if everything restarts at once
WHERE = "labels: {models: 'yes'}"
POOLS = (
    f"target.resources_per_rank={{num_cpus: 0.1, {WHERE}}}",
    "target.cache_per_rank.gib=0.1",
    f"target.replicas={{min: {WANTED['Target']}, max: {WANTED['Target']}}}",
    "draft={method: ngram, model: null, "
    f"replicas: {{min: {WANTED['Drafter']}, max: {WANTED['Drafter']}}}, resources: {{num_cpus: 0.1, {WHERE}}}}}",
    f"model.served_name={MODEL}",
    "model.max_context=1024",
    f"server.routers={WANTED['Router']}",
    "server.target_wait_s=300",
)


@dataclass
class Chaos:
    """Command-line options."""

    minutes: float
    every_s: float
    kinds: Sequence[str]
    seed: int
    overlaps: bool


@pytest.fixture(scope="module")
def chaos(request: pytest.FixtureRequest) -> Chaos:
    option = request.config.getoption
    kinds = [kind.strip() for kind in option("--kinds").split(",") if kind.strip()] or list(KINDS)
    assert set(kinds) <= set(KINDS), f"kinds of failures are {', '.join(KINDS)}"
    seed = option("--chaos-seed")
    seed = random.randrange(2**32) if seed is None else seed
    return Chaos(option("--minutes"), option("--every"), kinds, seed, option("--overlap"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    os.environ.update(RAY)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **ALONE})
    for _ in range(NODES):
        add_node(made)
    yield made
    made.shutdown()


def add_node(cluster: Cluster) -> None:
    cluster.add_node(wait=False, num_cpus=2, labels={"models": "yes"}, **ALONE)


@pytest.fixture(scope="module")
def served(
    nodes: Cluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Served]:
    target = make_small_target(tmp_path_factory.mktemp("target"), Path(demo_config([]).model.target))
    port = f"server.port={checked_port('127.0.0.1', 0)}"
    ranks = f"target.tensor_parallel={request.config.getoption('--ranks')}"
    pacing = f"speculation.schedule={request.config.getoption('--schedule')}"
    config = demo_config([*EXACT, f"model.target={target}", *POOLS, port, ranks, pacing])
    with (
        built_by("tests.chaos.reporting_router:build"),
        serving(config, Console(quiet=True), address=nodes.address) as url,
    ):
        yield Served(url, config)


def sizes() -> Sizes:
    status = serve.status().applications[APPLICATION].deployments
    at_s = time.monotonic()
    return Sizes(at_s, {name: status[name].replica_states.get("RUNNING", 0) for name in WANTED})


def are_all_running() -> bool:
    status = serve.status().applications[APPLICATION].deployments
    return all(dict(status[name].replica_states) == {"RUNNING": count} for name, count in WANTED.items())


def undisturbed(served: Served) -> list[str]:
    """Returns the expected answer to each request; greedy answers come from the reference."""
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


@dataclass
class ChaosRecord:
    """Injected failures, and running replicas over time."""

    began_s: float
    failures: list[Failure] = field(default_factory=list)
    sizes: list[Sizes] = field(default_factory=list)

    def look(self) -> None:
        """Records when pools lose and gain replicas."""
        now = sizes()
        if self.sizes and now.running != self.sizes[-1].running:
            print(f"{now.at_s - self.began_s:6.1f} s      there are {dict(now.running)}", flush=True)
        self.sizes.append(now)

    def at_work(self, now_s: float) -> frozenset[str]:
        """Returns the pools that may not have recovered from a failure."""
        return frozenset(
            pool for failure in self.failures if is_open(failure, self.sizes, WANTED, now_s) for pool in failure.pools
        )


def strike(scene: Scene, chaos: Chaos, record: ChaosRecord) -> None:
    """Injects failures until the time limit, then completes their follow-ups."""
    deck = Deck(chaos.kinds, scene.rng)
    began = record.began_s
    until = began + 60 * chaos.minutes
    next_s = began + chaos.every_s
    while (now := time.monotonic()) < until or not scene.is_over:
        scene.add_nodes_due(now)
        record.look()
        if next_s <= now < until:
            at_work = frozenset() if chaos.overlaps else record.at_work(now)
            kind = deck.draw(lambda kind, at_work=at_work: at_work.isdisjoint(KINDS[kind].pools))
            if kind is not None and (failure := KINDS[kind].strike(scene)) is not None:
                record.failures.append(failure)
                print(f"{now - began:6.1f} s  {failure.kind}: {failure.struck}", flush=True)
                next_s = now + scene.rng.uniform(0.3, 1.7) * chaos.every_s
        time.sleep(LOOK_S)


def with_failures(load: Load, scene: Scene, chaos: Chaos, record: ChaosRecord) -> None:
    """Runs the load in its own thread, because Ray starts nodes only in the main thread."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(asyncio.run, load.run())
        try:
            strike(scene, chaos, record)
            eventually(lambda: has_recovered(record), "all replicas run again", SETTLED_S)
        finally:
            scene.resume_all()
            load.stop()
        running.result()


def has_recovered(record: ChaosRecord) -> bool:
    record.look()
    return not record.at_work(time.monotonic()) and are_all_running()


def is_excused(answer: Answer, scene: Scene) -> bool:
    """Returns whether the request's router may have been killed; an unanswered request cannot name its router."""
    hits = scene.routers_hit
    times = [at for pid, ats in hits.items() for at in ats if answer.router in {None, pid}]
    return any(answer.began_s <= at <= answer.ended_s for at in times)


def test_chaos(nodes: Cluster, served: Served, chaos: Chaos, request: pytest.FixtureRequest) -> None:
    eventually(are_all_running, "all replicas run", seconds=SETTLED_S)
    texts = undisturbed(served)
    scene = Scene(nodes, lambda: add_node(nodes), random.Random(chaos.seed))
    print(f"\n{chaos}")
    load = Load(served.url, MODEL, TOKENS, REQUESTS)
    record = ChaosRecord(time.monotonic())
    with_failures(load, scene, chaos, record)

    failed = [answer for answer in load.answers if answer.error is not None]
    excused = [answer for answer in failed if is_excused(answer, scene)]
    streams = [Stream(one.began_s, one.came_s) for one in load.answers]
    lines = table(record.failures, streams, record.sizes, WANTED)
    print("\n".join(lines))
    print(
        f"{len(load.answers)} requests under {len(record.failures)} failures; {len(excused)} failed with their routers"
    )
    if missed := sorted(set(chaos.kinds) - {failure.kind for failure in record.failures}):
        print(f"there was no time for: {', '.join(missed)}")
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
    check_no_leaks(served, scene)


def check_no_leaks(served: Served, scene: Scene) -> None:
    """Fails if the idle deployment leaks sessions, pages, streams or processes."""
    assert_nothing_left(served)
    counts = {role: len(scene.processes(role)) for role in (*WANTED, "Rank")}
    assert counts == {**WANTED, "Rank": WANTED["Target"] * served.config.target.tensor_parallel}
    for target in served.inspect("Target"):
        assert target["sessions"] == target["queued"] == 0
    between = Counter({("Router", pool): WANTED["Router"] * WANTED[pool] for pool in ("Target", "Drafter")})
    deadline = time.monotonic() + 60
    while (found := open_streams(scene)) != between:
        assert time.monotonic() < deadline, f"streams are {found}, and were to be {between}"
        time.sleep(1)


def open_streams(scene: Scene) -> Counter[tuple[str, str]]:
    """Returns open streams as (dialer, peer); idle drafters have no streams to targets."""
    pools = grpc_ports()
    roles = {one.process.pid: role for role in WANTED for one in scene.processes(role)}
    return Counter(
        (roles.get(one.pid or 0, f"process {one.pid}"), pools[one.raddr.port])
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED and one.raddr and one.raddr.port in pools
    )
