"""Logits processor for vLLM's second model runner; draws with the drafters' noise.

vLLM runs at temperature 0. The processor decides each block by our own rules and leaves one token in every relevant
row. As a result, vLLM's argmax returns our draw, and its comparison with the draft yields our decision.
"""

from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from actors.sampling.acceptance import PendingBlock
from actors.sampling.logits_processors import PROCESSOR_FACTORIES
from actors.vllm_engine.coupled_sampler import ExtraResults, SessionDraws, decide_all, request_in

VOCABULARY_KEY = "slipstream_vocabulary"  # key in vLLM's additional_config


class SharedNoise(LogitsProcessor):  # type: ignore[misc]
    """Decides all requests, including greedy ones, so that padding ids beyond the vocabulary are never drawn."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.processor_factories = PROCESSOR_FACTORIES
        self.extra_results: dict[str, ExtraResults] = {}  # of the latest step, by session
        self._vocabulary = int(vllm_config.additional_config[VOCABULARY_KEY])
        self._states = req_states
        self._sessions: dict[int, SessionDraws] = {}  # by vLLM's request slot

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Registers a request; called again after a preemption, which recomputes all committed text."""
        request = request_in(sampling_params.extra_args)
        self._sessions.pop(req_idx, None)
        if request is not None:
            self._sessions[req_idx] = SessionDraws.of(request, self.processor_factories)
        return request is not None

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        rows = torch.stack([ctx.expanded_idx_mapping.long(), ctx.pos.long(), ctx.input_ids.long()]).tolist()
        slots, positions, fed = rows
        starts = [row for row in range(len(slots)) if not row or slots[row] != slots[row - 1]]
        spans = [(start, end) for start, end in zip(starts, [*starts[1:], len(slots)], strict=True)]
        committed_spans = [(start, end) for start, end in spans if self._decides(slots[start], positions[start] + 1)]
        self.extra_results = {}
        if not committed_spans:
            return logits
        blocks = [
            self._block(slots[start], positions[start] + 1, fed[start + 1 : end]) for start, end in committed_spans
        ]
        committed_rows = torch.tensor(
            [row for start, end in committed_spans for row in range(start, end)], device=logits.device
        )
        sessions = [self._sessions[slots[start]] for start, _ in committed_spans]
        decisions, self.extra_results = decide_all(sessions, blocks, logits[committed_rows, : self._vocabulary])
        drawn = []
        for (start, _), block, decision in zip(committed_spans, blocks, decisions, strict=True):
            tokens = [*block.draft.tokens[: len(decision.path)], decision.next_token]
            drawn += [(start + offset, token) for offset, token in enumerate(tokens)]
        at, tokens = torch.tensor(drawn, device=logits.device).T
        logits[at] = -torch.inf
        logits[at, tokens] = 0.0
        return logits

    def _decides(self, slot: int, length: int) -> bool:
        """Returns whether a row decides: it belongs to one of our requests and ends after the whole prompt."""
        return slot in self._sessions and length >= int(self._states.prefill_len.np[slot])

    def _block(self, slot: int, length: int, drafted: list[int]) -> PendingBlock:
        def text(begin: int, end: int) -> Sequence[int]:
            tokens: list[int] = self._states.all_token_ids.gpu[slot, begin:end].tolist()
            return tokens

        return self._sessions[slot].block(length, text, drafted)
