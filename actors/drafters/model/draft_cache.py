"""Cache of a draft model: sessions in branches, forked for the outcomes that a verdict may bring.

A session has one branch for its decided text. While a verdict is pending, it has further branches for possible
outcomes; the one that matches the verdict best then continues. Everything here can be recomputed, so when the pool runs
out of pages, the least recently used session is dropped.
"""

import secrets
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor

from actors.compute.kv_cache import FeedRow
from cluster.page_allocator import PageAllocator, PageCopy


@dataclass(eq=False)
class Branch:
    """Cached tokens of a session, on the pages that the page allocator holds under `name`."""

    session: str
    name: str
    tokens: list[int]
    first: int = 0  # index where the text begins for the model; tokens before it are skipped
    # For a draft head, which is fed each token with the state before it:
    exact: int = 0  # number of first tokens that were fed with the target's states
    predicted: dict[int, Tensor] = field(default_factory=dict)  # the head's states, by index of the token fed with them


class DraftCache:
    """All branches of all sessions, over one pool of pages.

    The first `unfed` tokens of a text are not fed, so a token's place in the cache is its index minus `unfed`. A draft
    head is fed each token with the state before it: it has no use for the first token, and a cache entry depends on
    more than the tokens up to it, so its pages are not shared between sessions. If a text begins in its middle
    (`Branch.first`), the tokens before that take no place either.
    """

    def __init__(self, pages: int, page_size: int, unfed: int = 0) -> None:
        self._unfed = unfed
        self._allocator = PageAllocator(pages, page_size, secrets.token_bytes(16))
        self._branches: OrderedDict[str, list[Branch]] = OrderedDict()  # by session, the one resumed last at the end
        self._names = count()

    @property
    def is_idle(self) -> bool:
        return not self._branches

    def check(self) -> None:
        """Raises AssertionError unless every page is accounted for."""
        self._allocator.check()

    def resume(self, session: str, tokens: Sequence[int], first: int = 0, salt: str = "") -> Branch:
        """Returns the branch that has cached most of `tokens`, cut to the common prefix; closes the other branches.

        The last token never counts as cached, because its logits are needed. A session that begins at `first` must be
        resumed with the same `first` every time; the tokens before it count as cached. Pages are shared only among
        sessions of the same salt.
        """
        branches = self._branches.pop(session, [])
        agreed = [_common(branch.tokens, tokens) for branch in branches]
        best = max(range(len(branches)), key=agreed.__getitem__, default=-1)
        for index, branch in enumerate(branches):
            if index != best:
                self._allocator.close(branch.name)
        if best < 0:
            found = self._open(session, tokens, first, salt)
        else:
            found = branches[best]
            self.cut(found, agreed[best])
            found.predicted = {index: state for index, state in found.predicted.items() if index <= agreed[best]}
        self._branches[session] = [found]
        return found

    def fork(self, branch: Branch, length: int) -> Branch:
        """Adds a branch with the first `length` tokens of this one."""
        name = self._name(branch.session)
        self._allocator.fork(branch.name, name, self._places(branch, length))
        exact = min(branch.exact, length)
        forked = Branch(branch.session, name, branch.tokens[:length], branch.first, exact, dict(branch.predicted))
        self._branches[branch.session].append(forked)
        return forked

    def publish(self, branch: Branch, length: int) -> None:
        """Shares the pages of the first `length` tokens, which are decided, with sessions of the same prefix."""
        if not self._unfed:
            self._allocator.publish(branch.name, branch.tokens, min(length, len(branch.tokens)))

    def feed(
        self, branch: Branch, tokens: Sequence[int], busy: set[str], masks: Sequence[int] = (), logits: int = 1
    ) -> tuple[FeedRow, list[PageCopy]] | None:
        """Appends tokens and returns the row to feed, with pages to copy first; None when the pool is full.

        The last `logits` tokens give logits, and so does each of `masks`. Masks are fed after the tokens and are not
        part of the branch: call `drop_masks` after the forward. Sessions that are not `busy` are evicted to make room.
        """
        start = self._places(branch, len(branch.tokens))
        end = self._places(branch, len(branch.tokens) + len(tokens))
        while (copies := self._allocator.reserve(branch.name, start, end + len(masks))) is None:
            idle = next((session for session in self._branches if session not in busy), None)
            if idle is None:
                return None
            self.close(idle)
        branch.tokens += tokens
        fed = tokens[len(tokens) - (end - start) :]
        return FeedRow((*fed, *masks), start, logits + len(masks), self._allocator.table(branch.name)), copies

    def drop_masks(self, branch: Branch) -> None:
        """Frees the cache entries of mask tokens."""
        self._allocator.truncate(branch.name, self._places(branch, len(branch.tokens)))

    def cut(self, branch: Branch, length: int) -> None:
        """Drops all but the first `length` tokens of a branch, and any masks after them."""
        del branch.tokens[length:]
        branch.exact = min(branch.exact, length)
        self._allocator.truncate(branch.name, self._places(branch, length))

    def close(self, session: str) -> None:
        """Drops a session; an unknown one is ignored."""
        for branch in self._branches.pop(session, []):
            self._allocator.close(branch.name)

    def _places(self, branch: Branch, tokens: int) -> int:
        """Returns how many cache places the first `tokens` tokens of a branch's text take."""
        return max(0, tokens - branch.first - self._unfed)

    def _open(self, session: str, tokens: Sequence[int], first: int, salt: str) -> Branch:
        assert not first or self._unfed, "of a text that begins in its middle no page is shared"
        name = self._name(session)
        cached = self._allocator.open(name, tokens, salt.encode())
        return Branch(session, name, list(tokens[: max(first, cached)]), first, exact=first)

    def _name(self, session: str) -> str:
        return f"{session}/{next(self._names)}"


def _common(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns the length of the common prefix, the last of `tokens` excluded."""
    limit = min(len(cached), len(tokens) - 1)
    if tuple(cached[:limit]) == tuple(tokens[:limit]):
        return limit
    return next(i for i in range(limit) if cached[i] != tokens[i])
