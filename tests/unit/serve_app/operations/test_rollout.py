"""Tests the addresses of a deployment, and refusals before any change."""

from typing import Any

import pytest
from rich.console import Console

from cluster.config import SlipstreamConfig, validated
from cluster.errors import ConfigError
from serve_app.operations.checks import Node, check_fit
from serve_app.operations.rollout import endpoints, up


def config(**server: Any) -> SlipstreamConfig:
    return validated({"model": {"target": "t"}, "draft": {"method": "ngram"}, "server": server})


def details(host: str, port: int, *proxies: str) -> dict[str, Any]:
    by_node = {f"node{index}": {"node_ip": ip} for index, ip in enumerate(proxies)}
    return {"http_options": {"host": host, "port": port}, "proxies": by_node}


def test_an_any_address_lists_all_nodes_with_a_proxy() -> None:
    reached = endpoints(details("0.0.0.0", 80, "10.0.0.2", "10.0.0.1"), config(host="0.0.0.0", port=80))
    assert reached.urls == ("http://10.0.0.1:80", "http://10.0.0.2:80")
    assert reached.difference is None


def test_a_single_address_is_used_unchanged() -> None:
    assert endpoints(details("127.0.0.1", 8000, "10.0.0.1"), config()).urls == ("http://127.0.0.1:8000",)


def test_an_ipv6_address_is_in_brackets() -> None:
    assert endpoints(details("::1", 8000), config(host="::1")).urls == ("http://[::1]:8000",)


def test_a_running_serve_on_another_address_is_reported() -> None:
    reached = endpoints(details("127.0.0.1", 8000, "10.0.0.1"), config(port=9000))
    assert reached.urls == ("http://127.0.0.1:8000",)
    assert reached.difference is not None
    assert "running on 127.0.0.1:8000; to move it to 127.0.0.1:9000" in reached.difference


def test_a_public_address_without_keys_is_refused_before_connecting() -> None:
    with pytest.raises(ConfigError, match=r"server\.keys is empty"):
        up(config(host="0.0.0.0"), "no-such-host:1", Console(quiet=True).status(""), autoscaled=False)


def test_a_cluster_that_is_too_small_is_refused_with_everything_missing() -> None:
    with pytest.raises(ConfigError, match="cannot hold this configuration") as refusal:
        check_fit(config(), [Node("n", "10.0.0.1", {"CPU": 0.01}, {})])
    assert [line.strip().split(":")[0] for line in str(refusal.value).splitlines()[1:4]] == [
        "target.resources_per_rank",
        "draft.resources",
        "server.routers",
    ]
