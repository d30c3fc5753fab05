"""A simulated router: the real ledgers and the real choice of replicas.

The counterpart of `serve_app/router.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cluster.errors import SlipstreamError
from cluster.routing.assignment import Assignment, Assignments
from cluster.routing.balancing import Peers
from cluster.routing.session import Command, Emit, Ended, Failed, Session, ToDrafter, ToTarget
from cluster.simulation.network import Door, Frame, Network, Process, SimulatedLink

MEMBERSHIP_PERIOD_S = 0.25


@dataclass(eq=False)
class SimulatedAssignment(Assignment):
    """One session from its arrival on, and what its client saw."""

    arrived_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    error: SlipstreamError | None = None
    longest_gap_s: float = 0.0
    heard_s: float = 0.0  # when tokens were last committed

    @property
    def latency_s(self) -> float | None:
        return self.ended_s - self.arrived_s if self.ended_s is not None else None

    @property
    def waited_s(self) -> float | None:
        """For the first token."""
        return self.first_token_s - self.arrived_s if self.first_token_s is not None else None


class SimulatedRouter:
    """One router's sessions; `on_commit` hears how many tokens were committed, `on_over` of each one's end."""

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
        self._assignments: Assignments[SimulatedAssignment] = Assignments(process.address, target_wait_s, self._do)
        self._targets: dict[str, SimulatedLink] = {}  # by address
        self._drafters: dict[str, SimulatedLink] = {}
        self._ticking = False

    @property
    def assignments(self) -> list[SimulatedAssignment]:
        return list(self._assignments)

    @property
    def given_up(self) -> int:
        """Times that a drafter was given up as silent."""
        return self._assignments.given_up

    def generate(self, session: Session) -> None:
        now = self.process.clock.now
        self._assignments.add(SimulatedAssignment(session, now, arrived_s=now, heard_s=now), now)
        self._tick_later()

    def _do(self, assignment: SimulatedAssignment, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Emit):
                self._hear(assignment, len(command.tokens))
            elif isinstance(command, ToTarget):
                self._targets[command.address].send(command.message)
            elif isinstance(command, ToDrafter):
                self._drafters[command.address].send(command.message)
            else:
                self._end(assignment, command)

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

    # ------------------------------------------------------------ what peers say

    def target_frame(self, address: str, frame: Frame) -> None:
        for message in frame:
            self._assignments.target_says(address, message, self.process.clock.now)
        self._tick_later()

    def drafter_frame(self, address: str, frame: Frame) -> None:
        for message in frame:
            self._assignments.drafter_says(address, message, self.process.clock.now)
        self._tick_later()

    def target_down(self, address: str) -> None:
        self._assignments.target_lost(address, self.process.clock.now)
        self._tick_later()

    def drafter_down(self, address: str) -> None:
        self._assignments.drafter_lost(address, self.process.clock.now)
        self._tick_later()

    # ------------------------------------------------------------ the slow loop

    def _tick_later(self) -> None:
        """Only while there is something to do: the simulation ends when nothing happens any more."""
        if self._assignments.has_waiting and not self._ticking:
            self._ticking = True
            self.process.after(MEMBERSHIP_PERIOD_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._assignments.tick(self.process.clock.now)
        self._tick_later()

    # ------------------------------------------------------------ streams

    def connect_target(self, network: Network, door: Door) -> None:
        """Keeps a stream to a target from now on."""
        address = door.process.address
        self._targets[address] = SimulatedLink(
            network,
            self.process,
            door,
            live=partial(self._assignments.live_at_target, address),
            on_up=partial(self._up, self._assignments.targets, address),
            on_frame=partial(self.target_frame, address),
            on_down=partial(self.target_down, address),
        )

    def connect_drafter(self, network: Network, door: Door) -> None:
        """Keeps a stream to a drafter from now on."""
        address = door.process.address
        self._drafters[address] = SimulatedLink(
            network,
            self.process,
            door,
            live=partial(self._assignments.live_at_drafter, address),
            on_up=partial(self._up, self._assignments.drafters, address),
            on_frame=partial(self.drafter_frame, address),
            on_down=partial(self.drafter_down, address),
        )

    def _up(self, peers: Peers, address: str) -> None:
        peers.up(address)
        self._assignments.tick(self.process.clock.now)
        self._tick_later()
