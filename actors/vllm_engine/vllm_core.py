"""vLLM's EngineCore in this process, step by step as the verification scheduler plans them.

Long waits and event loops are `vllm_engine.py`'s. Written for the vLLM that `arguments.VERSION` names.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import vllm
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor

from actors.vllm_engine.arguments import VERSION, engine_arguments
from actors.vllm_engine.session_draws import Told, extra_args
from cluster.config import SlipstreamConfig
from cluster.engines.session_memory import EnginePages
from cluster.errors import EngineError, ModelError
from cluster.verification.step import Outcome, StepPlan
from protos.messages import Open


class VllmCore:
    """Computes step plans, one at a time and on one thread; `memory` says what each has fed."""

    def __init__(
        self, config: SlipstreamConfig, folder: str, vocabulary: int, failed: Callable[[], None] | None = None
    ) -> None:
        """Loads the model. Raises ModelError for arguments that vLLM does not take, and for another vLLM."""
        if vllm.__version__.partition("+")[0] != VERSION:
            raise ModelError(f"vLLM {vllm.__version__} is installed, expected {VERSION}: install the extra [vllm]")
        first_runner = not (HAS_TRITON and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0")
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(not first_runner))
        try:
            args = EngineArgs(**engine_arguments(config, folder, vocabulary, first_runner))
            settings = args.create_engine_config()
        except (TypeError, ValueError) as error:
            raise ModelError(f"vLLM does not take these arguments: {error}; see target.vllm") from error
        self._core = EngineCore(settings, Executor.get_class(settings), False, failed)
        found = self._core.collective_rpc("draw_as_slipstream", args=(vocabulary, folder))
        self.runner = str(found[0])
        self._scheduler: Any = self._core.scheduler
        cache = settings.cache_config
        self.memory = EnginePages(int(cache.num_gpu_blocks), int(cache.block_size))
        self._names: dict[str, str] = {}  # vLLM's, by session
        self._asking: set[str] = set()  # sessions that are told more than tokens
        self._numbers = count()  # of requests

    def step(self, plan: StepPlan) -> list[Outcome]:
        """Forgets, adds, feeds, decides; one outcome for each row that was fed and decides."""
        for session in plan.closes:
            self._core.abort_requests([self._names.pop(session)])
            self._asking.discard(session)
        for request in plan.opens:
            self._open(request)
        if not plan.rows:
            return []
        self._scheduler.begin({self._names[row.session]: row for row in plan.rows})
        _, computed = self._core.step()
        self._core.post_step(computed)
        self.memory.step_made(self._scheduler.fed, self._scheduler.held_pages)
        outcomes: list[Outcome] = self._scheduler.outcomes
        return self._with_what_is_told(outcomes)

    def begin_grammar(self, grammar: str) -> None:
        """Has it compiled in the workers, for a session to come."""
        self._core.collective_rpc("begin_grammar", args=(grammar,))

    def close(self) -> None:
        self._core.shutdown()

    @property
    def is_idle(self) -> bool:
        """Whether no request is left, and no page held."""
        return not self._scheduler.requests and not self._names and self._scheduler.held_pages <= 1  # one is vLLM's

    @property
    def preempted(self) -> int:
        """Requests that are to be computed again from their beginning."""
        return sum(request.num_preemptions for request in self._scheduler.requests.values())

    def _with_what_is_told(self, outcomes: list[Outcome]) -> list[Outcome]:
        if not any(outcome.session in self._asking for outcome in outcomes):
            return outcomes
        told: dict[str, Told] = self._core.collective_rpc("told")[0]  # every rank decides the same
        answers = [(outcome, told.get(outcome.session, Told())) for outcome in outcomes]
        return [replace(outcome, scores=more.scores, margin=more.margin) for outcome, more in answers]

    def _open(self, request: Open) -> None:
        """Ends are the verification scheduler's to see, so vLLM knows of none but the longest text."""
        name = f"{request.session}/{next(self._numbers)}"
        assert request.session not in self._names, f"session {request.session} is open already"
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request.max_len - len(request.tokens),
            ignore_eos=True,
            detokenize=False,
            extra_args=extra_args(request),
        )
        asked = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=list(request.tokens),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            cache_salt=_cache_salt(request),
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(asked))
        self._names[request.session] = name
        if Told.is_asked_by(request):
            self._asking.add(request.session)


def _cache_salt(request: Open) -> str | None:
    """What shares pages with what: an audit is to compute all of its text itself."""
    return f"audit {request.session}" if request.audit else request.cache_salt or None


def start_core(
    config: SlipstreamConfig, folder: str, vocabulary: int, failed: Callable[[], None] | None = None
) -> VllmCore:
    """The same, with whatever vLLM raises at its start as an EngineError."""
    try:
        return VllmCore(config, folder, vocabulary, failed)
    except ModelError:
        raise
    except Exception as error:  # vLLM has no class of its own for what fails at its start
        raise EngineError(f"vLLM did not start: {error}") from error
