"""Connects to a running Ray cluster, and reads replicas' answers, recordings and measured costs.

`cost_model` builds the input of `slipstream plan --costs` from replicas' measurements at startup and from their
recordings.
"""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median, quantiles
from typing import Any

import grpc
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.context import _get_global_client
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import DeploymentStatus

from cluster.autoscaling import DRAFTER, TARGET, kind_of
from cluster.costs import CostModel, DraftCost, ForwardCost
from cluster.errors import SlipstreamError
from cluster.speculation.estimators import AcceptanceCounts
from cluster.telemetry import Actor, Span, spans, unpack
from serve_app.operations.checks import Node

RAY_ADDRESSES = ("auto", "local")
CONNECT_S = 3.0  # seconds; Ray itself would try for over a minute
ANSWER_S = 20.0


class ClusterError(SlipstreamError):
    """Raised if no Ray cluster is found, or a deployment does not answer."""


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects for the duration of the block. Raises ClusterError within seconds if nothing listens at `address`."""
    check_reachable(address)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # Serve's handles log at level INFO
    try:
        ray.init(address=address, logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:  # RuntimeError: our token was refused
        raise ClusterError(f"no Ray cluster can be reached at '{address}': {str(error).splitlines()[0]}") from error
    try:
        yield
    finally:
        disconnect()


def disconnect() -> None:
    """Disconnects from the cluster; stops it if this process started it.

    Also ends the threads of Serve's handles, which would otherwise start a new cluster. Serve has no public call that
    ends these threads without ending applications.
    """
    client = _get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None
    if client is not None:
        client.shutdown_cached_handles()
    ray.shutdown()


def check_reachable(address: str) -> None:
    """Raises ClusterError if `address` is not host:port or if no gRPC server answers there."""
    if address in RAY_ADDRESSES:
        return
    where = address.removeprefix("ray://")
    host, _, port = where.rpartition(":")
    if not (host and port.isdigit()):
        raise ClusterError(f"'{address}' is not a Ray address; expected host:port, ray://host:port or auto")
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return  # only Ray has the certificates
    with grpc.insecure_channel(where) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_S)
        except grpc.FutureTimeoutError as error:
            raise ClusterError(f"no Ray cluster at '{address}' answered within {CONNECT_S:.0f} s") from error


def alive_nodes() -> list[Node]:
    """Returns the live nodes of the connected cluster."""
    return [
        Node(one["NodeID"], one["NodeManagerAddress"], one["Resources"], one["Labels"])
        for one in ray.nodes()
        if one["Alive"]
    ]


def broadcast(handle: DeploymentHandle[Any], method: str, *args: Any) -> list[Any]:
    """Calls a method of all replicas of a deployment and returns their answers; empty if it is scaled to zero."""
    try:
        return list(handle.broadcast(method, *args).results(timeout_s=ANSWER_S))
    except (DeploymentUnavailableError, RayActorError) as error:
        if isinstance(error, DeploymentUnavailableError) and is_empty(handle):
            return []
        raise ClusterError(f"deployment {handle.deployment_name} does not answer: {error}") from error


def is_empty(handle: DeploymentHandle[Any]) -> bool:
    """Returns whether the deployment is scaled to zero, as a draft pool may be."""
    application = serve.status().applications.get(handle.app_name)
    status = application.deployments.get(handle.deployment_name) if application is not None else None
    return status is not None and status.status is DeploymentStatus.HEALTHY and not any(status.replica_states.values())


def deployed(deployment: str, application: str) -> DeploymentHandle[Any]:
    """Returns a handle to a running deployment."""
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(deployment, application)
    return handle


def live_actors(address: str, application: str) -> list[Actor]:
    """Returns the recordings of all replicas on the Ray cluster at `address`. Raises ClusterError."""
    with connected(address):
        return recordings(application)


def recordings(application: str) -> list[Actor]:
    """Returns the recordings of all replicas on the connected cluster."""
    return [unpack(one) for one in _ask_all(application, "trace", "Router", DRAFTER, TARGET)]


def _ask_all(application: str, method: str, *kinds: str) -> list[Any]:
    """Calls a method of all replicas of the given kinds of deployment, such as all target pools."""
    overview = serve.status().applications.get(application)
    if overview is None:
        raise ClusterError(f"no {application} is deployed on the Ray cluster; deploy it with `slipstream up`")
    names = [name for name in overview.deployments if kind_of(name) in kinds]
    try:
        return [answer for name in names for answer in broadcast(deployed(name, application), method)]
    except TimeoutError as error:
        raise ClusterError(
            f"a replica of {application} did not answer within {ANSWER_S:.0f} s; try again when it is less busy"
        ) from error


HOPS = ("send", "return")  # spans that cover the transport of a message


def live_costs(address: str, application: str) -> CostModel:
    """Returns the costs of a running deployment. Raises ClusterError if it cannot be reached."""
    with connected(address):
        actors = recordings(application)
        targets, drafters = (_ask_all(application, "inspect", kind) for kind in (TARGET, DRAFTER))
    return cost_model(targets, drafters, actors)


def cost_model(
    targets: Iterable[Mapping[str, Any]], drafters: Iterable[Mapping[str, Any]], actors: Sequence[Actor]
) -> CostModel:
    """Builds a fleet's cost model from its replicas' answers to `inspect` and their recordings.

    Uses the median replica of each pool, the median message time, and the acceptance over all blocks. A step includes
    the time until the next step.
    """
    targets = list(targets)
    steps = [(ForwardCost.model_validate_json(one["costs"]), _non_speculative(one)) for one in targets]
    passes = [DraftCost.model_validate_json(one["costs"]) for one in drafters]
    if not (steps and passes):
        raise ClusterError("no replica has published its costs yet; wait until a target and a drafter are running")
    target, non_speculative = sorted(steps, key=lambda costs: _one_token_s(costs[0]))[len(steps) // 2]
    draft = sorted(passes, key=_one_token_s)[len(passes) // 2]
    all_spans = spans(actors)
    target = target.plus(_between_steps_s(all_spans))
    costs = CostModel(
        target=target,
        draft=draft,
        non_speculative=non_speculative,
        acceptance=_acceptance(targets),
        host_step_s=0.0,  # part of the measured steps
        host_row_s=0.0,
    )
    hops = [span.ended_s - span.began_s for span in all_spans if span.name in HOPS]
    return costs.model_copy(update={"hop_s": max(0.0, median(hops))}) if hops else costs


def _non_speculative(target: Mapping[str, Any]) -> ForwardCost | None:
    published = target["non_speculative_costs"]
    return None if published is None else ForwardCost.model_validate_json(published)


def _acceptance(targets: Iterable[Mapping[str, Any]]) -> tuple[float, ...] | None:
    """Returns acceptance by position in a block, or None if too few blocks were verified."""
    counts = [AcceptanceCounts(**one["acceptance"]) for one in targets]
    return sum(counts, AcceptanceCounts()).by_position() or None


def _between_steps_s(all_spans: Sequence[Span]) -> float:
    """Returns the lower quartile of the seconds between steps, which excludes waits for work."""
    gaps: list[float] = []
    for actor in {span.actor for span in all_spans}:
        steps = [span for span in all_spans if span.actor == actor and span.name == "verify"]
        gaps += [max(0.0, later.began_s - earlier.ended_s) for earlier, later in pairwise(steps)]
    return quantiles(gaps, n=4)[0] if len(gaps) > 1 else 0.0


def _one_token_s(cost: ForwardCost | DraftCost) -> float:
    """Returns the seconds for one token, used to compare replicas of a pool."""
    return cost.seconds(1, 1)
