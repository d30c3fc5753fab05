"""Subcommands of `slipstream learn`: train drafts on the target's answers, and manage what a deployment has learned.

All but `run` work on the folder of `draft.learning` alone, so they need neither Ray nor a model and can run while the
deployment serves: drafters follow a promotion or a rollback within seconds.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from actors.learning.examples import FILE, ExampleStore
from actors.learning.versions import VersionFolder
from cluster.config import DraftPool, LearningOptions
from cluster.config_sections import HEADS
from cluster.errors import ConfigError
from cluster.learning import Comparison, Manifest
from cluster.placement import pools
from serve_app.cli.main import ConfigPath, Overrides, load, load_single
from serve_app.tables import table

if TYPE_CHECKING:
    import torch

    from actors.learning.trainee import TrainingOptions
    from actors.learning.trainer import Trained
    from cluster.learning import Example

learn_app = typer.Typer(
    help="Drafts that learn: train them, and manage what a deployment has learned.", no_args_is_help=True
)


@learn_app.command()
def run(
    config_path: ConfigPath,
    examples: Annotated[
        Path,
        typer.Option(help="Recorded conversations: JSON lines of messages, ShareGPT, or token ids."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="New folder for the draft; default: a version in draft.learning.folder."),
    ] = None,
    answer: Annotated[
        bool, typer.Option("--answer", help="Let the target write the answers itself, greedily; takes longer.")
    ] = False,
    answer_tokens: Annotated[int, typer.Option(min=1, help="With --answer: maximum tokens per answer.")] = 128,
    replay: Annotated[
        Path | None,
        typer.Option(
            help="General conversations that the draft must not forget; same formats. Default: draft.learning.replay."
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=2, help="Maximum examples to read; all replay examples are read.")] = 10_000,
    epochs: Annotated[
        float | None, typer.Option(min=0.01, help="Passes over the examples; default: draft.learning.epochs, else 2.")
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Peak learning rate of AdamW; default: draft.learning.learning_rate, else 1.5e-4 with --replay, 2e-4"
            " without.",
        ),
    ] = None,
    replay_share: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=0.99, help="Share of --replay in each batch; default: draft.learning.replay_share, else 0.5."
        ),
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: one per core.")] = None,
    overrides: Overrides = None,
) -> None:
    """Trains CONFIG's draft model on recorded conversations; writes a draft folder, or adds a version.

    One example in five is held out: training stops when the score on half of these no longer improves, and the table
    compares the other half before and after. Conversations with the target itself work best, because a draft learns to
    predict its target; with --answer the target writes new answers for other conversations. A version is added as a
    candidate, which serves once it is promoted. An interrupted run continues if it is started again with the same
    options.
    """
    config = load_single(config_path, overrides)
    if config.draft.method != "draft_model" or config.draft.model is None:
        raise ConfigError(
            f"draft.method is {config.draft.method}, which this command cannot train; set it to draft_model"
        )
    learning = config.draft.learning
    if out is None and learning is None:
        raise ConfigError(
            "there is no place for the trained draft; name a new folder with --out, or set draft.learning"
        )
    if out is not None and out.exists():
        raise ConfigError(f"{out} exists; name a new folder with --out")
    import torch

    from actors.learning.trainee import TrainingOptions
    from actors.learning.trainer import trainer_lock
    from actors.models.checkpoint import local_folder

    torch.set_num_threads(threads or os.cpu_count() or 1)
    console = Console()
    target = local_folder(config.model.target, with_weights=answer)
    recent = _read(target, examples, limit, answer_tokens if answer else None, console)
    if replay is None and learning is not None and learning.replay is not None:
        replay = Path(learning.replay).expanduser()
    general = [] if replay is None else _read(target, replay, None, None, console)
    if learning_rate is None and learning is None and not general:
        learning_rate = 2e-4
    defaults = learning or TrainingOptions()
    options = TrainingOptions(
        epochs=defaults.epochs if epochs is None else epochs,
        learning_rate=defaults.learning_rate if learning_rate is None else learning_rate,
        replay_share=(defaults.replay_share if replay_share is None else replay_share) if general else 0.0,
        draft_tokens=config.speculation.draft_tokens,
    )
    start = local_folder(config.draft.model)
    if out is not None:
        _train(start, out, recent, general, options, console)
        typer.echo(f"The trained draft is in {out}; to serve it, set draft.model to this folder")
        return
    assert learning is not None, "checked above"
    folder = Path(learning.folder).expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with trainer_lock(folder) as is_ours:
        if not is_ours:
            raise ConfigError(f"a trainer works in {folder}; try again later, or name a new folder with --out")
        version = _add_version(learning, start, target, recent, general, options, console)
    typer.echo(f"It is version {version} in {learning.folder}; to serve it, run `slipstream learn promote`")


def _add_version(
    learning: "LearningOptions",
    configured: Path,
    target: Path,
    recent: "Sequence[Example]",
    general: "Sequence[Example]",
    options: "TrainingOptions",
    console: Console,
) -> int:
    """Trains from the current version or the configured draft, and adds the result; returns the version's number."""
    from actors.learning.trainable import fingerprint_of
    from actors.learning.trainer import usable_version
    from actors.models.checkpoint import checkpoint_fingerprint
    from cluster.learning import State, decide

    fingerprint = checkpoint_fingerprint(target)
    folder = Path(learning.folder).expanduser()
    versions = VersionFolder(folder)
    draft = fingerprint_of(configured)
    parent = usable_version(versions, fingerprint, draft)
    start = versions.folder_of(parent) if parent else configured
    candidate = folder / "training" / "offline"
    shutil.rmtree(candidate, ignore_errors=True)
    trained = _train(start, candidate, recent, general, options, console)
    decision = decide(trained.recent, trained.general, learning.max_general_loss, learning.min_sessions)
    manifest = trained.manifest(
        parent=parent,
        created=time.time(),
        state=State.CANDIDATE,
        reason=f"offline: {decision.reason}",
        method="draft_model",
        target=fingerprint,
        draft=draft,
    )

    def copy(out: Path) -> None:
        shutil.copytree(candidate, out, dirs_exist_ok=True)

    try:
        return versions.add(manifest, copy).version
    finally:
        shutil.rmtree(candidate, ignore_errors=True)


def _read(target: Path, path: Path, limit: int | None, answer_tokens: int | None, console: Console) -> "list[Example]":
    """Reads a file's examples; with `answer_tokens`, the target writes new answers of at most that length."""
    from actors.learning.conversations import answered, read_examples
    from actors.models.checkpoint import load_model
    from actors.models.tokenizer_reader import end_ids, load_tokenizer

    ends = end_ids(target)
    found = read_examples(path, load_tokenizer(target), ends, limit)
    if answer_tokens is None:
        return found
    prompts = [example.prompt for example in found]
    with console.status("Loading the target"):
        device = _device()
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
) -> "Trained":
    """Trains, then prints the scores before and after on examples that were not used for training."""
    from actors.learning.trainer import train_candidate
    from actors.learning.training import TrainingProgress

    state = out.with_name(f".{out.name}.training")
    with _bar(console) as bar:
        task = bar.add_task("Training", note="")

        def show(progress: TrainingProgress) -> None:
            note = f"loss {progress.loss:.3f}, agreement {progress.agreement:.3f}"
            bar.update(task, total=progress.steps, completed=progress.step, note=note)

        trained = train_candidate(start, out, recent, general, options, progress=show, state=state, device=_device())
    assert trained is not None, "this training is never stopped"
    shutil.rmtree(state, ignore_errors=True)
    console.print(
        f"{trained.steps} steps in {trained.seconds:.0f} s over {trained.examples} examples; the weights are those"
        f" after step {trained.best_step}"
    )
    compared = {"recent": trained.recent, "general": trained.general}
    console.print(comparison_table({name: each for name, each in compared.items() if each is not None}))
    return trained


def _device() -> "torch.device":
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def comparison_table(rows: "Mapping[str, Comparison]") -> Table:
    """Tabulates comparisons of two drafts by kind of example."""
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


# ---------------------------------------------------------------- a deployment's examples and versions


DraftName = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="NAME", help="Draft pool in `drafts`, or draft; required if several draft pools learn."
    ),
]


def _learning_pool(
    config_path: Path, overrides: Sequence[str] | None, name: str | None
) -> tuple[DraftPool, LearningOptions]:
    """Returns the draft pool that learns, and its options; `name` is required if there are several."""
    learning = {
        section.removeprefix("drafts."): (pool, pool.learning)
        for section, pool in pools(load(config_path, overrides)).items()
        if isinstance(pool, DraftPool) and pool.learning is not None
    }
    if not learning:
        raise ConfigError(f"{config_path} has no draft.learning; set draft.learning.folder to learn from traffic")
    if name is None and len(learning) > 1:
        raise ConfigError(f"several draft pools learn; choose one with --draft: {', '.join(learning)}")
    chosen = name or next(iter(learning))
    if chosen not in learning:
        raise ConfigError(f"--draft is {chosen}, which does not learn; choose one of {', '.join(learning)}")
    return learning[chosen]


def _learning(config_path: Path, overrides: Sequence[str] | None, draft: str | None) -> LearningOptions:
    return _learning_pool(config_path, overrides, draft)[1]


def _versions(config_path: Path, overrides: Sequence[str] | None, draft: str | None) -> VersionFolder:
    folder = Path(_learning(config_path, overrides, draft).folder).expanduser()
    if not (folder / FILE).is_file() and not VersionFolder(folder).history():
        raise ConfigError(f"{folder} has neither {FILE} nor versions; correct draft.learning.folder")
    return VersionFolder(folder)


@contextmanager
def _examples(learning: LearningOptions) -> Iterator[ExampleStore]:
    """Opens the store of examples. Raises ConfigError if there is none, instead of creating one."""
    if not (Path(learning.folder).expanduser() / FILE).is_file():
        raise ConfigError(f"{learning.folder} has no {FILE}; correct draft.learning.folder, or serve requests first")
    store = ExampleStore.of(learning)
    try:
        yield store
    finally:
        store.close()


@learn_app.command()
def status(config_path: ConfigPath, draft: DraftName = None, overrides: Overrides = None) -> None:
    """Shows the stored examples, how many the next training lacks, the current version, and the latest training."""
    pool, learning = _learning_pool(config_path, overrides, draft)
    needs_states = pool.model_method in HEADS
    versions = VersionFolder(Path(learning.folder).expanduser())
    with _examples(learning) as store:
        size = store.size()
        key, share = store.largest_key()
        target, kind = store.newest()
        missing = store.missing(learning, target, versions.trained_to(target), kind if needs_states else "")
    shown = table("Learning", "what", "value")
    shown.add_row("folder", learning.folder)
    shown.add_row("consent", learning.consent.value)
    shown.add_row("examples", f"{size.examples} ({size.tokens} of at most {learning.max_tokens} tokens)")
    if key:
        shown.add_row("most from one key", f"{key}, {share:.0%} of the tokens")
    shown.add_row("next training", f"needs about {missing} more examples" if missing else "has enough examples")
    current = versions.current()
    shown.add_row("current version", str(current) if current else "0 (the configured draft)")
    if history := versions.history():
        shown.add_row("latest training", f"version {history[-1].version}: {history[-1].reason}")
    Console().print(shown)


@learn_app.command()
def history(config_path: ConfigPath, draft: DraftName = None, overrides: Overrides = None) -> None:
    """Lists all versions with their figures."""
    Console().print(history_table(_versions(config_path, overrides, draft).history()))


def history_table(manifests: Sequence[Manifest]) -> Table:
    """Tabulates versions, oldest first."""
    shown = table("Versions of the draft", "version", "parent", "state", "examples", "agreement", "a verify", "general")
    for one in manifests:
        shown.add_row(
            str(one.version),
            str(one.parent),
            one.state.value,
            str(one.examples),
            _change(one.recent, "agreement"),
            _change(one.recent, "tokens_per_verify"),
            _change(one.general, "agreement"),
        )
    return shown


def _change(comparison: Comparison | None, figure: str) -> str:
    if comparison is None:
        return ""
    return f"{getattr(comparison.before, figure):.2f} → {getattr(comparison.after, figure):.2f}"


@learn_app.command()
def promote(
    config_path: ConfigPath,
    version: Annotated[int, typer.Argument(min=0, help="Version to serve with; 0: the configured draft.")],
    draft: DraftName = None,
    overrides: Overrides = None,
) -> None:
    """Makes a version current, whatever its figures."""
    _versions(config_path, overrides, draft).promote(version)
    Console().print(f"version {version} is current; drafters load it within seconds")


@learn_app.command()
def rollback(config_path: ConfigPath, draft: DraftName = None, overrides: Overrides = None) -> None:
    """Returns to the parent of the current version."""
    versions = _versions(config_path, overrides, draft)
    if not versions.current():
        raise ConfigError("the configured draft is current, and it has no parent; use `slipstream learn promote`")
    Console().print(f"version {versions.rollback()} is current; drafters load it within seconds")


@learn_app.command()
def forget(
    config_path: ConfigPath,
    key: Annotated[str | None, typer.Option(help="Name of the API key whose examples to delete.")] = None,
    delete_all: Annotated[bool, typer.Option("--all", help="Delete all examples.")] = False,
    draft: DraftName = None,
    overrides: Overrides = None,
) -> None:
    """Deletes examples and overwrites their text; versions that have learned from them stay."""
    if (key is None) == (not delete_all):
        raise ConfigError("name what to forget: --key NAME, or --all")
    with _examples(_learning(config_path, overrides, draft)) as store:
        deleted = store.forget(key)
    Console().print(f"{deleted} examples deleted")
    names = load(config_path, overrides).server.keys
    if key is not None and not deleted and key not in names:
        Console().print(f"{key} is not in server.keys, whose names are: {', '.join(names) or 'none'}", markup=False)
