"""`slipstream learn run` with a tiny pair."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from actors.learning.versions import VersionFolder
from actors.models.checkpoint import load_model
from cluster.learning import State
from tests.byte_tokenizer import byte_tokenizer
from tests.unit.actors.learning.drafts import CPU, SHAPE
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
    assert "set it to draft_model, the only one that is trained" in str(done.exception)
