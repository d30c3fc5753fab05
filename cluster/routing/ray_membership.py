"""Membership as Ray Serve's controller publishes it: the one place in this package that knows Ray.

Each replica announces its gRPC address through Serve's `record_replica_metadata` hook; the controller pushes the
set of running replicas to every handle. Reading that set off a handle has no public call in Ray 2.60, hence the
private attributes here and nowhere else, and the pinned minor version.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.routing.membership import Endpoint, Members

ADDRESS = "grpc_address"  # keys in the replica metadata
NODE = "node"
ZONE = "zone"
COSTS = "costs"  # what it measured at its start, as JSON: `ForwardCost` of a target, `DraftCost` of a drafter


class ServeMembership:
    """Reads both pools off their deployment handles; costs no call, the controller pushes changes."""

    def __init__(self, targets: DeploymentHandle[Any], drafters: DeploymentHandle[Any]) -> None:
        self._targets = targets
        self._drafters = drafters

    async def current(self) -> Members:
        return Members(_endpoints(self._targets), _endpoints(self._drafters))


def addresses(handle: DeploymentHandle[Any]) -> frozenset[str]:
    """Where one pool's running replicas can be dialled, without a call; none before the controller is heard of.

    The first time is what has the controller push changes.
    """
    return frozenset(endpoint.address for endpoint in _endpoints(handle))


def _endpoints(handle: DeploymentHandle[Any]) -> tuple[Endpoint, ...]:
    return tuple(_endpoint(str(replica.replica_id), replica.replica_metadata) for replica in _replicas(handle))


def _endpoint(replica: str, metadata: Mapping[str, str]) -> Endpoint:
    """A replica of an earlier version says nothing of its place."""
    return Endpoint(replica, metadata[ADDRESS], metadata.get(NODE, ""), metadata.get(ZONE, ""))


def _replicas(handle: DeploymentHandle[Any]) -> list[Any]:
    request_router = handle._init_router()._asyncio_router.request_router
    if request_router is None:
        return []  # the controller has not been heard of yet
    return list(request_router.curr_replicas.values())
