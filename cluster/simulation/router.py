"""A simulated router: the real ledgers and the real choice of replicas.

The counterpart of `serve_app/router.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.errors import SlipstreamError
from cluster.flights import Flight, Flights
from cluster.routing import Peers
from cluster.session import Command, Emit, Ended, Failed, Session, ToDrafter, ToTarget
from cluster.simulation.network import Door, Frame, Link, Network, Process

MEMBERSHIP_PERIOD_S = 0.25


@dataclass(eq=False)
class SimulatedFlight(Flight):
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
    """All flights of one router; `on_commit` hears how many tokens were committed, `on_over` of each flight's end."""

    def __init__(
        self,
        process: Process,
        target_wait_s: float,
        on_commit: Callable[[int], None],
        on_over: Callable[[SimulatedFlight], None],
    ) -> None:
        self.process = process
        self._on_commit, self._on_over = on_commit, on_over
        self._flights: Flights[SimulatedFlight] = Flights(process.address, target_wait_s, self._do)
        self._targets: dict[str, Link] = {}  # by address
        self._drafters: dict[str, Link] = {}
        self._ticking = False

    @property
    def flights(self) -> list[SimulatedFlight]:
        return list(self._flights)

    @property
    def given_up(self) -> int:
        """Times that a drafter was given up as silent."""
        return self._flights.given_up

    def generate(self, session: Session) -> None:
        now = self.process.clock.now
        self._flights.add(SimulatedFlight(session, now, arrived_s=now, heard_s=now), now)
        self._tick_later()

    def _do(self, flight: SimulatedFlight, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, Emit):
                self._hear(flight, len(command.tokens))
            elif isinstance(command, ToTarget):
                self._targets[command.address].send(command.message)
            elif isinstance(command, ToDrafter):
                self._drafters[command.address].send(command.message)
            else:
                self._end(flight, command)

    def _hear(self, flight: SimulatedFlight, tokens: int) -> None:
        now = self.process.clock.now
        if flight.first_token_s is None:
            flight.first_token_s = now
        else:
            flight.longest_gap_s = max(flight.longest_gap_s, now - flight.heard_s)
        flight.heard_s = now
        self._on_commit(tokens)

    def _end(self, flight: SimulatedFlight, end: Ended | Failed) -> None:
        flight.ended_s = self.process.clock.now
        flight.error = end.error if isinstance(end, Failed) else None
        self._flights.forget(flight)
        self._on_over(flight)

    # ------------------------------------------------------------ what peers say

    def target_frame(self, address: str, frame: Frame) -> None:
        for message in frame:
            self._flights.target_says(address, message, self.process.clock.now)
        self._tick_later()

    def drafter_frame(self, address: str, frame: Frame) -> None:
        for message in frame:
            self._flights.drafter_says(address, message, self.process.clock.now)
        self._tick_later()

    def target_down(self, address: str) -> None:
        self._flights.target_lost(address, self.process.clock.now)
        self._tick_later()

    def drafter_down(self, address: str) -> None:
        self._flights.drafter_lost(address, self.process.clock.now)
        self._tick_later()

    # ------------------------------------------------------------ the slow loop

    def _tick_later(self) -> None:
        """Only while there is something to do: the simulation ends when nothing happens any more."""
        if self._flights.has_waiting and not self._ticking:
            self._ticking = True
            self.process.after(MEMBERSHIP_PERIOD_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._flights.tick(self.process.clock.now)
        self._tick_later()

    # ------------------------------------------------------------ streams

    def connect_target(self, network: Network, door: Door) -> None:
        """Keeps a stream to a target from now on."""
        address = door.process.address
        self._targets[address] = Link(
            network,
            self.process,
            door,
            live=lambda: self._flights.live_at_target(address),
            on_up=lambda: self._up(self._flights.targets, address),
            on_frame=lambda frame: self.target_frame(address, frame),
            on_down=lambda: self.target_down(address),
        )

    def connect_drafter(self, network: Network, door: Door) -> None:
        """Keeps a stream to a drafter from now on."""
        address = door.process.address
        self._drafters[address] = Link(
            network,
            self.process,
            door,
            live=lambda: self._flights.live_at_drafter(address),
            on_up=lambda: self._up(self._flights.drafters, address),
            on_frame=lambda frame: self.drafter_frame(address, frame),
            on_down=lambda: self.drafter_down(address),
        )

    def _up(self, peers: Peers, address: str) -> None:
        peers.up(address)
        self._flights.tick(self.process.clock.now)
        self._tick_later()
