"""Compares the simulator's predictions with a running system, given only published costs and measured acceptance.

    python benchmarks/prediction.py [--concurrency 1,2,4,8] [--draft-tokens 1,2,4] [--rounds 3] [--tokens 64]
        [--json OUT]

Serves the demo pair twice, once adaptive with draft-ahead and once in lock step, with drafter and target pinned to one
core each. Half of the prompts measure the acceptance rate of each block position, in lock step at the longest draft
length. The other half is sent over HTTP at every point (mode, concurrency, draft length), with all points interleaved.
The replicas publish their costs after each batch, because machine speed drifts. The simulator receives no measured
throughput: it runs the same batches with these costs and acceptance rates.

A batch keeps a fixed number of requests in flight until its prompts run out, and then drains. Its prompts are in the
prefix caches. The speculation controller keeps its estimates between batches, so the simulator runs many batches in a
row. Confidence does not shorten blocks here (`min_confidence` is 0), because the simulator models acceptance rates but
not the draft model's confidence. The simulator drafts chains, whereas a drafter adds siblings of the first token.
"""

import argparse
import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, astuple, dataclass
from itertools import combinations, pairwise, product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import ray
from rich.console import Console
from rich.progress import track
from rich.table import Table
from servers import PINNED, Server, side_by_side

from cluster.costs import CostModel
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Piece, Tally
from serve_app.tables import shown
from tools.bench.experiment import Prompt, read_prompts
from tools.planning.trial import unlimited_fleet
from tools.simulation.config import Mode, SimulationConfig, Speculation
from tools.simulation.oracle import ClosedLoop, DraftQuality, Workload
from tools.simulation.world import World

SERVERS = {Mode.ADAPTIVE: "adaptive", Mode.LOCK_STEP: "lock_step"}
UNCACHED_TOKENS = 8  # per prompt: on average half of the last page is recomputed
WARM_UP_TOKENS = 16
TURNOVER = 3  # prompts in a batch, per concurrent request
SIMULATED_BATCHES = 20  # consecutive batches per point
BOUND = 0.15  # allowed relative error
DIFFERENT = 0.10  # modes with a smaller relative difference count as equal


# ---------------------------------------------------------------- points


@dataclass(frozen=True, slots=True)
class Point:
    """A point to measure and predict."""

    mode: Mode
    concurrency: int
    draft_tokens: int  # 0: non-speculative decoding

    @property
    def name(self) -> str:
        return self.mode.value if self.draft_tokens else "plain"


@dataclass(frozen=True, slots=True)
class Rate:
    """Throughput and round time at a point."""

    tokens_per_s: float
    tokens_per_verify: float
    round_s: float  # mean seconds between two verdicts of a session, prompt processing included


@dataclass(frozen=True, slots=True)
class Result:
    """Measured and predicted rates at a point."""

    point: Point
    measured: Rate
    predicted: Rate

    @property
    def error(self) -> float:
        return self.predicted.tokens_per_s / self.measured.tokens_per_s - 1


def points_of(concurrencies: Iterable[int], draft_lengths: Sequence[int]) -> list[Point]:
    """Returns non-speculative decoding once per concurrency, then both modes at every draft length."""
    found = []
    for concurrency in concurrencies:
        found.append(Point(Mode.ADAPTIVE, concurrency, 0))
        found += [Point(mode, concurrency, draft_tokens) for draft_tokens, mode in product(draft_lengths, SERVERS)]
    return found


def ordered_pairs(results: Sequence[Result]) -> list[tuple[Result, Result, bool]]:
    """Returns (faster, slower, predicted correctly) for clearly different modes at one concurrency and draft length.

    Non-speculative decoding is compared with every draft length.
    """
    found = []
    for one, other in combinations(results, 2):
        a = one.point
        b = other.point
        if a.concurrency != b.concurrency or a.name == b.name or (a.draft_tokens and a.draft_tokens != b.draft_tokens):
            continue
        slower, faster = sorted((one, other), key=lambda result: result.measured.tokens_per_s)
        if faster.measured.tokens_per_s > (1 + DIFFERENT) * slower.measured.tokens_per_s:
            found.append((faster, slower, faster.predicted.tokens_per_s > slower.predicted.tokens_per_s))
    return found


# ---------------------------------------------------------------- prediction


def acceptances(accepted: Sequence[int], draft_tokens: int) -> tuple[float, ...]:
    """Returns each position's acceptance rate, given acceptance of all earlier positions.

    `accepted` holds the accepted tokens of each block of `draft_tokens`. A block that ended early counts as rejected
    where it ended.
    """
    reached = [sum(count >= position for count in accepted) for position in range(draft_tokens + 1)]
    return tuple(after / before for before, after in pairwise(reached) if before)


def predict(point: Point, costs: CostModel, draft: DraftQuality, tokens: int) -> Rate:
    """Simulates SIMULATED_BATCHES consecutive batches."""
    sessions = TURNOVER * point.concurrency * SIMULATED_BATCHES
    arrivals = ClosedLoop(point.concurrency, batch=TURNOVER * point.concurrency)
    load = Workload(arrivals, sessions, UNCACHED_TOKENS, tokens)
    speculation = Speculation(point.draft_tokens, draft, point.mode)
    fleet = unlimited_fleet(1, 1, load)
    report = World(SimulationConfig(costs, speculation, load, fleet)).run()
    seconds = report.tokens / report.tokens_per_s
    return Rate(report.tokens_per_s, report.tokens / report.verifies, point.concurrency * seconds / report.verifies)


# ---------------------------------------------------------------- measurement


@dataclass(frozen=True, slots=True)
class Batch:
    """Batch measured at a point."""

    point: Point
    seconds: float
    tally: Tally
    costs: CostModel  # published by its server after the batch


class Experiment:
    """Sends batches to both servers in turn."""

    def __init__(self, model: str, endpoints: Mapping[str, ChatEndpoint], urls: Mapping[str, str]) -> None:
        self._model = model
        self._endpoints = endpoints
        self._urls = urls

    async def warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Puts every prompt into the prefix caches of both servers."""
        for endpoint in self._endpoints.values():
            for prompt in prompts:
                await endpoint.ask(self._model, ChatQuestion(prompt.prompt, WARM_UP_TOKENS, ignore_eos=True))

    async def accepted(self, prompts: Sequence[Prompt], tokens: int, draft_tokens: int) -> list[int]:
        """Returns accepted tokens per block in lock step, excluding the prompt's step and the truncated last block."""
        endpoint = self._endpoints[SERVERS[Mode.LOCK_STEP]]
        found = list[int]()
        for prompt in prompts:
            pieces: list[Piece] = []
            question = ChatQuestion(prompt.prompt, tokens, ignore_eos=True, draft_tokens=draft_tokens)
            await endpoint.ask(self._model, question, pieces.extend)
            found += runs([drafted for _, drafted in pieces])[1:]
        return found

    async def batch(self, point: Point, prompts: Sequence[Prompt], tokens: int) -> Batch:
        """Sends all prompts, at most `point.concurrency` at a time; returns the measured batch."""
        endpoint = self._endpoints[SERVERS[point.mode]]
        places = asyncio.Semaphore(point.concurrency)

        async def ask(question: ChatQuestion) -> None:
            async with places:
                await endpoint.ask(self._model, question)

        questions = [ChatQuestion(prompt.prompt, tokens, True, point.draft_tokens) for prompt in prompts]
        before = (await endpoint.counters()).tally
        began = time.perf_counter()
        await asyncio.gather(*map(ask, questions))
        seconds = time.perf_counter() - began
        tally = (await endpoint.counters()).tally - before
        return Batch(point, seconds, tally, await asyncio.to_thread(live_costs, self._urls[SERVERS[point.mode]]))


def runs(drafted: Sequence[bool]) -> list[int]:
    """Returns the number of consecutive drafted tokens before each token of the target's own."""
    found = []
    length = 0
    for is_drafted in drafted:
        if is_drafted:
            length += 1
        else:
            found.append(length)
            length = 0
    return found


def rate(batches: Sequence[Batch]) -> Rate:
    """Returns the median speed of the batches, and per-verification means over all of them."""
    tally = sum((batch.tally for batch in batches), Tally())
    sessions_s = sum(batch.point.concurrency * batch.seconds for batch in batches)
    speed = median(batch.tally.tokens / batch.seconds for batch in batches)
    return Rate(speed, tally.tokens / tally.verifies, sessions_s / tally.verifies)


def live_costs(url: str) -> CostModel:
    """Returns the costs that `slipstream status --costs` writes in a child process."""
    address = ray.get_runtime_context().gcs_address
    with TemporaryDirectory() as folder:
        path = Path(folder) / "costs.json"
        slipstream = str(Path(sys.executable).with_name("slipstream"))
        command = [slipstream, "status", "--url", url, "--address", address, "--costs", str(path)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return CostModel.load(path)


# ---------------------------------------------------------------- run


async def run(
    servers: Mapping[str, Server], arguments: argparse.Namespace, save: Callable[[DraftQuality, list[Batch]], None]
) -> tuple[DraftQuality, list[Batch]]:
    """Measures acceptance, then all points in rounds; calls `save` after each round."""
    prompts = read_prompts(arguments.prompts)
    known = prompts[::2]
    asked = prompts[1::2]
    batches: list[Batch] = []
    async with AsyncExitStack() as stack:
        endpoints = {
            name: await stack.enter_async_context(ChatEndpoint.at(server.url)) for name, server in servers.items()
        }
        urls = {name: server.url for name, server in servers.items()}
        experiment = Experiment(await endpoints["adaptive"].model(), endpoints, urls)
        await experiment.warm_up(prompts)
        longest = max(arguments.draft_tokens)
        accepted = await experiment.accepted(known[: arguments.calibrate], arguments.tokens, longest)
        draft = DraftQuality(acceptances(accepted, longest))
        save(draft, batches)
        todo = points_of(arguments.concurrency, arguments.draft_tokens)
        for number in range(arguments.rounds):
            drawn = random.Random(number)
            order = drawn.sample(todo, len(todo))
            for point in track(order, f"Round {number + 1}", console=Console(stderr=True)):
                chosen = random.Random(f"{number} {point.concurrency}").choices(asked, k=TURNOVER * point.concurrency)
                batches.append(await experiment.batch(point, chosen, arguments.tokens))
            save(draft, batches)
    return draft, batches


def results_of(draft: DraftQuality, batches: Sequence[Batch], tokens: int) -> list[Result]:
    by_point: dict[Point, list[Batch]] = {}
    for batch in batches:
        by_point.setdefault(batch.point, []).append(batch)
    found = []
    for point, group in by_point.items():
        predictions = [astuple(predict(point, batch.costs, draft, tokens)) for batch in group]
        found.append(Result(point, rate(group), Rate(*map(median, zip(*predictions, strict=True)))))
    return sorted(found, key=lambda result: (result.point.concurrency, result.point.draft_tokens, result.point.name))


# ---------------------------------------------------------------- report


def results_table(results: Iterable[Result]) -> Table:
    pairs = [("tokens/s", "simulated"), ("tokens a verify", "sim."), ("round, ms", "sim.")]
    table = Table("at once", "K", "mode", *pairs[0], "error", *pairs[1], *pairs[2])
    for result in results:
        point = result.point
        measured = result.measured
        predicted = result.predicted
        table.add_row(
            str(point.concurrency),
            str(point.draft_tokens),
            point.name,
            shown(measured.tokens_per_s, ".1f"),
            shown(predicted.tokens_per_s, ".1f"),
            f"{result.error:+.0%}",
            shown(measured.tokens_per_verify),
            shown(predicted.tokens_per_verify),
            shown(1e3 * measured.round_s, ".1f"),
            shown(1e3 * predicted.round_s, ".1f"),
        )
    return table


def show(console: Console, results: Sequence[Result]) -> None:
    console.print(results_table(results))
    within = sum(abs(result.error) <= BOUND for result in results)
    console.print(f"{within} of {len(results)} points within {BOUND:.0%}")
    pairs = ordered_pairs(results)
    console.print(f"{sum(right for *_, right in pairs)} of {len(pairs)} pairs of modes in the right order")
    for faster, slower, right in pairs:
        if not right:
            a, b = (f"{one.point.name} K={one.point.draft_tokens}" for one in (faster, slower))
            console.print(f"  wrong at {faster.point.concurrency} at once: {a} is faster than {b}")


def write_json(path: Path, draft: DraftQuality, batches: Sequence[Batch], results: Sequence[Result]) -> None:
    data: dict[str, Any] = {
        "acceptance": draft.acceptances,
        "results": [asdict(result) | {"error": result.error} for result in results],
        "batches": [asdict(batch) | {"costs": batch.costs.model_dump(mode="json")} for batch in batches],
    }
    path.write_text(json.dumps(data, indent=1, default=lambda mode: mode.value) + "\n", encoding="utf-8")


def main() -> None:
    arguments = _arguments()
    console = Console(stderr=True)
    settings = [*PINNED, "draft.draft_model.min_confidence=0"]
    config = demo_config(settings)
    prepare_target(Path(config.model.target), console)
    configs = {"adaptive": config, "lock_step": demo_config([*settings, "speculation.schedule=lock_step"])}

    def save(draft: DraftQuality, batches: list[Batch]) -> None:
        if arguments.json is not None:
            write_json(arguments.json, draft, batches, [])

    with side_by_side(configs, console) as servers:
        draft, batches = asyncio.run(run(servers, arguments, save))
    results = results_of(draft, batches, arguments.tokens)
    console.print(f"acceptance {draft.acceptances}")
    show(Console(), results)
    if arguments.json is not None:
        write_json(arguments.json, draft, batches, results)


def _arguments() -> argparse.Namespace:
    def integers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=integers, default=[1, 2, 4, 8])
    parser.add_argument("--draft-tokens", type=integers, default=[1, 2, 4], help="draft lengths")
    parser.add_argument("--block-len", type=integers, dest="draft_tokens", help=argparse.SUPPRESS)  # its earlier name
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument("--calibrate", type=int, default=12, help="number of prompts for measuring acceptance")
    parser.add_argument("--prompts", type=Path, default=BENCH_PROMPTS)
    parser.add_argument("--json", type=Path, help="write inputs, batches and results here, after each round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
