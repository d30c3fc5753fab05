"""Reads membership from Ray Serve's controller; the only module of this package that imports Ray.

Each replica announces its gRPC address through Serve's `record_replica_metadata` hook; the controller pushes the set of
running replicas to every handle. Ray 2.60 has no public API to read that set from a handle. This module therefore reads
private attributes, and the project pins Ray's minor version.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.routing.membership import Endpoint, Members

ADDRESS = "grpc_address"  # keys of the replica metadata
NODE = "node"
ZONE = "zone"
COSTS = "costs"  # measured startup costs as JSON: `ForwardCost` (target) or `DraftCost` (drafter)
TRANSLATES = "translates"  # drafters only: not empty if the draft's tokenizer differs from the target's


class ServeMembership:
    """Reads both pools from their deployment handles, without remote calls, because the controller pushes changes."""

    def __init__(self, targets: DeploymentHandle[Any], drafters: DeploymentHandle[Any]) -> None:
        self._targets = targets
        self._drafters = drafters

    async def current(self) -> Members:
        return Members(_endpoints(self._targets), _endpoints(self._drafters))


def addresses(handle: DeploymentHandle[Any]) -> frozenset[str]:
    """Returns the addresses of a pool's running replicas, without a remote call; empty before the controller's first
    push.

    The first use of a handle subscribes it to the controller's pushes.
    """
    return frozenset(endpoint.address for endpoint in _endpoints(handle))


def running_replicas(handle: DeploymentHandle[Any]) -> frozenset[str]:
    """Returns the ids of the replicas to which Serve routes requests, without a remote call."""
    return frozenset(str(replica.replica_id) for replica in _replicas(handle))


def _endpoints(handle: DeploymentHandle[Any]) -> tuple[Endpoint, ...]:
    return tuple(_endpoint(str(replica.replica_id), replica.replica_metadata) for replica in _replicas(handle))


def _endpoint(replica: str, metadata: Mapping[str, str]) -> Endpoint:
    """Builds an endpoint; replicas of older versions report neither node nor zone."""
    place = (metadata.get(NODE, ""), metadata.get(ZONE, ""))
    return Endpoint(replica, metadata[ADDRESS], *place, translates=bool(metadata.get(TRANSLATES)))


def _replicas(handle: DeploymentHandle[Any]) -> list[Any]:
    request_router = handle._init_router()._asyncio_router.request_router
    if request_router is None:
        return []  # before the controller's first push
    return list(request_router.curr_replicas.values())
