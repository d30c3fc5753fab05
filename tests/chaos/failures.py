"""Failures to inject: processes killed or stopped, streams cut, whole nodes lost or frozen."""

import asyncio
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import psutil
from ray._private.node import Node
from ray.cluster_utils import Cluster

from cluster.routing.ray_membership import ServeMembership
from serve_app.app import APPLICATION
from serve_app.operations.ray_cluster import deployed
from tests.chaos.processes import Found, found_on, raylet, workers
from tests.chaos.recovery import Failure

STOPPED_S = (0.5, 12.0)  # from unnoticed to declared dead by Serve
NODE_STOPPED_S = (0.5, 8.0)
NODE_LOST_S = (2.0, 8.0)  # until a new node replaces it
ROLES = {"drafter": "Drafter", "target": "Target", "rank": "Rank", "router": "Router"}


@dataclass
class Scene:
    """Cluster under test, with pending follow-ups."""

    cluster: Cluster
    add_node: Callable[[], object]
    rng: random.Random
    routers_hit: dict[int, list[float]] = field(default_factory=dict)  # times when routers were killed, by pid
    nodes_due_s: list[float] = field(default_factory=list)  # times to add replacements of lost nodes
    _stopped: list[tuple[threading.Timer, Callable[[], None]]] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        """Returns all nodes except the head."""
        return sorted(self.cluster.worker_nodes, key=lambda node: str(node.node_id))

    def processes(self, role: str) -> list[Found]:
        everywhere = [self.cluster.head_node, *self.nodes]
        found = [one for node in everywhere for one in found_on(node) if one.role == role]
        return sorted(found, key=lambda one: one.process.pid)

    def stop(self, found: Sequence[Found], lasts_s: float) -> None:
        """Stops processes, and resumes them on a timer."""

        def go_on() -> None:
            for one in found:
                one.send(signal.SIGCONT)

        for one in found:
            one.send(signal.SIGSTOP)
        timer = threading.Timer(lasts_s, go_on)
        self._stopped.append((timer, go_on))
        timer.start()

    def add_nodes_due(self, now_s: float) -> None:
        """Adds due nodes; call it on the main thread, as Ray requires."""
        for due_s in [due_s for due_s in self.nodes_due_s if due_s <= now_s]:
            self.nodes_due_s.remove(due_s)
            self.add_node()

    @property
    def is_over(self) -> bool:
        """Returns whether no follow-up is pending."""
        return not self.nodes_due_s and not any(timer.is_alive() for timer, _ in self._stopped)

    def resume_all(self) -> None:
        """Resumes all stopped processes that still exist."""
        for timer, go_on in self._stopped:
            timer.cancel()
            go_on()

    def note_routers(self, struck: Sequence[Found]) -> None:
        for one in struck:
            if one.role == "Router":
                self.routers_hit.setdefault(one.process.pid, []).append(time.monotonic())


def _pool(role: str) -> str:
    """Kills a rank, which ends its replica."""
    return "Target" if role == "Rank" else role


def _pools(struck: Sequence[Found]) -> tuple[str, ...]:
    return tuple(sorted({_pool(one.role) for one in struck}))


def kill(role: str, scene: Scene) -> Failure | None:
    if not (found := scene.processes(ROLES[role])):
        return None
    one = scene.rng.choice(found)
    scene.note_routers([one])
    at_s = time.monotonic()
    one.send(signal.SIGKILL)
    return Failure(f"{role} killed", at_s, _pools([one]), f"pid {one.process.pid}")


def stop(role: str, scene: Scene) -> Failure | None:
    if not (found := scene.processes(ROLES[role])):
        return None
    one = scene.rng.choice(found)
    lasts_s = scene.rng.uniform(*STOPPED_S)
    at_s = time.monotonic()
    scene.stop([one], lasts_s)
    return Failure(f"{role} stopped", at_s, _pools([one]), f"pid {one.process.pid} for {lasts_s:.1f} s", lasts_s)


def cut(scene: Scene) -> Failure | None:
    """Resets a TCP connection to a drafter's or target's gRPC server through the kernel."""
    if not (connections := sorted(_streams())):
        return None
    dialling, dialled = scene.rng.choice(connections)
    at_s = time.monotonic()
    ports = ["sport", "=", f":{dialling}", "and", "dport", "=", f":{dialled}"]
    subprocess.run(["ss", "-K", *ports], capture_output=True, check=True)
    return Failure("stream cut", at_s, (), f"from port {dialling} to {dialled}")


def _streams() -> Iterator[tuple[int, int]]:
    """Returns the ports of both ends, with the dialer's port first."""
    ports = grpc_ports()
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_ESTABLISHED and one.raddr and one.raddr.port in ports:
            yield one.laddr.port, one.raddr.port


def grpc_ports() -> dict[int, str]:
    """Returns the pools of all targets and drafters by port, from the routers' view of one machine."""
    membership = ServeMembership(deployed("Target", APPLICATION), deployed("Drafter", APPLICATION))
    members = asyncio.run(membership.current())
    pools = {"Target": members.targets, "Drafter": members.drafters}
    return {int(one.address.rpartition(":")[2]): pool for pool, peers in pools.items() for one in peers}


def lose_node(scene: Scene) -> Failure | None:
    """Kills all processes of a node, like a power failure, and schedules a new node."""
    if not scene.nodes:
        return None
    node = scene.rng.choice(scene.nodes)
    struck = list(found_on(node))
    scene.note_routers(struck)
    processes = workers(node)
    at_s = time.monotonic()
    if (daemon := raylet(node)) is not None:
        daemon.suspend()  # otherwise it would report the death of each worker
    for process in processes:
        Found("", process).send(signal.SIGKILL)
    scene.cluster.remove_node(node, allow_graceful=False)
    scene.nodes_due_s.append(at_s + scene.rng.uniform(*NODE_LOST_S))
    return Failure("node killed", at_s, _pools(struck), _named(struck))


def freeze_node(scene: Scene) -> Failure | None:
    """Suspends all processes of a node, like a live migration or thrashing."""
    if not scene.nodes:
        return None
    node = scene.rng.choice(scene.nodes)
    struck = list(found_on(node))
    daemon = raylet(node)
    lasts_s = scene.rng.uniform(*NODE_STOPPED_S)
    processes = [Found("", process) for process in [*([daemon] if daemon else []), *workers(node)]]
    at_s = time.monotonic()
    scene.stop(processes, lasts_s)
    return Failure("node stopped", at_s, _pools(struck), f"{_named(struck)} for {lasts_s:.1f} s", lasts_s)


def _named(struck: Sequence[Found]) -> str:
    return ", ".join(f"{one.role} {one.process.pid}" for one in struck) or "nobody"


@dataclass(frozen=True)
class Kind:
    """Kind of failure; its function injects it once and describes it, or returns None without a possible victim."""

    strike: Callable[[Scene], Failure | None]
    pools: frozenset[str]  # deployments it may affect


EVERY_POOL = frozenset({"Drafter", "Target", "Router"})
KINDS: Mapping[str, Kind] = {
    **{f"{role} killed": Kind(partial(kill, role), frozenset({_pool(title)})) for role, title in ROLES.items()},
    **{f"{role} stopped": Kind(partial(stop, role), frozenset({_pool(title)})) for role, title in ROLES.items()},
    "stream cut": Kind(cut, frozenset()),
    "node killed": Kind(lose_node, EVERY_POOL),
    "node stopped": Kind(freeze_node, EVERY_POOL),
}
