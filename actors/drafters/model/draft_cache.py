"""Cache of a draft model, with branches per session for the possible outcomes of a verdict.

A session has one branch for its committed text. While a verdict is pending, it has further branches for possible
outcomes; the branch that best matches the verdict then continues. All cache entries can be recomputed, so when the pool
runs out of pages, the least recently used session is dropped.

A draft head is also fed a hidden state with each token (`FedStates`): token j of a text is paired with the target's
state at position j - 1. If this true state is missing, the head recycles the state from which it predicted the token.
Cache entries computed from recycled states are recomputed once the true states arrive (EAGLE's second pass over
accepted tokens); without this, about a tenth of the accepted tokens are lost. `SessionStates` holds a session's true
states, which may arrive in any order, twice, or never.
"""

import secrets
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from actors.compute.kv_cache import InputRow
from cluster.drafting.draft_state import BlockDraft
from cluster.page_allocator import PageAllocator, PageCopy
from protos.messages import StatesNeeded


@dataclass(eq=False)
class CacheBranch:
    """Cached tokens of one branch of a session. `name` identifies the branch in the page allocator."""

    session: str
    name: str
    tokens: list[int]
    first: int = 0  # index of the first token that the model reads
    # Only for draft heads, which pair each token with the preceding state:
    exact: int = 0  # number of leading tokens fed with the target's states
    predicted: dict[int, Tensor] = field(default_factory=dict)  # the head's own states, by index of the paired token


class DraftCache:
    """All branches of all sessions, over one pool of pages.

    The first `unfed` tokens of a text are not fed, so a token's cache position is its index minus `unfed`. A draft head
    pairs each token with the state before it, so it cannot be fed the first token. Its pages are not shared between
    sessions, because cache entries depend on more than the tokens. Tokens before `CacheBranch.first` have no cache
    positions either.
    """

    def __init__(self, pages: int, page_size: int, unfed: int = 0) -> None:
        self._unfed = unfed
        self._allocator = PageAllocator(pages, page_size, secrets.token_bytes(16))
        self._branches: OrderedDict[str, list[CacheBranch]] = OrderedDict()  # by session, in order of latest use
        self._names = count()

    @property
    def is_idle(self) -> bool:
        return not self._branches

    def clear(self) -> None:
        """Drops all entries, including shared prefixes, before the weights are exchanged."""
        self._branches.clear()
        self._allocator = PageAllocator(self._allocator.pages, self._allocator.page_size, secrets.token_bytes(16))

    def check(self) -> None:
        """Raises AssertionError unless every page is accounted for."""
        self._allocator.check()

    def resume(self, session: str, tokens: Sequence[int], first: int = 0, salt: str = "") -> CacheBranch:
        """Returns the branch that shares the longest prefix with `tokens`, cut to it; closes all other branches.

        The last token never counts as cached, because its logits are needed. `first` must be constant for a session;
        tokens before it count as cached. Only sessions with equal `salt` share pages.
        """
        branches = self._branches.pop(session, [])
        agreed = [_common(branch.tokens, tokens) for branch in branches]
        best = max(range(len(branches)), key=agreed.__getitem__, default=-1)
        for index, branch in enumerate(branches):
            if index != best:
                self._allocator.close(branch.name)
        if best < 0:
            branch = self._open(session, tokens, first, salt)
        else:
            branch = branches[best]
            self.cut(branch, agreed[best])
            branch.predicted = {index: state for index, state in branch.predicted.items() if index <= agreed[best]}
        self._branches[session] = [branch]
        return branch

    def fork(self, branch: CacheBranch, length: int) -> CacheBranch:
        """Adds a branch with the first `length` tokens of this one."""
        name = self._name(branch.session)
        self._allocator.fork(branch.name, name, self._fed_len(branch, length))
        exact = min(branch.exact, length)
        forked = CacheBranch(branch.session, name, branch.tokens[:length], branch.first, exact, dict(branch.predicted))
        self._branches[branch.session].append(forked)
        return forked

    def publish(self, branch: CacheBranch, length: int) -> None:
        """Shares the pages of the first `length` tokens with sessions of the same prefix; these tokens must be
        committed.
        """
        if not self._unfed:
            self._allocator.publish(branch.name, branch.tokens, min(length, len(branch.tokens)))

    def feed(
        self, branch: CacheBranch, tokens: Sequence[int], busy: set[str], masks: Sequence[int] = (), logits: int = 1
    ) -> tuple[InputRow, list[PageCopy]] | None:
        """Appends tokens; returns the row to feed and the pages to copy first, or None if the pool is full.

        The last `logits` tokens and all `masks` yield logits. Masks follow the tokens and are not part of the branch;
        call `drop_masks` after the forward. If pages are needed, sessions outside `busy` are evicted.
        """
        start = self._fed_len(branch, len(branch.tokens))
        end = self._fed_len(branch, len(branch.tokens) + len(tokens))
        if (copies := self._reserve(branch, start, end + len(masks), busy)) is None:
            return None
        branch.tokens += tokens
        fed = tokens[len(tokens) - (end - start) :]
        return InputRow((*fed, *masks), start, logits + len(masks), self._allocator.table(branch.name)), copies

    def reserve(self, branch: CacheBranch, count: int, busy: set[str]) -> InputRow | None:
        """Reserves pages for `count` further tokens, which are not known yet, after a forward over the branch.

        Returns the row to feed, with 0 for each token; None if the pool is full. Call `append` after the forward.
        """
        start = self._fed_len(branch, len(branch.tokens))
        if count:
            copies = self._reserve(branch, start, start + count, busy)
            if copies is None:
                return None
            assert not copies, "the forward has made the branch's last page its own"
        return InputRow((0,) * count, start, 0, self._allocator.table(branch.name))

    def append(self, branch: CacheBranch, tokens: Sequence[int]) -> None:
        """Adds the tokens fed at reserved positions; frees all pages after them."""
        branch.tokens += tokens
        self._allocator.truncate(branch.name, self._fed_len(branch, len(branch.tokens)))

    def _reserve(self, branch: CacheBranch, start: int, end: int, busy: set[str]) -> list[PageCopy] | None:
        """Reserves pages for these positions, evicting sessions outside `busy` if needed; None if the pool is full."""
        while (copies := self._allocator.reserve(branch.name, start, end)) is None:
            idle = next((session for session in self._branches if session not in busy), None)
            if idle is None:
                return None
            self.close(idle)
        return copies

    def drop_masks(self, branch: CacheBranch) -> None:
        """Frees the cache entries of mask tokens."""
        self.append(branch, ())

    def cut(self, branch: CacheBranch, length: int) -> None:
        """Truncates a branch to `length` tokens; also drops masks."""
        del branch.tokens[length:]
        branch.exact = min(branch.exact, length)
        self._allocator.truncate(branch.name, self._fed_len(branch, length))

    def close(self, session: str) -> None:
        """Drops a session. Ignores an unknown session."""
        for branch in self._branches.pop(session, []):
            self._allocator.close(branch.name)

    def _fed_len(self, branch: CacheBranch, tokens: int) -> int:
        """Returns the number of cache positions of a branch's first `tokens` tokens."""
        return max(0, tokens - branch.first - self._unfed)

    def _open(self, session: str, tokens: Sequence[int], first: int, salt: str) -> CacheBranch:
        assert not first or self._unfed, "only sessions of a head may begin mid-text"
        name = self._name(session)
        cached = self._allocator.open(name, tokens, salt.encode())
        return CacheBranch(session, name, list(tokens[: max(first, cached)]), first, exact=first)

    def _name(self, session: str) -> str:
        return f"{session}/{next(self._names)}"


def _common(cached: Sequence[int], tokens: Sequence[int]) -> int:
    """Returns the length of the common prefix, at most len(tokens) - 1."""
    limit = min(len(cached), len(tokens) - 1)
    if tuple(cached[:limit]) == tuple(tokens[:limit]):
        return limit
    return next(i for i in range(limit) if cached[i] != tokens[i])


class SessionStates:
    """States of one session, (hidden,) per position from `begin` on, in one growing tensor."""

    def __init__(self, begin: int = 0) -> None:
        self.begin = begin
        self._rows: Tensor | None = None  # (capacity, hidden)
        self._known = bytearray()  # index: position - begin; 1 if the row is present

    def __contains__(self, position: int) -> bool:
        at = position - self.begin
        return 0 <= at < len(self._known) and bool(self._known[at])

    def put(self, first: int, rows: Tensor) -> None:
        """Stores rows, (n, hidden), at positions `first` and up."""
        assert first >= self.begin, "no states precede the first position"
        first -= self.begin
        end = first + len(rows)
        self._grow(end, rows)
        assert self._rows is not None, "_grow allocates rows"
        self._rows[first:end] = rows
        self._known[first:end] = b"\1" * len(rows)

    def missing_from(self, position: int) -> int:
        """Returns the first position >= `position` without a row."""
        gap = self._known.find(0, position - self.begin)
        return max(position, self.begin + len(self._known)) if gap < 0 else self.begin + gap

    def rows(self, first: int, end: int) -> Tensor:
        """Returns the rows of positions `first` to `end` (exclusive), (end - first, hidden). All must be present."""
        assert self._rows is not None, "no rows are stored"
        return self._rows[first - self.begin : end - self.begin]

    def _grow(self, end: int, like: Tensor) -> None:
        self._known.extend(bytes(max(0, end - len(self._known))))
        capacity = 0 if self._rows is None else len(self._rows)
        if end <= capacity:
            return
        grown = torch.empty((max(end, 2 * capacity), like.shape[-1]), dtype=like.dtype, device=like.device)
        if self._rows is not None:
            grown[:capacity] = self._rows
        self._rows = grown


@dataclass(kw_only=True, eq=False)
class CachedDraft(BlockDraft):
    """A block with its cached branch. The states of a draft head are tensors, (hidden,)."""

    branch: CacheBranch
    pending: list[int]  # tokens not yet fed
    logits: int = 1  # trailing pending tokens that need logits

    def settle(self) -> None:
        super().settle()
        self.pending = list(self.tokens[len(self.branch.tokens) - self.base_len :])


class FedStates:
    """True states of all open sessions, for a head with at most `max_positions` positions.

    If a session's states begin mid-text, the head's text begins there. All tokens up to the first state's position then
    count as the first token, which is not fed, and positions are relative to it.

    `project` maps received rows, (n, width), to the head's inputs, (n, hidden). Mask tokens are paired with
    `mask_state`, (1, hidden).
    """

    def __init__(
        self,
        needs: StatesNeeded,
        project: Callable[[Tensor], Tensor],
        max_positions: int,
        mask_state: Tensor | None = None,
    ) -> None:
        self.needs = needs
        self._project = project
        self._max_positions = max_positions
        self._mask_state = mask_state
        self._sessions: dict[str, SessionStates] = {}

    def open(self, session: str) -> None:
        """Registers a session; keeps the states of an open session."""
        self._sessions.setdefault(session, SessionStates())

    def begin(self, session: str, first: int) -> None:
        """Sets the first position of a session's states; drops its stored states."""
        self._sessions[session] = SessionStates(first)

    def first_of(self, session: str) -> int:
        """Returns the first position of the session's states."""
        return self._sessions[session].begin

    def close(self, sessions: Sequence[str]) -> None:
        """Drops sessions. Ignores unknown sessions."""
        for session in sessions:
            self._sessions.pop(session, None)

    def put(self, session: str, first: int, rows: Tensor) -> None:
        """Stores true states, (n, width), at positions `first` and up. Ignores unknown sessions."""
        states = self._sessions.get(session)
        if states is None or states.missing_from(first) >= first + len(rows):
            return
        assert rows.shape[-1] == self.needs.width, f"rows have {rows.shape[-1]} elements, not {self.needs.width}"
        states.put(first, self._project(rows))

    def rewind(self, cache: DraftCache, branch: CacheBranch) -> None:
        """Truncates a branch before the first token with a recycled state if the true state has arrived.

        Keeps predicted states: tokens whose true states are still missing may be paired with them again.
        """
        if 0 < branch.exact < len(branch.tokens) and branch.exact - 1 in self._sessions[branch.session]:
            cache.cut(branch, branch.exact)

    def count_feedable(self, draft: CachedDraft, tokens: int) -> int:
        """Returns the number of feedable tokens among the draft's first `tokens` pending ones.

        Returns 0 if the pending tokens exceed the head's positions, or if only the first token is committed, because no
        state precedes this token.
        """
        branch = draft.branch
        start = len(branch.tokens)
        positions = start + len(draft.pending) - 1 - branch.first
        if positions > self._max_positions or draft.request.base_len <= branch.first + 1:
            return 0
        end = min(start + tokens, self._end_of_exact_states(branch, start))
        while end < start + tokens and (end in branch.predicted or end - 1 in self._sessions[branch.session]):
            end += 1
        return end - start if end > branch.first + 1 else 0

    def states(self, branch: CacheBranch, start: int, masks: int) -> Tensor:
        """Returns the states for a branch's tokens from `start` on, then for masks: (tokens, hidden).

        The tokens must be feedable. The first token of a text is not fed and has no state.
        """
        rows = self._of_tokens(branch, start, len(branch.tokens))
        if not masks:
            return rows
        assert self._mask_state is not None, "this head has no masks"
        return torch.cat([rows, self._mask_state.expand(masks, -1)])

    def _of_tokens(self, branch: CacheBranch, start: int, end: int) -> Tensor:
        states = self._sessions[branch.session]
        first = max(start, branch.first + 1)
        exact_end = min(end, self._end_of_exact_states(branch, start))
        if branch.exact == start:
            branch.exact = exact_end
        if exact_end == end:
            return states.rows(first - 1, end - 1)
        indices = range(first, end)
        return torch.stack([states.rows(i - 1, i)[0] if i - 1 in states else branch.predicted[i] for i in indices])

    def store_predicted(self, branch: CacheBranch, predicted: Tensor) -> None:
        """Stores the head's own states, (positions, hidden), at the last positions of a branch."""
        after = len(branch.tokens) + 1
        branch.predicted |= zip(range(after - len(predicted), after), predicted, strict=True)
        branch.predicted = {index: state for index, state in branch.predicted.items() if index >= branch.exact}

    def _end_of_exact_states(self, branch: CacheBranch, start: int) -> int:
        """Returns the index of the first token from `start` on whose preceding true state is missing."""
        return self._sessions[branch.session].missing_from(max(start, branch.first + 1) - 1) + 1
