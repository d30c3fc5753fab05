"""Runs several servers on one local Ray cluster, measures their actors per turn, and creates a useless draft.

Each server is a separate Serve application with its own processes, behind a shared HTTP proxy. Servers idle between
their turns instead of being suspended: Serve's health checks and gRPC's keep-alive would take a suspended process for
dead. Benchmarks report the CPU time of idle servers.
"""

import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
from ray import serve
from rich.console import Console
from turns import Work

from actors.engine.process import run_on
from cluster.config import SlipstreamConfig
from cluster.telemetry import STAGES, Actor, spans, unpack
from serve_app.app import APPLICATION, application
from serve_app.operations.local import serving, wait_until_ready
from serve_app.operations.ray_cluster import broadcast, deployed

VERIFY = tuple(stage for stage in STAGES if stage.name == "verify")

TARGET_CORE = 0  # for the target alone
OTHERS_CORE = 1  # for drafters, routers, proxy and client
PINNED = (
    "server.port=0",
    "model.dtype=bfloat16",
    "draft.method=draft_model",
    f"target.resources_per_rank.cpu_affinity=[{TARGET_CORE}]",
    f"draft.resources.cpu_affinity=[{OTHERS_CORE}]",
    # Small Ray reservations let several servers fit; threads and affinity set the actual use.
    "target.resources_per_rank.num_cpus=0.1",
    "draft.resources.num_cpus=0.1",
)


FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")  # what decides the models' kernels


def processor() -> str:
    """Returns the processor's name, its number of cores, and its vector and matrix units."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    units = [flag for flag in FLAGS if flag in facts.get("flags", "").split()]
    name = facts.get("model name", platform.processor())
    return f"{name}, {os.cpu_count()} cores, {', '.join(units)}{'' if 'amx_bf16' in units else ', no AMX'}"


@dataclass(frozen=True, slots=True)
class Mark:
    """Snapshot of a server's counters and its target's recording."""

    counts: Mapping[str, int]
    events: int


class Server:
    """Client of one Serve application; its methods block, so never call them in an event loop."""

    def __init__(self, name: str, url: str) -> None:
        self.url = url
        self._target = deployed("Target", name)
        self._drafter = deployed("Drafter", name)
        (target,) = broadcast(self._target, "inspect")
        (drafter,) = broadcast(self._drafter, "inspect")
        (router,) = broadcast(deployed("Router", name), "inspect")
        pids = [*target["rank_pids"], *(actor["pid"] for actor in (target, drafter, router))]
        self._processes = [psutil.Process(pid) for pid in pids]

    def mark(self) -> Mark:
        """Returns the state at the start of a turn."""
        events = self._recorded().recording.events
        return Mark(self._counts(), events[-1].order + 1 if events else 0)

    def since(self, mark: Mark) -> Work | None:
        """Returns the work since `mark`; None if the target's recording no longer reaches back to it."""
        counts = self._counts()
        recorded = self._recorded()
        events = tuple(event for event in recorded.recording.events if event.order >= mark.events)
        if events and events[0].order > mark.events:
            return None
        steps = spans([replace(recorded, recording=replace(recorded.recording, events=events))], VERIFY)
        hits, misses = (counts.get(name, 0) - mark.counts.get(name, 0) for name in ("guess_hit", "guess_miss"))
        gaps = tuple(later.began_s - earlier.ended_s for earlier, later in pairwise(steps))
        return Work(hits, misses, len(steps), sum(step.ended_s - step.began_s for step in steps), gaps)

    def cpu_s(self) -> float:
        """Returns the CPU seconds of its processes since their start."""
        times = [process.cpu_times() for process in self._processes]
        return float(sum(time.user + time.system for time in times))

    def _counts(self) -> dict[str, int]:
        (drafter,) = broadcast(self._drafter, "inspect")
        counts: dict[str, int] = drafter["counts"]
        return counts

    def _recorded(self) -> Actor:
        (packed,) = broadcast(self._target, "trace")
        return unpack(packed)


@contextmanager
def side_by_side(configs: Mapping[str, SlipstreamConfig], console: Console) -> Iterator[dict[str, Server]]:
    """Runs a server per config; yields them by name. All share the first one's cluster and proxy.

    Pins this process and its children off the target's core. Otherwise a router or client scheduled there while the
    target waits for a block would compete with the next step.
    """
    run_on([OTHERS_CORE])
    (first, config), *others = configs.items()
    with serving(config, console) as url, ExitStack() as stack:
        servers = {first: Server(APPLICATION, url)}
        for name, other in others:
            with console.status(f"Starting the server {name}"):
                serve.run(application(other), name=name, route_prefix=f"/{name}")
                stack.callback(serve.delete, name)
                wait_until_ready(f"{url}/{name}")
            servers[name] = Server(name, f"{url}/{name}")
        yield servers


def useless_draft(draft: Path, folder: Path, seed: int = 0) -> Path:
    """Writes a copy of the draft model to `folder`, with random matrices of the same scale; returns `folder`."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(draft, folder)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Any] = load_file(draft / "model.safetensors")
    for name, trained in weights.items():
        if trained.ndim > 1:
            drawn = torch.randn(trained.shape, generator=generator) * trained.float().std()
            weights[name] = drawn.to(trained.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
