"""What was found on the nodes of a cluster, before anybody judges it. Data."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from cluster.trust.roles import PeerRole
from serve_app.operations.fitting import Node


class ModelsNeeded(Enum):
    """Whose files a node must be able to read for the replicas that it may hold."""

    NONE = "none"
    TARGET = "target"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What one node says of itself."""

    node: Node
    versions: Mapping[str, str]  # by what has them, `protocol` among them
    shared_memory: int  # bytes of /dev/shm
    port_fault: str | None  # why the HTTP port cannot be listened on; None also where nobody would listen
    model_fault: str | None  # why the models cannot serve there; None also where no replica would run
    server: str | None  # address of the node's trial gRPC server
    server_role: PeerRole  # in which it proves itself
    server_fault: str | None  # why there is none
    ray_drain_s: float  # that Ray lets its node finish once it is asked to end
    ray_auth: str  # what Ray's own ports ask for, its RAY_AUTH_MODE


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """A gRPC call from one node to another, on a connection of its own."""

    caller: str  # node ids
    called: str
    seconds: float | None  # there and back, once connected
    fault: str | None


@dataclass(frozen=True, slots=True)
class ClockReading:
    """A node's wall clock against the examiner's."""

    node_id: str
    ahead_s: float
    error_s: float  # at most: half of what the question took there and back


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All that was found."""

    nodes: tuple[Node, ...]
    found: tuple[NodeFacts, ...]
    silent: Mapping[str, str]  # why nodes said nothing, by node id
    calls: tuple[ProbeCall, ...]
    clocks: tuple[ClockReading, ...]
