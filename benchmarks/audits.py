"""Measures the cost of audits to requests: the demo pair with and without audits, under sparse requests.

    python benchmarks/audits.py [--share 0.05] [--rounds 5] [--prompts 24] [--tokens 64] [--pause 1] [--json OUT]

Two servers, pinned as in `pipeline.py`, take turns to answer the same prompts, one request at a time with pauses in
between. One of them audits during the pauses, so its audits overlap later requests. A turn ends when all of its audits
have finished. The reported ratio is the throughput with audits over that without; an interval that contains 1 means no
measurable cost.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from servers import PINNED, side_by_side

from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config
from serve_app.demo_data import BENCH_PROMPTS
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Tally
from serve_app.operations.ray_cluster import broadcast, deployed
from tools.bench.experiment import WARM_UP_TOKENS, Prompt, read_prompts
from tools.bench.latencies import Batch, speedup
from tools.bench.tables import speedups_table

AUDITED = "audited"
PLAIN = "not audited"
NAMES = {AUDITED: APPLICATION, PLAIN: "plain"}  # Serve application names
PATIENCE_S = 120.0


async def turn(
    endpoint: ChatEndpoint, arm: str, prompts: Sequence[Prompt], number: int, arguments: argparse.Namespace
) -> list[Batch]:
    """Sends the prompts one at a time, each as its own batch, with the same pauses for both arms."""
    pauses = random.Random(number)
    model = await endpoint.model()
    batches = []
    for index, prompt in enumerate(prompts):
        await asyncio.sleep(pauses.expovariate(1 / arguments.pause))
        answer = await endpoint.ask(model, ChatQuestion(prompt.prompt, arguments.tokens, ignore_eos=True))
        batches.append(Batch(arm, 1, index, number, answer.latency_s, Tally(), (prompt.kind,), (answer,)))
    return batches


def audits_of(name: str) -> Mapping[str, int]:
    (router,) = broadcast(deployed("Router", name), "inspect")
    counts: dict[str, int] = router["audits"]
    return {**counts, "waiting": router["audits_waiting"]}


def wait_for_audits(name: str) -> None:
    """Waits until no audit is queued and the target has no session."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        (target,) = broadcast(deployed("Target", name), "inspect")
        if target["idle"] and not audits_of(name)["waiting"]:
            return
        time.sleep(0.5)
    raise SystemExit(f"audits did not finish within {PATIENCE_S:.0f} s; lower --share")


async def measure(urls: Mapping[str, str], arguments: argparse.Namespace, prompts: Sequence[Prompt]) -> list[Batch]:
    batches: list[Batch] = []
    async with ChatEndpoint.at(urls[AUDITED]) as audited, ChatEndpoint.at(urls[PLAIN]) as plain:
        endpoints = {AUDITED: audited, PLAIN: plain}
        for endpoint in endpoints.values():
            await endpoint.ask(await endpoint.model(), ChatQuestion(prompts[0].prompt, WARM_UP_TOKENS))
        for number in range(arguments.rounds):
            for arm in (AUDITED, PLAIN) if number % 2 else (PLAIN, AUDITED):
                batches += await turn(endpoints[arm], arm, prompts, number, arguments)
                await asyncio.to_thread(wait_for_audits, NAMES[arm])
            await asyncio.to_thread(show, arguments, batches)
    return batches


def show(arguments: argparse.Namespace, batches: Sequence[Batch]) -> None:
    audited, plain = ([batch for batch in batches if batch.arm == arm] for arm in (AUDITED, PLAIN))
    found = speedup(audited, plain)
    audits = audits_of(NAMES[AUDITED])
    Console().print(speedups_table([found]), f"audits: {dict(audits)}")
    if arguments.json:
        data = {"speedup": asdict(found), "audits": dict(audits), "batches": [asdict(batch) for batch in batches]}
        arguments.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.05, help="share of requests to audit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=24, help="number of demo prompts")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--pause", type=float, default=1.0, help="mean seconds between an answer and the next request")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements here, after every round")
    arguments = parser.parse_args()
    prompts = read_prompts(BENCH_PROMPTS)[: arguments.prompts]
    configs = {
        NAMES[AUDITED]: demo_config([*PINNED, f"server.audit.share={arguments.share}"]),
        NAMES[PLAIN]: demo_config(PINNED),
    }
    with side_by_side(configs, Console(stderr=True)) as servers:
        urls = {arm: servers[name].url for arm, name in NAMES.items()}
        asyncio.run(measure(urls, arguments, prompts))


if __name__ == "__main__":
    main()
