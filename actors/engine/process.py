"""Where a model's process computes: its cores and threads, its priority, its device."""

import os
from collections.abc import Collection

import torch

from cluster.config import Resources


def run_on(cores: Collection[int]) -> None:
    """Keeps this process, and those that it starts, to these cores; none: any."""
    if cores:
        for thread in os.listdir("/proc/self/task"):  # a call for the process would reach the calling thread only
            os.sched_setaffinity(int(thread), cores)


def use_cpu(resources: Resources) -> None:
    """Gives this process its cores and threads."""
    run_on(resources.cpu_affinity)
    torch.set_num_threads(resources.threads)


def compute_in_background() -> None:
    """Has the calling thread, and those it starts, run only while nobody else wants their cores.

    Whoever else wakes up finds such a core as good as idle, and goes on there at once.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def device_of(resources: Resources) -> torch.device:
    """The GPU that Ray made visible to this process, or the CPU."""
    return torch.device("cuda", 0) if resources.num_gpus > 0 else torch.device("cpu")
