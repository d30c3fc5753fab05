"""Logits processor for vLLM's second model runner; draws with the drafters' noise.

vLLM runs at temperature 0. The processor decides each block by our own rules and leaves one token in every relevant
row. As a result, vLLM's argmax returns our draw, and its comparison with the draft yields our decision.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from actors.sampling.acceptance import PendingBlock
from actors.sampling.logits_processors import PROCESSOR_FACTORIES
from actors.vllm_engine.coupled_sampler import ExtraResults, FedBlock, SessionDraws, decide_all, request_in

VOCABULARY_KEY = "slipstream_vocabulary"  # key in vLLM's additional_config


class SharedNoise(LogitsProcessor):  # type: ignore[misc]
    """Decides all requests, including greedy ones, so that padding ids beyond the vocabulary are never drawn."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.processor_factories = PROCESSOR_FACTORIES
        # Results of the step in progress; vLLM may apply the processor to parts of a step.
        self.extra_results: dict[str, ExtraResults] = {}  # by session
        self.undecided: set[str] = set()  # vLLM's ids of requests with NaN or infinite logits
        self._vocabulary = int(vllm_config.additional_config[VOCABULARY_KEY])
        self.names: Mapping[int, str] = {}  # vLLM's request ids by slot; set by the worker
        self._fed: Mapping[str, FedBlock] = {}  # by vLLM's request id
        self._states = req_states
        self._sessions: dict[int, SessionDraws] = {}  # by vLLM's request slot

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Registers a request; called again after a preemption, which recomputes all committed text."""
        request = request_in(sampling_params.extra_args)
        self._sessions.pop(req_idx, None)
        if request is not None:
            self._sessions[req_idx] = SessionDraws.of(request, self.processor_factories)
        return request is not None

    def begin(self, fed: Mapping[str, FedBlock]) -> None:
        """Begins a step with these blocks, by vLLM's request id; vLLM passes no host copy of a step's layout."""
        self._fed = fed
        self.extra_results = {}
        self.undecided = set()

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Decides all blocks of the step, or of a part of it; waits for the device once, for the decisions."""
        slots = [int(slot) for slot in ctx.idx_mapping_np]
        if not any(slot in self._sessions for slot in slots):
            return logits  # vLLM's own requests: on GPUs, it warms up before the worker sets `names`
        fed = [self._fed[self.names[slot]] for slot in slots]
        starts = [*accumulate((1 + len(block.drafted) for block in fed), initial=0)]
        assert starts[-1] == len(logits), f"{len(logits)} rows of logits, but {starts[-1]} were scheduled"
        deciding = [at for at, (slot, block) in enumerate(zip(slots, fed, strict=True)) if self._decides(slot, block)]
        if not deciding:
            return logits
        blocks = [self._block(slots[at], fed[at]) for at in deciding]
        sessions = [self._sessions[slots[at]] for at in deciding]
        decided = logits[:, : self._vocabulary]
        if len(deciding) < len(slots):
            rows = [row for at in deciding for row in range(starts[at], starts[at + 1])]
            decided = decided[_on_device(rows, logits.device)]
        decisions, extra_results = decide_all(sessions, blocks, decided)
        self.extra_results |= extra_results
        self.undecided |= {
            self.names[slots[at]] for at, one in zip(deciding, decisions, strict=True) if not one.is_finite
        }
        drawn = []
        for at, block, decision in zip(deciding, blocks, decisions, strict=True):
            tokens = [*block.draft.tokens[: len(decision.path)], decision.next_token]
            drawn += [(starts[at] + offset, token) for offset, token in enumerate(tokens)]
        places, tokens = _on_device(drawn, logits.device).T
        logits[places] = -torch.inf
        logits[places, tokens] = 0.0
        return logits

    def _decides(self, slot: int, block: FedBlock) -> bool:
        """Returns whether a row decides: it belongs to one of our requests and ends after the whole prompt."""
        return slot in self._sessions and block.length >= int(self._states.prefill_len.np[slot])

    def _block(self, slot: int, fed: FedBlock) -> PendingBlock:
        def text(begin: int, end: int) -> Sequence[int]:
            tokens: list[int] = self._states.all_token_ids.gpu[slot, begin:end].tolist()
            return tokens

        return self._sessions[slot].block(fed.length, text, fed.drafted)


def _on_device(numbers: Sequence[Any], device: torch.device) -> torch.Tensor:
    """Copies numbers to the device; does not wait for it, since the source is pinned."""
    tensor = torch.tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
