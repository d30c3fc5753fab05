"""A reachable address requires API keys, or a setting that explicitly allows access without keys."""

import pytest

from cluster.config import AdminConfig, ServerConfig
from cluster.config_sections import ApiKey
from cluster.errors import ConfigError
from serve_app.operations.checks import check_keys, on_loopback
from tests.asgi_front import config_of

KEYS = {"ann": ApiKey(sha256="0" * 64)}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com"])
def test_a_public_address_without_keys_is_refused(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.keys is empty"):
        check_keys(ServerConfig(host=host))
    check_keys(ServerConfig(host=host, keys=KEYS))
    with pytest.raises(ConfigError, match=r"server\.admin\.host"):
        check_keys(ServerConfig(admin=AdminConfig(host=host)))
    check_keys(ServerConfig(host=host, insecure=True))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_loopback_address_needs_no_keys(host: str) -> None:
    check_keys(ServerConfig(host=host))


def test_a_local_server_needs_no_keys() -> None:
    config = on_loopback(
        config_of({"host": "0.0.0.0", "keys": {"ann": {"sha256": "0" * 64}}, "routers": 3, "admin": {"port": 9400}})
    )
    check_keys(config.server)
    assert (config.server.keys, config.server.routers, config.server.admin.port) == ({}, 3, 0)
