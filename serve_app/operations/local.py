"""Serves a configuration during a block of code, on a new local Ray cluster or an existing cluster."""

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from rich.console import Console
from rich.status import Status

from cluster.config import SlipstreamConfig
from cluster.errors import ConfigError
from serve_app.api.proxy_errors import PROXY_ENVIRONMENT
from serve_app.operations.checks import check_fit, check_keys, check_resources, demand
from serve_app.operations.deploying import StartError, deploy, is_running, serve_details, step_text, withdraw
from serve_app.operations.ray_cluster import (
    ClusterError,
    alive_nodes,
    broadcast,
    check_reachable,
    deployed,
    disconnect,
)
from serve_app.serve_manifest import APPLICATION, ROUTER_SHUTDOWN_S, http_options

log = logging.getLogger(__name__)

OBJECT_STORE_BYTES = 100 << 20  # bytes; only Ray's own messages use the store
READY_TIMEOUT_S = 60.0  # seconds from deployment until a target is reached
POLL_S = 0.1
STARTS = 2  # attempts; Ray's processes may exceed their start limits on a busy machine


@contextmanager
def serving(
    config: SlipstreamConfig, console: Console, *, address: str | None = None, verbose: bool = False
) -> Iterator[str]:
    """Yields the base URL once requests are answered. SIGTERM, like Ctrl-C, raises KeyboardInterrupt in the block.

    On exit, stops everything after up to `server.drain_s` for running requests. Raises ConfigError if the cluster at
    `address` already runs a deployment.
    """
    check_keys(config.server)
    options = _proxy_options(config, address)
    with console.status("Starting") as status, _cluster(config, address, status, verbose):
        serve.start(proxy_location="HeadOnly", http_options=options)
        url = _local_url(serve_details()["http_options"])  # a running Serve keeps its address
        try:
            status.update("Loading the models")
            deploy(config, APPLICATION, show=lambda line: status.update(step_text("Loading the models", line)))
            wait_until_ready(url)
            status.stop()
            try:
                yield url
            finally:
                status.start()
                status.update("Letting running requests finish")
                drain_requests(config.server.drain_s)
        finally:
            status.update("Stopping")
            withdraw(APPLICATION)


def _proxy_options(config: SlipstreamConfig, address: str | None) -> dict[str, Any]:
    """Returns the options of Serve's proxies; only a local cluster may use any free port."""
    if address is not None:
        return http_options(config)
    server = config.server
    listening = server.model_copy(update={"port": checked_port(server.host, server.port)})
    return http_options(config.model_copy(update={"server": listening}))


def _local_url(options: Mapping[str, Any]) -> str:
    """Returns the URL of Serve's proxy on this machine."""
    host: str = options["host"]
    return base_url("127.0.0.1" if host == "0.0.0.0" else host, options["port"])


@contextmanager
def _cluster(config: SlipstreamConfig, address: str | None, status: Status, verbose: bool) -> Iterator[None]:
    level = logging.INFO if verbose else logging.ERROR
    logging.getLogger("ray.serve").setLevel(level)
    try:
        if address is None:
            status.update("Starting a local Ray cluster")
            _start_ray(config, level, verbose)
        else:
            status.update(f"Connecting to the Ray cluster at {address}")
            _connect_ray(config, address, level, verbose)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # set after Ray, which installs its own handler
        yield
    finally:
        disconnect()


def _start_ray(config: SlipstreamConfig, level: int, verbose: bool) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray's default of 15 would also slow down models
    for variable, value in PROXY_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    # Ray only counts cores. Declare enough for pools larger than the machine, which then share its cores.
    cpus = max(os.cpu_count() or 1, math.ceil(demand(config, lambda replicas: replicas.max)["CPU"]))
    for starts_left in reversed(range(STARTS)):
        try:
            ray.init(
                address="local",
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                logging_level=level,
                log_to_driver=verbose,
            )
            break
        except Exception as error:  # Ray raises plain Exception if its processes start too slowly
            if not starts_left:
                logs = "see Ray's latest logs, by default in /tmp/ray/session_latest/logs"
                raise StartError(f"Ray did not start on this machine: {error}; {logs}") from error
            log.warning("Ray did not start; trying once more: %s", error)
    check_resources(config, ray.cluster_resources())


def _connect_ray(config: SlipstreamConfig, address: str, level: int, verbose: bool) -> None:
    check_reachable(address)
    try:
        ray.init(address=address, logging_level=level, log_to_driver=verbose)
    except ConnectionError as error:
        raise StartError(f"there is no Ray cluster at {address}: {error}") from error
    _check_not_deployed(address)
    check_fit(config, alive_nodes())


def _check_not_deployed(address: str) -> None:
    """Raises ConfigError if the cluster already runs the application, which would be replaced and then removed."""
    if is_running() and APPLICATION in serve_details()["applications"]:
        raise ConfigError(
            f"{APPLICATION} is already deployed on the Ray cluster at '{address}'; remove it with `slipstream down`,"
            " measure it with `slipstream bench --url URL --rate 1`, or leave out --address and RAY_ADDRESS to start a"
            " local cluster"
        )


def wait_until_ready(url: str) -> None:
    """Waits until a router reaches a target replica of each model. Raises StartError after a time limit."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    answer = "nothing"
    while time.monotonic() < deadline:
        try:
            response = httpx.get(f"{url}/health", trust_env=False)
        except httpx.TransportError as error:
            answer = str(error)
        else:
            if response.is_success and set(response.json()["models"].values()) == {"ok"}:
                return
            answer = response.text
        time.sleep(POLL_S)
    raise StartError(f"{url}/health did not become ok within {READY_TIMEOUT_S:.0f} s; last answer: {answer}")


def drain_requests(drain_s: float) -> None:
    """Makes routers refuse new requests, and waits for running ones up to the drain time."""
    _refuse_new_requests(drain_s)
    _drain(drain_s + ROUTER_SHUTDOWN_S)


def _refuse_new_requests(drain_s: float) -> None:
    """Makes every router refuse new requests; logs a warning if the routers do not answer."""
    try:
        broadcast(deployed("Router", APPLICATION), "drain", drain_s)
    except (ClusterError, RayServeException, TimeoutError) as error:
        log.warning("could not stop the routers from accepting requests: %s", error)


def _drain(limit_s: float) -> None:
    """Waits until no router has requests, no router answers, or the time limit is reached."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            routers = broadcast(deployed("Router", APPLICATION), "inspect")
        except TimeoutError:
            continue
        except (ClusterError, RayServeException) as error:
            log.warning("no router answers; not waiting for running requests: %s", error)
            return
        if all(router["idle"] for router in routers):
            return
        time.sleep(POLL_S)


def base_url(host: str, port: int) -> str:
    """Returns the URL of a server; IPv6 addresses are in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def checked_port(host: str, port: int) -> int:
    """Returns the port; for 0, a free one. Raises ConfigError if the port is in use."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # allows ports of closed connections
        try:
            probe.bind((host, port))
        except OSError as error:
            place = f"{host}:{port} ({error.strerror})"
            raise ConfigError(f"server.port: cannot listen on {place}; choose another port, as with --port") from error
        return int(probe.getsockname()[1])
