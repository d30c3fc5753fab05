"""All audits of a router: the ended requests that are audited, the queue, and the target and time of each audit.

One audit runs at a time, on a target without other sessions of this router. The target refuses it while it serves other
routers' sessions, and ends it as soon as a request arrives. The audit then waits and continues where it stopped.
Callers pass the time in and send the returned messages.
"""

from collections import Counter, deque
from collections.abc import Callable
from hashlib import blake2b

from cluster.audit.replay import NEAR_TIES, Difference, Progress, Replay, is_repeatable
from cluster.config import AuditConfig
from cluster.envelope import Send
from cluster.routing.balancing import Peers
from cluster.routing.ledger import MAX_REOPENS, Session
from protos.messages import Close, Message, Refusal, RefusalReason, Verdict

PAUSE_S = 1.0  # after a target refused because it had requests to serve
OUTCOMES = ("equal", "near_tie", "differs", "ratio", "dropped", "failed")
"""Outcomes of the chosen requests.

equal, near_tie: the committed text is the target's, without or with near-ties. differs: it is not. ratio: not audited,
because under rejection sampling the text depends on the drafts. dropped: too many were waiting. failed: no target could
decide it.
"""


def is_chosen(session: str, share: float) -> bool:
    """Returns True for a share of all sessions, chosen by a hash of the name."""
    drawn = int.from_bytes(blake2b(session.encode(), digest_size=8).digest())
    return drawn < share * 2**64


class Audits:
    """Queue and results of audits; calls `alarm` for every difference."""

    def __init__(self, config: AuditConfig, dtype: str, alarm: Callable[[Difference], None]) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self.widest_near_tie = 0.0  # largest margin of a near-tie, in logits
        self._config = config
        self._near_tie = NEAR_TIES[dtype] if config.near_tie is None else config.near_tie
        self._alarm = alarm
        self._waiting: deque[Replay] = deque()
        self._running: Replay | None = None
        self._target = ""  # of the running audit
        self._not_before = 0.0  # earliest time of the next try

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def state(self) -> str:
        """Summary of the results: `off`, `ok` or `differs`."""
        if self.counts["differs"]:
            return "differs"
        return "ok" if self._config.share else "off"

    # ------------------------------------------------------------ starting and ending

    def ended(self, session: Session, served_by: frozenset[str]) -> None:
        """Queues an ended request if it is chosen, repeatable, and fits the queue."""
        generation = session.generation
        if not is_chosen(generation.session, self._config.share):
            return
        committed = session.committed
        if not committed:
            return
        if not is_repeatable(generation):
            self.counts["ratio"] += 1
            return
        replay = Replay(generation, committed, served_by, self._near_tie)
        tokens = sum(one.tokens for one in self._waiting)
        if len(self._waiting) >= self._config.max_waiting or tokens + replay.tokens > self._config.max_waiting_tokens:
            self.counts["dropped"] += 1
            return
        self._waiting.append(replay)

    def tick(self, targets: Peers, now: float) -> list[Send]:
        """Starts or continues the first audit for which a target has nothing else to do."""
        if self._running is not None or now < self._not_before:
            return []
        for replay in self._waiting:
            if target := targets.spare(replay.served_by):
                self._waiting.remove(replay)
                self._running = replay
                self._target = target
                return [(target, replay.open())]
        return []

    def stop(self) -> list[Send]:
        """Ends all audits, because the router serves no more requests."""
        self.counts["dropped"] += len(self._waiting)
        self._waiting.clear()
        if (replay := self._running) is None:
            return []
        self._give_up(replay, "dropped")
        return [(self._target, Close(replay.name, replay.attempt))]

    # ------------------------------------------------------------ messages from targets

    def receive(self, target: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a target's address if it is about the running audit."""
        replay = self._running
        if replay is None or target != self._target or getattr(message, "session", "") != replay.name:
            return []
        if isinstance(message, Verdict):
            return self._progress(replay, replay.receive(message))
        if isinstance(message, Refusal) and message.attempt == replay.attempt:
            if message.reason is RefusalReason.OVERLOADED:
                self._not_before = now + PAUSE_S
                self._put_back(replay)
            else:
                self._give_up(replay, "failed")
        return []

    def gone(self, target: str) -> None:
        """Handles a target's broken stream.

        Gives an audit up after several, so that it cannot bring all targets down.
        """
        replay = self._running
        if replay is None or target != self._target:
            return
        replay.failures += 1
        if replay.failures <= MAX_REOPENS:
            self._put_back(replay)
        else:
            self._give_up(replay, "failed")

    def unreadable(self, target: str, session: str) -> list[Send]:
        """Handles a malformed message from a target about a session."""
        replay = self._running
        if replay is None or target != self._target or session != replay.name:
            return []
        self.gone(target)
        return [(target, Close(replay.name, replay.attempt))]

    # ------------------------------------------------------------ helpers

    def _progress(self, replay: Replay, progress: Progress) -> list[Send]:
        match progress:
            case Progress.GOES_ON:
                return []
            case Progress.OPENS_ANEW:
                return [(self._target, replay.open())]
            case Progress.ENDED:
                self._running = None
                self._note(replay)
                return []

    def _note(self, replay: Replay) -> None:
        self.widest_near_tie = max([self.widest_near_tie, *replay.near_ties])
        if replay.differs:
            self.counts["differs"] += 1
            self._alarm(replay.difference(self._target))
        else:
            self.counts["near_tie" if replay.near_ties else "equal"] += 1

    def _put_back(self, replay: Replay) -> None:
        """Returns an audit to the head of the queue."""
        self._running = None
        self._waiting.appendleft(replay)

    def _give_up(self, replay: Replay, outcome: str) -> None:
        """Ends an audit early; a difference found so far is still reported."""
        self._running = None
        if replay.differs:
            self._note(replay)
        else:
            self.counts[outcome] += 1
