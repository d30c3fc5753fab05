"""vLLM's arguments for a target: what the configuration says, what a guarantee needs, what the user adds.

Knows nothing of vLLM but names; `cluster/engines/vllm_options.py` has refused what would break a guarantee.
"""

from typing import Any

from cluster.config import SlipstreamConfig

VERSION = "0.32.0"  # the one that the private parts were written against
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its scheduler and one rank may live in the process that plans the steps
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are the configuration's to give
}
PACKAGE = "actors.vllm_engine"


def engine_arguments(config: SlipstreamConfig, folder: str, vocabulary: int, first_runner: bool) -> dict[str, Any]:
    """For vLLM's EngineArgs; `first_runner` says which of its model runners it will take."""
    pool = config.target
    longest = config.speculation.max_draft_tokens
    arguments: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": True,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_context,
        "max_num_seqs": pool.max_sessions,
        "max_num_batched_tokens": pool.max_step_tokens,
        "tensor_parallel_size": pool.tensor_parallel,
        "distributed_executor_backend": _executor(config),
        "async_scheduling": False,  # a block is matched by the tokens before it, which must be known
        "scheduler_cls": f"{PACKAGE}.block_scheduler.BlockScheduler",
        "worker_extension_cls": f"{PACKAGE}.worker_draws.DrawingWorker",
        "additional_config": {"slipstream_vocabulary": vocabulary},
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if pool.cache_per_rank.gib is not None:
        arguments["kv_cache_memory_bytes"] = int(pool.cache_per_rank.gib * (1 << 30))
    if not first_runner:
        arguments["logits_processors"] = [f"{PACKAGE}.noise_processor:SharedNoise"]
    if longest:
        arguments["speculative_config"] = _speculation(longest, first_runner)
    return {**arguments, **pool.vllm}


def _executor(config: SlipstreamConfig) -> str:
    """Where its workers are: on GPUs actors in the replica's placement group, on CPUs this process or its children."""
    if config.target.resources_per_rank.num_gpus:
        return "ray"
    return "uni" if config.target.tensor_parallel == 1 else "mp"


def _speculation(longest: int, first_runner: bool) -> dict[str, Any]:
    """Makes room for drafts in vLLM's steps; whoever drafts in its process by this is replaced by nobody."""
    if first_runner:
        model = f"{PACKAGE}.worker_draws.NoProposer"
        return {"method": "custom_class", "model": model, "num_speculative_tokens": longest}
    return {"method": "ngram", "prompt_lookup_max": 2, "num_speculative_tokens": longest}
