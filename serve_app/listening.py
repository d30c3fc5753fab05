"""Where the gRPC servers of replicas listen."""

import ray

from cluster.trust.trust_options import TrustConfig

LOOPBACK = "127.0.0.1"


def listening_host(trust: TrustConfig) -> str:
    """The node's address; loopback where nobody need prove anything and the whole cluster is this machine.

    What is left, several machines and nobody trusted, is refused by whoever is told to listen there.
    """
    here = ray.util.get_node_ip_address()
    machines = {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return LOOPBACK if trust.is_off and machines == {here} else str(here)
