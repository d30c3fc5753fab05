"""Hooks in vLLM's workers that sample tokens like our own engine and take drafts from the scheduler.

`DrawingWorker` extends vLLM's worker through `worker_extension_cls`. It supports both model runners of vLLM. The first
(on CPUs without Triton) does not support logits processors with drafts, so its sampler is replaced. The second uses
`noise_processor.py` and reads drafts from a device table, which is filled before each forward.

`WorkerStates` stores hidden states in the leading worker. After each step, vLLM's second model runner passes them and
the slots of the fed tokens to its drafting component.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from actors.compute.hidden_states import CaptureSpec, StateCapture
from actors.grammars import grammars_of, load_grammar_vocabulary
from actors.sampling.acceptance import PendingBlock
from actors.sampling.logits_processors import PROCESSOR_FACTORIES, ProcessorFactory
from actors.vllm_engine.coupled_sampler import ExtraResults, FedBlock, SessionDraws, decide_all, request_in
from cluster.errors import ModelError

log = logging.getLogger(__name__)


class WorkerStates:
    """Stores the hidden states of all fed tokens, at the tokens' cache slots."""

    def __init__(self, spec: CaptureSpec, runner: Any) -> None:
        """Call before graph capture and, since the projection takes memory, before vLLM measures free memory.

        Raises ModelError if the model does not report a layer.
        """
        self._device: torch.device = runner.device
        self._spec = spec
        self._project = spec.projection_on(self._device)
        last = int(runner.model_config.hf_text_config.num_hidden_layers)
        inner = [layer for layer in spec.layers if layer < last]
        self._has_final = spec.layers[-1] == last
        if inner:
            _report_layers(runner, inner)
        self._layer = ""
        self._capture: StateCapture | None = None

    def keep(self, layer: str, pages: int, page_size: int) -> None:
        """Allocates the storage, with the slots of keys and values in `layer`."""
        self._layer = layer
        self._capture = StateCapture(self._spec, pages, page_size, self._device, self._project)

    def captured(self, batch: Any, slots: Mapping[str, torch.Tensor], final: torch.Tensor, inner: Any) -> None:
        """Stores one step's hidden states: `final`, (n, hidden), and one tensor of that shape per layer in `inner`."""
        assert self._capture is not None, "call keep first"
        streams = [*(inner or ()), *([final] if self._has_final else ())]
        fed = batch.num_tokens  # the remaining rows are padding
        self._capture.keep(slots[self._layer][:fed].long(), torch.cat([each[:fed] for each in streams], dim=-1))

    def read(self, slots: Sequence[int]) -> bytes:
        assert self._capture is not None, "call keep first"
        return self._capture.cache.read(slots)


def _report_layers(runner: Any, layers: Sequence[int]) -> None:
    """Makes the model report the hidden states after `layers`, as for EAGLE-3."""
    from vllm.model_executor.models.interfaces import supports_eagle3

    if not supports_eagle3(runner.model):
        raise ModelError(
            f"vLLM's {type(runner.model).__name__} reports only its final hidden states, but layers"
            f" {list(layers)} are required; use a head that reads only the final ones, or target.engine slipstream"
        )
    runner.model.set_aux_hidden_state_layers(tuple(layers))
    runner.use_aux_hidden_state_outputs = True


NOTHING = -1  # marks unused columns in vLLM's table of sampled tokens


class NoProposer:
    """No-op drafting component, required by the first runner."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class NoSpeculator:
    """Drafting component of the second runner; captures hidden states and drafts nothing."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    pcp_manager = None

    def __init__(self, req_states: Any, states: WorkerStates | None) -> None:
        self._req_states = req_states
        self._states = states

    def propose(
        self, input_batch: Any, metadata: Any, slots: Any, final: Any, inner: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Called after each step with the cache slots and the hidden states, `final` and `inner`, of the fed tokens."""
        if self._states is not None:
            self._states.captured(input_batch, slots, final, inner)
        drafts: torch.Tensor = self._req_states.draft_tokens[input_batch.idx_mapping]
        return drafts

    def prepare_watermarking(self, *args: Any) -> None: ...


class DrawingWorker:
    """Worker extension; vLLM adds its methods to the worker class."""

    model_runner: Any
    rank: int
    _slipstream_states: WorkerStates | None = None  # set only on the leading worker, if drafters read hidden states

    def begin_states(self, spec: CaptureSpec) -> None:
        """Prepares the capture of hidden states; called after the model is loaded."""
        if self.rank == 0:
            self._slipstream_states = WorkerStates(spec, self.model_runner)

    def keep_states(self, layer: str, pages: int, page_size: int) -> None:
        """Allocates storage for hidden states; called once the cache size is known."""
        if self._slipstream_states is not None:
            self._slipstream_states.keep(layer, pages, page_size)

    def read_states(self, slots: Sequence[int]) -> bytes:
        return self._slipstream_states.read(slots) if self._slipstream_states is not None else b""

    def draw_as_slipstream(self, vocabulary: int, folder: str) -> str:
        """Installs our sampling; returns the version of the model runner, "v1" or "v2".

        Token ids >= `vocabulary` are padding.
        """
        self._slipstream_grammars = grammars_of(lambda: load_grammar_vocabulary(Path(folder)))
        processor_factories = (
            PROCESSOR_FACTORIES
            if self._slipstream_grammars is None
            else (*PROCESSOR_FACTORIES, self._slipstream_grammars.masking)
        )
        runner = self.model_runner
        if not hasattr(runner, "req_states"):
            version = "v1"
            self._slipstream_draws: Any = FirstRunnerDraws(runner, vocabulary, processor_factories)
            runner._sample = self._slipstream_draws.sample
        else:
            version = "v2"
            self._slipstream_draws = next(
                processor for processor in runner.sampler.logits_processors if hasattr(processor, "extra_results")
            )
            self._slipstream_draws.processor_factories = processor_factories
            take_drafts_from_scheduler(runner, self._slipstream_states, self._slipstream_draws)
        runner.sample_tokens = with_undecided(self._slipstream_draws, runner.sample_tokens)
        if self.rank:
            runner.execute_model = or_exit(runner.execute_model)
            runner.sample_tokens = or_exit(runner.sample_tokens)
        return version

    def begin_grammar(self, grammar: str) -> None:
        """Starts compiling a grammar in the background."""
        if self._slipstream_grammars is not None:
            self._slipstream_grammars.begin(grammar)

    def extra_results(self) -> dict[str, ExtraResults]:
        """Returns the extra results of the latest step, by session."""
        results: dict[str, ExtraResults] = self._slipstream_draws.extra_results
        return results


def with_undecided(draws: Any, sample_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `sample_tokens`: reports requests that `draws` could not decide as requests with NaN in their logits."""

    def sample(*args: Any, **kwargs: Any) -> Any:
        answer = sample_tokens(*args, **kwargs)
        if draws.undecided:
            # The second runner returns an object that still copies the tokens to the host.
            output = getattr(answer, "model_runner_output", answer)
            output.num_nans_in_logits = dict.fromkeys(draws.undecided, 1)
        return answer

    return sample


def or_exit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ends the process if the function raises an exception.

    vLLM only logs exceptions of ranks other than the leading one, which then continue with the tokens of an earlier
    step. It does notice the end of a process, and then fails as a whole.
    """

    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            log.exception("this rank of vLLM failed in a step, and ends")
            os._exit(1)

    return guarded


class FirstRunnerDraws:
    """Replaces the sampler of the first runner."""

    def __init__(self, runner: Any, vocabulary: int, processor_factories: tuple[ProcessorFactory, ...]) -> None:
        self.extra_results: dict[str, ExtraResults] = {}
        self.undecided: set[str] = set()  # ids of requests with NaN or infinite logits in the latest step
        self._runner = runner
        self._vocabulary = vocabulary
        self._factories = processor_factories
        self._sessions: dict[str, SessionDraws] = {}  # by vLLM's request id

    def sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        batch = self._runner.input_batch
        counts = metadata.num_draft_tokens if metadata is not None else [0] * batch.num_reqs
        drafts = iter(metadata.draft_token_ids.tolist() if metadata is not None else ())
        names = batch.req_ids[: batch.num_reqs]
        blocks = []
        for index, name in enumerate(names):
            drafted = [next(drafts) for _ in range(counts[index])]
            blocks.append(self._block(name, int(batch.num_tokens_no_spec[index]), drafted))
        table = torch.full((len(blocks), 1 + max(counts)), NOTHING, dtype=torch.int32)
        sessions = [self._sessions[name] for name in names]
        decisions, self.extra_results = decide_all(sessions, blocks, logits[:, : self._vocabulary])
        self.undecided = {name for name, decision in zip(names, decisions, strict=True) if not decision.is_finite}
        for row, (block, decision) in enumerate(zip(blocks, decisions, strict=True)):
            accepted = block.draft.tokens[: len(decision.path)]
            table[row, : len(accepted) + 1] = torch.tensor([*accepted, decision.next_token], dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=table.to(logits.device), logprobs_tensors=None)

    def _block(self, name: str, length: int, drafted: list[int]) -> PendingBlock:
        state = self._runner.requests[name]
        if name not in self._sessions:
            request = request_in(state.sampling_params.extra_args)
            assert request is not None, f"request {name} carries no Open"
            self._sessions = {other: it for other, it in self._sessions.items() if other in self._runner.requests}
            self._sessions[name] = SessionDraws.of(request, self._factories)
        return self._sessions[name].block(length, lambda begin, end: _text(state)[begin:end], drafted)


def _text(state: Any) -> list[int]:
    return [*state.prompt_token_ids, *state.output_token_ids]


def take_drafts_from_scheduler(runner: Any, states: WorkerStates | None, draws: Any) -> None:
    """Writes the scheduler's drafts to the second runner's device table, its only source of drafts, and reports each
    step's blocks to `draws`, the logits processor.
    """
    runner.speculator = NoSpeculator(runner.req_states, states)
    draws.names = runner.req_states.index_to_req_id
    runner.execute_model = _with_drafts(runner, draws, runner.execute_model)


def fed_blocks(scheduler_output: Any) -> dict[str, FedBlock]:
    """Returns the end of each scheduled request, by vLLM's request id, from the scheduler's own numbers.

    These are exact, since the next step is scheduled only after the tokens of this one are known.
    """
    cached = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    drafts = scheduler_output.scheduled_spec_decode_tokens
    blocks = {}
    for name, scheduled in scheduler_output.num_scheduled_tokens.items():
        drafted = tuple(drafts.get(name, ()))
        blocks[name] = FedBlock(computed[name] + scheduled - len(drafted), drafted)
    return blocks


def write_drafts(table: torch.Tensor, drafts: Mapping[int, Sequence[int]]) -> None:
    """Writes drafts, by row, to the beginning of their rows of the device table, with one copy to the device.

    Shorter drafts are padded with zeros; vLLM reads only as many tokens of a row as are scheduled.
    """
    if not drafts:
        return
    longest = max(map(len, drafts.values()))
    padded = torch.tensor(
        [[row, *drafted, *[0] * (longest - len(drafted))] for row, drafted in drafts.items()], dtype=table.dtype
    )
    if table.device.type == "cuda":
        padded = padded.pin_memory()
    on_device = padded.to(table.device, non_blocking=True)
    table[on_device[:, 0], :longest] = on_device[:, 1:]


def _with_drafts(runner: Any, draws: Any, execute_model: Callable[..., Any]) -> Callable[..., Any]:
    states = runner.req_states
    adapter_inputs = runner.lora_state.make_lora_inputs

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = scheduler_output.scheduled_spec_decode_tokens
        draws.begin(fed_blocks(scheduler_output))
        write_drafts(states.draft_tokens, {states.req_id_to_index[name]: row for name, row in drafts.items()})

        def make_lora_inputs(names: Sequence[str], *inputs: Any) -> tuple[Any, ...]:
            """Repeats a request's adapter for each of its rows of logits; vLLM expects one row per request."""
            by_request, *more = adapter_inputs(names, *inputs)
            rows = [range(1 + len(drafts.get(name, ()))) for name in names]
            return tuple(one for one, places in zip(by_request, rows, strict=True) for _ in places), *more

        runner.lora_state.make_lora_inputs = make_lora_inputs
        return execute_model(scheduler_output, *args, **kwargs)

    return execute
