"""Hidden states without pages that keep them: those of the latest step are readable, earlier ones are recomputed.

States that a drafter lacks of cached tokens are computed again from the first position that it lacks. The cache is a
prefix, so the session is rolled back to that position. A drafter that has no states yet may report how late in the text
they may begin, which bounds what is recomputed. Pure.

If a drafter twice has no capacity for the states of the same tokens, they are not sent to it until it attaches again.
"""

from collections.abc import Iterable, Mapping, Sequence

from cluster.verification.sequence import StateFeed, TargetSession
from cluster.verification.step import Outcome, Row, StateRead, places_of

MOST_TRIES = 2


class FreshStates:
    """Tracks readable states of all sessions of a target.

    The engine holds the rows of one step until it makes the next.
    """

    def __init__(self, page_size: int) -> None:
        self.again = 0  # tokens that were recomputed for their states
        self.lost = 0  # feeds that ended because their drafter had no capacity for the states computed for it
        self._page_size = page_size
        self._reads: dict[str, StateRead] = {}  # readable states of the latest step, by session

    def step_made(self, rows: Sequence[tuple[TargetSession, Row]], decided: Mapping[str, Outcome]) -> None:
        """Replaces the readable states by those of this step."""
        self._reads = {}
        for session, row in rows:
            path = decided[row.session].path if row.decide else ()
            positions = [*range(row.start, row.base_len), *[row.base_len + node for node in path]]
            stand = positions[: session.cached_len - row.start]
            places = places_of(stand, row.pages, self._page_size)
            self._reads[row.session] = StateRead(row.session, row.start, tuple(places))
            feed = session.live_feed
            if feed is not None and self.end(row.session, feed.sent) > feed.sent:
                feed.tries += 1

    def end(self, session: str, first: int) -> int:
        """Returns the position up to which states can be read from `first` on; `first` if there are none."""
        read = self._reads.get(session)
        return max(first, read.end) if read is not None and read.first <= first else first

    def places(self, session: str, first: int, end: int) -> tuple[int, ...]:
        read = self._reads[session]
        return read.places[first - read.first : end - read.first]

    def begin(self, session: TargetSession, feed: StateFeed) -> None:
        """Moves the beginning of a feed to the first readable state, or as late as its drafter accepts.

        Does nothing if the drafter needs no later beginning or all that it lacks is readable.
        """
        if feed.begin_by > feed.sent and not self._are_there(session, feed.sent):
            feed.begin(max(feed.sent, min(feed.begin_by, self._first_there(session))))

    def rewind(self, sessions: Iterable[TargetSession]) -> None:
        """Rolls back sessions whose drafters lack states that are not readable. Call it before a step is planned."""
        for session in sessions:
            feed = session.live_feed
            if feed is None:
                continue
            if session.paused:
                feed.tries = 0  # nothing is sent because nothing is requested
                continue
            self.begin(session, feed)
            if not self._are_there(session, feed.sent):
                self._roll_back(session, feed)

    def _are_there(self, session: TargetSession, first: int) -> bool:
        """Returns True if the states of all cached tokens from a position on can be read."""
        return self.end(session.open.session, first) >= session.cached_len

    def _first_there(self, session: TargetSession) -> int:
        """Returns the first position from which the states of all cached tokens can be read."""
        read = self._reads.get(session.open.session)
        return session.cached_len if read is None or read.end < session.cached_len else read.first

    def _roll_back(self, session: TargetSession, feed: StateFeed) -> None:
        if feed.tries >= MOST_TRIES:
            session.feed = None
            self.lost += 1
            return
        self.again += session.cached_len - feed.sent
        session.cached_len = feed.sent
