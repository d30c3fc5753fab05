"""Every unsupported architecture and broken checkpoint is refused in one line before Ray starts.

`config check --models` and `serve` must print the same line within ten seconds of CPU time.
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
MAX_CPU_S = 10.0  # CPU time, because wall time depends on the machine's load
IN_OWN_PROCESS = (
    "no config",
    "T5",
    "GGUF",
    "missing shard",
    "missing tensor",
    "AWQ",
    "no tokenizer",
    "learned positions",
)
CHECK = ("config", "check", "--models")
SERVE = ("serve", "--port", "0")
COMMAND = (sys.executable, "-c", "from serve_app.cli.main import main; main()")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return good_checkpoint(tmp_path_factory.mktemp("good"))


def refusal(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...] = ()
) -> str:
    """Runs both commands in this process; returns the one line that each prints."""
    lines = set()
    for command in (CHECK, SERVE):
        arguments = ["slipstream", *command, str(config), *[f"--set={one}" for one in overrides]]
        monkeypatch.setattr(sys, "argv", arguments)
        capsys.readouterr()
        start = time.process_time()
        with pytest.raises(SystemExit) as end:
            main()
        assert time.process_time() - start < MAX_CPU_S
        assert end.value.code == 2
        assert not ray.is_initialized()
        lines.add(only_line(capsys.readouterr().err))
    (line,) = lines
    return line


def only_line(printed: str) -> str:
    """Returns a refusal's only line: a reason, a semicolon or comma, and a remedy."""
    (line,) = printed.strip().splitlines()
    assert line.startswith("error: ")
    assert ";" in line or ", expected" in line, line
    assert "Traceback" not in line
    return line


def broken(form: Form, good: Path, folder: Path) -> Path:
    """Breaks a copy of the valid checkpoint; returns a configuration for it."""
    copy = shutil.copytree(good, folder / "broken")
    form.edit(copy)
    config = folder / "config.yaml"
    config.write_text(config_lines(good, copy) if form.is_draft else config_lines(copy))
    return config


@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_architecture_without_weights_is_refused_in_one_line(
    kind: str, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Models have default sizes; supported architectures are refused because weights are missing."""
    folder = shutil.copytree(good, tmp_path / kind)
    (folder / WEIGHTS).unlink()
    try:
        AutoConfig.for_model(kind).save_pretrained(folder)
    except (AttributeError, KeyError, StrictDataclassError, TypeError, ValueError) as error:
        pytest.skip(f"transformers has no default configuration of it: {error}")
    config = tmp_path / "config.yaml"
    config.write_text(config_lines(folder))
    print(kind, refusal(config, monkeypatch, capsys))


def serve(config: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `slipstream serve` in a child process until it exits."""
    return subprocess.run(
        [*COMMAND, *SERVE, str(config)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("name", IN_OWN_PROCESS)
def test_serve_refuses_a_broken_checkpoint_before_ray_starts(name: str, good: Path, tmp_path: Path) -> None:
    served = serve(broken(FORMS[name], good, tmp_path), RAY_TMPDIR=str(tmp_path / "ray"))
    assert served.returncode == 2
    assert FORMS[name].reason in only_line(served.stderr)
    assert not (tmp_path / "ray").exists(), "Ray was started"


def test_serve_ends_with_the_error_of_a_replica(good: Path, tmp_path: Path) -> None:
    """Only the target replica reads the weights, so only it can detect a NaN weight."""
    folder = shutil.copytree(good, tmp_path / "not finite")
    weights = load_file(folder / WEIGHTS)
    weights["lm_head.weight"][3, 4] = float("nan")
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = tmp_path / "config.yaml"
    config.write_text(config_lines(folder))
    served = serve(config, RAY_AUTH_MODE="disabled")
    assert served.returncode != 0
    last = served.stderr.strip().splitlines()[-1]
    assert "lm_head.weight" in last
    assert "NaN or infinite" in last
    assert "Traceback" not in served.stderr
