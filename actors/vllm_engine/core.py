"""Runs vLLM's EngineCore in this process, one step per plan of the verification scheduler.

`engine.py` handles waiting and event loops. Written for vLLM `arguments.VERSION`. `with_states` makes vLLM's executors
reserve memory for hidden states in the leading worker, before they measure free memory.
"""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import vllm
from pydantic import ValidationError
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec

from actors.compute.hidden_states import CaptureSpec
from actors.vllm_engine.arguments import VERSION, engine_arguments
from actors.vllm_engine.coupled_sampler import ExtraResults, extra_args
from cluster.config import SlipstreamConfig
from cluster.errors import EngineError, ModelError
from cluster.page_allocator import EnginePages
from cluster.verification.step import Outcome, StateRead, StepPlan, with_states_of_rows
from protos.messages import Open


def with_states(executor: type[Executor], spec: CaptureSpec) -> type[Executor]:
    """Returns a subclass of `executor` that captures hidden states."""

    class StatesExecutor(executor):  # type: ignore[misc]
        """Executor whose leading worker reserves part of its memory for hidden states."""

        def _init_executor(self) -> None:
            super()._init_executor()
            self.collective_rpc("begin_states", args=(spec,))

        def determine_available_memory(self) -> list[int]:
            leading, *others = super().determine_available_memory()
            share = keys_share(self.get_kv_cache_specs()[0].values(), spec.format.row_bytes)
            return [int(leading * share), *others]

    return StatesExecutor


def keys_share(layers: Iterable[Any], row_bytes: int) -> float:
    """Returns the fraction of memory for keys and values if each token also stores a row of hidden states.

    Raises ModelError for layers with a sliding window, because vLLM frees their old pages and thus the hidden states.
    """
    token_bytes = 0.0
    for layer in layers:
        if not isinstance(layer, FullAttentionSpec):
            raise ModelError(
                f"vLLM treats a layer of the target as {type(layer).__name__}, but hidden states require layers that"
                " attend to the whole text; use a drafting method that reads none, or target.engine slipstream"
            )
        token_bytes += layer.page_size_bytes / layer.block_size
    return token_bytes / (token_bytes + row_bytes)


class VllmCore:
    """Executes step plans one at a time, on one thread; `memory` records the tokens fed by each step."""

    def __init__(
        self,
        config: SlipstreamConfig,
        folder: str,
        vocabulary: int,
        failed: Callable[[], None] | None = None,
        capture: CaptureSpec | None = None,
    ) -> None:
        """Loads the model. Raises ModelError for an unsupported vLLM version or rejected arguments.

        `capture` selects the hidden states to store.
        """
        if vllm.__version__.partition("+")[0] != VERSION:
            raise ModelError(f"vLLM {vllm.__version__} is not supported; install {VERSION} with the extra [vllm]")
        first_runner = not (HAS_TRITON and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0")
        if first_runner and capture is not None:
            raise ModelError(
                f"draft.method {config.draft.method} reads the target's hidden states, which vLLM's first model runner"
                " does not report. The second one needs Triton and VLLM_USE_V2_MODEL_RUNNER unset or 1; otherwise, use"
                " a method that reads none, or target.engine slipstream"
            )
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(not first_runner))
        try:
            layers = () if capture is None else capture.layers
            args = EngineArgs(**engine_arguments(config, folder, vocabulary, first_runner, layers))
            settings = args.create_engine_config()
        except (TypeError, ValueError) as error:
            raise ModelError(f"vLLM rejects its arguments: {_message(error)}; correct model or target.vllm") from error
        executor = Executor.get_class(settings)
        kind = executor if capture is None else with_states(executor, capture)
        self._core = EngineCore(settings, kind, False, failed)
        draws = self._core.collective_rpc("draw_as_slipstream", args=(vocabulary, folder))
        self.runner = str(draws[0])
        self._scheduler: Any = self._core.scheduler
        cache = settings.cache_config
        self.memory = EnginePages(int(cache.num_gpu_blocks), int(cache.block_size))
        self._keeps_states = capture is not None
        if self._keeps_states:
            layer = self._scheduler.kv_cache_config.kv_cache_groups[0].layer_names[0]
            self._core.collective_rpc("keep_states", args=(layer, self.memory.pages, self.memory.page_size))
        adapters = enumerate(config.target.adapters.items(), start=1)
        self._adapters = {name: LoRARequest(name, number, path) for number, (name, path) in adapters}
        self._load_adapters()
        self._names: dict[str, str] = {}  # vLLM's request ids, by session
        self._sessions_with_scores: set[str] = set()  # sessions that request scores or margins
        self._numbers = count()  # for unique request ids

    def step(self, plan: StepPlan) -> list[Outcome]:
        """Closes and opens sessions, feeds rows and decides blocks; returns one outcome per deciding row."""
        for session in plan.closes:
            self._core.abort_requests([self._names.pop(session)])
            self._sessions_with_scores.discard(session)
        for request in plan.opens:
            self._open(request)
        if not plan.rows:
            self.memory.record_step({}, self._scheduler.held_pages, self._computed())
            return []
        self._scheduler.begin({self._names[row.session]: row for row in plan.rows})
        _, computed = self._core.step()
        self._core.post_step(computed)
        fed = self._scheduler.fed
        self.memory.record_step(fed, self._scheduler.held_pages, self._computed())
        rows = [fed[outcome.session] for outcome in self._scheduler.outcomes]
        outcomes = with_states_of_rows(rows, self._scheduler.outcomes, self._states_at)
        return self._with_extra_results(outcomes)

    def read(self, read: StateRead) -> bytes:
        """Returns the hidden states at positions of a session."""
        return self._states_at(self._scheduler.slots(self._names[read.session], read.slots))

    def begin_grammar(self, grammar: str) -> None:
        """Starts compiling a grammar in the workers for a future session."""
        self._core.collective_rpc("begin_grammar", args=(grammar,))

    def close(self) -> None:
        self._core.shutdown()

    @property
    def is_idle(self) -> bool:
        """True if there are no requests and no pages in use, except the one that vLLM reserves."""
        return not self._scheduler.requests and not self._names and self._scheduler.held_pages <= 1

    @property
    def preempted(self) -> int:
        """Number of preemptions of current requests; each recomputes a request from its beginning."""
        return sum(request.num_preemptions for request in self._scheduler.requests.values())

    def _states_at(self, slots: Sequence[int]) -> bytes:
        states: bytes = self._core.collective_rpc("read_states", args=(slots,))[0]
        return states

    def _computed(self) -> dict[str, int]:
        """Returns the number of cached tokens per session; empty if hidden states are not stored."""
        if not self._keeps_states:
            return {}
        computed = self._scheduler.computed  # omits requests at max_len, whose pages are freed
        return {session: computed.get(name, 0) for session, name in self._names.items()}

    def _with_extra_results(self, outcomes: list[Outcome]) -> list[Outcome]:
        if not any(outcome.session in self._sessions_with_scores for outcome in outcomes):
            return outcomes
        by_rank = self._core.collective_rpc("extra_results")  # equal on all ranks
        extra: dict[str, ExtraResults] = by_rank[0]
        answers = [(outcome, extra.get(outcome.session, ExtraResults())) for outcome in outcomes]
        return [replace(outcome, scores=more.scores, margin=more.margin) for outcome, more in answers]

    def _load_adapters(self) -> None:
        """Loads all adapters now, because a failure during a step would end all sessions. Raises ModelError."""
        for name, adapter in self._adapters.items():
            try:
                self._core.add_lora(adapter)
            except Exception as error:  # vLLM raises many types of exceptions
                raise ModelError(f"vLLM rejects the adapter {name}: {error}; correct target.adapters") from error

    def _open(self, request: Open) -> None:
        """Adds a request. vLLM receives only the maximum length; the verification scheduler detects the end of text."""
        name = f"{request.session}/{next(self._numbers)}"
        assert request.session not in self._names, f"session {request.session} is open already"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_len - len(request.tokens),
            ignore_eos=True,
            detokenize=False,
            extra_args=extra_args(request),
        )
        request_to_core = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(request.tokens),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=self._adapters[request.adapter] if request.adapter else None,
            cache_salt=_cache_salt(request),
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request_to_core))
        self._names[request.session] = name
        if ExtraResults.is_requested_by(request):
            self._sessions_with_scores.add(request.session)


def _message(error: Exception) -> str:
    """Returns an error's message, without the long representation of values that pydantic rejects."""
    if isinstance(error, ValidationError):
        return "; ".join(fault["msg"] for fault in error.errors())
    return str(error)


def _cache_salt(request: Open) -> str | None:
    """Returns the salt that limits page sharing. An audit shares no pages, so that it recomputes its whole text."""
    return f"audit {request.session}" if request.audit else request.cache_salt or None


def start_core(
    config: SlipstreamConfig,
    folder: str,
    vocabulary: int,
    failed: Callable[[], None] | None = None,
    capture: CaptureSpec | None = None,
) -> VllmCore:
    """Creates a `VllmCore`; converts exceptions at vLLM's start into EngineError."""
    try:
        return VllmCore(config, folder, vocabulary, failed, capture)
    except ModelError:
        raise
    except Exception as error:  # vLLM raises many types of exceptions at start
        raise EngineError(f"vLLM did not start: {error}") from error
