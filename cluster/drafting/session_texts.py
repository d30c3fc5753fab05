"""Sessions as a drafting method knows them: the scheduler's news of them, and the texts that come of it.

A method runs on a thread of its own, so it has its own copy of every text and is told of changes before each pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.messages import Open
from protos.values import value


@value
class News:
    """What became of sessions since the pass before; they are closed, then opened, committed to, fed."""

    closed: tuple[str, ...] = ()
    opened: tuple[Open, ...] = ()
    committed: tuple[tuple[str, tuple[int, ...]], ...] = ()  # session, and the tokens after those known
    states: tuple[tuple[str, int, bytes], ...] = ()  # session, and the target's hidden states from this position on


class NewsCollector:
    """The news that no pass has taken yet."""

    def __init__(self) -> None:
        self._closed: dict[str, None] = {}  # in order, each once
        self._opened: dict[str, Open] = {}
        self._committed: dict[str, list[int]] = {}
        self._states: dict[str, tuple[int, list[bytes]]] = {}

    @property
    def has_states(self) -> bool:
        """Whether hidden states are here, which a method may work on while it waits."""
        return bool(self._states)

    @property
    def has_closed(self) -> bool:
        """Whether sessions ended whose caches a method could free."""
        return bool(self._closed)

    def opened(self, request: Open) -> None:
        self._opened[request.session] = request

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._committed.setdefault(session, []).extend(tokens)

    def states(self, session: str, first: int, rows: bytes) -> None:
        """These follow those that are known."""
        self._states.setdefault(session, (first, []))[1].append(rows)

    def closed(self, session: str) -> None:
        """Whatever else was new of it is of no interest any more."""
        self._opened.pop(session, None)
        self._committed.pop(session, None)
        self._states.pop(session, None)
        self._closed[session] = None

    def take(self) -> News:
        """All of it, once."""
        committed = tuple([(session, tuple(tokens)) for session, tokens in self._committed.items()])
        states = tuple([(session, first, b"".join(rows)) for session, (first, rows) in self._states.items()])
        news = News(tuple(self._closed), tuple(self._opened.values()), committed, states)
        self._closed.clear()
        self._opened.clear()
        self._committed.clear()
        self._states.clear()
        return news


@dataclass(frozen=True, slots=True, eq=False)
class SessionText:
    """One session's decided text; it grows in place."""

    open: Open
    tokens: list[int]  # prompt included


class SessionTexts:
    """Texts of all open sessions."""

    def __init__(self) -> None:
        self._all: dict[str, SessionText] = {}

    def __contains__(self, session: str) -> bool:
        return session in self._all

    @property
    def is_empty(self) -> bool:
        return not self._all

    def __getitem__(self, session: str) -> SessionText:
        return self._all[session]

    def open(self, request: Open) -> None:
        self._all[request.session] = SessionText(request, list(request.tokens))

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._all[session].tokens.extend(tokens)

    def close(self, sessions: Sequence[str]) -> None:
        """Forgets sessions; unknown ones are ignored."""
        for session in sessions:
            self._all.pop(session, None)
