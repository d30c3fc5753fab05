"""What may be done to a deployment: processes killed or stopped, streams cut, whole nodes lost or frozen."""

import asyncio
import random
import signal
import subprocess
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
from tests.chaos.recovery import Blow

STOPPED_S = (0.5, 12.0)  # from what nobody notices to what Serve takes for dead
NODE_STOPPED_S = (0.5, 8.0)
NODE_LOST_S = (2.0, 8.0)  # until another one takes its place
POOLS = {"drafter": "Drafter", "target": "Target", "rank": "Rank", "router": "Router"}


@dataclass(order=True)
class Later:
    """What follows a blow: a process goes on, a node comes."""

    due_s: float
    do: Callable[[], None] = field(compare=False)


@dataclass
class Scene:
    """Where blows are struck."""

    cluster: Cluster
    add_node: Callable[[], object]
    rng: random.Random
    routers_hit: dict[int, list[float]] = field(default_factory=dict)  # when routers were killed, by pid
    later: list[Later] = field(default_factory=list)

    @property
    def nodes(self) -> list[Node]:
        """Those that may be lost: all but the head."""
        return sorted(self.cluster.worker_nodes, key=lambda node: str(node.node_id))

    def processes(self, role: str) -> list[Found]:
        everywhere = [self.cluster.head_node, *self.nodes]
        found = [one for node in everywhere for one in found_on(node) if one.role == role]
        return sorted(found, key=lambda one: one.process.pid)

    def after(self, delay_s: float, do: Callable[[], None]) -> None:
        self.later.append(Later(time.monotonic() + delay_s, do))

    def do_what_is_due(self, now_s: float) -> None:
        for one in sorted(self.later):
            if one.due_s <= now_s:
                self.later.remove(one)
                one.do()

    def note_routers(self, struck: Sequence[Found]) -> None:
        for one in struck:
            if one.role == "Router":
                self.routers_hit.setdefault(one.process.pid, []).append(time.monotonic())


def _pools(struck: Sequence[Found]) -> tuple[str, ...]:
    """A rank's replica is lost with it."""
    return tuple(sorted({"Target" if one.role == "Rank" else one.role for one in struck}))


def kill(role: str, scene: Scene) -> Blow | None:
    if not (found := scene.processes(POOLS[role])):
        return None
    one = scene.rng.choice(found)
    scene.note_routers([one])
    at_s = time.monotonic()
    one.send(signal.SIGKILL)
    return Blow(f"{role} killed", at_s, _pools([one]), f"pid {one.process.pid}")


def stop(role: str, scene: Scene) -> Blow | None:
    if not (found := scene.processes(POOLS[role])):
        return None
    one = scene.rng.choice(found)
    lasts_s = scene.rng.uniform(*STOPPED_S)
    at_s = time.monotonic()
    one.send(signal.SIGSTOP)
    scene.after(lasts_s, partial(one.send, signal.SIGCONT))
    return Blow(f"{role} stopped", at_s, _pools([one]), f"pid {one.process.pid} for {lasts_s:.1f} s")


def cut(scene: Scene) -> Blow | None:
    """One TCP connection to a drafter's or a target's gRPC server, by the kernel: both ends see a reset."""
    if not (connections := sorted(_streams())):
        return None
    dialling, dialled = scene.rng.choice(connections)
    at_s = time.monotonic()
    ports = ["sport", "=", f":{dialling}", "and", "dport", "=", f":{dialled}"]
    subprocess.run(["ss", "-K", *ports], capture_output=True, check=True)
    return Blow("stream cut", at_s, (), f"from port {dialling} to {dialled}")


def _streams() -> Iterator[tuple[int, int]]:
    """Ports of who dialled and of who was dialled."""
    ports = grpc_ports()
    for one in psutil.net_connections("tcp"):
        if one.status == psutil.CONN_ESTABLISHED and one.raddr and one.raddr.port in ports:
            yield one.laddr.port, one.raddr.port


def grpc_ports() -> set[int]:
    """Of all targets and drafters, as routers know them. Ports are of one machine here, so they tell peers apart."""
    membership = ServeMembership(deployed("Target", APPLICATION), deployed("Drafter", APPLICATION))
    members = asyncio.run(membership.current())
    return {int(one.address.rpartition(":")[2]) for one in (*members.targets, *members.drafters)}


def lose_node(scene: Scene) -> Blow | None:
    """All processes of a node at once, as when its machine is switched off; a new one comes after a while."""
    if not scene.nodes:
        return None
    node = scene.rng.choice(scene.nodes)
    struck = list(found_on(node))
    scene.note_routers(struck)
    processes = workers(node)
    at_s = time.monotonic()
    if (daemon := raylet(node)) is not None:
        daemon.suspend()  # or it would see its workers go one by one, and tell
    for process in processes:
        Found("", process).send(signal.SIGKILL)
    scene.cluster.remove_node(node, allow_graceful=False)
    scene.after(scene.rng.uniform(*NODE_LOST_S), lambda: (scene.add_node(), None)[1])
    return Blow("node killed", at_s, _pools(struck), _named(struck))


def freeze_node(scene: Scene) -> Blow | None:
    """All processes of a node stand still, as when its machine is moved or its memory thrashes."""
    if not scene.nodes:
        return None
    node = scene.rng.choice(scene.nodes)
    struck = list(found_on(node))
    daemon = raylet(node)
    lasts_s = scene.rng.uniform(*NODE_STOPPED_S)
    processes = [Found("", process) for process in [*([daemon] if daemon else []), *workers(node)]]
    at_s = time.monotonic()
    for one in processes:
        one.send(signal.SIGSTOP)

    def go_on() -> None:
        for one in processes:
            one.send(signal.SIGCONT)

    scene.after(lasts_s, go_on)
    return Blow("node stopped", at_s, _pools(struck), f"{_named(struck)} for {lasts_s:.1f} s")


def _named(struck: Sequence[Found]) -> str:
    return ", ".join(f"{one.role} {one.process.pid}" for one in struck) or "nobody"


KINDS: Mapping[str, Callable[[Scene], Blow | None]] = {
    **{f"{role} killed": partial(kill, role) for role in POOLS},
    **{f"{role} stopped": partial(stop, role) for role in POOLS},
    "stream cut": cut,
    "node killed": lose_node,
    "node stopped": freeze_node,
}
"""Each strikes once, and says what it did; nothing where nobody is there to be struck."""
