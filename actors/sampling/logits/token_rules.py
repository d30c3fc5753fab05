"""Which tokens a request allows, and how much it likes them: allowed tokens, bad words, no early end, bias."""

from collections.abc import Sequence

import torch
from torch import Tensor

from actors.compute.h2d_copy import to_device
from actors.sampling.logits.processor import Path
from protos.messages import Open


class AllowedTokens:
    """Forbids all tokens but some."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self._allowed = allowed
        self._forbidden: Tensor | None = None  # (vocabulary,)

    def advance(self, tokens: Sequence[int]) -> None:
        """Whatever comes, the same tokens are allowed."""

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        if self._forbidden is None:
            self._forbidden = torch.ones(logits.shape[-1], dtype=torch.bool, device=logits.device)
            self._forbidden[to_device([self._allowed], logits.device)[0]] = False
        logits.masked_fill_(self._forbidden, -torch.inf)


class LogitBias:
    """Adds a number to the logit of each of some tokens."""

    def __init__(self, bias: Sequence[tuple[int, float]]) -> None:
        self._bias = bias
        self._on_device: tuple[Tensor, Tensor] | None = None  # ids and values, (tokens,)

    def advance(self, tokens: Sequence[int]) -> None:
        """Whatever comes, the bias is the same."""

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        if self._on_device is None:
            (ids,) = to_device([[token for token, _ in self._bias]], logits.device)
            (values,) = to_device([[value for _, value in self._bias]], logits.device, torch.float32)
            self._on_device = ids, values
        ids, values = self._on_device
        logits[:, ids] += values


class BadWords:
    """Forbids the last token of each of some sequences where the generated text ends in all tokens before it."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._words = words
        self._reach = max(map(len, words)) - 1  # tokens that are looked back at
        self._tail: Path = ()

    def advance(self, tokens: Sequence[int]) -> None:
        self._tail = self._last((*self._tail, *tokens))

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        rows: list[int] = []
        ids: list[int] = []
        for row, path in enumerate(paths):
            before = self._last((*self._tail, *path))
            found = [word[-1] for word in self._words if len(word) == 1 or before[1 - len(word) :] == word[:-1]]
            rows += [row] * len(found)
            ids += found
        forbid(logits, rows, ids)

    def _last(self, tokens: Path) -> Path:
        return tokens[max(0, len(tokens) - self._reach) :]


class NoEarlyEnd:
    """Forbids stop ids until enough tokens were generated."""

    def __init__(self, stop_ids: Sequence[int], missing: int) -> None:
        self._stop_ids = stop_ids
        self._missing = missing  # tokens

    def advance(self, tokens: Sequence[int]) -> None:
        self._missing -= len(tokens)

    def apply(self, logits: Tensor, paths: Sequence[Path]) -> None:
        early = [row for row, path in enumerate(paths) if len(path) < self._missing]
        forbid(logits, [row for row in early for _ in self._stop_ids], [*self._stop_ids] * len(early))


def forbid(logits: Tensor, rows: Sequence[int], ids: Sequence[int]) -> None:
    """Sets single tokens of single rows to -inf, in place."""
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


def make_no_early_end(request: Open) -> NoEarlyEnd | None:
    missing = request.rules.min_len - request.prompt_len
    return NoEarlyEnd(request.stop_ids, missing) if missing > 0 and request.stop_ids else None
