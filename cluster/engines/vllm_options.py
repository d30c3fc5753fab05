"""Checks of `target.vllm`: the arguments of vLLM that a target refuses, and why.

Pure; vLLM need not be installed. vLLM itself refuses unknown names when it starts.
"""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

BREAKS: Mapping[str, str] = MappingProxyType(
    {
        "async_scheduling": "a step would be scheduled before the tokens are known that blocks are matched by",
        "speculative_config": "drafts come from drafters; speculation.max_draft_tokens says how long they are",
        "pipeline_parallel_size": "several steps at once have not been tried",
        "data_parallel_size": "a replica is one engine; target.replicas says how many there are",
        "decode_context_parallel_size": "it has not been tried",
        "kv_transfer_config": "pages that come from elsewhere have not been tried",
        "kv_offloading_size": "pages that come from elsewhere have not been tried",
        "kv_offloading_backend": "pages that come from elsewhere have not been tried",
        "scheduler_cls": "it is what takes the blocks",
        "worker_cls": "workers are vLLM's own, extended to draw with shared noise",
        "worker_extension_cls": "it is what draws with shared noise",
        "logits_processors": "it is what draws with shared noise",
        "skip_tokenizer_init": "text is the router's",
        "runner": "a target generates",
    }
)
"""Arguments that would break a guarantee or that implement one, with the reason."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "model": "model.target",
        "tokenizer": "model.target",
        "served_model_name": "model.served_name",
        "dtype": "model.dtype",
        "max_model_len": "model.max_context",
        "tensor_parallel_size": "target.tensor_parallel",
        "max_num_seqs": "target.max_sessions",
        "max_num_batched_tokens": "target.max_step_tokens",
        "kv_cache_memory_bytes": "target.cache_per_rank.gib",
    }
)
"""Arguments that have a configuration key of their own."""


def faults_of(arguments: Iterable[str]) -> list[str]:
    """Returns one message for each argument that a target does not accept."""
    found = []
    for name in arguments:
        if name in BREAKS:
            found.append(f"vllm.{name} cannot be set: {BREAKS[name]}; leave it out")
        elif name in ELSEWHERE:
            found.append(f"vllm.{name} is {ELSEWHERE[name]} here; set that, and leave it out")
    return found
