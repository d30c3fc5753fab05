"""Logits processors: penalties, bias, token masks and grammars, applied to each row before temperature.

A processed row of logits is a function of the request, the text before the row, and the model's logits. This holds for
every row of a step, for every path of a draft tree, and for a drafter's rows. Hence speculation changes neither the
tokens under Gumbel coupling nor the distribution under rejection sampling.

**One processor serves one session in one process.** It receives two kinds of text:

* The committed text only grows: `advance` receives each generated token once, in order.
* A path of uncommitted tokens follows it and concerns one row: `apply` receives one path per row.

`advance` moves a stateful processor, such as a grammar's matcher, permanently. `apply` must leave the state unchanged:
it forks the state, or advances along a path and rolls back. In a block, a path's parent precedes the path, usually
directly, so rolling back to the common prefix of successive paths takes few steps. Later calls may repeat a path.

A path may contain tokens that the processor forbids, since drafters need not apply it. Tokens after a forbidden token
are never committed, so their rows may stay unchanged; `apply` must neither fail nor change other rows. The same holds
after a stop id.

In a target, only rank 0 calls `advance` between steps and `apply` once or more per step. In a drafter, the committed
text is the text that it has received, and a path consists of its draft tokens and predicted verdicts. Sessions without
processors skip all of this.

Penalties: the repetition penalty applies to prompt and generated tokens, as in transformers. Frequency and presence
penalties apply only to generated tokens, as in OpenAI's API. `chain_of` applies masks, then bias, then penalties, in
vLLM's order. To add a processor, write a class and a factory, and add it to `PROCESSOR_FACTORIES`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.kv_cache import to_device
from protos.draft_tree import DraftTree
from protos.messages import Open, Sampling

Path = tuple[int, ...]
"""Uncommitted tokens after the committed text."""


class LogitsProcessor(Protocol):
    """Changes the logits of one session."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Receives newly committed tokens, in order; excludes the prompt, which the Open contains."""
        ...

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        """Changes `logits` in place: float32, (rows, vocabulary), on the model's device, one row per path.

        Sets forbidden tokens to -inf. It must not wait for the device; use `to_device` to copy numbers.
        """
        ...


ProcessorFactory = Callable[[Open], LogitsProcessor | None]
"""Creates one kind of processor for a session; returns None if the request does not need it.

`advance` later receives the generated tokens in the Open.
"""


class ProcessorChain:
    """The processors of one session, applied in order."""

    def __init__(self, request: Open, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._length = request.prompt_len  # committed tokens, including the prompt

    def follow(self, text: Sequence[int], length: int | None = None) -> None:
        """Commits the text, including the prompt, up to `length`; None: all of it."""
        end = len(text) if length is None else length
        assert end >= self._length, "committed tokens are never retracted"
        self.advance(text[self._length : end])

    def advance(self, tokens: Sequence[int]) -> None:
        """Commits further tokens."""
        if tokens:
            for processor in self._processors:
                processor.advance(tokens)
            self._length += len(tokens)

    @property
    def length(self) -> int:
        """Number of committed tokens, including the prompt."""
        return self._length

    def path(self, text: Sequence[int]) -> Path:
        """Returns the part of `text` after the committed tokens."""
        return tuple(text[self._length :])

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Returns a processed float32 copy, (rows, vocabulary); row i follows the committed text and `paths[i]`."""
        assert len(logits) == len(paths), "expected one path per row"
        processed = logits.to(torch.float32, copy=True)
        for processor in self._processors:
            processor.apply(processed, paths)
        return processed


def paths_of(draft: DraftTree) -> list[Path]:
    """Returns the path before each row of a block: the empty path, then the path to each node."""
    paths: list[Path] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


class Penalties:
    """Applies repetition, frequency and presence penalties. Token counts stay on the device; a step copies only new
    tokens.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._prompt = sorted(set(prompt)) if sampling.repetition_penalty != 1.0 else []
        self._fresh: list[int] = []  # generated tokens not counted yet
        self._counts: Tensor | None = None  # (vocabulary,): counts of generated tokens
        self._in_prompt: Tensor | None = None  # (vocabulary,): mask of tokens in the prompt

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
            assert self._in_prompt is not None, "created together with the counts"
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
    if not request.sampling.penalized:
        return None
    return Penalties(request.sampling, request.tokens[: request.prompt_len])


class AllowedTokens:
    """Forbids all tokens except the given ones."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self._allowed = allowed
        self._forbidden: Tensor | None = None  # (vocabulary,)

    def advance(self, tokens: Sequence[int]) -> None:
        """Does nothing: the mask is constant."""

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        if self._forbidden is None:
            self._forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
            self._forbidden[to_device([self._allowed], logits.device)[0]] = False
        logits.masked_fill_(self._forbidden, -torch.inf)


class LogitBias:
    """Adds a bias to the logits of some tokens."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self._bias = bias
        self._on_device: tuple[Tensor, Tensor] | None = None  # ids and values, (tokens,)

    def advance(self, tokens: Sequence[int]) -> None:
        """Does nothing: the bias is constant."""

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        if self._on_device is None:
            (ids,) = to_device([[token for token, _ in self._bias]], logits.device)
            (values,) = to_device([[value for _, value in self._bias]], logits.device, torch.float32)
            self._on_device = ids, values
        ids, values = self._on_device
        logits[:, ids] += values


class BadWords:
    """Forbids the last token of a sequence after all of its other tokens."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._words = words
        self._reach = max(map(len, words)) - 1  # maximum number of preceding tokens to match
        self._tail: Path = ()

    def advance(self, tokens: Sequence[int]) -> None:
        self._tail = self._last((*self._tail, *tokens))

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        rows: list[int] = []
        ids: list[int] = []
        for row, path in enumerate(paths):
            before = self._last((*self._tail, *path))
            tokens = [word[-1] for word in self._words if len(word) == 1 or before[1 - len(word) :] == word[:-1]]
            rows += [row] * len(tokens)
            ids += tokens
        forbid(logits, rows, ids)

    def _last(self, tokens: Path) -> Path:
        return tokens[max(0, len(tokens) - self._reach) :]


class MinimumLength:
    """Forbids stop ids until a minimum number of tokens is generated."""

    def __init__(self, stop_ids: Sequence[int], missing: int) -> None:
        self._stop_ids = stop_ids
        self._missing = missing  # tokens still to generate

    def advance(self, tokens: Sequence[int]) -> None:
        self._missing -= len(tokens)

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        early = [row for row, path in enumerate(paths) if len(path) < self._missing]
        # A checkpoint may name end ids of padding rows of its embedding, which are never drawn.
        drawable = [token for token in self._stop_ids if token < logits.shape[-1]]
        forbid(logits, [row for row in early for _ in drawable], drawable * len(early))


def forbid(logits: Tensor, rows: Sequence[int], ids: Sequence[int]) -> None:
    """Sets the logits at (row, id) pairs to -inf, in place."""
    if rows:
        at, tokens = to_device([rows, ids], logits.device)
        logits.index_put_((at, tokens), logits.new_full((), -torch.inf))


def make_allowed(request: Open) -> AllowedTokens | None:
    allowed = request.rules.allowed
    return AllowedTokens(allowed) if allowed else None


def make_bias(request: Open) -> LogitBias | None:
    bias = request.rules.logit_bias
    return LogitBias(bias) if bias else None


def make_bad_words(request: Open) -> BadWords | None:
    words = request.rules.bad_words
    return BadWords(words) if words else None


def make_minimum_length(request: Open) -> MinimumLength | None:
    missing = request.rules.min_len - request.prompt_len
    return MinimumLength(request.stop_ids, missing) if missing > 0 and request.stop_ids else None


PROCESSOR_FACTORIES: tuple[ProcessorFactory, ...] = (
    make_allowed,
    make_bad_words,
    make_minimum_length,
    make_bias,
    make_penalties,
)


def chain_of(
    request: Open, processor_factories: tuple[ProcessorFactory, ...] = PROCESSOR_FACTORIES
) -> ProcessorChain | None:
    """Returns a session's processors; None if the request leaves logits unchanged.

    Pass other `processor_factories` for processors that need more than the Open, such as a tokenizer.
    """
    processors = [processor for factory in processor_factories if (processor := factory(request)) is not None]
    return ProcessorChain(request, processors) if processors else None
