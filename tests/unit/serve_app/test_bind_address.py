"""Replicas bind to loopback only on a single-machine cluster without authentication."""

import pytest
import ray

from cluster.config_sections import TrustConfig
from serve_app.startup import listening_host

HERE = "10.0.0.1"


@pytest.mark.parametrize(
    ("trust", "others", "expected"),
    [
        ({}, [], "127.0.0.1"),
        ({}, [("10.0.0.2", True)], HERE),
        ({}, [("10.0.0.2", False), (HERE, True)], "127.0.0.1"),
        ({"insecure": True}, [], HERE),
        ({"token_file": "/t"}, [], HERE),
        ({"certificates": "/c"}, [], HERE),
    ],
)
def test_loopback_is_used_only_on_a_single_node(trust, others, expected, monkeypatch):
    nodes = [{"NodeManagerAddress": address, "Alive": alive} for address, alive in [(HERE, True), *others]]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: HERE)
    assert listening_host(TrustConfig(**trust)) == expected
