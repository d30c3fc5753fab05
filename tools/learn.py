"""`slipstream learn`: trains drafts on the target's own answers."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from cluster.errors import ConfigError
from serve_app.cli.main import ConfigPath, Overrides, load
from serve_app.tables import table

if TYPE_CHECKING:
    from actors.learning.training import TrainingOptions
    from cluster.learning import Comparison, Example

learn_app = typer.Typer(help="Train drafts on the target's own answers.", no_args_is_help=True)


@learn_app.command()
def run(
    config_path: ConfigPath,
    examples: Annotated[
        Path,
        typer.Option(help="Recorded conversations: JSON lines of messages, ShareGPT, or token ids."),
    ],
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder to write the trained draft to.")],
    answer: Annotated[
        bool, typer.Option("--answer", help="Let the target write the answers itself, greedily; takes longer.")
    ] = False,
    answer_tokens: Annotated[int, typer.Option(min=1, help="With --answer: most tokens of an answer.")] = 128,
    replay: Annotated[
        Path | None, typer.Option(help="General conversations that the draft must not forget; same formats.")
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Most examples to use.")] = 10_000,
    epochs: Annotated[float, typer.Option(min=0.01, help="Passes over the examples.")] = 2.0,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Of AdamW.")] = 2e-4,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    overrides: Overrides = None,
) -> None:
    """Trains CONFIG's draft model on recorded conversations and writes a new draft folder.

    One example in six is held out: training stops when the score on these no longer improves, and the table compares
    them before and after. Conversations with the target itself work best, because a draft learns to predict its target;
    with --answer the target writes the answers of other conversations anew. An interrupted run continues if it is
    started again with the same options.
    """
    config = load(config_path, overrides)
    if config.draft.method != "draft_model" or config.draft.model is None:
        raise ConfigError(f"draft.method is {config.draft.method}; set it to draft_model, the only one that is trained")
    if out.exists():
        raise ConfigError(f"{out} exists; name a new folder with --out")
    import torch

    from actors.learning.training import TrainingOptions
    from actors.models.checkpoint import local_folder

    torch.set_num_threads(threads or os.cpu_count() or 1)
    console = Console()
    target = local_folder(config.model.target, with_weights=answer)
    recent = _read(target, examples, limit, answer_tokens if answer else None, console)
    general = [] if replay is None else _read(target, replay, limit, None, console)
    options = TrainingOptions(epochs=epochs, learning_rate=learning_rate, draft_tokens=config.speculation.draft_tokens)
    _train(local_folder(config.draft.model), out, recent, general, options, console)
    typer.echo(f"The trained draft is in {out}; to serve it, set draft.model to this folder")


def _read(target: Path, path: Path, limit: int, answer_tokens: int | None, console: Console) -> "list[Example]":
    """Reads the examples of a file; with `answer_tokens`, the target writes their answers, of at most that length."""
    import torch

    from actors.learning.conversations import answered, read_examples
    from actors.models.checkpoint import load_model
    from actors.models.tokenizer_reader import end_ids, load_tokenizer

    ends = end_ids(target)
    found = read_examples(path, load_tokenizer(target), ends, limit)
    if answer_tokens is None:
        return found
    prompts = [example.prompt for example in found]
    with console.status("Loading the target"):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        # On most CPUs, float32 is faster than bfloat16 in a batch.
        model = load_model(target, "float32" if device.type == "cpu" else "bfloat16", device)
    with _bar(console) as progress:
        task = progress.add_task("The target answers", total=len(prompts), note="")
        return answered(model, prompts, ends, answer_tokens, advance=lambda count: progress.advance(task, count))


def _train(
    start: Path,
    out: Path,
    recent: "Sequence[Example]",
    general: "Sequence[Example]",
    options: "TrainingOptions",
    console: Console,
) -> None:
    """Trains, then prints the scores of start and result on examples that the draft was not trained on."""
    import torch

    from actors.learning.evaluation import score_draft
    from actors.learning.training import TrainingProgress, train
    from cluster.learning import compare, is_held_out

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    held_out = [example for example in recent if is_held_out(example)]
    trained = [example for example in recent if not is_held_out(example)]
    unseen = [example for example in general if is_held_out(example)]
    rehearsed = [example for example in general if not is_held_out(example)]
    state = out.with_name(f".{out.name}.training")
    with _bar(console) as bar:
        task = bar.add_task("Training", note="")

        def show(progress: TrainingProgress) -> None:
            note = f"loss {progress.loss:.3f}, agreement {progress.agreement:.3f}"
            bar.update(task, total=progress.steps, completed=progress.step, note=note)

        result = train(start, out, trained, held_out, rehearsed, options, progress=show, state=state, device=device)
    shutil.rmtree(state, ignore_errors=True)
    console.print(
        f"{result.steps} steps in {result.seconds:.0f} s over {len(trained)} examples; the weights are those after step"
        f" {result.best_step}"
    )
    with console.status("Scoring"):
        rows = {
            name: compare(
                score_draft(start, examples, options.draft_tokens, device=device),
                score_draft(out, examples, options.draft_tokens, device=device),
            )
            for name, examples in (("recent", held_out), ("general", unseen))
            if examples
        }
    console.print(comparison_table(rows))


def comparison_table(rows: "Mapping[str, Comparison]") -> Table:
    """Renders comparisons of two drafts by kind of example."""
    made = table(
        "Held-out examples, before and after",
        "kind",
        "number",
        "agreement",
        "tokens per verify",
        "ratio, 95 % interval",
    )
    for name, compared in rows.items():
        before, after = compared.before, compared.after
        made.add_row(
            name,
            str(after.sessions),
            f"{before.agreement:.3f} -> {after.agreement:.3f}",
            f"{before.tokens_per_verify:.2f} -> {after.tokens_per_verify:.2f}",
            f"{compared.low:.2f} to {compared.high:.2f}",
        )
    return made


def _bar(console: Console) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[note]}")
    return Progress(*columns, console=console)
