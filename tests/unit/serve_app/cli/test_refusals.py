"""`config check --models` refuses unsupported models with exit status 2 and one line: reason, then remedy."""

import shutil
import sys
from pathlib import Path

import pytest

from serve_app.cli.main import main
from tests.broken_checkpoints import DESCRIPTIONS, FILES, Form, config_lines, edit_config, good_checkpoint

FORMS = DESCRIPTIONS | FILES


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_checkpoint(tmp_path_factory.mktemp("good"))


def check(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Runs `slipstream config check --models`; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["slipstream", "config", "check", "--models", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_an_unservable_model_is_one_line_with_a_remedy(
    form: Form, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = shutil.copytree(good, tmp_path / "broken")
    form.edit(broken)
    config = tmp_path / "config.yaml"
    config.write_text(config_lines(good, broken) if form.is_draft else config_lines(broken))
    capsys.readouterr()  # discards transformers' progress bar
    status = check(monkeypatch, str(config), *[f"--set={override}" for override in form.overrides])
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert status == 2
    assert printed.out == ""
    assert line.startswith("error: ")
    assert form.reason in line
    assert form.remedy in line
    assert line.index(form.reason) < line.rindex(form.remedy)


def test_a_servable_model_is_described(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(config_lines(good, good))
    assert check(monkeypatch, str(config)) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"target: LlamaForCausalLM in {good}, context 256 by the lean decoder, 259 tokens in 259 rows",
        "text ends with token 256 (generation_config.json)",
        f"draft: draft_model, LlamaForCausalLM in {good}, context 256 by the lean decoder",
        "pair: same vocabulary",
        f"{config} is valid",
    ]


def test_a_shorter_draft_context_is_described(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draft = shutil.copytree(good, tmp_path / "draft")
    edit_config(max_position_embeddings=64)(draft)
    config = tmp_path / "config.yaml"
    config.write_text(config_lines(good, draft))
    assert check(monkeypatch, str(config)) == 0, capsys.readouterr().err
    assert "draft: none for sessions of more than 64 tokens" in capsys.readouterr().out
