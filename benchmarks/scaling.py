r"""Records and plots the replicas of both pools in a real deployment under stepped load.

    python benchmarks/scaling.py --json OUT [--picture OUT.svg] [--stretch 1]
    python benchmarks/scaling.py --from FILE --picture OUT.svg

Serves the demo's target in bfloat16 with n-gram drafters, on a Ray cluster of a head and one node per pool. Each pool
scales up to three replicas, and drafters down to zero. The load changes in steps: some streams with drafts, many
without, then some with drafts again. `--stretch` multiplies the length of every step, for machines on which replicas
start slowly. Exits with status 1 if a request failed.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from ray import serve
from ray.cluster_utils import Cluster
from rich.console import Console

from cluster.errors import SlipstreamError
from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion
from serve_app.operations.local import checked_port, serving
from tools.bench.experiment import read_prompts

STORE_BYTES = 80 << 20
TOKENS = 64
SETTINGS = (
    "model.dtype=bfloat16",
    "model.max_context=1024",
    "speculation.schedule=lock_step",  # a session with speculation requests drafts in every round
    "target={max_sessions: 16, cache_per_rank: {gib: 0.1}, resources_per_rank: {num_cpus: 0.1, labels: {pool: target}},"
    " replicas: {min: 1, max: 3, sessions_per_replica: 8, up_delay_s: 4, down_delay_s: 20}}",
    "draft={method: ngram, model: null, max_sessions: 4, resources: {num_cpus: 0.1, labels: {pool: draft}},"
    " replicas: {min: 0, max: 3, up_delay_s: 4, down_delay_s: 20}}",
)


@dataclass(frozen=True, slots=True)
class Phase:
    """Number of concurrent streams for some seconds; each stream sends one request after another."""

    name: str
    seconds: float
    drafted: int = 0
    plain: int = 0


PHASES = (
    Phase("nobody", 15),
    Phase("drafts are wanted", 75, drafted=6),
    Phase("speculation off", 100, plain=22),
    Phase("nobody", 60),
    Phase("drafts again", 50, drafted=6),
    Phase("nobody", 60),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests and replicas at one time."""

    at_s: float
    drafted: int  # requests in flight with speculation
    plain: int
    targets: int  # running replicas
    drafters: int


class Load:
    """Keeps the wanted number of streams of both kinds running."""

    def __init__(self, endpoint: ChatEndpoint, model: str, prompts: Sequence[str]) -> None:
        self._endpoint = endpoint
        self._model = model
        self._prompts = prompts
        self._tasks: dict[bool, list[asyncio.Task[None]]] = {True: [], False: []}
        self._wanted_streams = {True: 0, False: 0}
        self.running = {True: 0, False: 0}
        self.answered = 0
        self.failures: list[str] = []

    def set_phase(self, phase: Phase) -> None:
        """Starts missing streams; surplus streams stop after their current request."""
        self._wanted_streams = {True: phase.drafted, False: phase.plain}
        for kind, wanted in self._wanted_streams.items():
            self._tasks[kind] = [task for task in self._tasks[kind] if not task.done()]
            for place in range(len(self._tasks[kind]), wanted):
                self._tasks[kind].append(asyncio.create_task(self._stream(kind, place)))

    async def end(self) -> None:
        await asyncio.gather(*self._tasks[True], *self._tasks[False])

    async def _stream(self, is_drafted: bool, place: int) -> None:
        turn = place
        while place < self._wanted_streams[is_drafted]:
            prompt = self._prompts[turn % len(self._prompts)]
            turn += 7
            self.running[is_drafted] += 1
            try:
                question = ChatQuestion(prompt, TOKENS, True, None if is_drafted else 0)
                answer = await self._endpoint.ask(self._model, question)
                self.answered += 1
                if answer.tokens != TOKENS:
                    self.failures.append(f"{answer.tokens} tokens instead of {TOKENS}")
            except SlipstreamError as error:
                self.failures.append(str(error))
            finally:
                self.running[is_drafted] -= 1


def replicas(deployment: str) -> int:
    status = serve.status().applications[APPLICATION].deployments[deployment]
    return status.replica_states.get("RUNNING", 0)


async def record(url: str, model: str, prompts: Sequence[str], stretch: float) -> tuple[list[Sample], Load]:
    """Runs all phases and takes a sample about every second."""
    samples = []
    async with ChatEndpoint.at(url) as endpoint:
        load = Load(endpoint, model, prompts)
        began = time.monotonic()
        ends = began
        for phase in PHASES:
            load.set_phase(phase)
            ends += stretch * phase.seconds
            while (now := time.monotonic()) < ends:
                sizes = [await asyncio.to_thread(replicas, name) for name in ("Target", "Drafter")]
                samples.append(Sample(now - began, load.running[True], load.running[False], *sizes))
                print(samples[-1], file=sys.stderr)
                await asyncio.sleep(1)
        await load.end()
    return samples, load


@contextmanager
def three_nodes() -> Iterator[str]:
    """Runs a Ray cluster of a head without models and one node per pool; yields its address."""
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    store = {"object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **store})
    try:
        for pool in ("target", "draft"):
            cluster.add_node(num_cpus=2, labels={"pool": pool}, **store)
        yield cluster.address
    finally:
        cluster.shutdown()


def save_plot(samples: Sequence[Sample], path: Path) -> None:
    """Plots requests in flight and, below them, replicas over time."""
    from matplotlib import pyplot

    figure, (load, pools) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 4.6), layout="constrained")
    at = [sample.at_s for sample in samples]
    drafted = [sample.drafted for sample in samples]
    both = [sample.drafted + sample.plain for sample in samples]
    load.fill_between(at, drafted, step="post", color="#2f7ed8", alpha=0.7, label="speculation on")
    load.fill_between(at, drafted, both, step="post", color="#999999", alpha=0.7, label="speculation off")
    load.set_ylabel("requests in flight")
    load.legend(loc="upper right", frameon=False)
    pools.step(at, [sample.targets for sample in samples], where="post", color="#222222", label="targets")
    pools.step(at, [sample.drafters for sample in samples], where="post", color="#2f7ed8", label="drafters")
    pools.set_ylabel("running replicas")
    pools.set_xlabel("seconds")
    pools.set_yticks(range(4))
    pools.set_ylim(-0.1, 4.2)
    pools.legend(loc="upper right", ncols=2, frameon=False)
    for axes in (load, pools):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the samples here")
    parser.add_argument("--from", type=Path, dest="recorded", metavar="FILE", help="plot these samples without a run")
    parser.add_argument("--picture", type=Path, metavar="OUT.svg")
    parser.add_argument("--stretch", type=float, default=1.0)
    arguments = parser.parse_args()
    failures: list[str] = []
    if arguments.recorded:
        samples = [Sample(**one) for one in json.loads(arguments.recorded.read_text())["samples"]]
    else:
        console = Console(stderr=True)
        try:
            prompts = [prompt.prompt for prompt in read_prompts(BENCH_PROMPTS)]
            config = demo_config([*SETTINGS, f"server.port={checked_port('127.0.0.1', 0)}"])
            prepare_target(Path(config.model.target), console)
            with three_nodes() as address, serving(config, console, address=address) as url:
                samples, load = asyncio.run(record(url, config.model.name, prompts, arguments.stretch))
        except SlipstreamError as error:
            sys.exit(f"error: {error}")
        failures = load.failures
        print(f"{load.answered} requests answered, {len(failures)} failed; {failures[:3]}")
        if arguments.json:
            results = {"phases": [asdict(phase) for phase in PHASES], "samples": [asdict(sample) for sample in samples]}
            arguments.json.write_text(json.dumps(results) + "\n", encoding="utf-8")
    if arguments.picture:
        save_plot(samples, arguments.picture)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
