"""vLLM's executors, whose leading worker keeps hidden states beside its cache and hears of it before memory is."""

from collections.abc import Iterable
from typing import Any

from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from actors.engine.capture import CaptureSpec
from cluster.errors import ModelError


def with_states(executor: type[Executor], spec: CaptureSpec) -> type[Executor]:
    """The same kind of executor."""

    class StatesExecutor(executor):  # type: ignore[misc]
        """The leading worker has less room for keys and values."""

        def _init_executor(self) -> None:
            super()._init_executor()
            self.collective_rpc("begin_states", args=(spec,))

        def determine_available_memory(self) -> list[int]:
            leading, *others = super().determine_available_memory()
            share = keys_share(self.get_kv_cache_specs()[0].values(), spec.format.row_bytes)
            return [int(leading * share), *others]

    return StatesExecutor


def keys_share(layers: Iterable[Any], row_bytes: int) -> float:
    """How much of a cache is keys' and values', where a row of states lies beside those of each token.

    Raises ModelError for layers that forget: vLLM frees what they have forgotten, and the states beside it.
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
