"""Families of replicas of Ray Serve: which replica they are of, and how all of a deployment are asked for theirs."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.publishing.packed_families import pack_families, unpack_families
from serve_app.publishing.vllm_names import with_labels
from serve_app.publishing.whole_exposition import Gather


def packed(families: Iterable[Metric]) -> bytes:
    """With the labels that Serve gives to a replica's metrics among Ray's; small, for Ray carries it in its reply."""
    context = serve.get_replica_context()
    labels = {"deployment": context.deployment, "replica": context.replica_tag, "application": context.app_name}
    return pack_families(with_labels(families, labels))


def own_deployment() -> DeploymentHandle[Any]:
    """The deployment that this replica is of."""
    context = serve.get_replica_context()
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(context.deployment, context.app_name)
    return handle


def replicas_metrics(pool: DeploymentHandle[Any]) -> Gather:
    """Asks each replica of a deployment for its `metrics`."""

    async def ask() -> Sequence[Sequence[Metric]]:
        answers: Sequence[bytes | Exception]
        answers = await pool.broadcast("metrics").results_async(return_exceptions=True)  # some may just be leaving
        return [unpack_families(answer) for answer in answers if isinstance(answer, bytes)]

    return ask
