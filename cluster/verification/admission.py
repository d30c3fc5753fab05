"""Which sessions have a place in a target's cache, which queue for one, and which pages each holds.

Knows nothing of blocks, of time or of what is computed; how long sessions waited is for others to judge. A replica that
leaves admits nobody, and what routers have not moved in time it gives back.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator

from cluster.dispatch import Send
from cluster.engines.session_memory import SessionMemory
from cluster.page_allocator import PageCopy
from cluster.verification.sequence import TargetSession
from protos.messages import Leaving, Open, Refusal, RefusalReason

LEAVES = "this target replica is stopping"


class Admission:
    """All sessions of a replica; what the engine is to open and close is collected for the next step."""

    def __init__(self, limit: int, pages: SessionMemory) -> None:
        self.running: dict[str, TargetSession] = {}  # they have a place in the cache; oldest first
        self.waiting: dict[str, TargetSession] = {}  # opened, not admitted yet, in order
        self.order: OrderedDict[str, None] = OrderedDict()  # admitted sessions, longest unserved first
        self.pages = pages
        self.preempted = 0  # times that a session lost its pages to older ones
        self.prefix_tokens = 0  # of sessions as they were first let into the cache, without audits
        self.prefix_hits = 0  # of them, whose keys and values were there
        self._limit = limit
        self._opens: list[Open] = []  # for the engine, with the next step
        self._closes: list[str] = []

    # ------------------------------------------------------------ who is there

    def __iter__(self) -> Iterator[TargetSession]:
        return iter([*self.running.values(), *self.waiting.values()])

    def find(self, name: str) -> TargetSession | None:
        return self.running.get(name) or self.waiting.get(name)

    def router_of(self, name: str) -> str | None:
        """The stream of the router whose session this is."""
        session = self.find(name)
        return None if session is None else session.router

    @property
    def has_sessions(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held, nor due to the engine."""
        return not any((self.running, self.waiting, self.order, self._opens, self._closes))

    # ------------------------------------------------------------ coming and going

    def admit(self) -> Iterator[TargetSession]:
        """Lets queued sessions into the cache as long as there is room; names each.

        Those of the lowest number of priority come first, and among them who came first.
        """
        while self.waiting and len(self.running) < self._limit:
            name, session = min(self.waiting.items(), key=lambda item: item[1].open.priority)
            shared = session.prefix.tokens if session.may_share else ()
            session.cached_len = self.pages.open(name, shared, session.open.cache_salt.encode())
            if not session.in_engine:  # else it was preempted, and finds its own pages
                session.prefix_cached = session.cached_len
            # A page for each running session to grow into keeps the newcomer from being preempted at once.
            missing = self.pages.missing(name, session.prefix.length + 1)
            if self.running and missing + self._owed() > self.pages.available:
                self.pages.close(name)
                return
            del self.waiting[name]
            self.running[name] = session
            self.order[name] = None
            if not session.in_engine:
                self._count_prefix(session)
                session.in_engine = True
                self._opens.append(session.open)
            yield session

    def _count_prefix(self, session: TargetSession) -> None:
        if not session.open.audit:
            self.prefix_tokens += session.prefix.length
            self.prefix_hits += session.cached_len

    def forget(self, name: str) -> None:
        """Frees all that a session holds; an unknown one is left alone."""
        session = self.find(name)
        if session is None:
            return
        if self.waiting.pop(name, None) is None:
            self._leave(name)
        pending = [request for request in self._opens if request.session != name]
        if session.in_engine and len(pending) == len(self._opens):
            self._closes.append(name)
        self._opens = pending

    def take_changes(self) -> tuple[tuple[str, ...], tuple[Open, ...]]:
        """Sessions that the engine is to close, then to open, since this was last asked."""
        changes = tuple(self._closes), tuple(self._opens)
        self._closes = []
        self._opens = []
        return changes

    # ------------------------------------------------------------ pages

    def reserve(self, session: TargetSession, start: int, end: int, in_step: set[str]) -> list[PageCopy] | None:
        """Pages for positions `start` to `end`, at the cost of younger sessions when there are too few.

        None when the session is the youngest itself, or when all that are younger are in the step already, whose
        sessions are `in_step`: in the next one it comes before them.
        """
        name = session.open.session
        while (copies := self.pages.reserve(name, start, end)) is None:
            youngest = next(n for n in reversed(self.running) if n not in in_step)
            if youngest != name or name == next(reversed(self.running)):
                self._preempt(youngest)
            if youngest == name:
                return None
        return copies

    def _owed(self) -> int:
        """Pages that running sessions have yet to take for the tokens that they have and one more; of each, one."""
        missing = self.pages.missing
        return sum([max(1, missing(name, session.prefix.length + 1)) for name, session in self.running.items()])

    def _preempt(self, name: str) -> None:
        """Back to the head of the queue; what is lost of its cache is computed again from its tokens."""
        self.preempted += 1
        session = self.running[name]
        self._leave(name)
        self.waiting = {name: session, **self.waiting}

    def _leave(self, name: str) -> None:
        """Takes a session out of the cache."""
        del self.running[name]
        del self.order[name]
        self.pages.close(name)


class Departure:
    """How a replica leaves, as planned; `forget` frees a session."""

    def __init__(self, admission: Admission, forget: Callable[[str], None]) -> None:
        self.is_under_way = False
        self._admission = admission
        self._forget = forget

    @property
    def is_complete(self) -> bool:
        """Whether nobody is served any more."""
        return self.is_under_way and not self._admission.has_sessions

    def begin(self) -> list[Send]:
        """From now on what comes is refused, and routers that have sessions here hear that they are to move them.

        Audits are given back at once, for nobody waits for them.
        """
        self.is_under_way = True
        audits = self._give_back([session for session in self._admission if session.open.audit])
        routers = dict.fromkeys(session.router for session in self._admission)
        return [*audits, *((router, Leaving()) for router in routers)]

    def end(self) -> list[Send]:
        """Gives back all that is left."""
        return self._give_back(list(self._admission))

    def refuse(self, router: str, request: Open) -> list[Send]:
        """A session that comes too late: it is no failure, another target takes it."""
        return [(router, _left(request)), (router, Leaving())] if self.is_under_way else []

    def _give_back(self, sessions: list[TargetSession]) -> list[Send]:
        for session in sessions:
            self._forget(session.open.session)
        return [(session.router, _left(session.open)) for session in sessions]


def _left(request: Open) -> Refusal:
    return Refusal(request.session, request.attempt, RefusalReason.OVERLOADED, LEAVES)
