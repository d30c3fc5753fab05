"""Hidden states that no page keeps: those of the latest step are there, and earlier ones are computed again.

What a drafter lacks of what is cached is fed once more, from the first position that it lacks: the cache is a prefix,
so the session is rolled back to there. A drafter that has none yet may say how late in the text it can begin: then no
more than that is computed again. Pure.

A drafter that has no room for what is computed, twice for the same tokens, goes without until it attaches again.
"""

from collections.abc import Iterable, Mapping, Sequence

from cluster.verification.sequence import StateFeed, TargetSession
from cluster.verification.step import Outcome, Row, StateRead, places_of

MOST_TRIES = 2


class FreshStates:
    """Of all sessions of a target; the engine holds the rows of one step until it makes the next."""

    def __init__(self, page_size: int) -> None:
        self.again = 0  # tokens whose states were there before, and that were computed again for them
        self.lost = 0  # feeds that ended because their drafter had no room for what was computed for it
        self._page_size = page_size
        self._reads: dict[str, StateRead] = {}  # what of the latest step can be read, by session

    def step_made(self, rows: Sequence[tuple[TargetSession, Row]], decided: Mapping[str, Outcome]) -> None:
        """What can be read is of this step from now on."""
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
        """Up to which position states can be read from `first` on; `first` where there are none."""
        read = self._reads.get(session)
        return max(first, read.end) if read is not None and read.first <= first else first

    def places(self, session: str, first: int, end: int) -> tuple[int, ...]:
        read = self._reads[session]
        return read.places[first - read.first : end - read.first]

    def begin(self, session: TargetSession, feed: StateFeed) -> None:
        """Where a drafter may begin later than at what is lacking, it does: at what is there, or as late as it can."""
        if feed.begin_by > feed.sent and not self._are_there(session, feed.sent):
            feed.begin(max(feed.sent, min(feed.begin_by, self._first_there(session))))

    def rewind(self, sessions: Iterable[TargetSession]) -> None:
        """Before a step is planned: sessions whose drafters lack what is not there are rolled back to it."""
        for session in sessions:
            feed = session.live_feed
            if feed is None:
                continue
            if session.paused:
                feed.tries = 0  # nothing goes out because nothing is wanted
                continue
            self.begin(session, feed)
            if not self._are_there(session, feed.sent):
                self._roll_back(session, feed)

    def _are_there(self, session: TargetSession, first: int) -> bool:
        """Whether all that is cached from a position on can be read."""
        return self.end(session.open.session, first) >= session.cached_len

    def _first_there(self, session: TargetSession) -> int:
        """From which position on all that is cached can be read."""
        read = self._reads.get(session.open.session)
        return session.cached_len if read is None or read.end < session.cached_len else read.first

    def _roll_back(self, session: TargetSession, feed: StateFeed) -> None:
        if feed.tries >= MOST_TRIES:
            session.feed = None
            self.lost += 1
            return
        self.again += session.cached_len - feed.sent
        session.cached_len = feed.sent
