"""Facts found on the nodes of a cluster, before they are judged. Data only."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from cluster.trust.roles import PeerRole
from serve_app.operations.capacity_check import Node


class ModelsNeeded(Enum):
    """Models whose files a node must be able to read for the replicas that it may hold."""

    NONE = "none"
    TARGET = "target"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Findings of one node about itself."""

    node: Node
    versions: Mapping[str, str]  # by component, including `protocol`
    shared_memory: int  # bytes of /dev/shm
    port_fault: str | None  # why the HTTP port cannot be bound; None also if nothing would bind it
    model_fault: str | None  # why the models cannot be served there; None also if no replica would run
    server: str | None  # address of the node's trial gRPC server
    server_role: PeerRole  # role that its credentials prove
    server_fault: str | None  # why no server could be started
    ray_drain_s: float  # time that Ray gives the node to finish after a stop request
    ray_auth: str  # authentication of Ray's own ports, its RAY_AUTH_MODE


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A gRPC call from one node to another, on its own connection."""

    caller: str  # node ids
    called: str
    seconds: float | None  # round trip, once connected
    fault: str | None


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A node's wall clock relative to the examiner's."""

    node_id: str
    ahead_s: float
    error_s: float  # upper bound: half of the round trip


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All findings."""

    nodes: tuple[Node, ...]
    found: tuple[NodeFacts, ...]
    silent: Mapping[str, str]  # why nodes did not answer, by node id
    calls: tuple[ProbeCall, ...]
    clocks: tuple[ClockReading, ...]
