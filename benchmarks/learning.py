"""Measures what the demo's draft learns from one kind of traffic after another: agreement, forgetting, specialization.

    python benchmarks/learning.py phases --out FOLDER [--picture OUT.svg] [--json FILE]
    python benchmarks/learning.py kinds --out FOLDER [--json FILE]

`phases` feeds the target's greedy answers to support requests, then to SQL requests, to a `Trainer` in FOLDER. It
scores the draft before, between and after on held-out requests of both kinds and on the prompts of `slipstream bench`.
`kinds` compares the resulting draft with two specialists, each of which learns one kind alone in as many epochs. What
FOLDER already has, answers included, is not made again.
"""

import argparse
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from servers import processor

from actors.learning.conversations import answered, chat_prompt, read_examples, write_examples
from actors.learning.evaluation import score_draft
from actors.learning.examples import ExampleStore
from actors.learning.trainer import Draft, Trainer
from actors.learning.versions import VersionFolder
from actors.models.checkpoint import checkpoint_fingerprint, load_model, local_folder
from actors.models.tokenizer_reader import end_ids, load_tokenizer
from cluster.config import LearningOptions
from cluster.learning import Example, Figures, Manifest, SessionScore, compare
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS, REPLAY
from serve_app.demo_data.sql import sql_requests
from serve_app.demo_data.support import support_requests
from serve_app.tables import table
from tools.bench.experiment import read_prompts
from tools.charts import line_chart, require_matplotlib, svg

CPU = torch.device("cpu")
LEARNED = 300  # requests of a kind that may be learned; the next HELD_OUT never are
HELD_OUT = 60
REQUESTS = {"support": support_requests, "sql": sql_requests}
GENERAL = "general"
TITLES = {"support": "support requests", "sql": "SQL requests", GENERAL: "general prompts"}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Answers of the target, by kind."""

    learned: Mapping[str, Sequence[Example]]
    held_out: Mapping[str, Sequence[Example]]  # general prompts included
    replay: Sequence[Example]


def traffic(arguments: argparse.Namespace, target: Path, console: Console) -> Traffic:
    count, held_out = arguments.count, arguments.held_out
    learned, unseen = {}, {}
    for kind, requests in REQUESTS.items():
        texts = requests(LEARNED + HELD_OUT)
        chosen = texts[:count] + texts[LEARNED : LEARNED + held_out]
        found = answers(kind, chosen, arguments, target, console)
        learned[kind], unseen[kind] = found[:count], found[count:]
    general = [each.prompt for each in read_prompts(BENCH_PROMPTS)][:held_out]
    unseen[GENERAL] = answers(GENERAL, general, arguments, target, console)
    return Traffic(learned, unseen, read_examples(REPLAY, load_tokenizer(target), end_ids(target)))


def answers(
    kind: str, texts: Sequence[str], arguments: argparse.Namespace, target: Path, console: Console
) -> list[Example]:
    """Returns the target's answers to prompts, from the file of an earlier run if there is one."""
    path = arguments.out / f"{kind}_{len(texts)}x{arguments.tokens}.jsonl"
    tokenizer = load_tokenizer(target)
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        prompts = [chat_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts]
        with Progress(console=console) as progress:
            task = progress.add_task(f"{kind}: the target answers", total=len(prompts))
            model = load_model(target, "float32", CPU)
            advance = lambda count: progress.advance(task, count)  # noqa: E731
            write_examples(path, answered(model, prompts, end_ids(target), arguments.tokens, advance=advance))
    return read_examples(path, tokenizer, end_ids(target))


class Learner:
    """A trainer in a folder that gets kinds of examples one after the other, as routers would write them."""

    def __init__(self, folder: Path, epochs: float, replay: Sequence[Example], draft: Draft, console: Console) -> None:
        options = LearningOptions(folder=str(folder), min_examples=1, epochs=epochs)
        self._store = ExampleStore.of(options)
        self._trainer = Trainer(options, draft, replay)
        self._versions = VersionFolder(folder)
        self._draft = draft
        self._console = console
        self._phases = 0

    def learn(self, kind: str, examples: Sequence[Example]) -> tuple[Path, Manifest]:
        """Returns the version of this phase, whether it was promoted or not, and its folder."""
        self._phases += 1
        if len(self._versions.history()) < self._phases:
            self._store.add(examples, self._draft.target)
            with self._console.status(f"Learning from {TITLES[kind]}"):
                made = self._trainer.look()
            assert made is not None, "training failed; the log above says why"
        manifest = self._versions.history()[self._phases - 1]
        return self._versions.folder_of(manifest.version), manifest


def configured_draft() -> tuple[Path, Draft]:
    """Returns the demo's target, and its draft as a trainer knows it."""
    config = demo_config()
    target = Path(config.model.target)
    assert config.draft.model is not None, "the demo drafts with a model"
    fingerprint = checkpoint_fingerprint(target)
    return target, Draft(
        local_folder(config.draft.model), config.draft.model_method, fingerprint, config.speculation.draft_tokens
    )


def scores(folder: Path, draft: Draft, examples: Mapping[str, Sequence[Example]]) -> dict[str, list[SessionScore]]:
    return {kind: score_draft(folder, own, draft.draft_tokens) for kind, own in examples.items()}


def phases(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Learns one kind after the other, and scores every version on all kinds."""
    target, draft = configured_draft()
    data = traffic(arguments, target, console)
    rows: list[dict[str, Any]] = []
    record = {**facts(arguments), "rows": rows}

    shipped = scores(draft.folder, draft, data.held_out)

    def add(name: str, folder: Path, found: Mapping[str, Sequence[SessionScore]], **about: Any) -> None:
        figures = {kind: Figures.of(own).model_dump() for kind, own in found.items()}
        ratios = {kind: compare(shipped[kind], own) for kind, own in found.items()}
        to_shipped = {kind: (one.low, one.high) for kind, one in ratios.items()}  # of tokens per verify
        rows.append({"after": name, "draft": str(folder), **about, "figures": figures, "to_shipped": to_shipped})
        write(arguments.json, record)

    add("as shipped", draft.folder, shipped)
    learner = Learner(arguments.out / "phases", arguments.epochs, data.replay, draft, console)
    for kind, examples in data.learned.items():
        began = time.process_time()
        folder, manifest = learner.learn(kind, examples)
        cpu_s = time.process_time() - began
        found = scores(folder, draft, data.held_out)
        add(TITLES[kind], folder, found, manifest=manifest.model_dump(mode="json"), cpu_s=cpu_s)
    shown = table(
        record["processor"], "after", "seconds", "examples", "state", *(TITLES[kind] for kind in data.held_out)
    )
    for row in rows:
        manifest_of = row.get("manifest", {"seconds": 0.0, "examples": 0, "state": ""})
        cells = [f"{each['agreement']:.3f}, {each['tokens_per_verify']:.2f}" for each in row["figures"].values()]
        about = (f"{manifest_of['seconds']:.0f}", str(manifest_of["examples"]), manifest_of["state"])
        shown.add_row(row["after"], *about, *cells)
    console.print(shown)
    if arguments.picture:
        picture(rows, arguments.picture)
    return record


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws agreement by phase, one line per kind."""
    lines = {
        TITLES[kind]: [(phase, row["figures"][kind]["agreement"]) for phase, row in enumerate(rows)]
        for kind in rows[0]["figures"]
    }
    names = "; ".join(f"{phase}: after {row['after']}" if phase else "0: as shipped" for phase, row in enumerate(rows))
    figure = line_chart(lines, {}, f"version ({names})", "agreement on held-out requests")
    path.write_text(svg(figure), encoding="utf-8")


def kinds(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Compares the draft that learned both kinds with a specialist for each."""
    target, draft = configured_draft()
    data = traffic(arguments, target, console)
    both = Learner(arguments.out / "phases", arguments.epochs, data.replay, draft, console)
    folder = [both.learn(kind, examples)[0] for kind, examples in data.learned.items()][-1]
    record: dict[str, Any] = {**facts(arguments), "draft": str(folder), "kinds": {}}
    shown = table("One draft -> a specialist", "held out", "agreement", "tokens per verify", "ratio, 95 % interval")
    for phase, (kind, examples) in enumerate(data.learned.items()):
        # The one draft trained on a kind in its own phase, and as older examples in each later one.
        epochs = arguments.epochs * (len(data.learned) - phase)
        alone = Learner(arguments.out / f"only_{kind}_{epochs:g}", epochs, data.replay, draft, console)
        specialist, manifest = alone.learn(kind, examples)
        before, after = (score_draft(each, data.held_out[kind], draft.draft_tokens) for each in (folder, specialist))
        found = compare(before, after)
        record["kinds"][kind] = {
            "specialist": str(specialist),
            "manifest": manifest.model_dump(mode="json"),
            "comparison": found.model_dump(mode="json"),
        }
        write(arguments.json, record)
        one, other = found.before, found.after
        shown.add_row(
            TITLES[kind],
            f"{one.agreement:.3f} -> {other.agreement:.3f}",
            f"{one.tokens_per_verify:.2f} -> {other.tokens_per_verify:.2f}",
            f"{found.low:.3f} to {found.high:.3f}",
        )
    console.print(shown)
    return record


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    chosen = {name: getattr(arguments, name) for name in ("count", "held_out", "tokens", "epochs", "threads")}
    return {"processor": processor(), **chosen}


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("purpose", choices=("phases", "kinds"))
    parser.add_argument("--out", type=Path, required=True, help="folder of answers and trained drafts")
    parser.add_argument("--count", type=int, default=LEARNED, help=f"requests of a kind, at most {LEARNED}")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help=f"unseen requests of a kind, at most {HELD_OUT}")
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--epochs", type=float, default=LearningOptions(folder="").epochs, help="of a phase")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--picture", type=Path, metavar="OUT.svg", help="draw agreement by phase")
    parser.add_argument("--json", type=Path, help="write all figures here, after each part")
    arguments = parser.parse_args()
    if arguments.picture:
        require_matplotlib()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(arguments.threads)
    console = Console()
    prepare_target(Path(demo_config().model.target), console)
    (phases if arguments.purpose == "phases" else kinds)(arguments, console)


if __name__ == "__main__":
    main()
