"""Tensor-parallel ranks: each its own Ray actor, one torch.distributed group, one engine to the coordinator.

The leader gets the step plan, broadcasts the rows, and alone samples. When any rank dies the engine is done for:
its replica is replaced as a whole. Knows nothing of verification.
"""

import asyncio
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from actors.cache import FeedRow
from actors.executor import StepExecutor
from actors.models import load_model
from actors.runner import ModelRunner
from cluster.config import Resources
from cluster.errors import EngineError
from cluster.placement import actor_options
from cluster.steps import Outcome, StepPlan

IDLE_TIMEOUT = timedelta(days=30)  # followers wait in a collective; a hung step is noticed by the coordinator


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What every rank of a replica is told."""

    folder: str
    vocabulary: int  # token ids are below this; the model may have padding rows beyond
    dtype: str
    slots: int
    context: int
    resources: Resources
    ranks: int


def use_cpu(resources: Resources) -> None:
    """Gives this process its cores and threads."""
    if resources.cpu_affinity:
        for thread in os.listdir("/proc/self/task"):  # a call for the process would reach the calling thread only
            os.sched_setaffinity(int(thread), resources.cpu_affinity)
    torch.set_num_threads(resources.threads)


def device_of(resources: Resources) -> torch.device:
    """The GPU that Ray made visible to this process, or the CPU."""
    return torch.device("cuda", 0) if resources.num_gpus > 0 else torch.device("cpu")


class LeadingRunner:
    """The leader's runner: has every follower make the same forward."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.vocabulary = runner.vocabulary
        self.free_slots = runner.free_slots

    def forward(self, rows: Sequence[FeedRow]) -> Tensor:
        dist.broadcast_object_list([list(rows)], src=0)
        return self._runner.forward(rows)


class Rank:
    """One rank's process."""

    def __init__(self, index: int, spec: RankSpec) -> None:
        use_cpu(spec.resources)
        self._index, self._spec = index, spec
        self._executor: StepExecutor | None = None
        self._runner: ModelRunner | None = None

    def free_address(self) -> str:
        """Where the group can meet: a free port on this rank's node."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def load(self, meeting_point: str) -> int:
        """Joins the group and loads this rank's share; returns this process's id."""
        spec = self._spec
        device = device_of(spec.resources)
        if spec.ranks > 1:
            # transformers reads these; a rank that Ray gave one GPU sees it as device 0.
            local = 0 if device.type == "cuda" else self._index
            os.environ |= {"RANK": str(self._index), "LOCAL_RANK": str(local), "WORLD_SIZE": str(spec.ranks)}
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, init_method=meeting_point, rank=self._index, world_size=spec.ranks, timeout=IDLE_TIMEOUT
            )
        model = load_model(Path(spec.folder), spec.dtype, device, spec.ranks)
        self._runner = ModelRunner(model, spec.slots, spec.context)
        self._executor = StepExecutor(LeadingRunner(self._runner) if spec.ranks > 1 else self._runner, spec.vocabulary)
        return os.getpid()

    def step(self, plan: StepPlan) -> list[Outcome]:
        """Leader only."""
        assert self._executor is not None, "load first"
        return self._executor.step(plan)

    def follow(self) -> None:
        """Followers only: makes the leader's forwards for as long as the leader lives."""
        assert self._runner is not None, "load first"
        while True:
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=0)
            self._runner.forward(received[0])

    def hold(self) -> None:
        """Never returns: the call fails when this process dies, which is how the coordinator hears of it."""
        threading.Event().wait()


class RankGroup:
    """The engine of a target replica: its ranks, seen from the coordinator."""

    def __init__(self, ranks: list[Any], pids: tuple[int, ...]) -> None:
        self.pids = pids  # of the ranks, in order
        self._ranks = ranks
        self._following = [rank.follow.remote() for rank in ranks[1:]]

    @classmethod
    async def start(cls, spec: RankSpec, group: PlacementGroup | None) -> "RankGroup":
        """Starts the ranks inside the replica's placement group and loads the model."""
        actor = ray.remote(Rank)
        ranks = []
        for index in range(spec.ranks):
            options = actor_options(spec.resources) | {"max_concurrency": 2}
            if group is not None:
                options.pop("label_selector", None)  # the group's bundles carry it
                options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=index, placement_group_capture_child_tasks=True
                )
            ranks.append(actor.options(**options).remote(index, spec))
        meeting_point = await ranks[0].free_address.remote()
        return cls(ranks, tuple(await asyncio.gather(*(rank.load.remote(meeting_point) for rank in ranks))))

    async def step(self, plan: StepPlan) -> list[Outcome]:
        """Raises EngineError when a rank is gone or its step failed."""
        try:
            outcomes: list[Outcome] = await self._ranks[0].step.remote(plan)
        except RayError as error:
            raise EngineError(f"a tensor-parallel rank failed: {error}") from error
        return outcomes

    async def watch(self) -> None:
        """Waits until a rank is gone, which is always a failure; raises EngineError."""
        held = [asyncio.ensure_future(_awaited(rank.hold.remote())) for rank in self._ranks]
        following = [asyncio.ensure_future(_awaited(reference)) for reference in self._following]
        try:
            done, _ = await asyncio.wait([*held, *following], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except RayError as error:
            raise EngineError(f"a tensor-parallel rank died: {error}") from error
        finally:
            for task in (*held, *following):
                task.cancel()

    async def close(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)


async def _awaited(reference: Any) -> Any:
    return await reference
