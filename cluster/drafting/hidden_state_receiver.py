"""Receives hidden states for a drafter, and checks that they are in order, gapless and match the session's text."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace

from cluster.drafting.draft_sequence import DraftSequence
from cluster.drafting.requests import SessionUpdates
from protos.frozen import value
from protos.messages import States, StatesFormat

MAX_EARLY_MESSAGES = 64  # maximum number of messages per session that wait for a verdict


@value
class StateBounds:
    """Limits on hidden states read and kept by a drafter."""

    window: int | None = None  # number of latest states read by the method; None: all
    min_states: int | None = None  # number of latest states that suffice if earlier ones must be recomputed; None: all
    max_states: int | None = None  # maximum number of states kept over all sessions; None: no limit

    def with_room(self, states: int | None) -> "StateBounds":
        """Returns these bounds with at most `states` states kept; None adds no limit."""
        limits = [limit for limit in (self.max_states, states) if limit is not None]
        return replace(self, max_states=min(limits, default=None))


NO_BOUNDS = StateBounds()


class HiddenStateReceiver:
    """Receives the hidden states of all sessions; drops and counts unusable states. Without a `layout`, all are
    unusable.

    It sends no messages. The session table acknowledges states, requests missing ones, and gives up sessions whose
    states exceed the limit.
    """

    def __init__(
        self,
        layout: StatesFormat | None,
        bounds: StateBounds,
        sessions: Mapping[str, DraftSequence],
        updates: SessionUpdates,
        counts: Counter[str],
    ) -> None:
        self._layout = layout
        self._bounds = bounds
        self._sessions = sessions
        self._updates = updates
        self._counts = counts
        self._early: defaultdict[str, list[States]] = defaultdict(list)  # early messages by session, oldest first
        self._asked: dict[str, tuple[int, int]] = {}  # by session: (position, text length) of the latest request

    def opened(self, session: DraftSequence) -> None:
        """Starts or restarts a session without hidden states."""
        self.forget(session.open.session)
        if self._layout is not None:
            window = self._bounds.window
            min_states = self._bounds.min_states
            read_to = session.prefix.length - 1  # the target may not have read the last token
            session.states_len = 0 if window is None else max(0, read_to - window)
            session.states_by = (
                session.states_len if min_states is None else max(session.states_len, read_to - min_states)
            )

    def forget(self, session: str) -> None:
        self._early.pop(session, None)
        self._asked.pop(session, None)

    def capacity_error(self, more: int = 0, replacing: str = "") -> str:
        """Returns an error message if another text of `more` tokens would exceed `max_states`, else "".

        States of the session `replacing`, which the new text replaces, do not count.
        """
        max_states = self._bounds.max_states
        if max_states is None or self._layout is None:
            return ""
        stored_tokens = sum(
            [self._stored_states(session) for name, session in self._sessions.items() if name != replacing]
        )
        if stored_tokens + self._states_of_tokens(more) <= max_states:
            return ""
        return f"hidden states of {stored_tokens} tokens are kept; the limit is {max_states}"

    def _stored_states(self, session: DraftSequence) -> int:
        return self._states_of_tokens((session.states_len or 0) - session.states_first)

    def _states_of_tokens(self, tokens: int) -> int:
        """Returns the number of states kept for a text of `tokens` tokens."""
        window = self._bounds.window
        return tokens if window is None else min(window, tokens)

    def take_early(self, session: DraftSequence) -> list[States]:
        """Removes and returns the states that arrived ahead of the verdict for their tokens."""
        return self._early.pop(session.open.session, [])

    def receive(self, session: DraftSequence, states: States) -> bool:
        """Keeps, queues or drops states; returns True if missing earlier states must be requested."""
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

    def _wait(self, states: States) -> None:
        waiting = self._early[states.session]
        if len(waiting) < MAX_EARLY_MESSAGES:
            waiting.append(states)
        else:
            self._counts["states_early"] += 1

    def _is_new_gap(self, session: DraftSequence, states_len: int) -> bool:
        """Returns True at the first detection of a gap at this text length.

        States in flight at the time of the request reveal the same gap again.
        """
        missing = (states_len, session.prefix.length)
        is_new = self._asked.get(session.open.session) != missing
        self._asked[session.open.session] = missing
        return is_new

    def _keep(self, session: DraftSequence, first: int, states: States) -> None:
        """Passes the rows from position `first` on to the method, as a continuation of the kept states or as their
        start.
        """
        if first != session.states_len:
            session.states_first = first
        rows = states.rows[(first - states.first) * states.format.row_bytes :]
        self._updates.add_states(session.open.session, first, rows)
        session.states_len = states.end
        session.states_by = states.end
        self._counts["states"] += states.end - first
