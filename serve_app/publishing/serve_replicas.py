"""Metric families of Ray Serve replicas: labels of the own replica, and collection from a whole deployment."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.publishing.aggregate_metrics import Gather, pack_families, unpack_families, with_labels


def packed(families: Iterable[Metric]) -> bytes:
    """Packs families with the labels that Serve gives a replica's metrics; compact, for Ray's reply."""
    context = serve.get_replica_context()
    labels = {"deployment": context.deployment, "replica": context.replica_tag, "application": context.app_name}
    return pack_families(with_labels(families, labels))


def own_deployment() -> DeploymentHandle[Any]:
    """Returns a handle to the deployment of this replica."""
    context = serve.get_replica_context()
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(context.deployment, context.app_name)
    return handle


def replicas_metrics(pool: DeploymentHandle[Any]) -> Gather:
    """Returns a function that calls `metrics` on each replica of a deployment."""

    async def ask() -> Sequence[Sequence[Metric]]:
        answers: Sequence[bytes | Exception]
        answers = await pool.broadcast("metrics").results_async(return_exceptions=True)  # some may be shutting down
        return [unpack_families(answer) for answer in answers if isinstance(answer, bytes)]

    return ask
