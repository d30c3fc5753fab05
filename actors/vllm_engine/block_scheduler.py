"""Makes vLLM's scheduler follow our step plan, which selects requests and their draft tokens.

vLLM manages pages, prefix sharing, chunked prompts and preemption. Written for vLLM `arguments.VERSION`: vLLM supports
another `scheduler_cls`, but not as a stable interface.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from actors.vllm_engine.coupled_sampler import fed_row, outcome_of
from cluster.verification.step import Outcome, Row, slots_of


class BlockScheduler(Scheduler):  # type: ignore[misc]
    """vLLM scheduler that skips every request outside the plan."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Otherwise, vLLM pads resumed requests with placeholders for nonexistent drafts.
        self.num_spec_tokens = 0
        self._planned: Mapping[str, Row] = {}
        self.fed: dict[str, Row] = {}  # rows fed by the latest step, by session
        self.outcomes: list[Outcome] = []

    def begin(self, planned: Mapping[str, Row]) -> None:
        """Sets the planned rows of the next step. The step runs only rows that fit in memory."""
        self._planned = planned
        self.fed = {}
        self.outcomes = []

    @property
    def computed(self) -> dict[str, int]:
        """Number of cached tokens, by request id."""
        return {name: int(request.num_computed_tokens) for name, request in self.requests.items()}

    def slots(self, name: str, positions: Sequence[int]) -> tuple[int, ...]:
        """Returns the cache slots of a request's positions in the first group of layers (full attention)."""
        size = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return tuple(slots_of(positions, self.kv_cache_manager.get_block_ids(name)[0], size))

    @property
    def held_pages(self) -> int:
        pool = self.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - pool.get_num_free_blocks())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        for request in self.running:
            row = self._planned.get(request.request_id)
            if row is None:
                request.next_decode_eligible_step = self.current_step + 2  # skips the request in this step
            # Feed the rest of a prompt without drafts, because vLLM treats drafts after it as placeholders.
            is_read = not request.is_prefill_chunk
            request.spec_token_ids = list(row.draft.tokens) if row is not None and is_read else []
        output = super().schedule(*args, **kwargs)
        for name, scheduled in output.num_scheduled_tokens.items():
            planned = self._planned[name]
            request = self.requests[name]
            drafted = len(output.scheduled_spec_decode_tokens.get(name, ()))
            start = request.num_computed_tokens - scheduled
            row = fed_row(planned, request.all_token_ids, start, scheduled, drafted)
            if row.state_slots:
                row = replace(row, state_slots=self.slots(name, row.state_slots))
            self.fed[planned.session] = row
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        undecided = model_runner_output.num_nans_in_logits or {}
        for name in scheduler_output.num_scheduled_tokens:
            row = self.fed[self._planned[name].session]
            sampled = model_runner_output.sampled_token_ids[model_runner_output.req_id_to_index[name]]
            if (outcome := outcome_of(row, sampled, not undecided.get(name))) is not None:
                self.outcomes.append(outcome)
        return super().update_from_output(scheduler_output, model_runner_output)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Does nothing, since drafts come from the plan."""

    def _handle_blocked_waiting_request(self, request: Any) -> bool:
        is_ready: bool = super()._handle_blocked_waiting_request(request)
        return is_ready and request.request_id in self._planned
