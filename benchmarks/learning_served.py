r"""Measures drafts that learn, over HTTP: speed, serving beside a trainer, and poisoned traffic.

    python benchmarks/learning_served.py speed --learned FOLDER [--concurrency 1,4,16] [--rounds 5] [--json OUT]
    python benchmarks/learning_served.py beside --trainer own [--rounds 10] [--json OUT]
    python benchmarks/learning_served.py poisoned [--requests 300] [--json OUT]

`speed` compares a learned draft with the shipped one and with non-speculative decoding, on support requests that
`learning.py` holds out. Target and drafters are pinned to one core each.

`beside` compares tokens per second and p99 inter-token times while the trainer works and while it is stopped by a
signal. `--trainer idle` trains in the background on all cores that serve. `--trainer own` gives the trainer a core that
nothing else uses: the third, or on two cores the second, and target, drafter, router and client then share the first.

`poisoned` repeats one request, then sends prompts of random tokens at temperature 2, all with consent, and waits for
the training that they start. It fails if a version is promoted.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from learning import HELD_OUT, LEARNED, write
from rich.console import Console
from rich.progress import track
from rounds import Arm, Rounds, add_options, measure
from servers import OTHERS_CORE, PINNED, TARGET_CORE, processor, side_by_side

from actors.engine.process import run_on
from actors.learning.conversations import read_examples
from actors.learning.examples import ExampleStore
from actors.learning.versions import VersionFolder
from actors.models.checkpoint import checkpoint_fingerprint
from actors.models.tokenizer_reader import end_ids, load_tokenizer
from cluster.config import SlipstreamConfig
from cluster.learning import is_held_out
from serve_app.app import APPLICATION
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import REPLAY
from serve_app.demo_data.support import support_requests
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion
from serve_app.operations.local import serving
from serve_app.operations.ray_cluster import broadcast, deployed
from serve_app.tables import table
from tools.bench.experiment import Prompt
from tools.bench.latencies import Batch, Latencies, mean_ratio

WITHIN_S = 1800.0  # longest wait for a training
TRAINING, STOPPED = "training", "stopped"


def held_out(count: int) -> list[Prompt]:
    """Returns support requests that no draft of `learning.py` was trained on."""
    assert 2 <= count <= HELD_OUT, f"--requests is {count}; set it from 2 to {HELD_OUT}"
    texts = support_requests(LEARNED + HELD_OUT)[LEARNED : LEARNED + count]
    return [Prompt("support", text) for text in texts]


# ---------------------------------------------------------------- speed


def speed(arguments: argparse.Namespace, console: Console) -> None:
    learned = f"draft.model={arguments.learned.resolve()}"
    configs = {"learned": demo_config([*PINNED, learned]), "shipped": demo_config(PINNED)}
    arms = Arm("learned", "learned"), Arm("shipped", "shipped"), Arm("none", "learned", draft_tokens=0)
    plan = Rounds.of(arguments, arms, [("learned", "none"), ("shipped", "none"), ("learned", "shipped")])
    with side_by_side(configs, console) as servers:
        urls = {name: server.url for name, server in servers.items()}
        asyncio.run(measure(plan, urls, held_out(arguments.requests), {"processor": processor()}))


# ---------------------------------------------------------------- beside


def beside(arguments: argparse.Namespace, console: Console) -> None:
    cores = os.cpu_count() or 1
    with TemporaryDirectory() as folder:
        settings, shares = layout(arguments.trainer, cores)
        # 1000 epochs outlast the measurement.
        learning = (f"draft.learning.folder={folder}", "draft.learning.min_examples=1", "draft.learning.epochs=1000")
        judged = "draft.learning.min_sessions=1"
        config = demo_config([*PINNED, *learning, judged, f"draft.learning.replay={REPLAY}", *settings])
        add_examples(config)
        arms = Arm(TRAINING, "server"), Arm(STOPPED, "server")
        plan = Rounds.of(arguments, arms, [(TRAINING, STOPPED)])
        facts = {"processor": processor(), "trainer": arguments.trainer, "shares": shares}
        console.print(shares)
        run_on(config.draft.resources.cpu_affinity)  # the client, and what is started without cores of its own
        with serving(config, console) as url:
            trainer = Trainer(training_process(console))
            batches = asyncio.run(measure(plan, {"server": url}, held_out(arguments.requests), facts, trainer.during))
    found = [gap_ratio(batches, at_once) for at_once in plan.concurrencies]
    busy = {name: sum(shares) / len(shares) for name, shares in trainer.busy.items()}
    shown = table("p99 inter-token time", "at once", f"{TRAINING}, ms", f"{STOPPED}, ms", "ratio, 95 % interval")
    for one in found:
        p99_ms = (f"{1e3 * one['p99_s'][name]:.1f}" for name in (TRAINING, STOPPED))
        shown.add_row(str(one["concurrency"]), *p99_ms, "{:.3f} ({:.3f} to {:.3f})".format(*one["ratio"]))
    console.print(shown)
    console.print(f"The trainer's share of a core: {busy}")
    if arguments.json:
        record = json.loads(arguments.json.read_text(encoding="utf-8"))
        write(arguments.json, {"p99": found, "trainer_busy": busy, **record})


def layout(trainer: str, cores: int) -> tuple[list[str], str]:
    """Returns settings of the cores, added to PINNED, and a description."""
    own = min(2, cores - 1)
    if trainer == "idle":
        affinity = [TARGET_CORE, OTHERS_CORE]
        settings = [f"draft.learning.resources={{num_cpus: 0, background: true, cpu_affinity: {affinity}}}"]
        return settings, f"target on core {TARGET_CORE}; all else on core {OTHERS_CORE}; idle trainer on both"
    settings = [f"draft.learning.resources={{num_cpus: 0.1, cpu_affinity: [{own}]}}"]
    if own == OTHERS_CORE:
        settings.append(f"draft.resources.cpu_affinity=[{TARGET_CORE}]")
        return settings, f"target, drafter, router and client on core {TARGET_CORE}; trainer alone on core {own}"
    return settings, f"target on core {TARGET_CORE}; all else on core {OTHERS_CORE}; trainer alone on core {own}"


def add_examples(config: SlipstreamConfig) -> None:
    """Fills the store with examples on which training never stops early."""
    assert config.draft.learning is not None, "beside a trainer, the draft learns"
    target = Path(config.model.target)
    examples = read_examples(REPLAY, load_tokenizer(target), end_ids(target))
    store = ExampleStore.of(config.draft.learning)
    # Half of the held-out examples may stop a training, beginning with the first, which has no answer to score.
    silent = next(one for each in examples if is_held_out(one := replace(each, answer=())))
    judging = next(filter(is_held_out, examples))
    learned = [one for one in examples if not is_held_out(one)]
    store.add([silent, judging, *learned], checkpoint_fingerprint(target))
    store.close()


class Trainer:
    """The trainer's process, which works during one arm's batches and is stopped otherwise."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.busy: dict[str, list[float]] = {TRAINING: [], STOPPED: []}  # processor seconds per second, by batch

    @contextmanager
    def during(self, arm: Arm) -> Iterator[None]:
        if arm.name == STOPPED:
            self._process.suspend()
        began, before = time.perf_counter(), self._cpu_s()
        try:
            yield
        finally:
            self.busy[arm.name].append((self._cpu_s() - before) / (time.perf_counter() - began))
            self._process.resume()  # in time for Serve's health checks

    def _cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def training_process(console: Console) -> int:
    """Waits until a training has begun; returns the trainer's process id."""
    until = time.monotonic() + WITHIN_S
    with console.status("Waiting for the training to begin"):
        while time.monotonic() < until:
            state = trainer_state()
            if state["progress"] is not None:
                return int(state["pid"])
            time.sleep(1.0)
    sys.exit(f"error: no training began within {WITHIN_S:.0f} s; the server's log says why")


def trainer_state() -> dict[str, Any]:
    """Returns the trainer's state; a trainer in the background may take a while to answer."""
    while True:
        try:
            (state,) = broadcast(deployed("Trainer", APPLICATION), "inspect")
        except TimeoutError:
            continue
        return dict(state)


def gap_ratio(batches: Sequence[Batch], concurrency: int) -> dict[str, Any]:
    """Compares the arms' p99 inter-token times: one ratio per round, and their geometric mean with its interval."""

    def p99_s(arm: str, rounds: Sequence[int]) -> float:
        chosen = [b for b in batches if (b.arm, b.concurrency) == (arm, concurrency) and b.repeat in rounds]
        found = Latencies.of([answer for batch in chosen for answer in batch.answers]).itl
        assert found is not None, "an answer of several tokens has gaps"
        return found.p99

    rounds = sorted({batch.repeat for batch in batches})
    ratios = [p99_s(TRAINING, [number]) / p99_s(STOPPED, [number]) for number in rounds]
    return {
        "concurrency": concurrency,
        "p99_s": {arm: p99_s(arm, rounds) for arm in (TRAINING, STOPPED)},
        "ratio": mean_ratio(ratios) if len(ratios) > 1 else (*ratios, 0.0, float("inf")),
        "ratios": ratios,
    }


# ---------------------------------------------------------------- poisoned


def poisoned(arguments: argparse.Namespace, console: Console) -> None:
    texts = random_texts(Path(demo_config().model.target), arguments.requests)
    tokens = arguments.tokens
    repeated = [ChatQuestion(held_out(2)[0].prompt, tokens)] * arguments.requests
    drawn = [ChatQuestion(text, tokens, temperature=2.0, seed=seed) for seed, text in enumerate(texts)]
    record: dict[str, Any] = {"processor": processor(), "requests": arguments.requests, "tokens": tokens}
    with TemporaryDirectory() as folder:
        # The repeated answer, and random ones that are near-duplicates, do not count as new examples.
        needed = max(2, round(0.75 * arguments.requests))
        learning = (f"draft.learning.folder={folder}", "draft.learning.consent=all", f"draft.learning.replay={REPLAY}")
        config = demo_config([*learning, f"draft.learning.min_examples={needed}", "server.port=0"])
        with serving(config, console) as url:
            for name, questions in (("repeated", repeated), ("random", drawn)):
                asyncio.run(ask_all(url, name, questions))
                record[name] = written(len(questions) * (1 + (name == "random")))
                console.print(f"After {len(questions)} {name} requests: {record[name]}")
                write(arguments.json, record)
            until = time.monotonic() + WITHIN_S
            with console.status("Waiting for the training"):
                while not (state := trainer_state())["counts"] and time.monotonic() < until:
                    time.sleep(2.0)
        versions = VersionFolder(Path(folder))
        record |= {
            "trainings": state["counts"],
            "current": versions.current(),
            "versions": [one.model_dump(mode="json") for one in versions.history()],
        }
    write(arguments.json, record)
    console.print(f"Trainings: {record['trainings']}; current version: {record['current']}")
    for one in record["versions"]:
        console.print(f"Version {one['version']}, {one['examples']} examples, {one['state']}: {one['reason']}")
    if record["current"] or record["trainings"] != {"rejected": 1}:
        sys.exit("error: expected one training, whose version is rejected")


def random_texts(target: Path, count: int, tokens: int = 24) -> list[str]:
    """Returns prompts of random tokens."""
    tokenizer = load_tokenizer(target)
    rng = random.Random(0)
    return [tokenizer.decode(rng.sample(range(len(tokenizer)), tokens), skip_special_tokens=True) for _ in range(count)]


async def ask_all(url: str, name: str, questions: Sequence[ChatQuestion], at_once: int = 8) -> None:
    room = asyncio.Semaphore(at_once)
    async with ChatEndpoint.at(url) as endpoint:
        model = await endpoint.model()

        async def ask(question: ChatQuestion) -> None:
            async with room:
                await endpoint.ask(model, question)

        for answered in track(asyncio.as_completed(map(ask, questions)), name, total=len(questions)):
            await answered


def written(offered: int, within_s: float = 60.0) -> dict[str, int]:
    """Waits until the routers have written or dropped all offered examples; returns their counts by outcome."""
    until = time.monotonic() + within_s
    while True:
        routers = broadcast(deployed("Router", APPLICATION), "inspect")
        counts = sum((Counter(router["examples"]) for router in routers), Counter[str]())
        if counts.total() >= offered or time.monotonic() > until:
            return dict(counts)
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    purposes = parser.add_subparsers(required=True)

    def add(purpose: Any, at_once: str, requests: int) -> argparse.ArgumentParser:
        made = purposes.add_parser(purpose.__name__)
        made.set_defaults(purpose=purpose)
        made.add_argument("--requests", type=int, default=requests)
        add_options(made, at_once, tokens=48)
        return made

    add(speed, "1,4,16", 24).add_argument("--learned", type=Path, required=True, help="folder of the learned draft")
    add(beside, "4", 24).add_argument("--trainer", choices=("own", "idle"), required=True)
    of_poisoned = purposes.add_parser("poisoned")
    of_poisoned.set_defaults(purpose=poisoned)
    of_poisoned.add_argument("--requests", type=int, default=300, help="of each kind")
    of_poisoned.add_argument("--tokens", type=int, default=48, help="most of an answer")
    of_poisoned.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    console = Console()
    console.print(processor())
    prepare_target(Path(demo_config().model.target), console)
    arguments.purpose(arguments, console)


if __name__ == "__main__":
    main()
