"""Membership as published by Ray Serve's controller; the only file of this package that imports Ray.

Each replica announces its gRPC address through Serve's `record_replica_metadata` hook; the controller pushes the set of
running replicas to every handle. Ray 2.60 has no public call that reads that set from a handle. This file therefore
reads private attributes, and the project pins Ray's minor version.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.routing.membership import Endpoint, Members

ADDRESS = "grpc_address"  # keys in the replica metadata
NODE = "node"
ZONE = "zone"
COSTS = "costs"  # costs measured at startup, as JSON: `ForwardCost` of a target, `DraftCost` of a drafter


class ServeMembership:
    """Reads both pools from their deployment handles. It makes no remote call: the controller pushes changes."""

    def __init__(self, targets: DeploymentHandle[Any], drafters: DeploymentHandle[Any]) -> None:
        self._targets = targets
        self._drafters = drafters

    async def current(self) -> Members:
        return Members(_endpoints(self._targets), _endpoints(self._drafters))


def addresses(handle: DeploymentHandle[Any]) -> frozenset[str]:
    """Returns the addresses of one pool's running replicas, without a remote call; none before the controller's first
    push.

    The first use of a handle makes the controller push changes to it.
    """
    return frozenset(endpoint.address for endpoint in _endpoints(handle))


def running_replicas(handle: DeploymentHandle[Any]) -> frozenset[str]:
    """Returns the ids of the replicas that Serve sends requests to, without a remote call."""
    return frozenset(str(replica.replica_id) for replica in _replicas(handle))


def _endpoints(handle: DeploymentHandle[Any]) -> tuple[Endpoint, ...]:
    return tuple(_endpoint(str(replica.replica_id), replica.replica_metadata) for replica in _replicas(handle))


def _endpoint(replica: str, metadata: Mapping[str, str]) -> Endpoint:
    """Builds an endpoint; replicas of an earlier version do not report a node or zone."""
    return Endpoint(replica, metadata[ADDRESS], metadata.get(NODE, ""), metadata.get(ZONE, ""))


def _replicas(handle: DeploymentHandle[Any]) -> list[Any]:
    request_router = handle._init_router()._asyncio_router.request_router
    if request_router is None:
        return []  # the controller has not pushed anything yet
    return list(request_router.curr_replicas.values())
