"""A connection to a running Ray cluster, while a block of code needs it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatus

from cluster.errors import SlipstreamError
from serve_app.operations.capacity_check import Node

FOUND_BY_RAY = ("auto", "local")
CONNECT_S = 3.0  # Ray itself would try for more than a minute
ANSWER_S = 20.0


class ClusterError(SlipstreamError):
    """There is no Ray cluster, or nobody in it answers."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Raises ClusterError within seconds when nothing listens at `address`."""
    check_reachable(address)
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:  # RuntimeError: the cluster refuses our token
        raise ClusterError(f"no Ray cluster can be reached at '{address}': {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        disconnect()


def disconnect() -> None:
    """Leaves the cluster, and ends it if it was started here.

    The threads of Serve's handles go on otherwise, and start a cluster of their own for what they have to report. Serve
    has no public call that ends them and leaves the applications alone.
    """
    client = _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    if client is not None:
        client.shutdown_cached_handles()
    ray.shutdown()


def check_reachable(address: str) -> None:
    """Raises ClusterError when `address` is no host:port, or no gRPC server answers there."""
    if address in FOUND_BY_RAY:
        return
    where = address.removeprefix("ray://")
    host, _, port = where.rpartition(":")
    if not (host and port.isdigit()):
        raise ClusterError(f"'{address}' is no address of a Ray cluster; expected host:port, ray://host:port or auto")
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # Ray has the certificates
    with grpc.insecure_channel(where) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
        except grpc.FutureTimeoutError as error:
            raise ClusterError(f"no Ray cluster answers at '{address}' within {CONNECT_S:.0f} s") from error


def alive_nodes() -> list[Node]:
    """Of the cluster that this process is connected to."""
    return [
        Node(one["NodeID"], one["NodeManagerAddress"], one["Resources"], one["Labels"])
        for one in ray.nodes()
        if one["Alive"]
    ]


def broadcast(handle: DeploymentHandle[Any], method: str, *args: Any) -> list[Any]:
    """Returns the answers of every replica of a deployment; none of one that is there and is scaled to none."""
    try:
        return list(handle.broadcast(method, *args).results(timeout_s=ANSWER_S))
    except (DeploymentUnavailableError, RayActorError) as error:
        if isinstance(error, DeploymentUnavailableError) and is_empty(handle):
            return []
        raise ClusterError(f"deployment {handle.deployment_name} does not answer: {error}") from error


def is_empty(handle: DeploymentHandle[Any]) -> bool:
    """Whether the deployment runs with no replica, as a draft pool may."""
    application = serve.status().applications.get(handle.app_name)
    status = application.deployments.get(handle.deployment_name) if application is not None else None
    return status is not None and status.status is DeploymentStatus.HEALTHY and not any(status.replica_states.values())


def deployed(deployment: str, application: str) -> DeploymentHandle[Any]:
    """A handle of a running deployment."""
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(deployment, application)
    return handle
