"""The demo of learning: serves support requests, trains the draft on them, and serves similar ones faster."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.errors import SlipstreamError
from cluster.learning import Manifest
from serve_app.demo_data.support import support_requests
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Tally
from serve_app.tables import TALLY_ROWS, sheet, tally_column

SERVED_BEFORE = 300  # number of requests before the draft is trained
COMPARED = 60  # number of first and of last requests that the table compares
AT_ONCE = 4
MAX_TOKENS = 64
LEARNS_WITHIN_S = 1800.0
LOAD_WAIT_S = 5.0  # wait for drafters to load a promoted version

# Trains once 150 of the 300 answers are kept, since near-duplicates are not kept.
OVERRIDES = ("draft.learning.consent=all", "draft.learning.min_examples=180")


@dataclass(frozen=True, slots=True)
class Phase:
    """Results of requests that were served together."""

    tally: Tally
    tokens_per_s: float


async def run_learning_demo(url: str, console: Console) -> None:
    """Serves requests, waits until the draft has learned, serves more, and prints the change."""
    requests = support_requests(SERVED_BEFORE + COMPARED, seed=1)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn()
    async with ChatEndpoint.at(url) as endpoint:
        model = await endpoint.model()
        await endpoint.ask(model, ChatQuestion("Hello!", max_tokens=8))
        with Progress(*columns, console=console) as progress:
            first = await _serve(endpoint, model, requests[:COMPARED], progress, "Serving the first requests")
            await _serve(endpoint, model, requests[COMPARED:SERVED_BEFORE], progress, "Serving further ones")
            await _wait_for_version(endpoint, progress)
            last = await _serve(endpoint, model, requests[SERVED_BEFORE:], progress, "Serving the last requests")
    console.print(worksheet(first, last))


async def _serve(endpoint: ChatEndpoint, model: str, prompts: Sequence[str], progress: Progress, what: str) -> Phase:
    """Sends the prompts, a few at a time."""
    task = progress.add_task(what, total=len(prompts), note="")
    room = asyncio.Semaphore(AT_ONCE)

    async def ask(prompt: str) -> int:
        async with room:
            answer = await endpoint.ask(model, ChatQuestion(prompt, MAX_TOKENS))
            progress.advance(task)
            return answer.tokens

    before = (await endpoint.counters()).tally
    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(ask, prompts)))
    took_s = time.perf_counter() - began
    return Phase((await endpoint.counters()).tally - before, tokens / took_s)


async def _wait_for_version(endpoint: ChatEndpoint, progress: Progress) -> None:
    """Shows the training until a version is promoted. Raises SlipstreamError if none is promoted in time."""
    task = progress.add_task("The draft learns", total=1.0, note="")
    until = time.monotonic() + LEARNS_WITHIN_S
    while time.monotonic() < until:
        learning = (await endpoint.page_state())["learning"]
        if learning is None:  # the trainer is too busy to answer
            await asyncio.sleep(1.0)
            continue
        progress.update(task, completed=learning["progress"] or 0.0, note=learning["phase"])
        if learning["version"]:
            progress.update(task, completed=1.0, note=f"version {learning['version']}")
            await asyncio.sleep(LOAD_WAIT_S)
            return
        await asyncio.sleep(1.0)
    raise SlipstreamError(f"no version was promoted within {LEARNS_WITHIN_S:g} s; the server's log says why")


def worksheet(first: Phase, last: Phase) -> Table:
    """Tabulates the first and the last requests side by side."""
    rows = (*TALLY_ROWS, "tokens/s")
    columns = {
        name: (*tally_column(phase.tally), f"{phase.tokens_per_s:.1f}")
        for name, phase in {f"first {COMPARED}": first, f"last {COMPARED}": last}.items()
    }
    return sheet("Before and after learning", rows, columns)


def figures(manifest: Manifest) -> str:
    """Summarizes a version's held-out scores in one line."""
    assert manifest.recent is not None, "a promoted version has been compared"
    recent, general = manifest.recent, manifest.general
    kept = (
        ""
        if general is None
        else (f"; on general prompts {general.before.agreement:.3f} -> {general.after.agreement:.3f}")
    )
    return (
        f"Agreement on held-out requests {recent.before.agreement:.3f} -> {recent.after.agreement:.3f}{kept},"
        f" {manifest.seconds:.0f} s of training"
    )
