"""Labels the metric families of Ray Serve replicas, and collects those of a whole deployment."""

from collections.abc import Iterable, Sequence
from typing import Any

from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.publishing.aggregate_metrics import Families, Gather, pack_families, unpack_families, with_labels


def packed(families: Iterable[Metric]) -> bytes:
    """Adds Serve's labels of this replica, and encodes the families for transfer."""
    context = serve.get_replica_context()
    labels = {"deployment": context.deployment, "replica": context.replica_tag, "application": context.app_name}
    return pack_families(with_labels(families, labels))


def own_deployment() -> DeploymentHandle[Any]:
    """Returns a handle to this replica's deployment."""
    context = serve.get_replica_context()
    handle: DeploymentHandle[Any] = serve.get_deployment_handle(context.deployment, context.app_name)
    return handle


def replicas_metrics(pool: DeploymentHandle[Any]) -> Gather:
    """Returns a function that collects the metrics of all replicas of a deployment."""

    async def ask() -> Families:
        answers: Sequence[bytes | Exception]
        answers = await pool.broadcast("metrics").results_async(return_exceptions=True)  # stopping replicas fail
        return [unpack_families(answer) for answer in answers if isinstance(answer, bytes)]

    return ask
