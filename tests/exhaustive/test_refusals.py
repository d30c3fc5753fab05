"""Every architecture that transformers knows, and every broken checkpoint: served, or refused in one line before Ray.

`config check --models` ends within ten seconds of computing, whatever the folder holds, and `serve` ends the same way.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from serve_app.cli.main import main
from tests.broken_checkpoints import DESCRIPTIONS, FILES, WEIGHTS, Form, config_lines, good_checkpoint

FORMS = DESCRIPTIONS | FILES
MOST_S = 10.0  # of computing; a busy machine takes longer
SERVED = ("no config", "T5", "GGUF", "missing shard", "missing tensor", "AWQ", "no tokenizer", "learned positions")
COMMAND = (sys.executable, "-c", "from serve_app.cli.main import main; main()")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_checkpoint(tmp_path_factory.mktemp("good"))


def check(config: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> int:
    """Runs `slipstream config check --models` in this process; returns its exit status."""
    arguments = ["slipstream", "config", "check", "--models", str(config), *[f"--set={one}" for one in overrides]]
    monkeypatch.setattr(sys, "argv", arguments)
    began = time.process_time()
    status = 0
    try:
        main()
    except SystemExit as end:
        status = int(end.code or 0)
    assert time.process_time() - began < MOST_S
    assert not ray.is_initialized()
    return status


def the_line(printed: str) -> str:
    """The only line of a refusal: a reason, and after a semicolon or a comma what to do."""
    (line,) = printed.strip().splitlines()
    assert line.startswith("error: ")
    assert ";" in line or ", expected" in line, line
    assert "Traceback" not in line
    return line


def broken(form: Form, good: Path, folder: Path) -> Path:
    """Breaks a copy of the good checkpoint; returns the configuration that names it."""
    copy = shutil.copytree(good, folder / "broken")
    form.edit(copy)
    config = folder / "config.yaml"
    config.write_text(config_lines(good, copy) if form.is_draft else config_lines(copy))
    return config


@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_architecture_is_described_or_refused_in_one_line(
    kind: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the sizes that its configuration has by default, without weights: those are missed once the class is right."""
    folder = shutil.copytree(good, tmp_path / kind)
    (folder / WEIGHTS).unlink()
    try:
        AutoConfig.for_model(kind).save_pretrained(folder)
    except (AttributeError, KeyError, StrictDataclassError, TypeError, ValueError) as error:
        pytest.skip(f"transformers has no default configuration of it: {error}")
    config = tmp_path / "config.yaml"
    config.write_text(config_lines(folder))
    capsys.readouterr()
    assert check(config, monkeypatch) == 2
    print(kind, the_line(capsys.readouterr().err))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_every_broken_checkpoint_is_refused_in_one_line(
    form: Form, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = broken(form, good, tmp_path)
    capsys.readouterr()
    assert check(config, monkeypatch, *form.overrides) == 2
    line = the_line(capsys.readouterr().err)
    assert form.reason in line
    assert form.remedy in line
    print(line)


@pytest.mark.parametrize("name", SERVED)
def test_serve_refuses_it_in_the_same_line_before_ray_starts(name: str, good: Path, tmp_path: Path) -> None:
    config = broken(FORMS[name], good, tmp_path)
    environment = os.environ | {"RAY_TMPDIR": str(tmp_path / "ray"), "OMP_NUM_THREADS": "1"}
    served = subprocess.run(
        [*COMMAND, "serve", str(config), "--port", "0"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert served.returncode == 2
    line = the_line(served.stderr)
    assert FORMS[name].reason in line
    assert not (tmp_path / "ray").exists(), "Ray was started"


def test_what_only_a_replica_finds_is_the_last_line_of_serve(good: Path, tmp_path: Path) -> None:
    """A weight that is NaN is found while the target loads it; nothing before reads the weights."""
    folder = shutil.copytree(good, tmp_path / "not finite")
    weights = load_file(folder / WEIGHTS)
    weights["lm_head.weight"][3, 4] = float("nan")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = tmp_path / "config.yaml"
    config.write_text(config_lines(folder))
    served = subprocess.run(
        [*COMMAND, "serve", str(config), "--port", "0"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert served.returncode != 0
    last = served.stderr.strip().splitlines()[-1]
    assert "lm_head.weight" in last
    assert "NaN or infinite" in last
    assert "Traceback" not in served.stderr
