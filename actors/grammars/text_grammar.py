"""One text along its grammar: which tokens may come after what was decided, and after each path of a draft."""

import logging
from collections.abc import Sequence

from llguidance import LLMatcher

_logger = logging.getLogger(__name__)


class TextGrammar:
    """A compiled grammar and where a text has got to in it.

    A mask has one bit a token, the lowest of a byte first. The tokens that end a text are in it where the grammar may
    end, and alone where it must.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._is_broken = False

    def advance(self, tokens: Sequence[int]) -> None:
        """The text goes on with these for good."""
        taken = self._matcher.try_consume_tokens(list(tokens)) if tokens else 0
        self._is_broken |= taken < len(tokens)

    def masks(self, paths: Sequence[tuple[int, ...]]) -> list[bytes | None]:
        """After the text and each path of tokens; None where that breaks the grammar.

        Nothing is asked for there: no such token is decided, so what would come after it decides nothing.
        """
        if self._is_broken:
            return [None] * len(paths)
        walk = _Walk(self._matcher)
        return [_mask(self._matcher) if not path else walk.mask(path) for path in paths]


class _Walk:
    """Goes from path to path by way of what they share, on a copy: what an expensive path does stays with that path."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._start = matcher
        self._matcher = matcher.deep_copy()
        self._taken: tuple[int, ...] = ()

    def mask(self, path: tuple[int, ...]) -> bytes | None:
        shared = _shared(self._taken, path)
        if shared < len(self._taken):
            self._matcher.rollback(len(self._taken) - shared)
        taken = self._matcher.try_consume_tokens(list(path[shared:]))
        self._taken = path[: shared + taken]
        if self._taken != path:
            return None
        mask = _mask(self._matcher)
        if self._matcher.is_error():
            self._matcher = self._start.deep_copy()
            self._taken = ()
        return mask


def _mask(matcher: LLMatcher) -> bytes:
    mask = matcher.compute_bitmask()
    if matcher.is_error():  # it took more work than is allowed: only the end is left
        _logger.warning("a grammar takes too much work to go on, so its text ends: %s", matcher.get_error())
    return mask


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """How many of the first tokens are the same."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
