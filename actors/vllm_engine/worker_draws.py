"""In vLLM's workers: tokens are drawn as the project's own engine draws them, and drafts come from the scheduler.

`DrawingWorker` extends vLLM's worker, by its `worker_extension_cls`. Both of vLLM's model runners are served: the first
(on CPUs without Triton) lets no logits processor in beside drafts, so its sampler is replaced; the second has
`noise_processor.py`, and keeps drafts on the device, where they are written before each forward.
"""

from collections.abc import Callable
from typing import Any

import torch

from actors.sampling.rejection_sampler import PendingBlock, decide
from actors.vllm_engine.draw_terms import DrawTerms

NOTHING = -1  # in vLLM's table of sampled tokens


class NoProposer:
    """For the first runner, which wants somebody who drafts in its process."""

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, *args: Any, **kwargs: Any) -> None: ...

    def propose(self, sampled_token_ids: list[list[int]], *args: Any, **kwargs: Any) -> list[list[int]]:
        return [[] for _ in sampled_token_ids]


class NoSpeculator:
    """The same for the second."""

    supports_mm_inputs = False
    draft_logits = None
    num_query_per_req = 1
    num_extra_query_per_req = 0
    pcp_manager = None

    def __init__(self, req_states: Any) -> None:
        self._req_states = req_states

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts: torch.Tensor = self._req_states.draft_tokens[input_batch.idx_mapping]
        return drafts

    def prepare_watermarking(self, *args: Any) -> None: ...


class DrawingWorker:
    """What a worker learns by being one of ours as well."""

    model_runner: Any

    def draw_as_slipstream(self, vocabulary: int) -> str:
        """Installs the draws; ids from `vocabulary` on are the model's padding. Returns which runner it found."""
        runner = self.model_runner
        if hasattr(runner, "req_states"):
            take_drafts_from_scheduler(runner)
            return "v2"
        runner._sample = FirstRunnerDraws(runner, vocabulary).sample
        return "v1"


class FirstRunnerDraws:
    """In the place of the first runner's sampler."""

    def __init__(self, runner: Any, vocabulary: int) -> None:
        self._runner = runner
        self._vocabulary = vocabulary

    def sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        from vllm.v1.outputs import SamplerOutput

        batch = self._runner.input_batch
        counts = metadata.num_draft_tokens if metadata is not None else [0] * batch.num_reqs
        drafts = iter(metadata.draft_token_ids.tolist() if metadata is not None else ())
        blocks = []
        for index, name in enumerate(batch.req_ids[: batch.num_reqs]):
            drafted = [next(drafts) for _ in range(counts[index])]
            blocks.append(self._block(name, int(batch.num_tokens_no_spec[index]), drafted))
        table = torch.full((len(blocks), 1 + max(counts)), NOTHING, dtype=torch.int32)
        decisions = decide(blocks, logits[:, : self._vocabulary])
        for row, (block, decision) in enumerate(zip(blocks, decisions, strict=True)):
            kept = block.draft.tokens[: len(decision.path)]
            table[row, : len(kept) + 1] = torch.tensor([*kept, decision.next_token], dtype=torch.int32)
        return SamplerOutput(sampled_token_ids=table.to(logits.device), logprobs_tensors=None)

    def _block(self, name: str, length: int, drafted: list[int]) -> PendingBlock:
        state = self._runner.requests[name]
        terms = DrawTerms.from_extra_args(state.sampling_params.extra_args)
        assert terms is not None, f"request {name} says nothing of its draws"
        if not terms.sampling.penalised:
            return terms.block_after(length, (), drafted)
        return terms.block([*state.prompt_token_ids, *state.output_token_ids][:length], drafted)


def take_drafts_from_scheduler(runner: Any) -> None:
    """The second runner keeps drafts in a table on the device and looks at no others."""
    runner.speculator = NoSpeculator(runner.req_states)
    runner.execute_model = _with_drafts(runner, runner.execute_model)


def _with_drafts(runner: Any, execute_model: Callable[..., Any]) -> Callable[..., Any]:
    states = runner.req_states

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        table = states.draft_tokens
        for name, drafted in scheduler_output.scheduled_spec_decode_tokens.items():
            row = torch.tensor(drafted, dtype=table.dtype, device=table.device)
            table[states.req_id_to_index[name], : len(drafted)] = row
        return execute_model(scheduler_output, *args, **kwargs)

    return execute
