"""Checks whether a cluster fits a configuration, from facts collected on its nodes. Pure.

Each fault names the node and states how to fix it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cluster.config import SlipstreamConfig
from cluster.config_sections import STATE_READERS
from cluster.trust import PeerRole
from serve_app.operations.checks import A_DRAFTER, A_TARGET, Node, needs, unmet_needs
from serve_app.operations.node_drain import RAY_DRAIN, drain_s


class ModelsNeeded(Enum):
    """Models that a node must be able to read for the replicas that it may hold."""

    NONE = "none"
    TARGET = "target"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts collected by the probe on one node."""

    node: Node
    versions: Mapping[str, str]  # by component, including `protocol`
    shared_memory: int  # bytes of /dev/shm
    port_fault: str | None  # error when binding the HTTP port; None if bound or not tried
    model_fault: str | None  # error when checking the models; None if valid or not needed
    server: str | None  # address of the node's trial gRPC server
    server_role: PeerRole  # role in the node's own credentials
    server_fault: str | None  # error when starting the trial server
    ray_drain_s: float  # Ray's drain time of the node, in seconds
    ray_auth: str  # RAY_AUTH_MODE, the authentication of Ray's own ports
    pairing: str = ""  # how the draft's tokens become the target's; empty if not checked


@dataclass(frozen=True, slots=True)
class ProbeCall:
    """Result of a gRPC call from one node to another, on its own connection."""

    caller: str  # node id of the caller
    called: str
    seconds: float | None  # shortest round trip in seconds, once connected
    fault: str | None


@dataclass(frozen=True, slots=True)
class ClockReading:
    """Offset of a node's wall clock from the examiner's."""

    node_id: str
    ahead_s: float
    error_s: float  # maximum error in seconds: half of the round trip


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """All facts about a cluster."""

    nodes: tuple[Node, ...]
    found: tuple[NodeFacts, ...]
    silent: Mapping[str, str]  # reason for a missing answer, by node id
    calls: tuple[ProbeCall, ...]
    clocks: tuple[ClockReading, ...]


MIB = 1 << 20
RANK_SHARED_MEMORY = 64 * MIB  # default total of a container; too small for the NCCL buffers of several ranks
MAX_CLOCK_GAP_S = 0.1
MAX_CALL_S = 0.02  # maximum round trip in seconds; targets never wait longer for drafts
COMPARED_VERSIONS = ("python", "ray", "torch", "transformers", "slipstream", "protocol")


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: a summary, and faults with their fixes."""

    name: str
    seen: str
    faults: tuple[str, ...]


def run_checks(config: SlipstreamConfig, facts: ClusterFacts) -> list[Check]:
    """Runs all checks. The cluster fits if no check has a fault."""
    names = _names(facts.nodes)
    checks: tuple[tuple[str, str, Callable[[], Iterable[str]]], ...] = (
        ("nodes", _count(facts.nodes), lambda: _unreachable(facts, names)),
        ("resources", _available_resources(facts.nodes), lambda: unmet_needs(config, facts.nodes)),
        ("versions", _versions_seen(facts.found), lambda: _versions(facts.found, names)),
        ("HTTP port", str(config.server.port), lambda: _ports(facts.found, names)),
        ("shared memory", _least_shared_memory(facts.found), lambda: _shared_memory(config, facts.found, names)),
        ("models", _models_seen(config, facts.found), lambda: _models(facts.found, names)),
        ("drain", _drains_seen(config, facts.found), lambda: _drains(config, facts.found, names)),
        ("Ray's token", _auth_seen(facts.found), lambda: _auth(config, facts.found, names)),
        ("gRPC", _calls_seen(facts.calls), lambda: _grpc(facts, names)),
        ("clocks", _clocks_seen(facts.clocks), lambda: _clocks(facts.clocks, names)),
    )
    return [Check(name, seen, tuple(faults())) for name, seen, faults in checks]


def _names(nodes: Iterable[Node]) -> dict[str, str]:
    """Returns each node's address, extended by the start of its node id if several nodes share the address."""
    nodes = list(nodes)
    addresses = [node.address for node in nodes]
    return {
        node.node_id: node.address if addresses.count(node.address) == 1 else f"{node.address} ({node.node_id[:8]})"
        for node in nodes
    }


# ------------------------------------------------------------ nodes and versions


def _unreachable(facts: ClusterFacts, names: dict[str, str]) -> Iterator[str]:
    for node_id, why in facts.silent.items():
        yield f"{names[node_id]} could not be examined: {why}; install this version of Slipstream there"


def _versions(found: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[str]:
    for name in COMPARED_VERSIONS:
        holders = defaultdict(list)
        for facts in found:
            holders[facts.versions[name]].append(names[facts.node.node_id])
        if len(holders) > 1:
            summary = "; ".join(f"{version} on {', '.join(where)}" for version, where in sorted(holders.items()))
            yield f"{name} differs: {summary}; install equal versions, preferably from one image"
    for facts in found:
        torch = facts.versions["torch"]
        if facts.node.resources.get("GPU", 0) and torch.endswith("+cpu"):
            name = names[facts.node.node_id]
            yield f"{name} has GPUs, but torch {torch} only supports CPUs; install torch for CUDA there"


def _versions_seen(found: Sequence[NodeFacts]) -> str:
    return ", ".join(f"{name} {found[0].versions[name]}" for name in COMPARED_VERSIONS) if found else "none"


# ------------------------------------------------------------ ports, memory and models of a node


def _ports(found: Iterable[NodeFacts], names: dict[str, str]) -> Iterator[str]:
    for facts in found:
        if facts.port_fault is not None:
            name = names[facts.node.node_id]
            yield f"{name}: {facts.port_fault}; choose another server.port, or end the process that listens there"


def _shared_memory(config: SlipstreamConfig, found: Iterable[NodeFacts], names: dict[str, str]) -> Iterator[str]:
    targets = [need for need in needs(config) if need.pool == A_TARGET]
    pools = [one.config.target for one in config.served]
    for facts in found:
        fitting = [pool.tensor_parallel for pool, need in zip(pools, targets, strict=True) if need.fits(facts.node)]
        ranks = max(fitting, default=0)
        name = names[facts.node.node_id]
        has = facts.shared_memory
        store = int(facts.node.resources.get("object_store_memory", 0))
        wanted = ranks * RANK_SHARED_MEMORY if ranks > 1 else 0
        if store > has:
            yield (
                f"{name} has {has // MIB} MiB in /dev/shm, but Ray's object store of {store // MIB} MiB does not fit"
                " and moves to disk; enlarge /dev/shm, or start Ray with a smaller --object-store-memory"
            )
        elif store + wanted > has:
            yield (
                f"{name} has {has // MIB} MiB in /dev/shm, but Ray's object store may use {store // MIB} MiB and"
                f" {ranks} ranks of a target need another {wanted // MIB} MiB; enlarge it, as with docker run"
                " --shm-size"
            )


def _least_shared_memory(found: Sequence[NodeFacts]) -> str:
    return f"{min(facts.shared_memory for facts in found) // MIB} MiB or more" if found else "unknown"


def _models(found: Iterable[NodeFacts], names: dict[str, str]) -> Iterator[str]:
    for facts in found:
        if facts.model_fault is not None:
            yield f"{names[facts.node.node_id]}: {facts.model_fault} (replicas may run on this node)"


def _models_seen(config: SlipstreamConfig, found: Sequence[NodeFacts]) -> str:
    holders = [facts for facts in found if models_needed(config, facts.node) is not ModelsNeeded.NONE]
    pairings = dict.fromkeys(facts.pairing for facts in holders if facts.pairing)
    return "; ".join([f"read on {_count(holders)}", *pairings])


def models_needed(config: SlipstreamConfig, node: Node) -> ModelsNeeded:
    """Returns the models that a node must read.

    Drafters read both models, routers read the target, and targets read the target and a head that uses its states.
    """
    fitting = {need.pool for need in needs(config) if need.fits(node)}
    reads_states = any(one.config.draft.model_method in STATE_READERS for one in config.served)
    if A_DRAFTER in fitting or (A_TARGET in fitting and reads_states):
        return ModelsNeeded.BOTH
    return ModelsNeeded.TARGET if fitting else ModelsNeeded.NONE


# ------------------------------------------------------------ how Ray was started


def _drains(config: SlipstreamConfig, found: Iterable[NodeFacts], names: dict[str, str]) -> Iterator[str]:
    """Checks Ray's drain time on nodes that may hold a replica; other nodes have no sessions."""
    wanted = drain_s(config)
    for facts in found:
        if facts.ray_drain_s < wanted and any(need.fits(facts.node) for need in needs(config)):
            yield (
                f"{names[facts.node.node_id]}: Ray drains the node for {facts.ray_drain_s:g} s, but its replicas may"
                f" take {wanted} s (server.drain_s, target.drain_s); start the node with"
                f" {RAY_DRAIN}={wanted} ray start --block"
            )


def _drains_seen(config: SlipstreamConfig, found: Sequence[NodeFacts]) -> str:
    if not found:
        return "unknown"
    return f"{min(facts.ray_drain_s for facts in found):g} s or more, {drain_s(config)} s required"


def _auth(config: SlipstreamConfig, found: Sequence[NodeFacts], names: dict[str, str]) -> Iterator[str]:
    """Checks that Ray requires a token, except on one machine or in a trusted network."""
    if config.trust.insecure or len({facts.node.address for facts in found}) == 1:
        return
    for facts in found:
        if facts.ray_auth != "token":
            yield (
                f"{names[facts.node.node_id]}: Ray requires no token (RAY_AUTH_MODE is {facts.ray_auth}), so any client"
                " of its ports can run code; export RAY_AUTH_MODE=token before ray start on every node, with one"
                " token (ray get-auth-token)"
            )


def _auth_seen(found: Sequence[NodeFacts]) -> str:
    return ", ".join(sorted({facts.ray_auth for facts in found})) or "unknown"


# ------------------------------------------------------------ calls and clocks between nodes


def _grpc(facts: ClusterFacts, names: dict[str, str]) -> Iterator[str]:
    for one in facts.found:
        if one.server_fault is not None:
            yield f"{names[one.node.node_id]}: a gRPC server cannot start: {one.server_fault}"
    for call in facts.calls:
        route = f"from {names[call.caller]} to {names[call.called]}"
        if call.fault is not None:
            yield (
                f"gRPC call {route} failed: {call.fault}; routers, drafters and targets listen on random ports, so open"
                " the firewall between nodes, and issue all credentials (trust) from one authority"
            )
        elif call.seconds is not None and call.seconds > MAX_CALL_S:
            yield (
                f"a gRPC call {route} takes {call.seconds * 1000:.0f} ms for the round trip, too slow for drafts;"
                " place drafters closer to targets with resources.labels"
            )


def _calls_seen(calls: Sequence[ProbeCall]) -> str:
    times = sorted(call.seconds for call in calls if call.seconds is not None)
    if not times:
        return "no pair of nodes to try" if not calls else f"{len(calls)} calls tried"
    return f"{len(calls)} calls tried, {times[len(times) // 2] * 1000:.1f} ms in the middle"


def _clocks(clocks: Sequence[ClockReading], names: dict[str, str]) -> Iterator[str]:
    """Compares each clock with the median clock, so that one wrong clock gives one fault."""
    for clock, gap in _gaps(clocks):
        if abs(gap) > MAX_CLOCK_GAP_S + clock.error_s:
            direction = "ahead of" if gap > 0 else "behind"
            yield (
                f"{names[clock.node_id]}: its clock is {abs(gap):.2f} s {direction} the other clocks, which misaligns"
                " traces and may invalidate certificates; run chrony or another NTP client"
            )


def _gaps(clocks: Sequence[ClockReading]) -> list[tuple[ClockReading, float]]:
    if not clocks:
        return []
    middle = sorted(clock.ahead_s for clock in clocks)[len(clocks) // 2]
    return [(clock, clock.ahead_s - middle) for clock in clocks]


def _clocks_seen(clocks: Sequence[ClockReading]) -> str:
    gaps = [abs(gap) for _, gap in _gaps(clocks)]
    return f"within {max(gaps) * 1000:.0f} ms" if gaps else "unknown"


def _available_resources(nodes: Iterable[Node]) -> str:
    total: dict[str, float] = defaultdict(float)
    for node in nodes:
        for name in ("CPU", "GPU"):
            total[name] += node.resources.get(name, 0.0)
    return ", ".join(f"{amount:g} {name}" for name, amount in total.items())


def _count(nodes: Iterable[object]) -> str:
    count = len(list(nodes))
    return "1 node" if count == 1 else f"{count} nodes"


def report(checks: Sequence[Check]) -> RenderableType:
    """Renders one line per check, followed by the faults with their fixes."""
    table = Table.grid(padding=(0, 2))
    for check in checks:
        table.add_row(check.name, "[red]wrong[/]" if check.faults else "[green]ok[/]", escape(check.seen))
    faults = [Text(f"{check.name}: {fault}") for check in checks for fault in check.faults]
    return Group(table, *faults)
