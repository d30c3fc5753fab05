"""Tests `slipstream learn run` and `forget` with a tiny pair."""

import json
import random
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from actors.learning import trainer
from actors.learning.examples import ExampleStore
from actors.learning.trainee import TrainingOptions
from actors.learning.trainer import Draft, Trainer, trainer_lock
from actors.learning.versions import VersionFolder
from actors.models.checkpoint import load_model
from cluster.config import LearningOptions
from cluster.errors import ConfigError
from cluster.learning import Example, Source, State
from tests.byte_tokenizer import byte_tokenizer
from tests.unit.actors.learning.drafts import CPU, SHAPE, VOCABULARY, holding, write_draft
from tools.cli import app

runner = CliRunner()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer()
    shape = SHAPE | {"vocab_size": len(tokenizer), "max_position_embeddings": 512}
    for name in ("target", "draft"):
        LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(tmp_path / name)
    tokenizer.save_pretrained(tmp_path / "target")
    path = tmp_path / "config.yaml"
    section = {"method": "draft_model", "model": str(tmp_path / "draft")}
    path.write_text(yaml.safe_dump({"model": {"target": str(tmp_path / "target")}, "draft": section}))
    return path


@pytest.fixture
def conversations(tmp_path: Path) -> Path:
    path = tmp_path / "conversations.jsonl"
    turns = [
        [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": "the answer is yes"}]
        for number in range(30)
    ]
    path.write_text("".join(f"{json.dumps({'messages': each})}\n" for each in turns))
    return path


@pytest.mark.parametrize("more", [(), ("--answer", "--answer-tokens", "6")])
def test_it_trains_a_draft_and_shows_both(
    more: tuple[str, ...], config: Path, conversations: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = ["learn", "run", str(config), "--examples", str(conversations), "--out", str(out), "--epochs", "1"]
    done = runner.invoke(app, [*given, "--threads", "1", "--replay", str(conversations), *more])
    assert done.exit_code == 0, done.output
    assert "general" in done.output
    assert " -> " in done.output
    load_model(out, "float32", CPU)
    assert not list(tmp_path.glob(".*training"))
    again = runner.invoke(app, given)
    assert "name a new folder with --out" in str(again.exception)


def test_without_a_folder_it_adds_a_version(config: Path, conversations: Path, tmp_path: Path) -> None:
    given = ["learn", "run", str(config), "--examples", str(conversations), "--epochs", "1", "--threads", "1"]
    refused = runner.invoke(app, given)
    assert "name a new folder with --out, or set draft.learning" in str(refused.exception)
    for number in (1, 2):
        done = runner.invoke(app, [*given, "--set", f"draft.learning.folder={tmp_path / 'learned'}"])
        assert done.exit_code == 0, done.output
        assert f"It is version {number} in" in done.output
        VersionFolder(tmp_path / "learned").promote(number)
    first, second = VersionFolder(tmp_path / "learned").history()
    assert (first.parent, first.state) == (0, State.REPLACED)
    assert (second.parent, second.examples) == (1, first.examples)
    load_model(VersionFolder(tmp_path / "learned").folder_of(2), "float32", CPU)
    assert not list((tmp_path / "learned" / "training").iterdir())


def test_other_methods_are_refused(config: Path, conversations: Path, tmp_path: Path) -> None:
    given = ["learn", "run", str(config), "--examples", str(conversations), "--out", str(tmp_path / "out")]
    done = runner.invoke(app, [*given, "--set", "draft.method=ngram", "--set", "draft.model=null"])
    assert "which this command cannot train; set it to draft_model" in str(done.exception)


def test_it_waits_for_a_trainer_of_the_same_folder(config: Path, conversations: Path, tmp_path: Path) -> None:
    learned = tmp_path / "learned"
    learned.mkdir()
    given = ["learn", "run", str(config), "--examples", str(conversations), "--epochs", "1", "--threads", "1"]
    with trainer_lock(learned):
        done = runner.invoke(app, [*given, "--set", f"draft.learning.folder={learned}"])
    assert "a trainer works in" in str(done.exception)
    assert VersionFolder(learned).history() == []


def test_the_configuration_sets_the_training(
    config: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[tuple[int, TrainingOptions]] = []

    class Noted(Exception):
        pass

    def train(start: Path, out: Path, recent: object, general: list[Example], options: TrainingOptions, **_: object):
        trained.append((len(general), options))
        raise Noted

    monkeypatch.setattr(trainer, "train_candidate", train)
    given = ["learn", "run", str(config), "--examples", str(conversations), "--threads", "1"]
    section = {
        "folder": str(tmp_path / "learned"),
        "epochs": 3,
        "learning_rate": 5e-4,
        "replay": str(conversations),
        "replay_share": 0.25,
    }
    learning = [f"--set=draft.learning.{key}={value}" for key, value in section.items()]
    overridden = ["--epochs", "1", "--learning-rate", "1e-3", "--replay-share", "0.75"]
    for number, arguments in enumerate(([], learning, [*learning, *overridden])):
        out = ["--out", str(tmp_path / f"out{number}")]
        assert isinstance(runner.invoke(app, [*given, *out, *arguments]).exception, Noted)
    assert [(count, one.epochs, one.learning_rate, one.replay_share) for count, one in trained] == [
        (0, 2.0, 2e-4, 0.0),
        (30, 3.0, 5e-4, 0.25),
        (30, 1.0, 1e-3, 0.75),
    ]


# ---------------------------------------------------------------- forgetting

KILLED = """
import os, signal, sqlite3, sys

connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA cache_size = 1")  # writes changed pages early, and before them the journal
connection.execute("BEGIN IMMEDIATE")
connection.execute("UPDATE examples SET created = created + 1, prompt_version = 'longer than before'")
os.kill(os.getpid(), signal.SIGKILL)
"""


def texts(key: str, count: int = 150) -> list[Example]:
    chosen = random.Random(key)
    drawn = [tuple(chosen.randrange(VOCABULARY) for _ in range(40)) for _ in range(count)]
    return [Example(text[:10], text[10:], Source(key)) for text in drawn]


@pytest.mark.parametrize("whose", ["--key", "--all"])
def test_forget_leaves_nothing(config: Path, tmp_path: Path, whose: str) -> None:
    """The cases are a finished training, an interrupted training, and a router killed during a write."""
    folder = tmp_path / "learning"
    options = LearningOptions(folder=str(folder), min_examples=100, min_sessions=6, epochs=1)
    draft = Draft(write_draft(tmp_path / "tiny"), "draft_model", "target", draft_tokens=4)
    ours, theirs = texts("ours"), texts("theirs")
    store = ExampleStore.of(options)
    for key, kept in (("ours", ours), ("theirs", theirs)):
        assert store.add(kept, "target")["kept"] == len(kept)
        passes = iter(range(1000))
        trainer = Trainer(options, draft, [], should_stop=lambda: key == "theirs" and next(passes) > 10)  # noqa: B023
        trainer.look()
    store.close()
    child = subprocess.run([sys.executable, "-c", KILLED, str(folder / "examples.sqlite")], check=False)
    assert child.returncode == -signal.SIGKILL
    assert {path.name for path in folder.rglob("*.safetensors")} == {"model.safetensors", "state.safetensors"}
    known = set().union(*(holding(folder, each.answer) for each in ours[:20]))
    assert known == {"examples.sqlite", "examples.sqlite-journal"}

    name = ["--key", "ours"] if whose == "--key" else ["--all"]
    done = runner.invoke(app, ["learn", "forget", str(config), *name, "--set", f"draft.learning.folder={folder}"])
    assert done.exit_code == 0, done.output
    assert f"{150 if whose == '--key' else 300} examples deleted" in done.output
    gone = ours if whose == "--key" else [*ours, *theirs]
    assert not any(holding(folder, tokens) for each in gone[::10] for tokens in (each.prompt, each.answer))
    store = ExampleStore.of(options)
    assert store.read("target") == (theirs if whose == "--key" else [])
    store.close()
    assert len(VersionFolder(folder).history()) == 1, "versions stay"


def test_status_names_the_key_with_the_most_examples(config: Path, tmp_path: Path) -> None:
    options = LearningOptions(folder=str(tmp_path / "learning"))
    store = ExampleStore.of(options)
    store.add([*texts("busy", 30), *texts("quiet", 10)], "target")
    given = ["learn", "status", str(config), "--set", f"draft.learning.folder={options.folder}"]
    assert "busy, 75% of the tokens" in runner.invoke(app, given).output
    store.forget()
    store.add([replace(each, source=Source()) for each in texts("unnamed", 5)], "target")
    store.close()
    assert "one key" not in runner.invoke(app, given).output


def test_status_shows_how_many_examples_the_next_training_needs(config: Path, tmp_path: Path) -> None:
    options = LearningOptions(folder=str(tmp_path / "learning"))
    given = ["learn", "status", str(config), "--set", f"draft.learning.folder={options.folder}"]
    store = ExampleStore.of(options)
    assert "needs about 200 more examples" in runner.invoke(app, given).output
    store.add(texts("few", 30), "target")
    assert "needs about 170 more examples" in runner.invoke(app, given).output
    store.add(texts("more", 250), "target")
    store.close()
    assert "has enough examples" in runner.invoke(app, given).output


def test_drafts_of_several_models_are_managed_by_name(tmp_path: Path) -> None:
    folders = {name: str(tmp_path / name) for name in ("draft", "fast")}
    pools = {name: {"model": f"org/{name}", "learning": {"folder": folder}} for name, folder in folders.items()}
    models = {"a": {"model": {"target": "org/a"}}, "b": {"model": {"target": "org/b"}, "draft": "fast"}}
    path = tmp_path / "several.yaml"
    path.write_text(yaml.safe_dump({"models": models, "draft": pools["draft"], "drafts": {"fast": pools["fast"]}}))
    for name, folder in folders.items():
        store = ExampleStore.of(LearningOptions(folder=folder))
        store.add(texts(name, 10), "target")
        store.close()
        for command in ("status", "history", "rollback", "promote", "forget"):
            more = {"promote": ["0"], "forget": ["--key", name]}.get(command, [])
            refused = runner.invoke(app, ["learn", command, str(path), *more])
            assert "several draft pools learn; choose one with --draft: draft, fast" in str(refused.exception)
        shown = runner.invoke(app, ["learn", "status", str(path), "--draft", name]).output
        assert f"{name}, 100% of the tokens" in shown
        deleted = runner.invoke(app, ["learn", "forget", str(path), "--draft", name, "--key", name])
        assert "10 examples deleted" in deleted.output
    unknown = runner.invoke(app, ["learn", "status", str(path), "--draft", "slow"])
    assert "choose one of draft, fast" in str(unknown.exception)
    path.write_text(yaml.safe_dump({"models": models, "draft": pools["draft"], "drafts": {"fast": {"model": "org/f"}}}))
    assert runner.invoke(app, ["learn", "status", str(path)]).exit_code == 0


@pytest.mark.parametrize("command", ["status", "history", "rollback", "promote 0", "forget --all"])
def test_a_mistyped_folder_is_refused_and_not_created(command: str, config: Path, tmp_path: Path) -> None:
    name, *more = command.split()
    folder = tmp_path / "mistyped"
    done = runner.invoke(app, ["learn", name, str(config), *more, "--set", f"draft.learning.folder={folder}"])
    assert isinstance(done.exception, ConfigError)
    assert "correct draft.learning.folder" in str(done.exception)
    assert not folder.exists()


def test_forgetting_a_mistyped_key_names_the_known_ones(config: Path, tmp_path: Path) -> None:
    store = ExampleStore.of(LearningOptions(folder=str(tmp_path / "learning")))
    store.add(texts("ours", 3), "target")
    store.close()
    known = f"--set=server.keys={{ours: {{sha256: '{64 * '0'}'}}, theirs: {{sha256: '{64 * '1'}'}}}}"
    given = ["learn", "forget", str(config), known, "--set", f"draft.learning.folder={tmp_path / 'learning'}"]
    output = runner.invoke(app, [*given, "--key", "uors"]).output
    assert "0 examples deleted\nuors is not in server.keys, whose names are: ours, theirs" in output
    assert runner.invoke(app, [*given, "--key", "theirs"]).output == "0 examples deleted\n"
    assert runner.invoke(app, [*given, "--key", "ours"]).output == "3 examples deleted\n"
