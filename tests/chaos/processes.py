"""Finds a deployment's processes by their Ray process titles, because suspended processes cannot answer."""

import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import psutil
from ray._private.node import Node
from ray._private.ray_constants import PROCESS_TYPE_RAYLET

REPLICA = "ray::ServeReplica:slipstream:"
RANK = "ray::Rank"
ROLES = {"Drafter": f"{REPLICA}Drafter", "Target": f"{REPLICA}Target", "Router": f"{REPLICA}Router", "Rank": RANK}


@dataclass(frozen=True)
class Found:
    """Process with its role."""

    role: str
    process: psutil.Process

    def send(self, what: signal.Signals) -> None:
        """Sends a signal unless the process has ended."""
        with suppress(psutil.NoSuchProcess):
            self.process.send_signal(what)


def raylet(node: Node) -> psutil.Process | None:
    started = node.all_processes.get(PROCESS_TYPE_RAYLET, [])
    with suppress(psutil.NoSuchProcess, IndexError):
        return psutil.Process(started[0].process.pid)
    return None


def workers(node: Node) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        found = raylet(node)
        return found.children(recursive=True) if found else []
    return []


def found_on(node: Node) -> Iterator[Found]:
    """Returns the replicas and ranks on a node."""
    for process in workers(node):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
            title = process.cmdline()[0]
            role = next((role for role, prefix in ROLES.items() if title.startswith(prefix)), None)
            if role is not None and process.status() != psutil.STATUS_ZOMBIE:
                yield Found(role, process)
