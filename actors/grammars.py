"""Grammars: compiled in the background, advanced by a text's tokens, applied to its logits as vocabulary masks.

`GrammarCompiler` compiles on one thread, with limits on work and memory, and caches the most recently used grammars.
`TextGrammar` tracks one text and computes a mask after each path of its draft. `GrammarMasking` applies the masks as a
logits processor, in targets and drafters.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from torch import Tensor

from actors.models.config_reader import one_line
from actors.models.tokenizer_reader import end_ids as end_ids
from actors.models.tokenizer_reader import id_limit, load_tokenizer
from cluster.errors import GrammarError, ModelError
from protos.messages import Open


def load_grammar_vocabulary(folder: Path) -> LLTokenizer:
    """Loads a checkpoint's vocabulary for grammars. Takes one second, or several for a large vocabulary.

    Raises ModelError if the model has no end-of-text id or its tokenizer is not of the tokenizers library.
    """
    return grammar_vocabulary(load_tokenizer(folder), end_ids(folder))


def grammar_vocabulary(tokenizer: Any, ends: Sequence[int]) -> LLTokenizer:
    """Converts a Hugging Face tokenizer; `ends` are the end-of-text ids."""
    if not ends:
        raise ModelError(
            "the model has no end-of-text token, and grammars need one; add eos_token_id to generation_config.json"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{type(tokenizer).__name__} is not a fast tokenizer, which grammars need; add tokenizer.json")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    try:
        return LLTokenizer(backend.to_str(), n_vocab=id_limit(tokenizer), eos_token=list(ends))
    except ValueError as error:
        raise ModelError(f"grammars do not support this tokenizer; use another model: {one_line(error)}") from error


_logger = logging.getLogger(__name__)


class TextGrammar:
    """A compiled grammar and its state after a text.

    A mask has one bit per token, lowest bit of a byte first. The end-of-text ids `ends` are allowed where the grammar
    may end; where it must end, only they are allowed. Where the grammar allows only one string, the mask allows only
    the tokenizer's own tokens of this string.
    """

    def __init__(self, matcher: LLMatcher, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = frozenset(ends)
        self._is_over = False  # whether the text has ended or broken its grammar

    def advance(self, tokens: Sequence[int]) -> None:
        """Appends committed tokens to the text."""
        if tokens and not self._is_over:
            self._is_over = not self._ends.isdisjoint(tokens) or self._matcher.try_consume_tokens([*tokens]) < len(
                tokens
            )

    def masks(self, paths: Sequence[tuple[int, ...]]) -> list[bytes | None]:
        """Returns the mask after the text plus each path; None if the path ends the text or breaks the grammar.

        No mask is needed after such a path, because no token after it is ever committed.
        """
        if self._is_over:
            return [None] * len(paths)
        had_error = self._matcher.is_error()
        walk = _Walk(self._matcher)
        masks = [None if not self._ends.isdisjoint(path) else walk.mask(path) for path in paths]
        if self._matcher.is_error() and not had_error:
            _logger.warning("a grammar exceeded its work limit, so its text ends: %s", self._matcher.get_error())
        return masks


class _Walk:
    """Advances a copy of the grammar along paths, reusing common prefixes; a path over the work limit affects only
    itself.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._start = matcher
        self._matcher = matcher.deep_copy()
        self._taken: tuple[int, ...] = ()

    def mask(self, path: tuple[int, ...]) -> bytes | None:
        if not path:
            return self._start.compute_bitmask()
        shared = _shared(self._taken, path)
        if shared < len(self._taken):
            self._matcher.rollback(len(self._taken) - shared)
        consumed = self._matcher.try_consume_tokens(list(path[shared:]))
        self._taken = path[: shared + consumed]
        if self._taken != path:
            return None
        mask = self._matcher.compute_bitmask()  # only `ends` if the mask exceeds its work limit
        if self._matcher.is_error():
            self._matcher = self._start.deep_copy()
            self._taken = ()
        return mask


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Returns the length of the common prefix."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


_BITS = 8


class GrammarMasking:
    """Logits processor that leaves only the tokens allowed by a session's grammar.

    The first row waits until the grammar is compiled. The grammar takes precedence: if other processors forbid every
    token that it allows, these tokens become equally likely.
    """

    def __init__(self, compiled: Callable[[], TextGrammar]) -> None:
        """Stores `compiled`, which returns the grammar in its initial state."""
        self._compiled = compiled

    @cached_property
    def _grammar(self) -> TextGrammar:
        return self._compiled()

    def advance(self, tokens: Sequence[int]) -> None:
        self._grammar.advance(tokens)

    def apply(self, logits: Tensor, paths: Sequence[tuple[int, ...]]) -> None:
        masks = self._grammar.masks(paths)
        allowed = unpacked(masks, logits)
        is_left = (allowed & ~logits.isneginf()).any(dim=-1, keepdim=True)
        logits.copy_(torch.where(is_left, logits, 0.0).masked_fill(~allowed, -torch.inf))


def unpacked(masks: Sequence[bytes | None], logits: Tensor) -> Tensor:
    """Unpacks bit masks into booleans shaped like `logits`, (rows, vocabulary); rows without a mask allow everything.

    Masks end with the tokenizer's last token, and logits may have further columns, for padding rows of the embedding;
    masks forbid these. Unpacks on the device: the bits have a thirty-second of the bytes of the logits, so copying them
    is cheap.
    """
    packed = np.zeros((len(masks), -(-logits.shape[-1] // _BITS)), np.uint8)
    for row, mask in zip(packed, masks, strict=True):
        known = np.frombuffer(b"\xff" * len(row) if mask is None else mask, np.uint8)[: len(row)]
        row[: len(known)] = known
    bits = torch.from_numpy(packed).to(logits.device)
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=logits.device)
    return (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[-1]].bool()


MAX_CACHED_GRAMMARS = 64  # maximum number of cached grammars
MAX_MESSAGE_CHARS = 1024
REWORDED_ERRORS = {  # replacements for the library's messages
    "NoExtensionBias": "no text meets this: nothing can stand at its beginning, for instance because a rule or a $ref"
    " leads only to itself; expected one that leads to a type or a text",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "a oneOf whose options may match the same value is not supported; use anyOf, or options of different types"
    ),
}
LIMITS = LLParserLimits(
    max_lexer_states=20_000,  # states of 1 to 2 kB each
    max_grammar_size=100_000,
    step_lexer_fuel=100_000,  # work limit per mask, about 7 ms
    step_max_items=4_000,  # items per mask; the library's default of 50,000 may take a second
    precompute_large_lexemes=False,  # large lexemes are compiled only when reached
    verbose_errors=False,
)


def grammars_of(vocabulary: Callable[[], LLTokenizer]) -> "GrammarCompiler | None":
    """Returns a compiler for a vocabulary; if grammars are not supported, logs the reason and returns None."""
    try:
        return GrammarCompiler(vocabulary())
    except ModelError as error:
        _logger.warning("structured output is disabled: %s", error)
        return None


class GrammarCompiler:
    """Compiles grammars over one vocabulary on one thread, so that compilation uses at most one core.

    Methods may be called from any thread. Caches the `max_cached` most recently used results, failures included.
    """

    def __init__(self, tokenizer: LLTokenizer, max_cached: int = MAX_CACHED_GRAMMARS) -> None:
        self._tokenizer = tokenizer
        self._max_cached = max_cached
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # by grammar text, most recently used last
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def begin(self, grammar: str) -> "Future[LLMatcher]":
        """Starts compiling a grammar unless it is cached; the future raises GrammarError on failure.

        A caller may cancel the future while it waits for other grammars.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is None or known.cancelled():
                self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > self._max_cached:
                self._compiled.popitem(last=False)
            return self._compiled[grammar]

    def follow(self, grammar: str) -> TextGrammar:
        """Waits for the compiled grammar and returns it in its initial state. Raises GrammarError if it is invalid."""
        return TextGrammar(self.begin(grammar).result().deep_copy(), self._tokenizer.eos_tokens)

    def fault(self, grammar: str) -> str | None:
        """Compiles a grammar and returns its error message; None if it is valid."""
        error = self.begin(grammar).exception()
        if error is not None and not isinstance(error, GrammarError):
            raise error
        return None if error is None else str(error)

    def masking(self, request: Open) -> GrammarMasking | None:
        """Starts compiling a session's grammar and returns its logits processor; None without a grammar."""
        if not request.grammar:
            return None
        self.begin(request.grammar)
        return GrammarMasking(partial(self.follow, request.grammar))

    def draft_masking(self, request: Open) -> GrammarMasking | None:
        """Returns a drafter's logits processor, like `masking`; also returns None for an invalid grammar."""
        try:
            return self.masking(request) if request.grammar and self.begin(request.grammar).result() else None
        except GrammarError as error:
            _logger.warning("drafting for session %s without its invalid grammar: %s", request.session, error)
            return None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        trial = matcher.deep_copy()
        if not matcher.is_error():
            trial.compute_bitmask()  # reveals errors of unreachable rules
        if trial.is_error():
            why, *_ = trial.get_error().split("\n<")  # drops details for developers of the library
            raise GrammarError(REWORDED_ERRORS.get(why, why)[:MAX_MESSAGE_CHARS])
        return matcher
