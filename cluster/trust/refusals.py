"""Requests that are refused because of their sender: counted by cause, and logged once per peer and cause.

A refused peer retries, and a hostile one does so at full speed; neither may fill the log.
"""

import logging
from collections import Counter, OrderedDict

from protos.messages import Open, Refusal, RefusalReason

REMEMBERED = 1024  # latest pairs of peer and cause that are kept; a dropped one is logged again


class Refusals:
    """Refusals of one process over its lifetime."""

    def __init__(self, log: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()  # by cause
        self._log = log
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, peer: str, cause: str, why: str = "") -> None:
        """Counts a refusal and logs the first one of the peer and cause; `why` is only logged."""
        self.counts[cause] += 1
        self.log_once(peer, cause, why)

    def log_once(self, peer: str, cause: str, why: str = "") -> None:
        if (peer, cause) not in self._logged:
            self._log.warning("refused %s: %s%s; further ones are only counted", peer, cause, why and f": {why}")
        self._logged[peer, cause] = None
        self._logged.move_to_end((peer, cause))
        if len(self._logged) > REMEMBERED:
            self._logged.popitem(last=False)


def not_permitted(request: Open) -> Refusal:
    """Returns the refusal of a request that the sender may not make; its message gives no other reason."""
    return Refusal(request.session, request.attempt, RefusalReason.INVALID, "not permitted")
