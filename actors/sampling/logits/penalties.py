"""Repetition, frequency and presence penalties.

Repetition looks at prompt and generated tokens alike, as in transformers; the other two only at generated ones, as in
OpenAI's API.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.compute.h2d_copy import to_device
from actors.sampling.logits.processor import Path
from protos.messages import Open, Sampling


class Penalties:
    """Counts tokens on the device; a step brings it only what is new."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._prompt = sorted(set(prompt)) if sampling.repetition_penalty != 1.0 else []
        self._fresh: list[int] = []  # generated, and not counted yet
        self._counts: Tensor | None = None  # of generated tokens, (vocabulary,)
        self._in_prompt: Tensor | None = None  # (vocabulary,)

    def advance(self, tokens: Sequence[int]) -> None:
        self._fresh += tokens

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        counts = self._counted(logits).repeat(len(paths), 1)
        rows = [row for row, path in enumerate(paths) for _ in path]
        if rows:
            at, ids = to_device([rows, [token for path in paths for token in path]], logits.device)
            counts.index_put_((at, ids), counts.new_ones(len(rows)), accumulate=True)
        sampling = self._sampling
        if sampling.repetition_penalty != 1.0:
            assert self._in_prompt is not None, "it is made with the counts"
            penalty = sampling.repetition_penalty
            repeated = torch.where(logits > 0, logits / penalty, logits * penalty)
            logits.copy_(torch.where((counts > 0) | self._in_prompt, repeated, logits))
        logits -= sampling.frequency_penalty * counts
        logits -= sampling.presence_penalty * (counts > 0)

    def _counted(self, logits: Tensor) -> Tensor:
        if self._counts is None:
            self._counts = logits.new_zeros(logits.shape[-1])
            self._in_prompt = torch.zeros_like(self._counts, dtype=torch.bool)
            if self._prompt:
                self._in_prompt[to_device([self._prompt], logits.device)[0]] = True
        if self._fresh:
            (ids,) = to_device([self._fresh], logits.device)
            self._counts.index_put_((ids,), self._counts.new_ones(len(ids)), accumulate=True)
            self._fresh = []
        return self._counts


def make_penalties(request: Open) -> Penalties | None:
    if not request.sampling.penalised:
        return None
    return Penalties(request.sampling, request.tokens[: request.prompt_len])
