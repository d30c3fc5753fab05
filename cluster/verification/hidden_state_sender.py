"""Sends hidden states to drafters: small amounts with verdicts, the rest on a separate stream.

The cache pages serve as the queue: unsent states stay there and are read only when a drafter's window has capacity.
Pure; the engine reads the pages.

If pages keep no states, the states of the latest step are sent before the next step. Missing earlier states are
recomputed by a rollback of the session to the page of the first missing position. A drafter without states can announce
the latest acceptable start, which limits the recomputation. If a drafter lacks capacity twice for the states of the
same tokens, its feed stops until it attaches again.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cluster.envelope import Send, peer_of, states_stream
from cluster.verification.admission import Admission
from cluster.verification.sequence import StateFeed, TargetSequence
from cluster.verification.step import Outcome, Row, StateRead, slots_of
from protos.messages import Attach, DraftRequest, States, StatesAck, StatesFormat, Verdict

MAX_TRIES = 2


class StateRecompute:
    """Tracks readable hidden states if pages keep none.

    The engine holds the rows of the latest step until the next one.
    """

    def __init__(self, page_size: int) -> None:
        self.recomputed = 0  # number of tokens recomputed for their states
        self.lost = 0  # number of feeds stopped for lack of capacity at the drafter
        self._page_size = page_size
        self._reads: dict[str, StateRead] = {}  # readable states, by session

    def record_step(self, rows: Sequence[tuple[TargetSequence, Row]], decided: Mapping[str, Outcome]) -> None:
        """Replaces the readable states with those of this step."""
        self._reads = {}
        for session, row in rows:
            path = decided[row.session].path if row.decide else ()
            positions = [*range(row.start, row.base_len), *[row.base_len + node for node in path]]
            committed = positions[: session.cache.length - row.start]
            slots = slots_of(committed, row.pages, self._page_size)
            self._reads[row.session] = StateRead(row.session, row.start, tuple(slots))
            feed = session.live_feed
            if feed is not None and self.end(row.session, feed.sent) > feed.sent:
                feed.tries += 1

    def end(self, session: str, first: int) -> int:
        """Returns the end of the readable states from position `first` on; `first` if none are readable."""
        read = self._reads.get(session)
        return max(first, read.end) if read is not None and read.first <= first else first

    def slots(self, session: str, first: int, end: int) -> tuple[int, ...]:
        read = self._reads[session]
        return read.slots[first - read.first : end - read.first]

    def begin(self, session: TargetSequence, feed: StateFeed) -> None:
        """Moves a feed's start to the first readable state, but not beyond the latest start that its drafter accepts.

        Does nothing if the drafter accepts no later start or all missing states are readable.
        """
        if feed.begin_by > feed.sent and not self._are_readable(session, feed.sent):
            feed.begin(max(feed.sent, min(feed.begin_by, self._first_readable(session))))

    def rewind(self, sessions: Iterable[TargetSequence]) -> None:
        """Rolls back sessions that must recompute states for their drafters. Call this before planning a step."""
        for session in sessions:
            feed = session.live_feed
            if feed is None:
                continue
            if session.exchange.is_paused:
                feed.tries = 0  # no states are sent because no blocks are requested
                continue
            self.begin(session, feed)
            if not self._are_readable(session, feed.sent):
                self._roll_back(session, feed)

    def _are_readable(self, session: TargetSequence, first: int) -> bool:
        """Returns True if the states of all cached tokens from position `first` on are readable."""
        return self.end(session.open.session, first) >= session.cache.length

    def _first_readable(self, session: TargetSequence) -> int:
        """Returns the first position from which the states of all cached tokens are readable."""
        read = self._reads.get(session.open.session)
        return session.cache.length if read is None or read.end < session.cache.length else read.first

    def _roll_back(self, session: TargetSequence, feed: StateFeed) -> None:
        if feed.tries >= MAX_TRIES:
            session.feed = None
            self.lost += 1
            return
        # Whole pages, because a copy of a shared page could need one page more than the cache has.
        start = feed.sent - feed.sent % self._page_size
        self.recomputed += session.cache.length - start
        session.cache.length = start


VERDICT_STATES_BYTES = 256 << 10  # maximum bytes of earlier states per verdict: 2 ms at 1 Gbit/s
WINDOW_BYTES = 4 << 20  # maximum unacknowledged bytes per drafter: 3 ms at 10 Gbit/s, longer than a round trip
UNSTORED_WINDOW_BYTES = 64 << 20  # the same limit if states are not stored with pages


@dataclass(frozen=True, slots=True)
class _MissingStates:
    """Readable states that a session's drafter lacks."""

    session: TargetSequence
    feed: StateFeed
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.feed.sent


class HiddenStateSender:
    """Sends the hidden states of all sessions to drafters; disabled if `layout` is None.

    `is_kept` is True if pages next to the cache keep the states. `verdict_states_bytes` limits the earlier states sent
    with a verdict, and `window_bytes` the unacknowledged states per drafter.
    """

    def __init__(
        self,
        layout: StatesFormat | None,
        admission: Admission,
        is_kept: bool = True,
        verdict_states_bytes: int | None = None,
        window_bytes: int | None = None,
    ) -> None:
        self.rows: Counter[str] = Counter()  # number of rows sent, by channel: `verdict` or `apart`
        self.recompute = None if is_kept else StateRecompute(admission.pages.page_size)
        self._layout = layout
        self._admission = admission
        self._pages = admission.pages
        self._verdict_states_bytes = VERDICT_STATES_BYTES if verdict_states_bytes is None else verdict_states_bytes
        default = WINDOW_BYTES if is_kept else UNSTORED_WINDOW_BYTES
        self._window_bytes = default if window_bytes is None else window_bytes

    @property
    def counts(self) -> dict[str, int]:
        """Rows and bytes sent by channel; if pages keep no states, also recomputed tokens and stopped feeds."""
        row_bytes = self._layout.row_bytes if self._layout is not None else 0
        rows = {way: self.rows[way] for way in ("verdict", "apart")}
        counts = {**rows, **{f"{way}_bytes": count * row_bytes for way, count in rows.items()}}
        if self.recompute is None:
            return counts
        return {**counts, "again": self.recompute.recomputed, "lost": self.recompute.lost}

    # ------------------------------------------------------------ steps

    def before_step(self) -> None:
        """Prepares feeds before a step is planned; no-op if pages keep states."""
        if self.recompute is not None:
            self.recompute.rewind(self._admission.running.values())

    def record_step(self, rows: Sequence[tuple[TargetSequence, Row]], decided: Mapping[str, Outcome]) -> None:
        """Makes the step's states readable for sessions that are still open."""
        if self.recompute is not None and rows:
            running = self._admission.running
            self.recompute.record_step([each for each in rows if running.get(each[1].session) is each[0]], decided)

    # ------------------------------------------------------------ messages from drafters

    def attached(self, session: TargetSequence, drafter: str, attach: Attach) -> None:
        """Starts a feed of missing states to a newly attached drafter, if it reads hidden states."""
        first = attach.states_from
        if first is None or self._layout is None:
            session.feed = None
        else:
            session.feed = StateFeed(drafter, first, first, first if attach.states_by is None else attach.states_by)

    def acked(self, peer: str, ack: StatesAck) -> None:
        """Records an acknowledgement of states.

        Ignores acknowledgements of other drafters, and of positions that were not sent.
        """
        session = self._admission.find(ack.session)
        feed = session.live_feed if session is not None else None
        if feed is not None and peer_of(feed.drafter) == peer_of(peer):
            feed.acked = max(feed.acked, min(ack.have_len, feed.sent))

    # ------------------------------------------------------------ with verdicts

    def slots_with_verdict(self, session: TargetSequence, row: Row) -> tuple[int, ...]:
        """Returns the slots whose states the row's outcome should contain; empty if there are too many states."""
        feed = session.live_feed
        if self._layout is None or feed is None or session.exchange.is_paused or not row.decide:
            return ()
        unsent_bytes = (row.base_len - feed.sent) * self._layout.row_bytes
        if not 0 <= unsent_bytes <= self._verdict_states_bytes:
            return ()
        if self.recompute is not None and feed.sent < row.start:
            return ()
        return self._slots(session, feed.sent, row.start + len(row.tokens))

    def with_states(
        self, session: TargetSequence, row: Row, outcome: Outcome, messages: list[Verdict | DraftRequest]
    ) -> list[Verdict | States | DraftRequest]:
        """Inserts hidden states between a verdict and the next draft request.

        Inserts none if the session has ended.
        """
        if not outcome.states or len(messages) < 2:
            return [*messages]
        return [messages[0], *self._states_with_verdict(session, row, outcome), *messages[1:]]

    def _states_with_verdict(self, session: TargetSequence, row: Row, outcome: Outcome) -> list[States]:
        """Returns the states to send with a verdict.

        Returns none while earlier states are in flight on the states stream, because these would overtake them. Also
        returns none if the drafter has reattached and lacks other states.
        """
        feed = session.live_feed
        if feed is None or not feed.sent == feed.acked == row.states_from:
            return []
        messages = list(self._messages(session, feed.sent, outcome.states))
        feed.mark_sent(messages[-1].end)
        feed.acked = feed.sent  # a broken verdict stream is detected, so these need no acknowledgement
        self.rows["verdict"] += feed.sent - row.states_from
        return messages

    # ------------------------------------------------------------ apart from verdicts

    def next_read(self) -> StateRead | None:
        """Returns the next states to read from pages. The session with the fewest missing states comes first, so that
        decoding does not wait for prompts.
        """
        layout = self._layout
        if layout is None:
            return None
        in_flight = self._rows_in_flight()
        window = max(1, self._window_bytes // layout.row_bytes)
        candidates = [missing for missing in self._missing_states() if in_flight[missing.feed.drafter] < window]
        if not candidates:
            return None
        missing = min(candidates, key=lambda each: each.rows)
        first = missing.feed.sent
        end = min(missing.end, first + layout.rows_in_message)
        name = missing.session.open.session
        if self.recompute is not None:
            return StateRead(name, first, self.recompute.slots(name, first, end))
        return StateRead(name, first, self._slots(missing.session, first, end))

    def sent(self, read: StateRead, rows: bytes) -> list[Send]:
        """Returns the messages for states read from pages, unless the drafter has gone or the session has changed."""
        session = self._admission.find(read.session)
        feed = session.live_feed if session is not None else None
        if session is None or feed is None or feed.sent != read.first or read.end > session.cache.length:
            return []
        feed.mark_sent(read.end)
        self.rows["apart"] += len(read.slots)
        return [(states_stream(feed.drafter), states) for states in self._messages(session, read.first, rows)]

    # ------------------------------------------------------------ helpers

    def _missing_states(self) -> Iterator[_MissingStates]:
        for session in self._admission.running.values():
            feed = session.live_feed
            if feed is None or session.exchange.is_paused:
                continue
            if self.recompute is not None:
                self.recompute.begin(session, feed)
            end = self._end_of_readable(session, feed)
            if end > feed.sent:
                yield _MissingStates(session, feed, end)

    def _end_of_readable(self, session: TargetSequence, feed: StateFeed) -> int:
        if self.recompute is not None:
            readable = self.recompute.end(session.open.session, feed.sent)
            return min(readable, session.cache.length)  # less after a rollback
        end = self._pages.held(session.open.session, session.cache.length)
        return end if session.cache.displaced_from is None else min(end, session.cache.displaced_from)

    def _rows_in_flight(self) -> Counter[str]:
        """Returns the number of unacknowledged rows, by drafter."""
        rows: Counter[str] = Counter()
        for session in self._admission:
            if (feed := session.live_feed) is not None:
                rows[feed.drafter] += feed.sent - feed.acked
        return rows

    def _slots(self, session: TargetSequence, first: int, end: int) -> tuple[int, ...]:
        return tuple(slots_of(range(first, end), self._pages.table(session.open.session), self._pages.page_size))

    def _messages(self, session: TargetSequence, first: int, rows: bytes) -> Iterator[States]:
        layout = self._layout
        assert layout is not None, "the engine captures no hidden states"
        size = layout.row_bytes * layout.rows_in_message
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            begin = first + at // layout.row_bytes
            prefix_hash = session.prefix.hash_at(begin + len(part) // layout.row_bytes)
            assert prefix_hash is not None, "states extend beyond the committed tokens"
            yield States(session.open.session, begin, prefix_hash, layout.dtype, layout.width, part)
