"""`slipstream up` and `slipstream down`: deploy to a running Ray cluster, and remove the deployment.

The calling process can end: Serve's controller keeps the state, as after `serve deploy`.
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.status import Status

from cluster.config import SlipstreamConfig, validated
from cluster.errors import ModelError
from serve_app.operations.checks import A_DRAFTER, Node, check_fit, check_keys, needs
from serve_app.operations.deploying import StartError, deploy, is_running, serve_details, step_text, withdraw
from serve_app.operations.local import READY_TIMEOUT_S, base_url, drain_requests
from serve_app.operations.preflight import check_models
from serve_app.operations.ray_cluster import ClusterError, alive_nodes, broadcast, connected, deployed
from serve_app.serve_manifest import APPLICATION, deploy_file, deployed_drain_s, http_options

POLL_S = 0.5
ANY_ADDRESS = "0.0.0.0"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses of a deployment; `difference` describes configured settings that the running proxies lack."""

    urls: tuple[str, ...]
    difference: str | None


def up(config: SlipstreamConfig, address: str, status: Status, *, autoscaled: bool) -> Endpoints:
    """Deploys or updates, and waits until every router reaches a target. An `autoscaled` cluster may add nodes."""
    check_keys(config.server)
    status.update(f"Connecting to the Ray cluster at {address}")
    with connected(address):
        nodes = alive_nodes()
        if not autoscaled:
            check_fit(config, nodes)
        status.update("Checking the models")
        _check_models_on_node(config, nodes)
        status.update("Starting Serve")
        serve.start(proxy_location=deploy_file(config)["proxy_location"], http_options=http_options(config))
        status.update("Starting the replicas")
        deploy(config, APPLICATION, show=lambda line: status.update(step_text("Starting the replicas", line)))
        status.update("Waiting until the routers reach a target")
        _wait_for_routers()
        return endpoints(serve_details(), config)


def down(address: str, drain_s: float | None, status: Status) -> None:
    """Removes the deployment after up to `drain_s` for running requests, by default the deployment's own setting.

    Also ends Serve if no application remains.
    """
    status.update(f"Connecting to the Ray cluster at {address}")
    with connected(address):
        applications = serve_details()["applications"] if is_running() else {}
        if APPLICATION not in applications:
            names = ", ".join(applications) or "none"
            raise ClusterError(f"no {APPLICATION} is deployed at '{address}'; applications there: {names}")
        status.update("Letting running requests finish")
        drain_requests(drain_s if drain_s is not None else _deployed_drain_s(applications[APPLICATION]))
        status.update("Stopping")
        withdraw(APPLICATION)
        if not serve.status().applications:
            serve.shutdown()


def _check_models_on_node(config: SlipstreamConfig, nodes: Iterable[Node]) -> None:
    """Checks the models on a node that can hold a drafter, since the calling machine may lack them."""
    drafters = [need for need in needs(config) if need.pool == A_DRAFTER]
    drafter_node = next((node for node in nodes if any(need.fits(node) for need in drafters)), None)
    if drafter_node is None:
        return
    strategy = NodeAffinitySchedulingStrategy(drafter_node.node_id, soft=False)
    try:
        ray.get(
            ray.remote(check_models)
            .options(num_cpus=0, scheduling_strategy=strategy)
            .remote(config, with_weights=False)
        )
    except RayTaskError as error:
        raise ModelError(f"on node {drafter_node.address}: {error.cause}") from error


def endpoints(details: Mapping[str, Any], config: SlipstreamConfig) -> Endpoints:
    """Returns the addresses from Serve's details; Serve keeps its first address until it ends, despite updates."""
    host = details["http_options"]["host"]
    port = details["http_options"]["port"]
    hosts = sorted({proxy["node_ip"] for proxy in details["proxies"].values()}) if host == ANY_ADDRESS else [host]
    urls = tuple(base_url(one, port) for one in hosts)
    configured = (config.server.host, config.server.port)
    if configured == (host, port):
        return Endpoints(urls, None)
    difference = (
        f"Serve was already running on {host}:{port}; to move it to {configured[0]}:{configured[1]}, end its last"
        " application with `slipstream down`, then run `slipstream up` again"
    )
    return Endpoints(urls, difference)


def _deployed_drain_s(application: Mapping[str, Any]) -> float:
    deployed_config = application.get("deployed_app_config") or {}
    drain_s = deployed_drain_s(deployed_config)
    return drain_s if drain_s is not None else validated(deployed_config.get("args", {})).server.drain_s


def _wait_for_routers() -> None:
    deadline = time.monotonic() + READY_TIMEOUT_S
    reason = "nothing"
    while time.monotonic() < deadline:
        try:
            routers = broadcast(deployed("Router", APPLICATION), "inspect")
        except (ClusterError, RayServeException, TimeoutError) as error:
            reason = str(error)
        else:
            if routers and all(router["ready"] for router in routers):
                return
            reason = "; ".join(f"{address}: {why}" for one in routers for address, why in one["refusals"].items())
        time.sleep(POLL_S)
    raise StartError(f"no router reached a target within {READY_TIMEOUT_S:.0f} s; the routers report: {reason}")
