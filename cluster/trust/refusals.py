"""What is refused for who sent it: counted by cause, and logged once a peer and cause.

A peer that is refused tries again, and one that means harm does so at full speed: neither may fill the log.
"""

import logging
from collections import Counter, OrderedDict

from protos.messages import Open, Refusal, RefusalReason

REMEMBERED = 1024  # latest pairs of peer and cause; one that is forgotten is logged once more


class Refusals:
    """Of one process, as long as it lives."""

    def __init__(self, log: logging.Logger) -> None:
        self.counts: Counter[str] = Counter()  # by cause
        self._log = log
        self._logged: OrderedDict[tuple[str, str], None] = OrderedDict()

    def note(self, peer: str, cause: str, why: str = "") -> None:
        """`why` is for the log only."""
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
    """The answer to a request that the sender has no right to: it says that alone."""
    return Refusal(request.session, request.attempt, RefusalReason.INVALID, "not permitted")
