r"""Compares speculation with non-speculative decoding, lock step, a useless draft, and `generate`.

    python benchmarks/pipeline.py [--concurrency 1,2,4,8] [--rounds 5] [--tokens 64] [--json OUT]
    python benchmarks/pipeline.py --table acceptance
    python benchmarks/pipeline.py --arms plain,adaptive,other --other \
        'draft={method: eagle, model: FOLDER, resources: {num_cpus: 0.1, cpu_affinity: [1], background: true}}'

Serves the demo pair in bfloat16 over HTTP, once per compared configuration, with drafter and target pinned to one core
each. In each round, every batch of prompts runs under all arms in rotating order. At a concurrency above 1, a batch
holds several prompts per concurrent request, a new request starts as soon as one finishes, and each round shuffles the
prompts.

An unmeasured pass over all prompts fills the prefix caches of every arm except `generate`. The arms `plain` and
`adaptive` share a server. `control` is non-speculative decoding on the server with the useless draft: its ratio to
`plain` shows the difference between two servers. An idle server takes a few hundredths of a core for health checks;
name fewer --arms to start fewer servers.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from rich.console import Console
from rich.progress import track
from rich.table import Table
from servers import PINNED, Server, side_by_side, useless_draft
from turns import Cell, Turn, cells_of, idle_share, speedups_of

from cluster.config import SlipstreamConfig
from cluster.errors import SlipstreamError
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Tally, TimedAnswer
from serve_app.tables import sheet, shown
from tools.bench.baseline import Reference
from tools.bench.experiment import WARM_UP_TOKENS, Prompt, prompt_batches, read_prompts
from tools.bench.latencies import Batch
from tools.bench.tables import speedups_table

# ---------------------------------------------------------------- arms


@dataclass(frozen=True, slots=True)
class Arm:
    """Server and request options to compare."""

    name: str
    server: str | None  # None: transformers' `generate`, one request at a time
    draft_tokens: int | None = None  # None: the server's setting
    temperature: float = 0.0
    acceptance: Literal["coupled", "rejection"] | None = None


PIPELINE = (
    Arm("plain", "adaptive", draft_tokens=0),
    Arm("adaptive", "adaptive"),
    Arm("lock_step", "lock_step"),
    Arm("useless", "useless"),
    Arm("generate", None),
    Arm("control", "useless", draft_tokens=0),
    Arm("other", "other"),
)
TEMPERATURES = (0.0, 0.7, 1.0)
# Lock step drafts in every round whatever the cost, so it measures acceptance without the controller's choices.
ACCEPTANCE = tuple(
    Arm(f"{rule} {temperature:g}{suffix}", server, None, temperature, rule)
    for server, suffix in (("adaptive", ""), ("lock_step", " in lock step"))
    for temperature in TEMPERATURES
    for rule in ("rejection", "coupled")
)
TURNOVER = 3  # prompts in a batch, per concurrent request
TABLES = {"pipeline": PIPELINE, "acceptance": ACCEPTANCE}
RATIOS = (
    ("adaptive", "plain"),
    ("adaptive", "lock_step"),
    ("useless", "plain"),
    ("adaptive", "generate"),
    ("useless", "control"),
    ("control", "plain"),
    ("other", "plain"),
    ("other", "adaptive"),
    *((f"ratio {temperature:g}", f"coupled {temperature:g}") for temperature in TEMPERATURES),
)


def config_of(server: str, scratch: Path, other: Sequence[str]) -> SlipstreamConfig:
    """Returns the demo's config with the one change that gives the server its name."""
    if server == "other":
        return demo_config([*PINNED, *other])
    if server == "lock_step":
        return demo_config([*PINNED, "speculation.schedule=lock_step"])
    if server == "useless":
        draft = demo_config().draft.model
        assert draft is not None, "the demo drafts with a model"
        return demo_config([*PINNED, f"draft.model={useless_draft(Path(draft), scratch / 'useless_draft')}"])
    return demo_config(PINNED)


# ---------------------------------------------------------------- measurement


class Experiment:
    """Sends batches to the servers in turn."""

    def __init__(
        self,
        model: str,
        servers: Mapping[str, Server],
        endpoints: Mapping[str, ChatEndpoint],
        reference: Reference | None,
    ) -> None:
        self._model = model
        self._servers = servers
        self._endpoints = endpoints
        self._reference = reference

    async def warm_up(self, arms: Iterable[Arm], prompts: Sequence[Prompt]) -> None:
        """Runs every arm once and puts every prompt into every prefix cache."""
        for arm in arms:
            await self._answers(arm, prompts[:1] if arm.server is None else prompts, len(prompts), WARM_UP_TOKENS)

    async def turn(
        self, arm: Arm, prompts: Sequence[Prompt], concurrency: int, max_tokens: int, index: int, number: int
    ) -> Turn:
        """Runs one batch with `concurrency` requests in flight; `number` is the round's."""
        idle = [server for name, server in self._servers.items() if name != arm.server]
        server = self._servers.get(arm.server or "")
        mark = await asyncio.to_thread(server.mark) if server else None
        tally_before = await self._tally(arm)
        idle_before = sum(server.cpu_s() for server in idle)
        began = time.perf_counter()
        answers = await self._answers(arm, prompts, concurrency, max_tokens)
        seconds = time.perf_counter() - began
        idle_cpu_s = sum(server.cpu_s() for server in idle) - idle_before
        tally = await self._tally(arm) - tally_before
        work = await asyncio.to_thread(server.since, mark) if server and mark else None
        kinds = tuple(prompt.kind for prompt in prompts)
        batch = Batch(arm.name, concurrency, index, number, seconds, tally, kinds, tuple(answers))
        return Turn(batch, work, idle_cpu_s)

    async def _answers(
        self, arm: Arm, prompts: Sequence[Prompt], concurrency: int, max_tokens: int
    ) -> list[TimedAnswer]:
        questions = [
            ChatQuestion(prompt.prompt, max_tokens, True, arm.draft_tokens, arm.temperature, arm.acceptance)
            for prompt in prompts
        ]
        if arm.server is None:
            assert self._reference is not None
            return [await self._reference.ask(question) for question in questions]
        endpoint = self._endpoints[arm.server]
        places = asyncio.Semaphore(concurrency)

        async def ask(question: ChatQuestion) -> TimedAnswer:
            async with places:
                return await endpoint.ask(self._model, question)

        return await asyncio.gather(*map(ask, questions))

    async def _tally(self, arm: Arm) -> Tally:
        return Tally() if arm.server is None else (await self._endpoints[arm.server].counters()).tally


def round_of(
    arms: Sequence[Arm], prompts: Sequence[Prompt], concurrency: int, number: int
) -> list[tuple[Arm, tuple[Prompt, ...], int]]:
    """Returns (arm, batch, index) in execution order; batches with the same index hold the same prompts.

    At concurrency 1, a prompt keeps its index in all rounds, so an interval counts its repeats as one observation.
    """
    order = list(prompts)
    if concurrency > 1:
        random.Random(number).shuffle(order)
    batches = prompt_batches(order, concurrency if concurrency == 1 else TURNOVER * concurrency)
    at_once = [arm for arm in arms if arm.server is not None or concurrency == 1]  # `generate` has no queue
    found = []
    for place, batch in enumerate(batches):
        first = (number + place) % len(at_once)
        index = place if concurrency == 1 else number * len(batches) + place
        found += [(arm, batch, index) for arm in at_once[first:] + at_once[:first]]
    return found


async def run(
    experiment: Experiment, arguments: argparse.Namespace, prompts: Sequence[Prompt], save: Callable[[list[Turn]], None]
) -> list[Turn]:
    """Runs all rounds at all concurrencies; calls `save` after each round."""
    arms = arguments.arms
    turns = list[Turn]()
    await experiment.warm_up(arms, prompts)
    for number in range(arguments.rounds):
        todo = [
            (at_once, *turn) for at_once in arguments.concurrency for turn in round_of(arms, prompts, at_once, number)
        ]
        for at_once, arm, batch, index in track(todo, f"Round {number + 1}", console=Console(stderr=True)):
            turns.append(await experiment.turn(arm, batch, at_once, arguments.tokens, index, number))
        save(turns)
    return turns


# ---------------------------------------------------------------- report

ROWS = (
    "tokens/s (median of rounds)",
    "tokens a verify",
    "acceptance rate",
    "block length",
    "verifies with a block, %",
    "guesses that hit, %",
    "target step, ms",
    "tokens a step",
    "between steps, ms (median)",
    "target in a step, % of time",
)


def cells_sheet(concurrency: int, cells: Iterable[Cell]) -> Table:
    """Formats the cells of one concurrency.

    Apart from noise, tokens/s = (tokens per step / step time) x share of time in a step.
    """
    columns = {cell.arm: _column(cell) for cell in cells if cell.concurrency == concurrency}
    return sheet(f"{concurrency} at once", ROWS, columns)


def _column(cell: Cell) -> tuple[str, ...]:
    return (
        shown(cell.tokens_per_s, ".1f"),
        shown(cell.tokens_per_verify),
        shown(cell.acceptance_rate),
        shown(cell.block_tokens),
        shown(_times(cell.verifies_with_block, 100), ".0f"),
        shown(_times(cell.guess_hits, 100), ".0f"),
        shown(_times(cell.step_s, 1e3), ".1f"),
        shown(cell.tokens_per_step),
        shown(_times(cell.gap_s, 1e3), ".1f"),
        shown(_times(cell.target_busy, 100), ".0f"),
    )


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def acceptance_markdown(arms: Sequence[Arm], cells: Iterable[Cell]) -> str:
    """Formats a Markdown row per rule, temperature, schedule and concurrency."""
    lines = [
        "| at once | pacing | temperature | rule | acceptance rate | tokens a verify | block length | tokens/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    arm_of = {arm.name: arm for arm in arms}
    for cell in sorted(cells, key=lambda cell: (cell.concurrency, list(arm_of).index(cell.arm))):
        arm = arm_of[cell.arm]
        values = (
            str(cell.concurrency),
            str(arm.server),
            f"{arm.temperature:g}",
            str(arm.acceptance),
            shown(cell.acceptance_rate),
            shown(cell.tokens_per_verify),
            shown(cell.block_tokens),
            shown(cell.tokens_per_s, ".1f"),
        )
        lines.append(f"| {' | '.join(values)} |")
    return "\n".join(lines)


def show(console: Console, arguments: argparse.Namespace, turns: Sequence[Turn]) -> None:
    cells = cells_of(turns)
    if arguments.table == "acceptance":
        print(acceptance_markdown(arguments.arms, cells))
    else:
        console.print(*(cells_sheet(concurrency, cells) for concurrency in arguments.concurrency))
    console.print(speedups_table(speedups_of(turns, RATIOS)))
    console.print(f"Servers without the turn took {idle_share(turns):.1%} of a core.")


def write(path: Path, arguments: argparse.Namespace, turns: Sequence[Turn]) -> None:
    """Writes all results and raw turns so far, replacing the file atomically."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    data: dict[str, Any] = {
        "settings": {**settings, "arms": [asdict(arm) for arm in arguments.arms]},
        "cells": [asdict(cell) for cell in cells_of(turns)],
        "speedups": [asdict(found) for found in speedups_of(turns, RATIOS)],
        "idle_share": idle_share(turns),
        "turns": [asdict(turn) for turn in turns],
    }
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    whole.replace(path)


# ---------------------------------------------------------------- command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=TABLES, default="pipeline")
    parser.add_argument("--concurrency", help="comma-separated; default 1,2,4,8, for acceptance 1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    parser.add_argument(
        "--arms", help=f"comma-separated; default: all except control and other; pipeline arms: {_names(PIPELINE)}"
    )
    parser.add_argument("--other", action="append", default=[], metavar="KEY=VALUE", help="settings of the arm 'other'")
    parser.add_argument("--temperature", type=float, help="of all arms; default: 0 in the pipeline table")
    parser.add_argument("--prompts", type=Path, default=BENCH_PROMPTS, help='JSON lines {"kind", "prompt"}')
    parser.add_argument("--json", type=Path, metavar="OUT", help="write all measurements here, after every round")
    arguments = parser.parse_args()
    known = {arm.name: arm for arm in TABLES[arguments.table]}
    names = (
        arguments.arms.split(",") if arguments.arms else [name for name in known if name not in ("control", "other")]
    )
    if unknown := set(names) - known.keys():
        parser.error(f"--arms: unknown {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    at_once = arguments.concurrency or ("1" if arguments.table == "acceptance" else "1,2,4,8")
    if not all(part.isdigit() and int(part) > 0 for part in at_once.split(",")):
        parser.error(f"--concurrency is {at_once}; expected comma-separated positive integers, such as 1,4")
    arguments.arms = [known[name] for name in names]
    if arguments.temperature is not None:
        arguments.arms = [replace(arm, temperature=arguments.temperature) for arm in arguments.arms]
    if ("other" in names) != bool(arguments.other):
        parser.error(
            "--other needs the arm 'other' and vice versa; for example --arms plain,other --other draft.method=suffix"
        )
    if all(arm.server is None for arm in arguments.arms):
        parser.error("--arms: nothing to compare generate with; add another arm")
    arguments.concurrency = [int(part) for part in at_once.split(",")]
    if arguments.rounds < 1 or arguments.tokens < 1:
        parser.error("--rounds and --tokens must be at least 1")
    return arguments


def _names(arms: Iterable[Arm]) -> str:
    return ",".join(arm.name for arm in arms)


async def measure(
    arguments: argparse.Namespace, prompts: Sequence[Prompt], config: SlipstreamConfig, servers: Mapping[str, Server]
) -> list[Turn]:
    async with AsyncExitStack() as stack:
        endpoints = {name: await stack.enter_async_context(ChatEndpoint.at(s.url)) for name, s in servers.items()}
        reference = None
        if any(arm.server is None for arm in arguments.arms):
            reference = await stack.enter_async_context(Reference.started(config))
        experiment = Experiment(config.model.name, servers, endpoints, reference)
        save = (lambda turns: write(arguments.json, arguments, turns)) if arguments.json else (lambda turns: None)
        return await run(experiment, arguments, prompts, save)


def main() -> None:
    arguments = parse_arguments()
    console = Console(stderr=True)
    try:
        prompts = read_prompts(arguments.prompts)
        config = demo_config(PINNED)
        prepare_target(Path(config.model.target), console)
        names = dict.fromkeys(arm.server for arm in arguments.arms if arm.server is not None)
        with TemporaryDirectory() as scratch:
            configs = {name: config_of(name, Path(scratch), arguments.other) for name in names}
            with side_by_side(configs, console) as servers:
                turns = asyncio.run(measure(arguments, prompts, config, servers))
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    show(Console(), arguments, turns)


if __name__ == "__main__":
    main()
