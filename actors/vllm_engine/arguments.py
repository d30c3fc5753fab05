"""Builds vLLM's arguments from the configuration, our exactness requirements, and the user's `target.vllm`.

Only this module knows vLLM's argument names. `cluster/config_sections.py` refuses options that would break exactness.
"""

from collections.abc import Sequence
from typing import Any

from cluster.config import SlipstreamConfig

VERSION = "0.32.0"  # the supported version, since we use private interfaces
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # runs the scheduler and one rank in this process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the configuration assigns cores
}
PACKAGE = "actors.vllm_engine"


def engine_arguments(
    config: SlipstreamConfig, folder: str, vocabulary: int, first_runner: bool, layers: Sequence[int] = ()
) -> dict[str, Any]:
    """Returns the arguments for vLLM's EngineArgs; `first_runner` selects vLLM's first or second model runner.

    `layers` are those whose hidden states are captured. They change the compiled model, which vLLM finds in its cache
    by its arguments.
    """
    pool = config.target
    longest = config.speculation.draft_tokens
    arguments: dict[str, Any] = {
        "model": folder,
        "runner": "generate",  # otherwise, vLLM infers it from `architectures`, which a config.json may lack
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_context,
        "max_num_seqs": pool.max_sessions,
        "max_num_batched_tokens": pool.max_step_tokens,
        "tensor_parallel_size": pool.tensor_parallel,
        "distributed_executor_backend": _executor(config),
        "async_scheduling": False,  # drafts follow committed tokens, so planning must wait for these
        "scheduler_cls": f"{PACKAGE}.block_scheduler.BlockScheduler",
        "worker_extension_cls": f"{PACKAGE}.worker.DrawingWorker",
        "additional_config": {"slipstream_vocabulary": vocabulary, "slipstream_layers": list(layers)},
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if pool.cache_per_rank.gib is not None:
        arguments["kv_cache_memory_bytes"] = int(pool.cache_per_rank.gib * (1 << 30))
    if not first_runner:
        arguments["logits_processors"] = [f"{PACKAGE}.noise_processor:SharedNoise"]
    if pool.adapters:
        # A step may use all adapters. On CPUs, vLLM also applies the last slot to tokens without an adapter (its pull
        # request 48421), so one slot stays empty.
        arguments["max_loras"] = len(pool.adapters) + (not pool.resources_per_rank.num_gpus)
    if longest:
        arguments["speculative_config"] = _speculation(longest, first_runner)
    arguments |= pool.vllm
    if pool.resources_per_rank.num_gpus and not first_runner:
        arguments["compilation_config"] = _with_full_graphs(pool.vllm.get("compilation_config", {}))
    return arguments


def _with_full_graphs(compilation: Any) -> Any:
    """Captures whole steps of any row lengths, unless the user chose a mode or gave a compilation level.

    vLLM's default captures whole steps only if every row has the longest draft, so steps without drafts run piecewise.
    With an attention backend that needs equal rows, such as FlashAttention 2, vLLM returns to its default.
    """
    return {"cudagraph_mode": "FULL"} | compilation if isinstance(compilation, dict) else compilation


def _executor(config: SlipstreamConfig) -> str:
    """Returns vLLM's executor: `ray`, in the placement group, on GPUs; this process or its children on CPUs."""
    if config.target.resources_per_rank.num_gpus:
        return "ray"
    return "uni" if config.target.tensor_parallel == 1 else "mp"


def _speculation(longest: int, first_runner: bool) -> dict[str, Any]:
    """Enables drafts in vLLM's steps; a no-op replaces the drafting component configured here."""
    if first_runner:
        model = f"{PACKAGE}.worker.NoProposer"
        return {"method": "custom_class", "model": model, "num_speculative_tokens": longest}
    return {"method": "ngram", "prompt_lookup_max": 2, "num_speculative_tokens": longest}
