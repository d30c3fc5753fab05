"""Computes the cache size: bytes per page and number of pages."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from actors.attention.paged import WORKSPACE_BYTES
from actors.attention.select_backend import attention_shape
from actors.compute.hidden_states import CaptureSpec
from actors.engine.process import CONTEXT_BYTES
from cluster.config import CacheConfig
from cluster.errors import ModelError

GIB = 1 << 30
MIB = 1 << 20
PAGE_SIZES = (64, 128, 256, 512, 1024)  # proposed for models with recurrent layers
SHARE_OF_FREE = {"cuda": 0.9, "cpu": 0.5}  # usable share of free memory; on a host, other programs need the rest
GRAPH_BYTES = (
    10 * MIB
)  # estimate per graph: its kernels' parameters in the driver; graphs share one pool of activations
CHAIN_STEP_BYTES = 4 * MIB  # the same estimate per step of a captured chain: a draft model has fewer layers
LOGIT_BYTES = 4  # sampling computes in float32; a captured step has two copies in 16 bits
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
STAT = "memory.stat"  # in a limit's folder; cgroup version 1 has total_rss and total_shmem, version 2 anon and shmem


def page_bytes(model: PreTrainedModel, page_size: int, ranks: int = 1) -> int:
    """Returns the size of one page over all layers, in bytes per rank."""
    return attention_shape(model, page_size, ranks).page_bytes


def state_bytes(capture: CaptureSpec | None, page_size: int) -> int:
    """Returns the size of one page's hidden states, in bytes."""
    return page_size * capture.format.row_bytes if capture is not None and capture.is_kept else 0


def page_size_warning(page_size: int, key_value_bytes: int, recurrent_bytes: int) -> str:
    """Returns a warning if a page's recurrent states take more memory than its keys and values; empty otherwise."""
    if recurrent_bytes <= key_value_bytes:
        return ""
    enough = page_size * recurrent_bytes / key_value_bytes if key_value_bytes else PAGE_SIZES[-1]
    larger = next((size for size in PAGE_SIZES if size >= enough), PAGE_SIZES[-1])
    if larger <= page_size:
        return ""
    return (
        f"a page of {page_size} tokens takes {recurrent_bytes / MIB:.1f} MiB of recurrent states and"
        f" {key_value_bytes / MIB:.1f} MiB of keys and values; set"
        f" cache_per_rank.page_size: {larger} to cache more tokens"
    )


def free_bytes(device: torch.device) -> int:
    """Returns the free memory in bytes, at most what a container's limit leaves."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    limits = {path: path.read_text().strip() for path in MEMORY_LIMITS if path.is_file()}
    rests = [int(limit) - _held_bytes(path.with_name(STAT)) for path, limit in limits.items() if limit.isdigit()]
    return max(0, min([free, *rests]))


def _held_bytes(stat: Path) -> int:
    """Returns the bytes of a container that the kernel cannot reclaim without swap; 0 if `stat` does not exist."""
    if not stat.is_file():
        return 0
    fields = dict(line.split() for line in stat.read_text().splitlines())
    anonymous = fields.get("anon", fields.get("total_rss", 0))
    return int(anonymous) + int(fields.get("total_shmem", fields.get("shmem", 0)))


def remaining_share(device: torch.device, share: float) -> int:
    """Returns the bytes that a process may still allocate of its share of a GPU."""
    total = int(torch.cuda.mem_get_info(device)[1])
    return int(share * total) - int(torch.cuda.memory_reserved(device))


@dataclass(frozen=True, slots=True)
class Reserve:
    """Memory, in bytes, that a process needs besides weights and cache pages."""

    context: int = 0  # counts only against a share of a GPU: free memory of a whole GPU excludes it already
    attention: int = 0  # partial results of the kernel
    logits: int = 0  # logits of the largest step
    graphs: int = 0
    successor: int = 0  # weights of a learned draft's next version, which is loaded beside the one in use

    @property
    def beside_cache(self) -> int:
        """Total bytes without the context."""
        return self.attention + self.logits + self.graphs + self.successor

    @classmethod
    def of_steps(
        cls, logit_rows: int, vocabulary: int, device: torch.device, graphs: int = 0, chain_steps: int = 0
    ) -> "Reserve":
        """Returns the reserve of a process whose steps compute up to `logit_rows` rows of logits.

        It captures `graphs` steps, and chains of `chain_steps` steps in all.
        """
        logits = logit_rows * vocabulary * LOGIT_BYTES
        if device.type != "cuda":
            return cls(logits=logits)
        return cls(CONTEXT_BYTES, WORKSPACE_BYTES, logits, graphs * GRAPH_BYTES + chain_steps * CHAIN_STEP_BYTES)


def weight_bytes(model: PreTrainedModel) -> int:
    """Returns the size of a model's weights in bytes; call it before a decoder takes them over."""
    return sum(weight.nbytes for weight in model.parameters())


def step_logit_rows(sessions: int, draft_tokens: int, max_step_tokens: int) -> int:
    """Returns the most rows of logits in a target's step: every session verifies a block, within the step's limit."""
    return min(sessions * (draft_tokens + 1), max_step_tokens)


def page_count(
    cache: CacheConfig,
    bytes_each: int,
    sessions: int,
    context: int,
    device: torch.device,
    gpu_share: float = 1.0,
    reserve: Reserve = Reserve(),
    ranks: int = 1,
) -> int:
    """Returns the number of cache pages beside the reserve, which a configured cache size does not consider.

    On CPUs, `ranks` processes on this machine share the free memory.

    Raises ModelError if one session of full context does not fit.
    """
    per_session = -(-context // cache.page_size)
    if cache.gib is not None:
        pages = int(cache.gib * GIB) // bytes_each
    else:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # memory that torch keeps for reuse counts as used
        free = free_bytes(device)
        if device.type == "cuda":
            free = min(free, remaining_share(device, gpu_share) - reserve.context)
        else:
            free //= ranks
        room = max(0, int((free - reserve.beside_cache) * SHARE_OF_FREE[device.type])) // bytes_each
        pages = min(room, sessions * per_session)
    if pages < per_session:
        needed = per_session * bytes_each / GIB
        raise ModelError(
            f"the cache has room for {pages * cache.page_size} tokens, but a session may have {context}: give the cache"
            f" at least {needed:.2f} GiB, or lower model.max_context"
        )
    return pages
