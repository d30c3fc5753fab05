"""Variants of vLLM's executors whose leading worker reserves room for hidden states before memory is measured."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from actors.engine.capture import CaptureSpec
from cluster.errors import ModelError


def with_states(executor: type[Executor], spec: CaptureSpec) -> type[Executor]:
    """Returns a subclass of `executor` that captures hidden states."""

    class StatesExecutor(executor):  # type: ignore[misc]
        """Executor whose leading worker has less room for keys and values."""

        def _init_executor(self) -> None:
            super()._init_executor()
            self.collective_rpc("begin_states", args=(spec,))

        def determine_available_memory(self) -> list[int]:
            leading, *others = super().determine_available_memory()
            share = keys_share(self.get_kv_cache_specs()[0].values(), spec.format.row_bytes)
            return [int(leading * share), *others]

    return StatesExecutor


def keys_share(layers: Iterable[Any], row_bytes: int) -> float:
    """Returns the share of memory for keys and values, if a row of states is stored with those of each token.

    Raises ModelError for layers with a limited window: vLLM frees the pages they no longer need, and with them the
    states.
    """
    token_bytes = 0.0
    for layer in layers:
        if not isinstance(layer, FullAttentionSpec):
            raise ModelError(
                f"a layer of the target is a {type(layer).__name__} to vLLM, hidden states are kept beside layers that"
                " attend to the whole text; use a drafting method that reads none, or target.engine slipstream"
            )
        token_bytes += layer.page_size_bytes / layer.block_size
    return token_bytes / (token_bytes + row_bytes)
