"""Serve reads the manifest for `serve deploy` and finds the configuration in it."""

from pathlib import Path

import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from typer.testing import CliRunner

from cluster.config import validated
from cluster.errors import ConfigError
from serve_app.cli.main import app
from serve_app.operations.deploying import application_schema
from serve_app.serve_manifest import deploy_file, with_default_routers

CONFIG = """
model: {target: owner/target}
draft: {method: ngram, replicas: {min: 0, max: 2}}
server: {host: 0.0.0.0, port: 8123, keep_alive_s: 30, insecure: true}
"""


def test_the_printed_file_equals_what_up_deploys(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    printed = CliRunner().invoke(app, ["config", "serve", str(path), "--set", "server.port=8124"])
    assert printed.exit_code == 0
    schema = ServeDeploySchema.model_validate(yaml.safe_load(printed.stdout))
    config = validated(yaml.safe_load(CONFIG.replace("8123", "8124")))
    assert [one.model_dump(exclude_unset=True) for one in schema.applications] == [
        application_schema(config, "slipstream", "/").model_dump(exclude_unset=True)
    ]
    assert (schema.http_options.host, schema.http_options.port, schema.http_options.keep_alive_timeout_s) == (
        "0.0.0.0",
        8124,
        30,
    )
    assert schema.proxy_location == "EveryNode"


@pytest.mark.parametrize(("cpus", "routers"), [(0, 1), (2, 1), (15.5, 1), (16, 2), (33, 4), (512, 4)])
def test_the_number_of_routers_follows_the_cluster_unless_configured(cpus: float, routers: int) -> None:
    config = validated(yaml.safe_load(CONFIG))
    assert with_default_routers(config, cpus).server.routers == routers
    configured = validated(yaml.safe_load(CONFIG.replace("insecure", "routers: 1, insecure")))
    assert with_default_routers(configured, cpus).server.routers == 1


def test_a_public_address_without_keys_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG.replace("insecure: true", "insecure: false"))
    refused = CliRunner().invoke(app, ["config", "serve", str(path)])
    assert isinstance(refused.exception, ConfigError)
    assert "server.keys is empty" in str(refused.exception)
    assert refused.stdout == ""


def test_port_zero_is_refused() -> None:
    config = validated(yaml.safe_load(CONFIG.replace("8123", "0")))
    with pytest.raises(ConfigError, match=r"server\.port is 0"):
        deploy_file(config)
