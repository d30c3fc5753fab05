"""The command line starts quickly, and reports each error in one clear message."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NoReturn

import pytest
import ray
from typer.testing import CliRunner

from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError
from serve_app.demo_data import CONFIG
from serve_app.operations import local
from tools import cli
from tools.cli import app, main
from tools.planning import plan_report

VALID = "model: {target: some/model}\ndraft: {method: ngram}\n"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(VALID)
    return path


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["slipstream", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_schema_describes_the_configuration() -> None:
    result = CliRunner().invoke(app, ["config", "schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == SlipstreamConfig.model_json_schema()


def test_version_equals_the_packages() -> None:
    result = CliRunner().invoke(app, ["--version"])
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert (result.exit_code, result.stdout) == (0, f"slipstream {project['version']}\n")


def test_a_valid_config_passes(config_file: Path) -> None:
    result = CliRunner().invoke(app, ["config", "check", str(config_file), "--set", "target.tensor_parallel=3"])
    assert (result.exit_code, result.stdout) == (0, f"{config_file} is valid\n")


def test_the_demo_config_passes() -> None:
    assert CliRunner().invoke(app, ["config", "check", str(CONFIG)]).exit_code == 0


@pytest.mark.parametrize("name", ["server.host", "server.admin.host"])
def test_an_exposed_address_needs_keys(
    name: str, config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exposed = ("config", "check", config_file, "--set", f"{name}=0.0.0.0")
    assert run_main(monkeypatch, *exposed) == 2
    assert f"{name} is 0.0.0.0, reachable from other machines, and server.keys is empty" in capsys.readouterr().err
    assert CliRunner().invoke(app, [*map(str, exposed), "--set", "server.insecure=true"]).exit_code == 0


def test_environment_variables_override_the_file(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM__MODEL__DTYPE", "int3")
    assert run_main(monkeypatch, "config", "check", config_file) == 2


@pytest.mark.parametrize("command", ["serve", "bench", "config check"])
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target.tensor_paralel=2", "target.tensor_paralel"),
        ("target.tensor_parallel=zero", "target.tensor_parallel"),
        ("target.tensor_parallel", "malformed; expected section.key=value"),
    ],
)
def test_an_invalid_config_is_one_message_with_the_key(
    command: str,
    override: str,
    message: str,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_main(monkeypatch, *command.split(), config_file, "--set", override) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""


def test_a_missing_config_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "config", "check", "nowhere.yaml") == 2
    assert "cannot read config nowhere.yaml" in capsys.readouterr().err


def test_a_missing_model_is_refused_before_startup(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "serve", config_file, "--set", "model.target=/no/such/folder") == 2
    assert "there is no model folder /no/such/folder" in capsys.readouterr().err
    assert not ray.is_initialized()


def test_missing_prompts_are_refused_before_startup(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, "bench", config_file, "--prompts", "nowhere.jsonl") == 2
    assert "cannot read prompts nowhere.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        "bench --json",
        "bench --html",
        "drafts measure config.yaml --json",
        "drafts measure config.yaml --plot",
        "plan --json",
        "plan --plot",
        "status --costs",
        "trace",
        "trace trace.json --gantt",
    ],
)
def test_an_output_in_a_missing_folder_is_refused_before_any_work(
    arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, *arguments.split(), "missing/out") == 2
    printed = capsys.readouterr()
    assert "cannot write missing/out: there is no folder missing; create it" in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("bench --rate 1 --concurrency 2", ("--rate", "--concurrency")),
        ("bench --rate 1 --repeats 2", ("--rate", "--repeats")),
        ("bench --rate 1 --generate", ("--rate", "--generate")),
        ("bench --requests 9", ("--requests", "--rate")),
        ("bench --dataset a.jsonl --prompts b.jsonl", ("--dataset", "--prompts")),
        ("bench config.yaml --url http://localhost:1 --rate 1", ("--url", "CONFIG")),
        ("bench --url http://localhost:1 --rate 1 --set target.max_sessions=3", ("--url", "--set")),
        ("bench --url http://localhost:1 --rate 1 --port 9000", ("--url", "--port")),
        ("bench --url http://localhost:1 --rate 1 --address auto", ("--url", "--address")),
        ("bench --url http://localhost:1 --concurrency 2", ("--url", "--concurrency")),
        ("plan --theory --json plan.json", ("--theory", "--json")),
        ("plan --theory --plot plan.svg", ("--theory", "--plot")),
    ],
)
def test_an_option_without_effect_is_refused(
    arguments: str, options: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cli, "load_demo", None)
    monkeypatch.setattr(plan_report, "run_theory", None)
    assert run_main(monkeypatch, *arguments.split()) == 2
    message = capsys.readouterr().err
    assert all(option in message for option in options)
    assert "leave" in message


def test_an_address_from_the_environment_is_no_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert run_main(monkeypatch, "bench", "--url", "http://localhost:1") == 2
    assert "--url needs --rate" in capsys.readouterr().err


@pytest.mark.parametrize(("address", "port"), [([], 0), (["--address", "auto"], 8000)])
def test_bench_uses_a_free_port_only_on_a_cluster_of_its_own(
    address: list[str], port: int, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes of an existing cluster would choose different free ports."""
    ports: list[int] = []

    def refuse(config: SlipstreamConfig, *_: object, **__: object) -> None:
        ports.append(config.server.port)
        raise ConfigError("nothing is served")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cli, "check_models_of", lambda *_, **__: [])
    monkeypatch.setattr(local, "serving", refuse)
    assert run_main(monkeypatch, "bench", config_file, *address) == 2
    assert ports == [port]


def test_serve_checks_keys_and_port_before_it_loads_models(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cli, "check_models_of", pytest.fail)
    monkeypatch.setattr(local, "checked_port", refused)
    assert run_main(monkeypatch, "serve", config_file, "--set", "server.host=0.0.0.0") == 2
    assert "server.keys is empty" in capsys.readouterr().err
    assert run_main(monkeypatch, "serve", config_file) == 2
    assert "the port is in use" in capsys.readouterr().err


def refused(host: str, port: int) -> NoReturn:
    raise ConfigError("the port is in use")


def test_an_unknown_option_is_a_usage_error(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_main(monkeypatch, "serve", config_file, "--prot", "8000") == 2


@pytest.mark.parametrize("module", ["serve_app.cli.main", "tools.cli"])
def test_help_and_config_import_neither_torch_nor_ray(module: str) -> None:
    script = f"import sys, {module}; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("command", ["up", "doctor", "down"])
def test_an_invalid_address_is_one_message(
    command: str, config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(monkeypatch, command, config_file, "--address", "nowhere") == 2
    printed = capsys.readouterr()
    assert "'nowhere' is not a Ray address; expected host:port" in printed.err
    assert printed.out == ""
    assert not ray.is_initialized()
