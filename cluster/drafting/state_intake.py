"""Hidden states as they reach a drafter: each session's in order, without a gap, and of its own text."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from cluster.dispatch import Send, states_stream
from cluster.drafting.drafted_session import DraftedSession
from cluster.drafting.session_texts import NewsCollector
from protos.messages import States, StatesAck
from protos.states import StatesFormat
from protos.values import value

MOST_EARLY = 64  # messages of a session that may wait for the verdict that brings their tokens


@value
class StateBounds:
    """Which states a method reads, and how many."""

    window: int | None = None  # how many of a text's latest; None: all
    enough: int | None = None  # of these, to begin with where earlier ones would be computed again; None: all
    most: int | None = None  # of all sessions together; None: no bound


NO_BOUNDS = StateBounds()


class StateIntake:
    """Of all sessions; what does not fit is dropped and counted. With no format nothing fits.

    `attach` makes the message that asks for what is missing. `give_up` ends a session whose states there is no room
    for, and says why to who has to know.
    """

    def __init__(
        self,
        layout: StatesFormat | None,
        bounds: StateBounds,
        sessions: Mapping[str, DraftedSession],
        news: NewsCollector,
        counts: Counter[str],
        attach: Callable[[DraftedSession], Send],
        give_up: Callable[[DraftedSession, str], list[Send]],
    ) -> None:
        self._layout = layout
        self._bounds = bounds
        self._sessions = sessions
        self._news = news
        self._counts = counts
        self._attach = attach
        self._give_up = give_up
        self._early: defaultdict[str, list[States]] = defaultdict(list)  # by session, as they came
        self._asked: dict[str, tuple[int, int]] = {}  # what was missing, and of how long a text, when it was asked for

    def opened(self, session: DraftedSession) -> None:
        """It begins, or begins anew, without any."""
        self.forget(session.open.session)
        if self._layout is not None:
            window = self._bounds.window
            enough = self._bounds.enough
            read_to = session.prefix.length - 1  # the target need not have read the last token
            session.states_len = 0 if window is None else max(0, read_to - window)
            session.states_by = session.states_len if enough is None else max(session.states_len, read_to - enough)

    def forget(self, session: str) -> None:
        self._early.pop(session, None)
        self._asked.pop(session, None)

    def receive(self, peer: str, states: States) -> list[Send]:
        """From a target's address, or from its stream for states, where what has arrived is acknowledged."""
        session = self._sessions.get(states.session)
        if session is None or peer not in (session.target, states_stream(session.target)):
            self._counts["states_unknown"] += 1
            return []
        is_gap = self._take(session, states)
        if why := self.no_room():
            return self._give_up(session, why)
        return self._answer(session, is_gap) if is_gap or peer != session.target else []

    def no_room(self, more: int = 0, instead_of: str = "") -> str:
        """Why the states of a text of `more` tokens, in the place of a session's, cannot be kept; empty if they can."""
        most = self._bounds.most
        if most is None or self._layout is None:
            return ""
        kept = sum([self._kept(session) for name, session in self._sessions.items() if name != instead_of])
        if kept + self._of(more) <= most:
            return ""
        return f"hidden states of {kept} tokens are kept, and there is room for {most}"

    def _kept(self, session: DraftedSession) -> int:
        return self._of((session.states_len or 0) - session.states_first)

    def _of(self, tokens: int) -> int:
        """How many of a text's states are kept."""
        window = self._bounds.window
        return tokens if window is None else min(window, tokens)

    def heard(self, session: DraftedSession) -> list[Send]:
        """A verdict is in: what came before it may fit now."""
        waiting = self._early.pop(session.open.session, None)
        if not waiting:
            return []
        gaps = [states for states in waiting if self._take(session, states)]
        if why := self.no_room():
            return self._give_up(session, why)
        return self._answer(session, is_gap=bool(gaps))

    def _take(self, session: DraftedSession, states: States) -> bool:
        """Whether some before them are missing, which are to be asked for."""
        if states.format != self._layout or session.states_len is None or session.states_by is None:
            self._counts["states_unfit"] += 1
        elif states.end > session.prefix.length:
            self._wait(states)
        elif not session.prefix.matches(states.end, states.prefix_hash):
            self._counts["states_mismatch"] += 1
        elif states.first > session.states_by:
            self._counts["states_gap"] += 1
            return self._is_new_gap(session, session.states_len)
        elif states.end <= session.states_len:
            self._counts["states_known"] += 1
        else:
            self._keep(session, max(session.states_len, states.first), states)
        return False

    def _answer(self, session: DraftedSession, is_gap: bool) -> list[Send]:
        if is_gap:
            return [self._attach(session)]
        if not session.states_len:
            return []
        return [(states_stream(session.target), StatesAck(session.open.session, session.states_len))]

    def _wait(self, states: States) -> None:
        waiting = self._early[states.session]
        if len(waiting) < MOST_EARLY:
            waiting.append(states)
        else:
            self._counts["states_early"] += 1

    def _is_new_gap(self, session: DraftedSession, states_len: int) -> bool:
        """Once for each length of the text: what was under way when it was asked for comes after the gap too."""
        missing = (states_len, session.prefix.length)
        is_new = self._asked.get(session.open.session) != missing
        self._asked[session.open.session] = missing
        return is_new

    def _keep(self, session: DraftedSession, first: int, states: States) -> None:
        """From a position on that follows those that are here, or is the first."""
        if first != session.states_len:
            session.states_first = first
        rows = states.rows[(first - states.first) * states.format.row_bytes :]
        self._news.states(session.open.session, first, rows)
        session.states_len = states.end
        session.states_by = states.end
        self._counts["states"] += states.end - first
