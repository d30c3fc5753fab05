"""One text along its grammar: which tokens may come after what was decided, and after each path of a draft."""

import logging
from collections.abc import Sequence

from llguidance import LLMatcher

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
