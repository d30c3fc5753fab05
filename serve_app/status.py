"""What a running deployment says of itself: over HTTP, and from Ray where that can be reached.

Knows nothing of how it was started.
"""

from typing import Any

from ray import serve
from rich.console import Group
from rich.table import Table

from serve_app.client import Counters, Endpoint
from serve_app.ray_cluster import ClusterError, connected
from serve_app.tables import shown, table


async def endpoint_status(url: str) -> Table:
    """Health, model and counters; raises EndpointError when nothing answers."""
    async with Endpoint.at(url) as endpoint:
        health, model, counters = await endpoint.health(), await endpoint.model(), await endpoint.counters()
    return _endpoint_table(url, health, model, counters)


def ray_status(address: str) -> Group | str:
    """Every deployment of every application on the cluster, or why there is nothing to see."""
    try:
        with connected(address):
            applications = serve.status().applications
    except ClusterError as error:
        return f"Ray: {error}"
    if not applications:
        return f"Ray: nothing is deployed on the cluster at '{address}'"
    return Group(*(_application_table(name, status) for name, status in applications.items()))


def _endpoint_table(url: str, health: dict[str, Any], model: str, counters: Counters) -> Table:
    made, tally = table(url, "what", "value"), counters.tally
    made.add_row("model", model)
    for name, value in health.items():
        made.add_row(name, str(value))
    made.add_row("running requests", str(counters.running_requests))
    made.add_row("committed tokens", str(tally.tokens))
    made.add_row("drafted, accepted", f"{tally.drafted}, {tally.accepted}")
    made.add_row("acceptance rate", shown(tally.acceptance_rate))
    made.add_row("acceptance length", shown(tally.acceptance_length))
    return made


def _application_table(name: str, application: Any) -> Table:
    made = table(f"Ray application {name}: {application.status.value}", "deployment", "status", "replicas", "message")
    for deployment, status in application.deployments.items():
        replicas = ", ".join(f"{count} {state}" for state, count in status.replica_states.items() if count)
        made.add_row(deployment, status.status.value, replicas, status.message)
    return made
