"""Where replicas are, and where their gRPC servers listen."""

import ray

from cluster.routing.ray_membership import NODE, ZONE
from cluster.trust.options import TrustConfig

LOOPBACK = "127.0.0.1"
ZONE_LABEL = "ray.io/availability-zone"  # which Ray takes from RAY_NODE_ZONE


def place() -> dict[str, str]:
    """What a replica publishes of where it runs, so that drafters are chosen near their targets."""
    context = ray.get_runtime_context()
    return {NODE: context.get_node_id(), ZONE: str(context.get_node_labels().get(ZONE_LABEL, ""))}


def listening_host(trust: TrustConfig) -> str:
    """The node's address; loopback where nobody need prove anything and the whole cluster is this machine.

    What is left, several machines and nobody trusted, is refused by whoever is told to listen there.
    """
    here = ray.util.get_node_ip_address()
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if trust.is_off and machines == {here} else str(here)
