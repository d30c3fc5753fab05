"""Admission of sessions to a target's cache: running sessions, the queue, and page reservations.

It is independent of blocks, time and computation; callers measure waiting times.
"""

from collections import OrderedDict
from collections.abc import Iterator

from cluster.page_allocator import PageCopy, SessionMemory
from cluster.verification.sequence import TargetSequence
from protos.messages import Open


class Admission:
    """Holds all sessions of a replica; collects the sessions to open and close in the engine's next step."""

    def __init__(self, limit: int, pages: SessionMemory) -> None:
        self.running: dict[str, TargetSequence] = {}  # sessions in the cache, oldest first
        self.waiting: dict[str, TargetSequence] = {}  # queued sessions, in order of arrival
        self.order: OrderedDict[str, None] = OrderedDict()  # running sessions, longest unserved first
        self.pages = pages
        self.preempted = 0  # number of preemptions by older sessions
        self.prefix_tokens = 0  # tokens of sessions at first admission, without audits
        self.prefix_hits = 0  # cached tokens among `prefix_tokens`
        self._limit = limit
        self._blocked: TargetSequence | None = None  # head of the queue that lacked pages, until a session leaves
        self._blocked_pages = 0  # pages that were available to it
        self._opens: list[Open] = []  # sessions to open in the engine's next step
        self._closes: list[str] = []

    # ------------------------------------------------------------ lookup

    def __iter__(self) -> Iterator[TargetSequence]:
        return iter([*self.running.values(), *self.waiting.values()])

    def find(self, name: str) -> TargetSequence | None:
        return self.running.get(name) or self.waiting.get(name)

    def router_of(self, name: str) -> str | None:
        """Returns the stream of the session's router; None if the session is unknown."""
        session = self.find(name)
        return None if session is None else session.router

    @property
    def has_sessions(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def is_empty(self) -> bool:
        """True if there are no sessions and no pending changes for the engine."""
        return not any((self.running, self.waiting, self.order, self._opens, self._closes))

    # ------------------------------------------------------------ opening and closing

    def admit(self) -> Iterator[TargetSequence]:
        """Admits queued sessions to the cache while pages last, and yields each admitted session.

        Admits lower priority numbers first, then earlier arrivals. A session that lacked pages is tried again only
        after pages were freed or a session has left, because looking up its cached pages is slow.
        """
        while self.waiting and len(self.running) < self._limit:
            name, session = min(self.waiting.items(), key=lambda item: item[1].open.priority)
            if session is self._blocked:
                self._trim()
                if self.pages.available <= self._blocked_pages:
                    return
            shared = session.prefix.tokens if session.may_share else ()
            session.cache.enter(self.pages.open(name, shared, session.open.cache_salt.encode()))
            # Reserve one page of growth per running session; otherwise they would preempt the new session at once.
            missing = self.pages.missing(name, session.prefix.length + 1)
            if self.running and missing + self._owed() > self.pages.available:
                self.pages.close(name)
                if self._trim():
                    continue
                self._blocked, self._blocked_pages = session, self.pages.available
                return
            del self.waiting[name]
            self.running[name] = session
            self.order[name] = None
            if not session.cache.is_open:
                self._count_prefix(session)
                session.cache.is_open = True
                self._opens.append(session.open)
            yield session

    def _count_prefix(self, session: TargetSequence) -> None:
        if not session.open.audit:
            self.prefix_tokens += session.prefix.length
            self.prefix_hits += session.cache.length

    def forget(self, name: str) -> None:
        """Frees all resources of a session; ignores unknown sessions."""
        session = self.find(name)
        if session is None:
            return
        if self.waiting.pop(name, None) is None:
            self._leave(name)
        pending = [request for request in self._opens if request.session != name]
        if session.cache.is_open and len(pending) == len(self._opens):
            self._closes.append(name)
        self._opens = pending

    def take_changes(self) -> tuple[tuple[str, ...], tuple[Open, ...]]:
        """Returns the sessions to close and to open (in that order) since the previous call."""
        changes = tuple(self._closes), tuple(self._opens)
        self._closes = []
        self._opens = []
        return changes

    # ------------------------------------------------------------ pages

    def reserve(self, session: TargetSequence, start: int, end: int, in_step: set[str]) -> list[PageCopy] | None:
        """Reserves pages for positions `start` to `end`; preempts younger sessions if pages are short.

        Returns None if the session itself is the youngest and is preempted, or if all younger sessions are already in
        the step (`in_step`). In the latter case, a decoding session precedes them in the next step, and a prompt waits
        until one of them ends or needs a page.
        """
        name = session.open.session
        while (copies := self.pages.reserve(name, start, end)) is None:
            if self._trim():
                continue
            youngest = next(n for n in reversed(self.running) if n not in in_step)
            if youngest == name:
                if name == next(reversed(self.running)):
                    self._preempt(name)
                return None
            self._preempt(youngest)
        return copies

    def _trim(self) -> bool:
        """Frees pages that held only rejected draft tokens; sessions otherwise keep them for their next rows.

        Returns True if pages became available.
        """
        available = self.pages.available
        for name, session in self.running.items():
            if not session.in_step:
                self.pages.truncate(name, session.cache.length)
        return self.pages.available > available

    def _owed(self) -> int:
        """Returns the number of pages that running sessions still need for their tokens plus one, at least one page
        each.
        """
        missing = self.pages.missing
        return sum([max(1, missing(name, session.prefix.length + 1)) for name, session in self.running.items()])

    def _preempt(self, name: str) -> None:
        """Moves a session to the head of the queue; its cache is later recomputed from its tokens."""
        self.preempted += 1
        session = self.running[name]
        self._leave(name)
        self.waiting = {name: session, **self.waiting}

    def _leave(self, name: str) -> None:
        """Removes a session from the cache."""
        self._blocked = None
        del self.running[name]
        del self.order[name]
        self.pages.close(name)
