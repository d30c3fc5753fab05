"""A logits processor of vLLM's second model runner that draws with the noise that drafters share.

vLLM is told temperature 0. The processor decides each block by the project's own rules and leaves, of every row that
matters, one token: vLLM's argmax is then the draw itself, and its comparison with the draft is ours.
"""

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from actors.sampling.rejection_sampler import decide
from actors.vllm_engine.draw_terms import DrawTerms

VOCABULARY_KEY = "slipstream_vocabulary"  # in vLLM's additional_config


class SharedNoise(LogitsProcessor):  # type: ignore[misc]
    """Of all requests, greedy ones too: what their model has beyond the vocabulary is never drawn."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._vocabulary = int(vllm_config.additional_config[VOCABULARY_KEY])
        self._states = req_states
        self._terms: dict[int, DrawTerms] = {}  # by slot

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        terms = DrawTerms.from_extra_args(sampling_params.extra_args)
        self._terms.pop(req_idx, None)
        if terms is not None:
            self._terms[req_idx] = terms
        return terms is not None

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        rows = torch.stack([ctx.expanded_idx_mapping.long(), ctx.pos.long(), ctx.input_ids.long()]).tolist()
        slots, positions, fed = rows
        starts = [row for row in range(len(slots)) if not row or slots[row] != slots[row - 1]]
        spans = [(start, end) for start, end in zip(starts, [*starts[1:], len(slots)], strict=True)]
        ours = [(start, end) for start, end in spans if slots[start] in self._terms]
        if not ours:
            return logits
        blocks = [self._block(slots[start], positions[start] + 1, fed[start + 1 : end]) for start, end in ours]
        wanted = torch.tensor([row for start, end in ours for row in range(start, end)], device=logits.device)
        decisions = decide(blocks, logits[wanted, : self._vocabulary])
        drawn = []
        for (start, _), block, decision in zip(ours, blocks, decisions, strict=True):
            tokens = [*block.draft.tokens[: len(decision.path)], decision.next_token]
            drawn += [(start + offset, token) for offset, token in enumerate(tokens)]
        at, tokens = torch.tensor(drawn, device=logits.device).T
        logits[at] = -torch.inf
        logits[at, tokens] = 0.0
        return logits

    def _block(self, slot: int, length: int, drafted: list[int]) -> Any:
        terms = self._terms[slot]
        generated: list[int] = []
        if terms.sampling.penalised:
            generated = self._states.all_token_ids.gpu[slot, terms.prompt_len : length].tolist()
        return terms.block_after(length, generated, drafted)
