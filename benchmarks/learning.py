"""Measures the demo draft's learning on one kind of traffic: agreement, speed and forgetting.

    python benchmarks/learning.py --trial [--epochs 2] [--data FOLDER] [--json FILE]

The target answers 360 support requests (`serve_app/demo_data/support.py`) and the 24 prompts of `slipstream bench`,
greedily. 300 of the support answers are trained on, with the demo's replay examples; 60 are held out. Agreement is the
share of positions at which the draft's first choice is the target's token. Answers are kept in FOLDER for the next run.
"""

import argparse
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from actors.learning.conversations import answered, chat_prompt, read_examples, write_examples
from actors.learning.evaluation import score_draft
from actors.learning.training import TrainingOptions, TrainingProgress, train
from actors.models.checkpoint import load_model, local_folder
from actors.models.tokenizer_reader import end_ids, load_tokenizer
from cluster.learning import Example, Figures
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS, REPLAY
from serve_app.demo_data.support import support_requests
from serve_app.tables import table
from tools.bench.experiment import read_prompts

CPU = torch.device("cpu")
TRAINED = 300
HELD_OUT = 60
TOKENS = 64  # most of an answer
DRAFT_TOKENS = 4


def processor() -> str:
    """Returns the processor's name and whether it has matrix units."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {'AMX' if 'amx_bf16' in text else 'no AMX'}"


def answers(name: str, texts: Sequence[str], data: Path, target: Path, console: Console) -> list[Example]:
    """Returns the target's answers to prompts, from the file of an earlier run if there is one."""
    path = data / f"{name}.jsonl"
    tokenizer = load_tokenizer(target)
    if not path.is_file():
        data.mkdir(parents=True, exist_ok=True)
        prompts = [chat_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]
        with Progress(console=console) as progress:
            task = progress.add_task(f"{name}: the target answers", total=len(prompts))
            model = load_model(target, "float32", CPU)
            advance = lambda count: progress.advance(task, count)  # noqa: E731
            write_examples(path, answered(model, prompts, end_ids(target), TOKENS, advance=advance))
    return read_examples(path, tokenizer, end_ids(target))


def figures(draft: Path, kinds: Mapping[str, Sequence[Example]]) -> dict[str, Figures]:
    return {kind: Figures.of(score_draft(draft, examples, DRAFT_TOKENS)) for kind, examples in kinds.items()}


def trial(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Trains for 1 to `epochs` epochs, each from the shipped draft, and scores every result."""
    config = demo_config()
    target = Path(config.model.target)
    prepare_target(target, console)
    assert config.draft.model is not None, "the demo drafts with a model"
    start = local_folder(config.draft.model)
    requests = answers("support", support_requests(TRAINED + HELD_OUT), arguments.data, target, console)
    general = answers("general", [each.prompt for each in read_prompts(BENCH_PROMPTS)], arguments.data, target, console)
    replay = read_examples(REPLAY, load_tokenizer(target), end_ids(target)) if arguments.replay else []
    kinds = {"support": requests[TRAINED:], "general": general}
    found: dict[str, Any] = {"processor": processor(), "threads": arguments.threads, "rows": []}

    def add(name: str, draft: Path, seconds: float) -> None:
        found["rows"].append(
            {"name": name, "seconds": seconds}
            | {kind: value.model_dump() for kind, value in figures(draft, kinds).items()}
        )
        console.print(found["rows"][-1])

    add("as it ships", start, 0.0)
    options = TrainingOptions(epochs=1, learning_rate=arguments.learning_rate, draft_tokens=DRAFT_TOKENS, patience=100)
    for epochs in range(1, arguments.epochs + 1):
        with TemporaryDirectory() as folder, Progress(console=console) as bar:
            task = bar.add_task(f"{epochs} epochs")

            def show(progress: TrainingProgress) -> None:
                bar.update(task, total=progress.steps, completed=progress.step)  # noqa: B023

            out = Path(folder) / "draft"
            wanted = replace(options, epochs=epochs)
            result = train(start, out, requests[:TRAINED], [], replay, wanted, progress=show)
            add(f"{epochs} epochs", out, result.seconds)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trial", action="store_true", help="train and score (the only part so far)")
    parser.add_argument("--epochs", type=int, default=2, help="trainings of 1 to so many epochs")
    parser.add_argument("--learning-rate", type=float, default=TrainingOptions().learning_rate)
    parser.add_argument("--replay", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--data", type=Path, default=Path("/tmp/slipstream-learning"), help="folder for answers")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all figures here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    console = Console()
    found = trial(arguments, console)
    sheet = table(f"One draft, {found['processor']}", "", "seconds", "support", "general")
    for row in found["rows"]:
        shares = (f"{row[kind]['agreement']:.3f}" for kind in ("support", "general"))
        sheet.add_row(row["name"], f"{row['seconds']:.0f}", *shares)
    console.print(sheet)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
