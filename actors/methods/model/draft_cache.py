"""The cache of a draft model: sessions in branches, forked for what a verdict may bring.

A session has one branch that follows it and, while a verdict is out, further ones for what the verdict may bring; when
it is in, the branch that guessed best goes on. Everything here can be computed again: when the pool runs dry, whoever
was not asked for lately is forgotten.
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
    """Cached tokens of a session, on the page allocator's pages of `name`."""

    session: str
    name: str
    tokens: list[int]
    first: int = 0  # index of the first of them that is not left out: the text begins there for the model
    # Of a draft head, which is fed each token with the state before it:
    exact: int = 0  # of its tokens, the first so many were fed with the target's states
    predicted: dict[int, Tensor] = field(default_factory=dict)  # the head's own, to feed the token of that index with


class DraftCache:
    """All branches of all sessions, over one pool of pages.

    The first `unfed` tokens of a text are not fed, so that a token lies so many places before its index. A draft head
    is fed each token with the state before it: it has no use for the first token, and what lies at a place depends on
    more than the tokens up to there, so that its pages are not shared between sessions. Where a text begins in its
    middle, what is before that takes no place either.
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
        """The branch that has cached most of `tokens`, cut to what agrees; the session's other branches are closed.

        The last token is never among the cached ones: its logits are wanted. A session whose text begins at `first`
        begins there whenever it is resumed; the tokens before count as cached. Pages are shared among sessions of the
        same salt alone.
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
        """A further branch with the first `length` tokens of this one."""
        name = self._name(branch.session)
        self._allocator.fork(branch.name, name, self._places(branch, length))
        exact = min(branch.exact, length)
        forked = Branch(branch.session, name, branch.tokens[:length], branch.first, exact, dict(branch.predicted))
        self._branches[branch.session].append(forked)
        return forked

    def publish(self, branch: Branch, length: int) -> None:
        """Shares pages of the first `length` tokens, which are decided, with sessions that begin alike."""
        if not self._unfed:
            self._allocator.publish(branch.name, branch.tokens, min(length, len(branch.tokens)))

    def feed(
        self, branch: Branch, tokens: Sequence[int], busy: set[str], masks: Sequence[int] = (), logits: int = 1
    ) -> tuple[FeedRow, list[PageCopy]] | None:
        """Appends tokens, the last `logits` of which give logits; None when the pool is dry.

        So does each of `masks`, which are fed after them and are no part of the branch: `drop_masks` once that is done.
        Room is made at the cost of sessions that are not `busy`.
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
        """Frees what was cached of mask tokens."""
        self._allocator.truncate(branch.name, self._places(branch, len(branch.tokens)))

    def cut(self, branch: Branch, length: int) -> None:
        """Forgets all but the first `length` tokens of a branch, and masks after them."""
        del branch.tokens[length:]
        branch.exact = min(branch.exact, length)
        self._allocator.truncate(branch.name, self._places(branch, length))

    def close(self, session: str) -> None:
        """Forgets a session; an unknown one is ignored."""
        for branch in self._branches.pop(session, []):
            self._allocator.close(branch.name)

    def _places(self, branch: Branch, tokens: int) -> int:
        """That the first so many tokens of a branch's text take."""
        return max(0, tokens - branch.first - self._unfed)

    def _open(self, session: str, tokens: Sequence[int], first: int, salt: str) -> Branch:
        assert not first or self._unfed, "of a text that begins in its middle no page is shared"
        name = self._name(session)
        cached = self._allocator.open(name, tokens, salt.encode())
        return Branch(session, name, list(tokens[: max(first, cached)]), first, exact=first)

    def _name(self, session: str) -> str:
        return f"{session}/{next(self._names)}"


def _common(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """How many first tokens agree, but for the last."""
    limit = min(len(cached), len(tokens) - 1)
    if tuple(cached[:limit]) == tuple(tokens[:limit]):
        return limit
    return next(i for i in range(limit) if cached[i] != tokens[i])
