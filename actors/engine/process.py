"""CPU cores, threads, priority and device of a model's process."""

import gc
import os
from collections.abc import Collection

import torch

from cluster.config import Resources
from cluster.errors import ModelError

CONTEXT_BYTES = 512 << 20  # CUDA context: the driver's state and loaded kernels, which torch's allocator does not count


def run_on(cores: Collection[int]) -> None:
    """Restricts this process and its children to these cores; no-op if empty."""
    if cores:
        for thread in os.listdir("/proc/self/task"):  # a process id would affect only its main thread
            os.sched_setaffinity(int(thread), cores)


def use_cpu(resources: Resources) -> None:
    """Applies the configured cores and thread count to this process."""
    run_on(resources.cpu_affinity)
    torch.set_num_threads(resources.threads)


def freeze_heap() -> None:
    """Exempts all present objects from garbage collection, since they live as long as the started process."""
    gc.collect()
    gc.freeze()


def compute_in_background() -> None:
    """Gives the calling thread and its future threads idle priority, so they run only on otherwise idle cores.

    The kernel schedules other threads on such a core as if it were idle.
    """
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def device_of(resources: Resources) -> torch.device:
    """Returns the GPU that Ray made visible to this process, or the CPU.

    On a GPU, turns off cuDNN's attention, which builds a graph for each length of a text; the build takes longer than
    attention by torch's other kernels. With a share of a GPU, the process is limited to that share of its memory.
    """
    if resources.num_gpus == 0:
        return torch.device("cpu")
    torch.backends.cuda.enable_cudnn_sdp(False)
    device = torch.device("cuda", 0)
    if resources.gpu_share < 1:
        share = resources.gpu_share - CONTEXT_BYTES / torch.cuda.mem_get_info(device)[1]
        if share <= 0:
            raise ModelError(
                f"num_gpus is {resources.num_gpus:g}, too small a share of memory for a CUDA context; raise it"
            )
        torch.cuda.set_per_process_memory_fraction(share, device)
    return device
