"""Simulated router: the real ledgers and the real choice of replicas.

The counterpart of `serve_app/router.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.envelope import Send
from cluster.errors import SlipstreamError
from cluster.routing.assignment import Assignment, Assignments
from cluster.routing.balancing import Peers
from cluster.routing.ledger import Emit, Ended, Event, Failed, Session
from tools.simulation.network import Door, Frame, Network, Process, SimulatedLink

MEMBERSHIP_PERIOD_S = 0.25


@dataclass(eq=False)
class SimulatedAssignment(Assignment):
    """One session from its arrival on, with its client's measurements."""

    arrived_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    error: SlipstreamError | None = None
    longest_gap_s: float = 0.0
    heard_s: float = 0.0  # time of the latest commit

    @property
    def latency_s(self) -> float | None:
        return self.ended_s - self.arrived_s if self.ended_s is not None else None

    @property
    def waited_s(self) -> float | None:
        """Time to the first token."""
        return self.first_token_s - self.arrived_s if self.first_token_s is not None else None


class SimulatedRouter:
    """One router's sessions. `on_commit` receives the number of committed tokens, `on_over` each ended session."""

    def __init__(
        self,
        process: Process,
        target_wait_s: float,
        on_commit: Callable[[int], None],
        on_over: Callable[[SimulatedAssignment], None],
    ) -> None:
        self.process = process
        self._on_commit = on_commit
        self._on_over = on_over
        self._assignments: Assignments[SimulatedAssignment] = Assignments(process.address, target_wait_s, self._tell)
        self._links: dict[str, SimulatedLink] = {}  # by address
        self._ticking = False

    @property
    def assignments(self) -> list[SimulatedAssignment]:
        return list(self._assignments)

    @property
    def given_up(self) -> int:
        """Number of times that a drafter was given up as silent."""
        return self._assignments.given_up.total()

    @property
    def remedies(self) -> Counter[str]:
        """Remedies that were taken because drafters' blocks had become bad, by name."""
        counts: Counter[str] = Counter()
        for (_, remedy), count in self._assignments.remedies.counts.items():
            counts[f"bad: {remedy.value}"] += count
        return counts

    def generate(self, session: Session) -> None:
        now = self.process.clock.now
        self._go_on(self._assignments.add(SimulatedAssignment(session, now, arrived_s=now, heard_s=now), now))

    def _tell(self, assignment: SimulatedAssignment, event: Event) -> None:
        if isinstance(event, Emit):
            self._hear(assignment, len(event.tokens))
        else:
            self._end(assignment, event)

    def _go_on(self, sends: Sequence[Send]) -> None:
        """Sends messages and schedules a tick while one is awaited; the simulation ends when no event is left."""
        for address, message in sends:
            self._links[address].send(message)
        if self._assignments.awaits_tick and not self._ticking:
            self._ticking = True
            self.process.after(MEMBERSHIP_PERIOD_S, self._tick)

    def _hear(self, assignment: SimulatedAssignment, tokens: int) -> None:
        now = self.process.clock.now
        if assignment.first_token_s is None:
            assignment.first_token_s = now
        else:
            assignment.longest_gap_s = max(assignment.longest_gap_s, now - assignment.heard_s)
        assignment.heard_s = now
        self._on_commit(tokens)

    def _end(self, assignment: SimulatedAssignment, end: Ended | Failed) -> None:
        assignment.ended_s = self.process.clock.now
        assignment.error = end.error if isinstance(end, Failed) else None
        self._assignments.forget(assignment)
        self._on_over(assignment)

    # ------------------------------------------------------------ peers

    def connect_target(self, network: Network, door: Door) -> None:
        """Keeps a stream to a target from now on."""
        self._connect(network, door, self._assignments.targets)

    def connect_drafter(self, network: Network, door: Door) -> None:
        """Keeps a stream to a drafter from now on."""
        self._connect(network, door, self._assignments.drafters)

    def _connect(self, network: Network, door: Door, pool: Peers) -> None:
        address = door.process.address
        self._links[address] = SimulatedLink(
            network,
            self.process,
            door,
            live=partial(self._assignments.live_at, address),
            on_up=partial(self._up, pool, address),
            on_frame=partial(self._frame, address),
            on_down=lambda: self._go_on(self._assignments.gone(address, self.process.clock.now)),
        )

    def _up(self, pool: Peers, address: str) -> None:
        pool.up(address)
        self._go_on(self._assignments.tick(self.process.clock.now))

    def _frame(self, address: str, frame: Frame) -> None:
        sends: list[Send] = []
        for message in frame:
            sends += self._assignments.receive(address, message, self.process.clock.now)
        self._go_on(sends)

    def _tick(self) -> None:
        self._ticking = False
        self._go_on(self._assignments.tick(self.process.clock.now))
