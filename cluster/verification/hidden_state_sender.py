"""Sends hidden states to drafters: a few with each verdict, all others separately, as read from pages.

Pages serve as the queue. States are read from them only when a drafter's window has capacity, so nothing waits in
memory, and unsent states stay in the pages. Pure; the engine reads the pages.

If pages keep no states, those of the latest step are sent before the next step, and earlier ones that a drafter lacks
are recomputed: the cache is a prefix, so the session is rolled back to the first position that is missing. A drafter
without states may report how late in the text they may begin, which bounds the recomputation. If a drafter twice has no
capacity for the states of the same tokens, they are not sent to it until it attaches again.
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
    """Tracks which states of a target's sessions can be read, where pages keep none.

    The engine holds the rows of the latest step until the next one.
    """

    def __init__(self, page_size: int) -> None:
        self.again = 0  # tokens that were recomputed for their states
        self.lost = 0  # feeds ended because their drafter had no capacity for recomputed states
        self._page_size = page_size
        self._reads: dict[str, StateRead] = {}  # readable states of the latest step, by session

    def step_made(self, rows: Sequence[tuple[TargetSequence, Row]], decided: Mapping[str, Outcome]) -> None:
        """Replaces the readable states by those of this step."""
        self._reads = {}
        for session, row in rows:
            path = decided[row.session].path if row.decide else ()
            positions = [*range(row.start, row.base_len), *[row.base_len + node for node in path]]
            stand = positions[: session.cache.length - row.start]
            slots = slots_of(stand, row.pages, self._page_size)
            self._reads[row.session] = StateRead(row.session, row.start, tuple(slots))
            feed = session.live_feed
            if feed is not None and self.end(row.session, feed.sent) > feed.sent:
                feed.tries += 1

    def end(self, session: str, first: int) -> int:
        """Returns the end of the states that can be read from position `first` on; `first` if there are none."""
        read = self._reads.get(session)
        return max(first, read.end) if read is not None and read.first <= first else first

    def slots(self, session: str, first: int, end: int) -> tuple[int, ...]:
        read = self._reads[session]
        return read.slots[first - read.first : end - read.first]

    def begin(self, session: TargetSequence, feed: StateFeed) -> None:
        """Moves a feed's start to the first readable state, or to the latest start that its drafter accepts.

        Does nothing if the drafter accepts no later start or all states that it lacks are readable.
        """
        if feed.begin_by > feed.sent and not self._are_there(session, feed.sent):
            feed.begin(max(feed.sent, min(feed.begin_by, self._first_there(session))))

    def rewind(self, sessions: Iterable[TargetSequence]) -> None:
        """Rolls back sessions whose drafters lack states that cannot be read. Call it before a step is planned."""
        for session in sessions:
            feed = session.live_feed
            if feed is None:
                continue
            if session.exchange.is_paused:
                feed.tries = 0  # nothing is sent because nothing is requested
                continue
            self.begin(session, feed)
            if not self._are_there(session, feed.sent):
                self._roll_back(session, feed)

    def _are_there(self, session: TargetSequence, first: int) -> bool:
        """Returns True if the states of all cached tokens from position `first` on can be read."""
        return self.end(session.open.session, first) >= session.cache.length

    def _first_there(self, session: TargetSequence) -> int:
        """Returns the first position from which the states of all cached tokens can be read."""
        read = self._reads.get(session.open.session)
        return session.cache.length if read is None or read.end < session.cache.length else read.first

    def _roll_back(self, session: TargetSequence, feed: StateFeed) -> None:
        if feed.tries >= MAX_TRIES:
            session.feed = None
            self.lost += 1
            return
        self.again += session.cache.length - feed.sent
        session.cache.length = feed.sent


RIDE_BYTES = 256 << 10  # most bytes of earlier tokens' states sent with a verdict: 2 ms at 1 Gbit/s
WINDOW_BYTES = 4 << 20  # most unacknowledged bytes per drafter: 3 ms at 10 Gbit/s, more than a round trip
UNKEPT_WINDOW_BYTES = 64 << 20  # the same bound if pages keep no states


@dataclass(frozen=True, slots=True)
class _Lack:
    """States that a session's drafter lacks and that can be read now."""

    session: TargetSequence
    feed: StateFeed
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.feed.sent


class HiddenStateSender:
    """Sends drafters the hidden states of all sessions of a target; sends nothing if `layout` is None.

    `is_kept`: pages next to the cache keep the states. `ride_bytes` limits the states of earlier tokens sent with a
    verdict; `window_bytes` limits a drafter's unacknowledged states.
    """

    def __init__(
        self,
        layout: StatesFormat | None,
        admission: Admission,
        is_kept: bool = True,
        ride_bytes: int | None = None,
        window_bytes: int | None = None,
    ) -> None:
        self.rows: Counter[str] = Counter()  # rows sent, by way: `verdict` or `apart`
        self.fresh = None if is_kept else StateRecompute(admission.pages.page_size)
        self._layout = layout
        self._admission = admission
        self._pages = admission.pages
        self._ride_bytes = RIDE_BYTES if ride_bytes is None else ride_bytes
        default = WINDOW_BYTES if is_kept else UNKEPT_WINDOW_BYTES
        self._window_bytes = default if window_bytes is None else window_bytes

    @property
    def counts(self) -> dict[str, int]:
        """Rows and bytes sent with verdicts and apart; if pages keep none, also recomputed tokens and lost feeds."""
        row_bytes = self._layout.row_bytes if self._layout is not None else 0
        rows = {way: self.rows[way] for way in ("verdict", "apart")}
        counts = {**rows, **{f"{way}_bytes": count * row_bytes for way, count in rows.items()}}
        return counts if self.fresh is None else {**counts, "again": self.fresh.again, "lost": self.fresh.lost}

    # ------------------------------------------------------------ steps

    def before_step(self) -> None:
        """Prepares feeds before a step is planned; does nothing if states are kept."""
        if self.fresh is not None:
            self.fresh.rewind(self._admission.running.values())

    def step_made(self, rows: Sequence[tuple[TargetSequence, Row]], decided: Mapping[str, Outcome]) -> None:
        """Makes the step's states readable for the sessions that are still open."""
        if self.fresh is not None and rows:
            running = self._admission.running
            self.fresh.step_made([each for each in rows if running.get(each[1].session) is each[0]], decided)

    # ------------------------------------------------------------ messages from drafters

    def attached(self, session: TargetSequence, drafter: str, attach: Attach) -> None:
        """Starts a feed of the states that the attaching drafter lacks, if it reads any."""
        first = attach.states_from
        if first is None or self._layout is None:
            session.feed = None
        else:
            session.feed = StateFeed(drafter, first, first, first if attach.states_by is None else attach.states_by)

    def acked(self, peer: str, ack: StatesAck) -> None:
        """Records an acknowledgement of states.

        Ignores other drafters' acknowledgements, and positions that were not sent.
        """
        session = self._admission.find(ack.session)
        feed = session.live_feed if session is not None else None
        if feed is not None and peer_of(feed.drafter) == peer_of(peer):
            feed.acked = max(feed.acked, min(ack.have_len, feed.sent))

    # ------------------------------------------------------------ with verdicts

    def to_ride(self, session: TargetSequence, row: Row) -> tuple[int, ...]:
        """Returns the slots whose states the row's outcome should contain; none if there are too many."""
        feed = session.live_feed
        if self._layout is None or feed is None or session.exchange.is_paused or not row.decide:
            return ()
        unsent_bytes = (row.base_len - feed.sent) * self._layout.row_bytes
        if not 0 <= unsent_bytes <= self._ride_bytes or (self.fresh is not None and feed.sent < row.start):
            return ()
        return self._slots(session, feed.sent, row.start + len(row.tokens))

    def with_states(
        self, session: TargetSequence, row: Row, outcome: Outcome, news: list[Verdict | DraftRequest]
    ) -> list[Verdict | States | DraftRequest]:
        """Inserts the states that go with a verdict between the verdict and the next request.

        Inserts none if the session is over.
        """
        if not outcome.states or len(news) < 2:
            return [*news]
        return [news[0], *self._riding(session, row, outcome), *news[1:]]

    def _riding(self, session: TargetSequence, row: Row, outcome: Outcome) -> list[States]:
        """Returns the states to send with a verdict.

        Returns none while earlier states are under way on the states stream, because these would overtake them, or if
        the drafter has attached again meanwhile and lacks other states.
        """
        feed = session.live_feed
        if feed is None or not feed.sent == feed.acked == row.states_from:
            return []
        messages = list(self._messages(session, feed.sent, outcome.states))
        feed.went_out(messages[-1].end)
        feed.acked = feed.sent  # breaks of the verdict stream are noticed, so these need no acknowledgement
        self.rows["verdict"] += feed.sent - row.states_from
        return messages

    # ------------------------------------------------------------ apart from verdicts

    def next_read(self) -> StateRead | None:
        """Returns the states to read from pages now: those of the session that lacks fewest, so that decoding does not
        wait for prompts.
        """
        layout = self._layout
        if layout is None:
            return None
        on_way = self._rows_on_way()
        window = max(1, self._window_bytes // layout.row_bytes)
        lacks = [lack for lack in self._lacks() if on_way[lack.feed.drafter] < window]
        if not lacks:
            return None
        lack = min(lacks, key=lambda each: each.rows)
        first = lack.feed.sent
        end = min(lack.end, first + layout.rows_in_message)
        name = lack.session.open.session
        if self.fresh is not None:
            return StateRead(name, first, self.fresh.slots(name, first, end))
        return StateRead(name, first, self._slots(lack.session, first, end))

    def sent(self, read: StateRead, rows: bytes) -> list[Send]:
        """Returns the messages for states that were read, unless their drafter has gone or the session has changed."""
        session = self._admission.find(read.session)
        feed = session.live_feed if session is not None else None
        if session is None or feed is None or feed.sent != read.first or read.end > session.cache.length:
            return []
        feed.went_out(read.end)
        self.rows["apart"] += len(read.slots)
        return [(states_stream(feed.drafter), states) for states in self._messages(session, read.first, rows)]

    # ------------------------------------------------------------ helpers

    def _lacks(self) -> Iterator[_Lack]:
        for session in self._admission.running.values():
            feed = session.live_feed
            if feed is None or session.exchange.is_paused:
                continue
            if self.fresh is not None:
                self.fresh.begin(session, feed)
            end = self._readable_to(session, feed)
            if end > feed.sent:
                yield _Lack(session, feed, end)

    def _readable_to(self, session: TargetSequence, feed: StateFeed) -> int:
        if self.fresh is not None:
            return self.fresh.end(session.open.session, feed.sent)
        end = self._pages.held(session.open.session, session.cache.length)
        return end if session.cache.displaced_from is None else min(end, session.cache.displaced_from)

    def _rows_on_way(self) -> Counter[str]:
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
        assert layout is not None, "states come from an engine that captures them"
        size = layout.row_bytes * layout.rows_in_message
        for at in range(0, len(rows), size):
            part = rows[at : at + size]
            begin = first + at // layout.row_bytes
            prefix_hash = session.prefix.hash_at(begin + len(part) // layout.row_bytes)
            assert prefix_hash is not None, "states are of committed tokens"
            yield States(session.open.session, begin, prefix_hash, layout.dtype, layout.width, part)
