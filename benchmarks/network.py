r"""Measures speculation over a network: the drafter sits behind an emulated link with delay and packet loss.

    python benchmarks/network.py [--lines 0,1,5,20,5/1,20/1] [--concurrency 1,4] [--rounds 3] [--tokens 48] [--json OUT]

Serves the demo pair in bfloat16 on a Ray cluster of two nodes, pinned to one core each: router and target here, the
drafter on the far node. A line is the one-way delay in milliseconds and, after a slash, the packet loss in percent per
direction. Each line runs all prompts with and without speculation, interleaved batch by batch. An unmeasured round
before that lets the speculation controller adapt to the line. Needs root.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from far_link import HERE, FarLink, Line, far_link, far_node
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from rich.console import Console
from servers import OTHERS_CORE, PINNED

from actors.engine.process import run_on
from cluster.errors import SlipstreamError
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS
from serve_app.endpoint_client import ChatEndpoint
from serve_app.operations.local import checked_port, serving
from tools.bench.experiment import PLAIN, SPECULATIVE, Bench, BenchReport, Plan, Prompt, read_prompts

STORE_BYTES = 80 << 20
JOINS_S = 30  # time limit for a node to join
PLACED = (
    *(setting for setting in PINNED if not setting.startswith("server.port")),
    "target.resources_per_rank.labels={pool: target}",
    "draft.resources.labels={pool: draft}",
    "trust.insecure=true",  # the network is local to this machine
)


@contextmanager
def two_nodes() -> Iterator[str]:
    """Runs a Ray cluster with a node at each end of the link; yields its address."""
    os.environ.update({"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    store = {"object_store_memory": STORE_BYTES}
    head = {"num_cpus": 2, "include_dashboard": False, "node_ip_address": HERE, "labels": {"pool": "target"}, **store}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        with far_node(cluster.address, "--num-cpus=1", "--labels=pool=draft", f"--object-store-memory={STORE_BYTES}"):
            wait_for_nodes(cluster.address, 2)
            yield cluster.address
    finally:
        cluster.shutdown()


def wait_for_nodes(address: str, count: int) -> None:
    """Waits for `count` nodes; raises SlipstreamError after JOINS_S seconds."""
    client = GcsClient(address=address)
    deadline = time.monotonic() + JOINS_S
    while len(client.get_all_node_info()) < count:
        if time.monotonic() > deadline:
            raise SlipstreamError(f"the far node did not join {address} within {JOINS_S} s; see its output above")
        time.sleep(0.2)


async def measure(
    url: str, model: str, link: FarLink, arguments: argparse.Namespace, prompts: Sequence[Prompt]
) -> list[tuple[str, BenchReport]]:
    """Measures the lines in order; a repeated line serves as a control."""
    reports = []
    async with ChatEndpoint.at(url) as endpoint:
        bench = Bench(endpoint, model, reference=None)
        for line in arguments.lines:
            link.set_line(line)
            plan = Plan(tuple(prompts), arguments.concurrency, arguments.tokens, arguments.rounds)
            await bench.run(Plan(tuple(prompts), arguments.concurrency, arguments.tokens), lambda: None)
            report = BenchReport.of(await bench.run(plan, lambda: None))
            reports.append((line.name, report))
            print("\n".join(rows(line.name, report)), flush=True)
    return reports


def rows(line: str, report: BenchReport) -> list[str]:
    """Formats results as Markdown, one row per concurrency."""
    arms = {(arm.concurrency, arm.arm): arm for arm in report.arms}
    found = []
    for ratio in report.speedups:
        plain, fast = arms[ratio.concurrency, PLAIN], arms[ratio.concurrency, SPECULATIVE]
        with_block = fast.tally.blocks / fast.tally.verifies
        accepted = fast.tally.acceptance_rate
        values = (
            line,
            str(ratio.concurrency),
            f"{plain.tokens_per_s:.1f}",
            f"{fast.tokens_per_s:.1f}",
            f"{100 * with_block:.0f} %",
            "" if accepted is None else f"{accepted:.2f}",
            f"{fast.tally.tokens / fast.tally.verifies:.2f}",
            f"{ratio.mean:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
        )
        found.append(f"| {' | '.join(values)} |")
    return found


HEADER = (
    "| one way | at once | plain, tokens/s | speculative, tokens/s | verifies with a block | acceptance rate"
    " | tokens a verify | speculative / plain |",
    "|---|---|---|---|---|---|---|---|",
)


def line_of(text: str) -> Line:
    delay_ms, _, loss = text.partition("/")
    return Line(float(delay_ms) / 1e3, float(loss or 0) / 100)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", default="0,1,5,20,5/1,20/1")
    parser.add_argument("--concurrency", default="1,4")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="tokens per answer")
    parser.add_argument("--prompts", type=Path, default=BENCH_PROMPTS, help='JSON lines {"kind", "prompt"}')
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements here")
    arguments = parser.parse_args()
    arguments.lines = [line_of(text) for text in arguments.lines.split(",")]
    arguments.concurrency = tuple(int(text) for text in arguments.concurrency.split(","))
    return arguments


def main() -> None:
    arguments = parse_arguments()
    console = Console(stderr=True)
    try:
        prompts = read_prompts(arguments.prompts)
        port = f"server.port={checked_port('127.0.0.1', 0)}"
        config = demo_config([*PLACED, port])
        prepare_target(Path(config.model.target), console)
        run_on([OTHERS_CORE])
        with far_link() as link, two_nodes() as address, serving(config, console, address=address) as url:
            print("\n".join(HEADER))
            reports = asyncio.run(measure(url, config.model.name, link, arguments, prompts))
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    if arguments.json:
        results = [
            {"line": name, "arms": [asdict(arm) for arm in one.arms], "speedups": [asdict(s) for s in one.speedups]}
            for name, one in reports
        ]
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
