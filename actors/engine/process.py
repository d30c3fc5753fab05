"""CPU cores, threads, priority and device of a model's process."""

import os
from collections.abc import Collection

import torch

from cluster.config import Resources


def run_on(cores: Collection[int]) -> None:
    """Restricts this process and its children to these cores; empty: no restriction."""
    if cores:
        for thread in os.listdir("/proc/self/task"):  # passing the process's id would affect only the calling thread
            os.sched_setaffinity(int(thread), cores)


def use_cpu(resources: Resources) -> None:
    """Applies the configured cores and number of threads to this process."""
    run_on(resources.cpu_affinity)
    torch.set_num_threads(resources.threads)


def compute_in_background() -> None:
    """Gives the calling thread, and threads it starts, the idle priority: they run only on otherwise idle cores.

    Any other thread that wakes up treats such a core as idle and runs there at once.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def device_of(resources: Resources) -> torch.device:
    """Returns the GPU that Ray made visible to this process, or the CPU."""
    return torch.device("cuda", 0) if resources.num_gpus > 0 else torch.device("cpu")
