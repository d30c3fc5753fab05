"""Logits processors: penalties, bias, token masks and grammars, applied to each row before temperature.

A processed row of logits is a function of the request, the text before the row, and the model's row. This holds for
every row of a step, on every path of a draft tree, and for a drafter's rows. Hence Gumbel coupling gives the same
tokens with and without speculation, and rejection sampling the same distribution.

**One processor serves one session in one process.** It receives two kinds of text:

* the committed text, which only grows: `advance` receives each generated token once, in order;
* a path of tokens after it, which applies to one row only: `apply` receives one path per row.

`advance` moves a stateful processor, such as a grammar's matcher, permanently. `apply` must leave the state unchanged:
it forks the state, or moves along a path and rolls back. A block's paths are ordered such that a path's parent precedes
it, mostly directly, so rolling back to the common prefix of two successive paths takes few steps. Later calls may
repeat a path.

A path may hold tokens that the processor itself forbids, since drafters need not know it. Nothing after such a token
can be decided, so its row may stay unchanged; `apply` must neither fail nor change another row. The same holds after a
stop id.

In a target, only rank 0 calls `advance` between steps and `apply` once or more per step. In a drafter, the committed
text is what the drafter has received, and a path is what it drafts after that, predicted verdicts included. Sessions
without processors skip all of this.

Penalties: repetition applies to prompt and generated tokens, as in transformers; frequency and presence only to
generated ones, as in OpenAI's API. `chain_of` applies masks, then bias, then penalties, in vLLM's order. To add a kind,
write a class and a maker and add it there.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from actors.compute.kv_cache import to_device
from protos.draft_tree import DraftTree
from protos.messages import Open, Sampling

Path = tuple[int, ...]
"""Tokens that follow the committed text."""


class LogitsProcessor(Protocol):
    """Changes the logits of one session's rows."""

    def advance(self, tokens: Sequence[int]) -> None:
        """Receives newly committed tokens, in order; never the prompt, which the Open contains."""
        ...

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        """Changes `logits` in place: float32, (rows, vocabulary), on the model's device, one row per path.

        Sets forbidden tokens to -inf. It must not wait for the device: it copies numbers there with `to_device`.
        """
        ...


Maker = Callable[[Open], LogitsProcessor | None]
"""Creates a session's processor of one kind; returns None if the request does not need it.

Generated tokens in the Open are passed to `advance` later.
"""


class ProcessorChain:
    """All processors of one session, applied in order."""

    def __init__(self, request: Open, processors: Sequence[LogitsProcessor]) -> None:
        self._processors = processors
        self._length = request.prompt_len  # number of committed tokens, prompt included

    def follow(self, text: Sequence[int], length: int | None = None) -> None:
        """Commits the text, prompt included, up to `length`; None: all of it."""
        end = len(text) if length is None else length
        assert end >= self._length, "what was decided is never taken back"
        self.advance(text[self._length : end])

    def advance(self, tokens: Sequence[int]) -> None:
        """Commits further tokens."""
        if tokens:
            for processor in self._processors:
                processor.advance(tokens)
            self._length += len(tokens)

    @property
    def length(self) -> int:
        """Number of committed tokens, prompt included."""
        return self._length

    def path(self, text: Sequence[int]) -> Path:
        """Returns the part of `text` after the committed tokens."""
        return tuple(text[self._length :])

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> Tensor:
        """Returns a processed copy in float32, (rows, vocabulary): row i follows the committed text and `paths[i]`."""
        assert len(logits) == len(paths), "one path for each row"
        processed = logits.to(torch.float32, copy=True)
        for processor in self._processors:
            processor.apply(processed, paths)
        return processed


def paths_of(draft: DraftTree) -> list[Path]:
    """Returns the path of each of a block's rows: first the empty path, then the path to each node."""
    paths: list[Path] = [()]
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append((*paths[parent + 1], token))
    return paths


class Penalties:
    """Applies repetition, frequency and presence penalties. Token counts stay on the device; steps copy only new
    tokens.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()) -> None:
        self._sampling = sampling
        self._prompt = sorted(set(prompt)) if sampling.repetition_penalty != 1.0 else []
        self._fresh: list[int] = []  # generated tokens that are not counted yet
        self._counts: Tensor | None = None  # counts of generated tokens, (vocabulary,)
        self._in_prompt: Tensor | None = None  # (vocabulary,): whether the prompt contains each token

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


class AllowedTokens:
    """Forbids all tokens except the given ones."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self._allowed = allowed
        self._forbidden: Tensor | None = None  # (vocabulary,)

    def advance(self, tokens: Sequence[int]) -> None:
        """Does nothing: the mask is the same after every token."""

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
        """Does nothing: the bias is the same after every token."""

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        if self._on_device is None:
            (ids,) = to_device([[token for token, _ in self._bias]], logits.device)
            (values,) = to_device([[value for _, value in self._bias]], logits.device, torch.float32)
            self._on_device = ids, values
        ids, values = self._on_device
        logits[:, ids] += values


class BadWords:
    """Forbids a sequence's last token wherever the generated text ends in all its other tokens."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._words = words
        self._reach = max(map(len, words)) - 1  # most preceding tokens that a sequence can match
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
    """Forbids stop ids until the minimum number of tokens is generated."""

    def __init__(self, stop_ids: Sequence[int], missing: int) -> None:
        self._stop_ids = stop_ids
        self._missing = missing  # tokens still to be generated

    def advance(self, tokens: Sequence[int]) -> None:
        self._missing -= len(tokens)

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        early = [row for row, path in enumerate(paths) if len(path) < self._missing]
        forbid(logits, [row for row in early for _ in self._stop_ids], [*self._stop_ids] * len(early))


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


MAKERS: tuple[Maker, ...] = (make_allowed, make_bad_words, make_minimum_length, make_bias, make_penalties)


def chain_of(request: Open, makers: tuple[Maker, ...] = MAKERS) -> ProcessorChain | None:
    """Returns a session's processors; None if the request leaves logits unchanged.

    An engine or drafting method whose processors need more than the Open, such as a tokenizer, passes its own `makers`.
    """
    processors = [processor for maker in makers if (processor := maker(request)) is not None]
    return ProcessorChain(request, processors) if processors else None
