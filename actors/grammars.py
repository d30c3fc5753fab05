"""Grammars that a text must keep to: compiled, followed along its tokens, and as masks over the vocabulary.

The vocabulary as grammars see it: the bytes that each token stands for, and which tokens end a text.

From a grammar's text to what follows it along tokens, beside the caller's thread; the latest ones are kept.

Compiling is bounded in work and memory, and so is following what was compiled: who asks for more is told so.

One text along its grammar: which tokens may come after what was decided, and after each path of a draft.

The grammar of a session as a logits processor, in a target and in a drafter alike.
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
    """Of the checkpoint in this folder. Takes a second, or several of a large vocabulary.

    Raises ModelError where grammars cannot be kept to: no token ends a text, or tokens are of another library.
    """
    return grammar_vocabulary(load_tokenizer(folder), end_ids(folder))


def grammar_vocabulary(tokenizer: Any, ends: Sequence[int]) -> LLTokenizer:
    """Of a Hugging Face tokenizer, with the ids of the tokens that end a text."""
    if not ends:
        raise ModelError(
            "the model has no end-of-text token, and grammars need one; add eos_token_id to generation_config.json"
        )
    if not getattr(tokenizer, "is_fast", False):
        raise ModelError(f"{type(tokenizer).__name__} has no tokens of the tokenizers library, which grammars need")
    backend = copy(tokenizer.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    try:
        return LLTokenizer(backend.to_str(), n_vocab=id_limit(tokenizer), eos_token=list(ends))
    except ValueError as error:
        raise ModelError(f"grammars cannot be kept to with this tokenizer: {one_line(error)}") from error


_logger = logging.getLogger(__name__)


class TextGrammar:
    """A compiled grammar and where a text has got to in it.

    A mask has one bit a token, the lowest of a byte first. `ends`, the tokens that end a text, are in it where the
    grammar may end, and alone where it must. Where only one string may follow, it is spelt as the tokenizer would.
    """

    def __init__(self, matcher: LLMatcher, ends: Sequence[int]) -> None:
        self._matcher = matcher
        self._ends = frozenset(ends)
        self._is_over = False  # the text has ended, or has broken its grammar

    def advance(self, tokens: Sequence[int]) -> None:
        """The text goes on with these for good."""
        if tokens and not self._is_over:
            self._is_over = not self._ends.isdisjoint(tokens) or self._matcher.try_consume_tokens([*tokens]) < len(
                tokens
            )

    def masks(self, paths: Sequence[tuple[int, ...]]) -> list[bytes | None]:
        """After the text and each path of tokens; None where that has ended the text or broken the grammar.

        Nothing is asked for there: no such token is decided with another after it.
        """
        if self._is_over:
            return [None] * len(paths)
        was_error = self._matcher.is_error()
        walk = _Walk(self._matcher)
        found = [None if not self._ends.isdisjoint(path) else walk.mask(path) for path in paths]
        if self._matcher.is_error() and not was_error:
            _logger.warning("a grammar takes too much work to go on, so its text ends: %s", self._matcher.get_error())
        return found


class _Walk:
    """Goes from path to path by way of what they share, on a copy: what an expensive path does stays with that path."""

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
        taken = self._matcher.try_consume_tokens(list(path[shared:]))
        self._taken = path[: shared + taken]
        if self._taken != path:
            return None
        mask = self._matcher.compute_bitmask()  # the ends alone, where that took more work than is allowed
        if self._matcher.is_error():
            self._matcher = self._start.deep_copy()
            self._taken = ()
        return mask


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many of the first tokens are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


_BITS = 8


class GrammarMasking:
    """Leaves the tokens that a session's grammar allows.

    The grammar may still be being compiled when this is made; the first row waits for it. Where other processors have
    left nothing that the grammar allows, all that it allows is equally likely: a text is never anything else.
    """

    def __init__(self, compiled: Callable[[], TextGrammar]) -> None:
        """`compiled` gives the grammar from its beginning."""
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
    """Whether each token is allowed, like `logits`, (rows, vocabulary); all of them in a row without a mask.

    The bits go to the device, which is a thirty-second of what the logits themselves have.
    """
    width = -(-logits.shape[-1] // _BITS)
    rows = [np.full(width, 0xFF, np.uint8) if m is None else np.frombuffer(m, np.uint8, width) for m in masks]
    bits = torch.from_numpy(np.stack(rows)).to(logits.device)
    shifts = torch.arange(_BITS, dtype=torch.uint8, device=logits.device)
    return (bits.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[-1]].bool()


KEPT = 64  # compiled grammars
MAX_MESSAGE_CHARS = 1024
PLAINLY = {  # what the library's own word means
    "NoExtensionBias": "no text meets this: nothing can stand at its beginning, for instance because a rule or a $ref"
    " leads only to itself; expected one that leads to a type or a text",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "a oneOf whose options may match the same value is not supported; use anyOf, or options of different types"
    ),
}
LIMITS = LLParserLimits(
    max_lexer_states=20_000,  # of 1 to 2 kB
    max_grammar_size=100_000,
    step_lexer_fuel=100_000,  # of one mask: 7 ms
    step_max_items=4_000,  # of one mask; the library's own bound of 50 000 may take a second
    precompute_large_lexemes=False,  # what is never reached is never paid for
    verbose_errors=False,
)


def grammars_of(vocabulary: Callable[[], LLTokenizer]) -> "GrammarCompiler | None":
    """Over a vocabulary; None, and a word in the log, for a model whose texts cannot have any."""
    try:
        return GrammarCompiler(vocabulary())
    except ModelError as error:
        _logger.warning("no structured output: %s", error)
        return None


class GrammarCompiler:
    """The grammars over one vocabulary. Any thread may ask; one compiles, so that grammars never take more than a core.

    `kept` compiled ones stay, those used last, whether they could be compiled or not.
    """

    def __init__(self, tokenizer: LLTokenizer, kept: int = KEPT) -> None:
        self._tokenizer = tokenizer
        self._kept = kept
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # by text, latest use last
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar")

    def begin(self, grammar: str) -> "Future[LLMatcher]":
        """Has a grammar compiled, unless it is; the future raises GrammarError where that cannot be."""
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = self._thread.submit(self._compile, grammar)
            self._compiled.move_to_end(grammar)
            while len(self._compiled) > self._kept:
                self._compiled.popitem(last=False)
            return self._compiled[grammar]

    def follow(self, grammar: str) -> TextGrammar:
        """The grammar from its beginning, once it is compiled. Raises GrammarError."""
        return TextGrammar(self.begin(grammar).result().deep_copy(), self._tokenizer.eos_tokens)

    def fault(self, grammar: str) -> str | None:
        """Compiles a grammar; what is wrong with it, if anything is."""
        error = self.begin(grammar).exception()
        if error is not None and not isinstance(error, GrammarError):
            raise error
        return None if error is None else str(error)

    def masking(self, request: Open) -> GrammarMasking | None:
        """A session's logits processor; None where any text will do. What it needs begins to be compiled."""
        if not request.grammar:
            return None
        self.begin(request.grammar)
        return GrammarMasking(partial(self.follow, request.grammar))

    def draft_masking(self, request: Open) -> GrammarMasking | None:
        """The same for a drafter: where it cannot compile a grammar, it drafts as if there were none."""
        try:
            return self.masking(request) if request.grammar and self.begin(request.grammar).result() else None
        except GrammarError as error:
            _logger.warning("session %s is drafted for without its grammar: %s", request.session, error)
            return None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        trial = matcher.deep_copy()
        if not matcher.is_error():
            trial.compute_bitmask()  # what no text meets shows only here
        if trial.is_error():
            why, *_ = trial.get_error().split("\n<")  # what follows is for the library's developers
            raise GrammarError(PLAINLY.get(why, why)[:MAX_MESSAGE_CHARS])
        return matcher
