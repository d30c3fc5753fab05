"""Experiment: runs the same prompts and answer lengths with and without speculation, interleaved.

Each batch of prompts runs under all arms in succession, in an order that rotates from batch to batch. A temporary
slowdown of the machine therefore affects all arms equally. Prompts come from JSON lines of prompts or messages, or from
ShareGPT conversations.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from itertools import cycle, groupby, islice
from pathlib import Path
from typing import Any

from rich.console import Console, Group

from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Tally, Turn
from tools.bench.baseline import Reference
from tools.bench.latencies import (
    ArmSummary,
    Batch,
    Latencies,
    LoadPoint,
    Speedup,
    acceptance_by_kind,
    arm_summary,
    speedup,
)
from tools.bench.tables import arms_sheet, kinds_table, latencies_table, speedups_table
from tools.progress import log_phase, progress

SPECULATIVE = "speculative"
PLAIN = "plain"
GENERATE = "generate"
AT_ONCE = "requests at once"
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """One entry of a prompts file."""

    kind: str
    prompt: str
    earlier: tuple[Turn, ...] = ()  # earlier messages of the conversation

    def question(self, max_tokens: int, draft_tokens: int | None) -> ChatQuestion:
        """Returns a greedy question that ignores EOS, which makes all answers equally long."""
        return ChatQuestion(self.prompt, max_tokens, True, draft_tokens, earlier=self.earlier)


@dataclass(frozen=True, slots=True)
class Plan:
    """Parameters of the experiment."""

    prompts: tuple[Prompt, ...]
    concurrencies: tuple[int, ...] = (1,)
    max_tokens: int = 96
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Task:
    """One batch of prompts, and the arm to run it under."""

    arm: str
    concurrency: int
    index: int
    repeat: int
    prompts: tuple[Prompt, ...]


def tasks(plan: Plan, arms: Sequence[str]) -> Iterator[Task]:
    """Yields every batch under every arm, in execution order."""
    for concurrency in plan.concurrencies:
        at_once = [arm for arm in arms if arm != GENERATE or concurrency == 1]  # `generate` takes one request at a time
        batches = prompt_batches(plan.prompts, concurrency)
        for repeat in range(plan.repeats):
            for index, prompts in enumerate(batches):
                first = (repeat + index) % len(at_once)
                for arm in at_once[first:] + at_once[:first]:
                    yield Task(arm, concurrency, index, repeat, prompts)


def prompt_batches(prompts: Sequence[Prompt], size: int) -> list[tuple[Prompt, ...]]:
    """Splits prompts into at least two full batches; completes the last batch with prompts from the beginning."""
    count = max(2, -(-len(prompts) // size))
    supply = cycle(prompts)
    return [tuple(islice(supply, size)) for _ in range(count)]


class Bench:
    """Runs tasks against an endpoint and, if given, the reference."""

    def __init__(self, endpoint: ChatEndpoint, model: str, reference: Reference | None) -> None:
        self._endpoint = endpoint
        self._model = model
        self._reference = reference

    @property
    def arms(self) -> tuple[str, ...]:
        return (SPECULATIVE, PLAIN) if self._reference is None else (SPECULATIVE, PLAIN, GENERATE)

    async def run(self, plan: Plan, advance: Callable[[], None]) -> list[Batch]:
        """Runs the plan; `advance` is called after every batch."""
        for arm in self.arms:
            await self._batch(Task(arm, 1, 0, 0, plan.prompts[:1]), WARM_UP_TOKENS)
        batches = []
        for task in tasks(plan, self.arms):
            batches.append(await self._batch(task, plan.max_tokens))
            advance()
        return batches

    async def _batch(self, task: Task, max_tokens: int) -> Batch:
        most = 0 if task.arm == PLAIN else None
        questions = [prompt.question(max_tokens, most) for prompt in task.prompts]
        before = (await self._endpoint.counters()).tally
        started = time.perf_counter()
        if task.arm == GENERATE:
            assert self._reference is not None
            answers = [await self._reference.ask(question) for question in questions]
        else:
            answers = await asyncio.gather(*(self._endpoint.ask(self._model, question) for question in questions))
        seconds = time.perf_counter() - started
        return Batch(
            arm=task.arm,
            concurrency=task.concurrency,
            index=task.index,
            repeat=task.repeat,
            seconds=seconds,
            tally=(await self._endpoint.counters()).tally - before,
            kinds=tuple(prompt.kind for prompt in task.prompts),
            answers=tuple(answers),
        )


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Results of the experiment."""

    arms: tuple[ArmSummary, ...]
    speedups: tuple[Speedup, ...]
    kinds: dict[str, Tally]
    points: tuple[LoadPoint, ...]

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "BenchReport":
        """Summarizes batches; acceptance by kind covers all concurrencies."""
        groups: dict[tuple[int, str], list[Batch]] = {}
        for batch in batches:
            groups.setdefault((batch.concurrency, batch.arm), []).append(batch)
        speedups = [
            speedup(group, groups[concurrency, base])
            for (concurrency, arm), group in groups.items()
            for base in (PLAIN, GENERATE)
            if arm == SPECULATIVE and (concurrency, base) in groups
        ]
        kinds = acceptance_by_kind(batch for batch in batches if batch.arm == SPECULATIVE)
        points = tuple(map(_point, groups.values()))
        return cls(tuple(map(arm_summary, groups.values())), tuple(speedups), kinds, points)

    def tables(self) -> Group:
        by_concurrency = groupby(self.arms, lambda summary: summary.concurrency)
        sheets = [arms_sheet(concurrency, list(arms)) for concurrency, arms in by_concurrency]
        latencies = latencies_table(AT_ONCE, self.points)
        return Group(*sheets, latencies, speedups_table(self.speedups), kinds_table(self.kinds))


def _point(batches: Sequence[Batch]) -> LoadPoint:
    """Summarizes batches of one arm at one concurrency."""
    summary = arm_summary(batches)
    answers = [answer for batch in batches for answer in batch.answers]
    latencies = Latencies.of(answers)
    return LoadPoint(summary.arm, summary.concurrency, summary.tokens_per_s, len(answers), 0, latencies)


async def run_bench(
    url: str, config: SlipstreamConfig, plan: Plan, generate: bool, console: Console, json_path: Path | None
) -> BenchReport:
    """Runs the whole experiment against the endpoint at `url`, which serves `config`."""
    async with AsyncExitStack() as stack:
        endpoint = await stack.enter_async_context(ChatEndpoint.at(url))
        reference = None
        if generate:
            log_phase(console, "Loading the model for generate")
            with console.status("Loading the model for generate"):
                reference = await stack.enter_async_context(Reference.started(config))
        bench = Bench(endpoint, config.model.name, reference)
        total = sum(1 for _ in tasks(plan, bench.arms))
        log_phase(console, "Warming up")
        with progress(console, "Batches", total) as advance:
            batches = await bench.run(plan, advance)
    report = BenchReport.of(batches)
    if json_path is not None:
        write_json(json_path, config.model_dump(mode="json"), plan, report, batches)
    return report


def write_json(path: Path, config: dict[str, Any], plan: Plan, report: BenchReport, batches: Sequence[Batch]) -> None:
    """Writes all measurements, including raw runs."""
    settings = {"concurrencies": plan.concurrencies, "max_tokens": plan.max_tokens, "repeats": plan.repeats}
    prompts = [asdict(prompt) for prompt in plan.prompts]
    runs = [asdict(batch) for batch in batches]
    data = {"config": config, "settings": settings, "report": asdict(report), "prompts": prompts, "runs": runs}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


EXPECTED = (
    'expected {"prompt": ...}, {"messages": [{"role", "content"}, ...]} or {"conversations": [{"from", "value"}, ...]}'
)
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def read_prompts(path: Path) -> tuple[Prompt, ...]:
    """Reads the prompts of a file. Raises ConfigError that names an invalid entry.

    A list of messages ends at the user's last message. A ShareGPT conversation, with answers from another model, ends
    at the user's first message.
    """
    prompts = tuple(_prompt(entry, f"{path}, {where}") for where, entry in _entries(path))
    if len(prompts) < 2:
        raise ConfigError(f"{path} contains {len(prompts)} prompts; add prompts, since an interval needs at least 2")
    return prompts


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yields (location, entry) pairs from one JSON list, like ShareGPT's, or from JSON lines."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read prompts {path}: {error}") from error
    if text.lstrip().startswith("["):
        yield from ((f"entry {number}", entry) for number, entry in enumerate(_parsed(text, str(path)), 1))
        return
    for number, line in enumerate(text.split("\n"), 1):  # splitlines() also splits at U+2028 inside a text
        if line.strip():
            yield f"line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where}: invalid JSON: {error}; {EXPECTED}") from error


def _prompt(entry: Any, where: str) -> Prompt:
    match entry:
        case {"prompt": str(text)} if text:
            return Prompt(kind=str(entry.get("kind", "prompt")), prompt=text)
        case {"messages": [*messages]}:
            turns = [_turn(message, "role", "content", where) for message in messages]
            ends = max((at for at, (role, _) in enumerate(turns) if role == "user"), default=None)
        case {"conversations": [*messages]}:
            turns = [_turn(message, "from", "value", where) for message in messages]
            ends = next((at for at, (role, _) in enumerate(turns) if role == "user"), None)
        case _:
            raise ConfigError(f"{where}: {EXPECTED}")
    if ends is None:
        raise ConfigError(f"{where}: no user message; {EXPECTED}")
    return Prompt(kind=str(entry.get("kind", "conversation")), prompt=turns[ends][1], earlier=tuple(turns[:ends]))


def _turn(message: Any, speaker: str, content: str, where: str) -> Turn:
    if isinstance(message, Mapping) and isinstance(message.get(content), str) and message.get(speaker) in SPEAKERS:
        return SPEAKERS[message[speaker]], message[content]
    raise ConfigError(f"{where}: a message is {json.dumps(message)[:80]}; {EXPECTED}")
