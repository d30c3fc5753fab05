"""Tests `slipstream drafts`: exit statuses, output, written files and refusals."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from tests.unit.actors.drafters.heads.eagle_fixtures import TARGET, checkpoint
from tests.unit.tools.drafts.eval.tiny_target import a_target
from tools.cli import app, main


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def a_config(path: Path, target: Path, **draft: object) -> Path:
    model = {"target": str(target), "dtype": "float32", "max_context": 128}
    path.write_text(yaml.safe_dump({"model": model, "draft": draft}))
    return path


def test_a_fitting_head_is_shown_with_a_configuration() -> None:
    found = CliRunner().invoke(app, ["drafts", "inspect", str(checkpoint("eagle3")), "--target", str(TARGET)])
    assert found.exit_code == 0
    assert "SafeAILab's layout" in found.stdout
    assert "[2, 4, 5] (k: after k layers), before any norm" in found.stdout
    assert yaml.safe_load(found.stdout.partition("configure it as\n")[2])["draft"]["method"] == "eagle"


def test_a_misfit_exits_with_1_and_the_reason(tmp_path: Path) -> None:
    target = a_target(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"vocab_size": 95}))
    found = CliRunner().invoke(app, ["drafts", "inspect", str(checkpoint("eagle3")), "--target", str(target)])
    assert found.exit_code == 1
    assert "* vocabulary of the target: expected 96, found 95" in found.stdout
    assert "configure it as" not in found.stdout


def test_json_contains_all_facts() -> None:
    found = CliRunner().invoke(app, ["drafts", "inspect", str(checkpoint("medusa")), "--json"])
    data = json.loads(found.stdout)
    assert (data["fits"], data["layout"]["method"], data["proposes"]) == (True, "medusa", 96)
    assert data["bytes_a_token"] == {"drafter": {"bfloat16": 64, "float8": 36}}
    assert yaml.safe_load(data["config"])["draft"]["method"] == "medusa"


def test_options_are_applied_to_the_shown_head() -> None:
    keys = ["--set", "draft.eagle.output_norm=both", "--set", "draft.eagle.states=[1, 2, 3]"]
    found = CliRunner().invoke(app, ["drafts", "inspect", str(checkpoint("eagle3")), "--target", str(TARGET), *keys])
    assert found.exit_code == 0, found.output
    assert "norm after the last layer: logits and recycled states" in found.stdout
    assert "[1, 2, 3] (k: after k layers)" in found.stdout
    section = yaml.safe_load(found.stdout.partition("configure it as\n")[2])["draft"]["eagle"]
    assert (section["output_norm"], section["states"], section["draft_probs_top_k"]) == ("both", [1, 2, 3], 64)


@pytest.mark.parametrize(
    ("key", "reason"),
    [
        ("draft.eagle.norm=both", "draft.eagle.norm: unknown key"),
        ("draft.dflash.quantization=int8", "method eagle does not use the options in dflash"),
        ("draft.model=other", "draft.model is read from the checkpoint"),
        ("model.max_context=9", "--set only accepts keys of the section draft"),
        ("draft=eagle", "--set only accepts keys of the section draft"),
        ("draft.eagle.layer_ids", "malformed; expected section.key=value"),
    ],
)
def test_unrelated_options_exit_with_2(
    key: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "drafts", "inspect", checkpoint("eagle3"), "--set", key) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("drafts", "inspect"), ("drafts", "inspect", "/nowhere"), ("drafts", "measure")])
def test_usage_errors_exit_with_2(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_main(monkeypatch, *arguments) == 2


def test_drafts_of_different_targets_are_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = a_config(tmp_path / "one.yaml", tmp_path / "a", method="ngram")
    other = a_config(tmp_path / "other.yaml", tmp_path / "b", method="ngram")
    assert run_main(monkeypatch, "drafts", "measure", one, other) == 2
    assert "compare drafts of one target" in capsys.readouterr().err


def test_several_drafts_are_measured_together(tmp_path: Path) -> None:
    target = a_target(tmp_path / "target")
    configs = [
        a_config(tmp_path / "lookup.yaml", target, method="ngram"),
        a_config(tmp_path / "skip.yaml", target, method="layer_skip", layer_skip={"layers": 6}),
        a_config(tmp_path / "head.yaml", target, method="eagle", model=str(checkpoint("eagle3"))),
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"kind": "a", "prompt": text}) + "\n" for text in ("abcabcabc", "xyxyxy")))
    out = tmp_path / "out.json"
    picture = tmp_path / "out.svg"
    options = ["--prompts", prompts, "--tokens", 12, "--temperature", 0, "--temperature", 0.7]
    sizes = ["--block-len", 1, "--block-len", 3, "--nodes", 4, "--json", out, "--plot", picture]
    found = CliRunner().invoke(app, ["drafts", "measure", *map(str, [*configs, *options, *sizes])])
    assert found.exit_code == 0, found.output
    assert "Temperature 0.7" in found.stdout
    data = json.loads(out.read_text())
    rows = [(each["draft"], each["method"], each["temperature"], each["positions"]) for each in data["drafts"]]
    methods = {"lookup": "ngram", "skip": "layer_skip", "head": "eagle"}
    assert rows == [(name, methods[name], heat, 2 * 11) for heat in (0.0, 0.7) for name in methods]
    assert [each["states_bytes"] > 0 for each in data["drafts"]] == [False, False, True] * 2
    for each in data["drafts"]:
        assert list(each["agreement"]) == sorted(each["agreement"])
        assert 1.0 <= each["chains"]["1"] <= each["chains"]["3"] <= 4.0
    labels = {text.strip() for text in ElementTree.parse(picture).getroot().itertext()}
    lines = {f"{name}, T {heat}, {kind}" for name in methods for heat in ("0", "0.7") for kind in ("chain", "tree")}
    assert lines | {"non-speculative decoding", "block size, tokens", "tokens per verify"} <= labels
