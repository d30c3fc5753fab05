"""Measures what drafts learn from one kind of traffic after another: agreement, forgetting, specialization.

    python benchmarks/learning.py phases --out FOLDER [--picture OUT.svg] [--json FILE]
    python benchmarks/learning.py kinds --out FOLDER [--json FILE]
    PYTHONPATH=. python benchmarks/learning.py heads --out FOLDER --method eagle --learning-rate 1e-3 [--json FILE]

`phases` feeds the target's greedy answers to support requests, then to SQL requests, to a `Trainer` in FOLDER. It
scores the draft before, between and after on held-out requests of both kinds and on the prompts of `slipstream bench`.
`kinds` compares the resulting draft with two specialists, each of which learns one kind alone in as many epochs.
`heads` starts from an untrained head for the demo's target (`examples.train_head`). The head learns general dialogues,
then support requests, from the target's states, stored as drafters store them. Results of earlier runs in FOLDER, such
as answers, are reused.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from servers import processor

from actors.drafters.heads.eagle.config import default_states
from actors.drafters.model.forwards import read_frequent_tokens
from actors.drafters.registry import capture_spec
from actors.learning.conversations import answered, chat_prompt, read_examples, write_examples
from actors.learning.evaluation import do_nothing, score_draft
from actors.learning.examples import ExampleStore, KeptStates
from actors.learning.head_loading import head_learning
from actors.learning.head_trainee import StatesFile
from actors.learning.target_states import kept_states
from actors.learning.trainee import TrainingOptions
from actors.learning.trainer import Draft, Trainer
from actors.learning.versions import VersionFolder
from actors.models.checkpoint import checkpoint_fingerprint, load_model, local_folder
from actors.models.tokenizer_reader import end_ids, load_tokenizer
from cluster.config import DraftPool, LearningOptions
from cluster.learning import Example, Figures, Manifest, SessionScore, compare
from serve_app.cli.demo import demo_config, prepare_target
from serve_app.demo_data import BENCH_PROMPTS, REPLAY
from serve_app.demo_data.sql import sql_requests
from serve_app.demo_data.support import support_requests
from serve_app.tables import table
from tools.bench.experiment import read_prompts
from tools.charts import line_chart, require_matplotlib, svg

CPU = torch.device("cpu")
DEFAULTS = LearningOptions(folder="")
LEARNED = 300  # requests of a kind that may be learned; the next HELD_OUT never are
HELD_OUT = 60
REQUESTS = {"support": support_requests, "sql": sql_requests}
GENERAL = "general"
DIALOGUES = "dialogues"  # general ones, the demo's replay examples
TITLES = {
    "support": "support requests",
    "sql": "SQL requests",
    GENERAL: "general prompts",
    DIALOGUES: "general dialogues",
}
DRAFT_VOCABULARY = 8192  # number of tokens in a head's vocabulary

Scores = Mapping[str, Sequence[SessionScore]]  # by kind


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


StatesOf = Callable[[Sequence[Example]], Iterator[KeptStates]]


class Learner:
    """A trainer in a folder that gets kinds of examples one after the other, as routers would write them.

    If the draft is a head, `states_of` computes the states that drafters would keep.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        name: str,
        replay: Sequence[Example],
        draft: Draft,
        console: Console,
        epochs: float | None = None,
        states_of: StatesOf | None = None,
    ) -> None:
        folder = arguments.out / name
        options = LearningOptions(
            folder=str(folder),
            min_examples=1,
            epochs=epochs or arguments.epochs,
            learning_rate=arguments.learning_rate,
        )
        self._store = ExampleStore.of(options)
        self._trainer = Trainer(options, draft, replay)
        self._versions = VersionFolder(folder)
        self._draft = draft
        self._states_of = states_of
        self._console = console
        self._phases = 0
        self.cpu_s = 0.0  # CPU time of the latest phase's training and evaluation; 0 if an earlier run made it

    def learn(self, kind: str, examples: Sequence[Example]) -> tuple[Path, Manifest]:
        """Returns the version of this phase, whether it was promoted or not, and its folder."""
        self._phases += 1
        self.cpu_s = 0.0
        if len(self._versions.history()) < self._phases:
            before = self._store.size(self._draft.target).newest
            self._store.add(examples, self._draft.target)
            if self._states_of is not None:
                with self._console.status(f"Computing states of {TITLES[kind]}"):
                    self._store.add_states([*self._states_of(self._store.read(self._draft.target, before))])
            began = time.process_time()
            with self._console.status(f"Learning from {TITLES[kind]}"):
                made = self._trainer.look()
            self.cpu_s = time.process_time() - began
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


def phases(arguments: argparse.Namespace, console: Console) -> None:
    """Learns one kind after the other, and scores every version on all kinds."""
    target, draft = configured_draft()
    data = traffic(arguments, target, console)
    learner = Learner(arguments, "phases", data.replay, draft, console)

    def scores(folder: Path) -> Scores:
        return {kind: score_draft(folder, own, draft.draft_tokens) for kind, own in data.held_out.items()}

    rows = learn_in_phases(arguments, console, learner, data.learned, "as shipped", draft.folder, scores)
    if arguments.picture:
        save_plot(rows, arguments.picture)


def heads(arguments: argparse.Namespace, console: Console) -> None:
    """Lets an untrained head learn general dialogues, then support requests."""
    target, draft = configured_draft()
    data = traffic(arguments, target, console)
    folder = untrained_head(arguments.method, arguments.out / f"untrained_{arguments.method}", target, draft)
    pool = DraftPool(method=arguments.method, model=str(folder))
    head = head_learning(pool, str(target))
    draft = replace(draft, folder=folder, method=pool.method, head=head)
    spec = capture_spec(pool, target, "float32")
    assert spec is not None, "a head reads states"
    states_of = partial(kept_states, load_model(target, "float32", CPU), spec, head.kind)
    learner = Learner(arguments, pool.method, [], draft, console, states_of=states_of)
    learned = {DIALOGUES: data.replay[: arguments.count], "support": data.learned["support"]}
    held_out = {kind: named(kind, data.held_out[kind]) for kind in ("support", GENERAL)}
    options = TrainingOptions(draft_tokens=draft.draft_tokens)
    with StatesFile(arguments.out, head.layout) as states:
        for each in states_of([example for own in held_out.values() for example in own]):
            states.add(each.session, each.first, each.rows)

        def scores(folder: Path) -> Scores:
            trainee = head.trainee(states)(folder, CPU)
            return {kind: trainee.score(own, options, do_nothing) for kind, own in held_out.items()}

        learned = {kind: named(kind, own) for kind, own in learned.items()}
        learn_in_phases(arguments, console, learner, learned, "untrained", draft.folder, scores)


def named(kind: str, examples: Sequence[Example]) -> list[Example]:
    """Gives each example a session, by which its states are kept."""
    return [replace(example, session=f"{kind}-{index}") for index, example in enumerate(examples)]


def untrained_head(method: str, folder: Path, target: Path, draft: Draft) -> Path:
    """Writes a head made of parts of the target, for a draft model's frequent tokens; returns `folder`."""
    from examples.train_head.checkpoints import write_head
    from examples.train_head.heads.eagle import EagleModule
    from examples.train_head.heads.medusa_module import MedusaModule
    from examples.train_head.heads.target_parts import target_parts

    if not folder.is_dir():
        parts = target_parts(str(target))
        frequent = read_frequent_tokens(draft.folder, parts.sizes.vocabulary) or []
        ids = torch.tensor(sorted(frequent[:DRAFT_VOCABULARY]))
        module = (
            EagleModule(parts, default_states(parts.layers), ids, layers=1, seed=0)
            if method == "eagle"
            else MedusaModule(parts, ids, draft.draft_tokens)
        )
        write_head(folder, module.published(), torch.bfloat16)
    return folder


def learn_in_phases(
    arguments: argparse.Namespace,
    console: Console,
    learner: Learner,
    learned: Mapping[str, Sequence[Example]],
    start: str,  # describes the draft before any training
    folder: Path,  # that draft
    score: Callable[[Path], Scores],  # scores a version's held-out examples
) -> list[dict[str, Any]]:
    """Learns one kind after the other, prints and writes the scores of every version, and returns them."""
    rows: list[dict[str, Any]] = []
    record = {**facts(arguments), "rows": rows}
    first = score(folder)

    def add(name: str, folder: Path, found: Scores, **about: Any) -> None:
        figures = {kind: Figures.of(own).model_dump() for kind, own in found.items()}
        ratios = {kind: compare(first[kind], own) for kind, own in found.items()}
        to_first = {kind: (one.low, one.high) for kind, one in ratios.items()}  # of tokens per verify
        rows.append({"after": name, "draft": str(folder), **about, "figures": figures, "to_first": to_first})
        write(arguments.json, record)

    add(start, folder, first)
    for kind, examples in learned.items():
        version, manifest = learner.learn(kind, examples)
        add(TITLES[kind], version, score(version), manifest=manifest.model_dump(mode="json"), cpu_s=learner.cpu_s)
    shown = table(record["processor"], "after", "seconds", "examples", "state", *(TITLES[kind] for kind in first))
    for row in rows:
        manifest_of = row.get("manifest", {"seconds": 0.0, "examples": 0, "state": ""})
        cells = [f"{each['agreement']:.3f}, {each['tokens_per_verify']:.2f}" for each in row["figures"].values()]
        about = (f"{manifest_of['seconds']:.0f}", str(manifest_of["examples"]), manifest_of["state"])
        shown.add_row(row["after"], *about, *cells)
    console.print(shown)
    return rows


def save_plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws agreement by phase, one line per kind."""
    lines = {
        TITLES[kind]: [(phase, row["figures"][kind]["agreement"]) for phase, row in enumerate(rows)]
        for kind in rows[0]["figures"]
    }
    names = "; ".join(f"{phase}: after {row['after']}" if phase else "0: as shipped" for phase, row in enumerate(rows))
    figure = line_chart(lines, {}, f"version ({names})", "agreement on held-out requests")
    path.write_text(svg(figure), encoding="utf-8")


def kinds(arguments: argparse.Namespace, console: Console) -> None:
    """Compares the draft that learned both kinds with a specialist for each."""
    target, draft = configured_draft()
    data = traffic(arguments, target, console)
    both = Learner(arguments, "phases", data.replay, draft, console)
    folder = [both.learn(kind, examples)[0] for kind, examples in data.learned.items()][-1]
    record: dict[str, Any] = {**facts(arguments), "draft": str(folder), "kinds": {}}
    shown = table("One draft -> a specialist", "held out", "agreement", "tokens per verify", "ratio, 95 % interval")
    for phase, (kind, examples) in enumerate(data.learned.items()):
        # The one draft trained on a kind in its own phase, and as older examples in each later one.
        epochs = arguments.epochs * (len(data.learned) - phase)
        alone = Learner(arguments, f"only_{kind}_{epochs:g}", data.replay, draft, console, epochs)
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


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    names = ("count", "held_out", "tokens", "epochs", "learning_rate", "threads")
    return {"processor": processor(), **{name: getattr(arguments, name) for name in names}}


def write(path: Path | None, record: Mapping[str, Any]) -> None:
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


PURPOSES = {"phases": phases, "kinds": kinds, "heads": heads}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("purpose", choices=PURPOSES)
    parser.add_argument("--out", type=Path, required=True, help="folder of answers and trained drafts")
    parser.add_argument("--count", type=int, default=LEARNED, help=f"requests of a kind, at most {LEARNED}")
    parser.add_argument("--held-out", type=int, default=HELD_OUT, help=f"unseen requests of a kind, at most {HELD_OUT}")
    parser.add_argument("--tokens", type=int, default=48, help="maximum tokens per answer")
    parser.add_argument("--epochs", type=float, default=DEFAULTS.epochs, help="of a phase")
    parser.add_argument("--learning-rate", type=float, default=DEFAULTS.learning_rate, help="of AdamW")
    parser.add_argument("--method", choices=("eagle", "medusa"), default="eagle", help="kind of head")
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
    PURPOSES[arguments.purpose](arguments, console)


if __name__ == "__main__":
    main()
