"""What the replicas of a running deployment recorded last, read from a Ray cluster."""

from cluster.telemetry import Actor, unpack
from serve_app.operations.ray_cluster import broadcast, connected, deployed

DEPLOYMENTS = ("Router", "Drafter", "Target")


def live_actors(address: str, application: str) -> list[Actor]:
    """Connects to the Ray cluster at `address` and returns every replica's recording; raises ClusterError."""
    with connected(address):
        return recordings(application)


def recordings(application: str) -> list[Actor]:
    """Returns every replica's recording on the connected cluster."""
    packed = [one for deployment in DEPLOYMENTS for one in broadcast(deployed(deployment, application), "trace")]
    return [unpack(one) for one in packed]
