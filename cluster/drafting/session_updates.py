"""Sessions as a drafting method sees them: changes collected by the scheduler, and the texts that result.

A method runs on its own thread, so it keeps its own copy of every text and receives the changes before each pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protos.frozen import value
from protos.messages import Open


@value
class News:
    """Changes to sessions since the previous pass, to be applied in this order: closed, opened, committed, states."""

    closed: tuple[str, ...] = ()
    opened: tuple[Open, ...] = ()
    committed: tuple[tuple[str, tuple[int, ...]], ...] = ()  # session, and the tokens that follow those known
    states: tuple[tuple[str, int, bytes], ...] = ()  # session, and the target's hidden states from this position on


class NewsCollector:
    """Changes that no pass has taken yet."""

    def __init__(self) -> None:
        self._closed: dict[str, None] = {}  # an ordered set
        self._opened: dict[str, Open] = {}
        self._committed: dict[str, list[int]] = {}
        self._states: dict[str, tuple[int, list[bytes]]] = {}

    @property
    def has_states(self) -> bool:
        """True if hidden states have arrived; a method may process them while it is idle."""
        return bool(self._states)

    @property
    def has_closed(self) -> bool:
        """True if sessions have ended, so that a method could free their caches."""
        return bool(self._closed)

    def opened(self, request: Open) -> None:
        self._opened[request.session] = request

    def committed(self, session: str, tokens: Sequence[int]) -> None:
        self._committed.setdefault(session, []).extend(tokens)

    def states(self, session: str, first: int, rows: bytes) -> None:
        """Adds the rows that follow the session's previous ones; `first` is the position of the first row."""
        self._states.setdefault(session, (first, []))[1].append(rows)

    def closed(self, session: str) -> None:
        """Records that a session ended and drops its other pending changes."""
        self._opened.pop(session, None)
        self._committed.pop(session, None)
        self._states.pop(session, None)
        self._closed[session] = None

    def take(self) -> News:
        """Returns all pending changes and clears them."""
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
        """Forgets sessions; ignores unknown ones."""
        for session in sessions:
            self._all.pop(session, None)
