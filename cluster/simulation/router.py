"""A simulated router: the real ledgers and the real choice of replicas.

The counterpart of `serve_app/router.py`.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cluster.breaker import Breakers
from cluster.errors import CapacityError, SlipstreamError, TargetLostError
from cluster.routing import Candidate, choose, turn
from cluster.session import Command, Emit, Ended, Failed, Phase, Session, ToDrafter, ToTarget
from cluster.simulation.network import Door, Frame, Link, Network, Process
from protos.messages import LiveSession, Refusal, RefusalReason, Resync, Verdict

MEMBERSHIP_PERIOD_S = 0.25
FULL_FOR_S = 1.0


@dataclass(eq=False)
class Flight:
    """One session from its arrival on, and what its client saw."""

    session: Session
    arrived_s: float
    seeking_since: float
    target: str | None = None  # as counted among the peers
    drafter: str | None = None
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


class Peers:
    """One pool as a router sees it: who is connected, and how many of its sessions each has."""

    def __init__(self, router: str) -> None:
        self.links: dict[str, Link] = {}  # by address
        self._router = router
        self._sessions: Counter[str] = Counter()
        self._up: dict[str, Candidate] = {}  # by address
        self._ranked: list[tuple[int, int, str]] = []  # their sessions, turns and addresses: the next one first

    def up(self, address: str) -> None:
        self.down(address)
        self._up[address] = one = Candidate(address, self._sessions[address], turn(self._router, address))
        insort(self._ranked, _rank(one))

    def down(self, address: str) -> None:
        one = self._up.pop(address, None)
        if one is not None:
            del self._ranked[bisect_left(self._ranked, _rank(one))]

    def moved(self, old: str | None, new: str | None) -> None:
        """A session left one peer for another."""
        for address, change in ((old, -1), (new, 1)):
            if address is not None:
                self._sessions[address] += change
                if address in self._up:
                    self.up(address)

    def choose(self, takes: Callable[[str], bool], avoid: frozenset[str] = frozenset()) -> str | None:
        """One of those that take sessions now."""
        return choose(self._contenders(takes, avoid), avoid)

    def _contenders(self, takes: Callable[[str], bool], avoid: frozenset[str]) -> Iterator[Candidate]:
        """Up to the first that need not be avoided: a large fleet is not looked through for every session."""
        for _, _, address in self._ranked:
            if takes(address):
                yield self._up[address]
                if address not in avoid:
                    return


def _rank(one: Candidate) -> tuple[int, int, str]:
    return one.sessions, one.turn, one.address


class SimulatedRouter:
    """All flights of one router; `on_commit` hears how many tokens were committed, `on_over` of each flight's end."""

    def __init__(
        self,
        process: Process,
        target_wait_s: float,
        on_commit: Callable[[int], None],
        on_over: Callable[[Flight], None],
    ) -> None:
        self.process = process
        self.targets, self.drafters = Peers(process.address), Peers(process.address)
        self._target_wait_s, self._on_commit, self._on_over = target_wait_s, on_commit, on_over
        self._flights: dict[str, Flight] = {}  # by session
        self._waiting: dict[str, Flight] = {}  # of them, those that may lack a target or a drafter
        self._ticking = False
        self.given_up = 0  # times that a drafter was given up as silent
        self._full_until: dict[str, float] = {}  # by address of a target that said it is full
        self._breakers = Breakers()  # of the drafters

    @property
    def flights(self) -> list[Flight]:
        return list(self._flights.values())

    def generate(self, session: Session) -> None:
        now = self.process.clock.now
        flight = Flight(session, now, now, heard_s=now)
        self._flights[session.generation.session] = flight
        self._place(flight)

    # ------------------------------------------------------------ placement

    def _place(self, *flights: Flight) -> None:
        """Gives sessions the target and the drafter that they lack, as far as there are any."""
        for flight in flights:
            session = flight.session
            if session.phase is Phase.SEEKING and (target := self._choose_target(session)):
                self._do(flight, session.assign_target(target))
            if session.wants_drafter and (drafter := self._choose_drafter()):
                self._assign_drafter(flight, drafter)
            if session.phase is Phase.SEEKING or session.wants_drafter:
                self._waiting[session.generation.session] = flight
                self._tick_later()
            else:
                self._waiting.pop(session.generation.session, None)

    def _choose_target(self, session: Session) -> str | None:
        now = self.process.clock.now
        return self.targets.choose(lambda address: self._full_until.get(address, 0.0) <= now, session.failed_targets)

    def _choose_drafter(self) -> str | None:
        now = self.process.clock.now
        return self.drafters.choose(lambda address: self._breakers.takes(address, now))

    def _assign_drafter(self, flight: Flight, drafter: str) -> None:
        self._do(flight, flight.session.assign_drafter(drafter))
        self._breakers.placed(drafter, flight.session.generation.session, self.process.clock.now)

    def _move_off(self, address: str) -> None:
        """Gives a silent drafter's sessions to others; where there is none, they stay and go on without blocks."""
        for flight in [f for f in self._flights.values() if f.session.drafter == address]:
            if (drafter := self._choose_drafter()) is None:
                return
            self._do(flight, flight.session.leave_drafter())
            if flight.session.wants_drafter:
                self._assign_drafter(flight, drafter)

    def _do(self, flight: Flight, commands: Sequence[Command]) -> None:
        """Carries out what the ledger asks for, and counts who has how many sessions now."""
        self._recount(flight)
        for command in commands:
            if isinstance(command, Emit):
                self._hear(flight, len(command.tokens))
            elif isinstance(command, ToTarget):
                self.targets.links[command.address].send(command.message)
            elif isinstance(command, ToDrafter):
                self.drafters.links[command.address].send(command.message)
            else:
                self._end(flight, command)

    def _recount(self, flight: Flight) -> None:
        session = flight.session
        if flight.target != session.target:
            self.targets.moved(flight.target, session.target)
            flight.target = session.target
        if flight.drafter != session.drafter:
            self.drafters.moved(flight.drafter, session.drafter)
            flight.drafter = session.drafter

    def _hear(self, flight: Flight, tokens: int) -> None:
        now = self.process.clock.now
        if flight.first_token_s is None:
            flight.first_token_s = now
        else:
            flight.longest_gap_s = max(flight.longest_gap_s, now - flight.heard_s)
        flight.heard_s = now
        self._on_commit(tokens)

    def _end(self, flight: Flight, end: Ended | Failed) -> None:
        name = flight.session.generation.session
        flight.ended_s = self.process.clock.now
        flight.error = end.error if isinstance(end, Failed) else None
        del self._flights[name]
        self._waiting.pop(name, None)
        self._on_over(flight)

    # ------------------------------------------------------------ what peers say

    def target_frame(self, address: str, frame: Frame) -> None:
        for message in frame:
            flight = self._flight(message)
            if flight is None:
                continue
            session = flight.session
            if isinstance(message, Verdict):
                self._note_answer(flight, message)
                self._do(flight, session.on_verdict(address, message))
            elif isinstance(message, Refusal):
                if message.reason is RefusalReason.OVERLOADED:
                    self._full_until[address] = self.process.clock.now + FULL_FOR_S
                self._do(flight, session.on_target_refusal(address, message))
                self._await_place(flight)

    def drafter_frame(self, address: str, frame: Frame) -> None:
        for message in frame:
            flight = self._flight(message)
            if flight is None:
                continue
            session = flight.session
            if isinstance(message, Resync):
                self._do(flight, session.on_drafter_resync(address))
            elif isinstance(message, Refusal):
                if message.reason is RefusalReason.OVERLOADED:
                    self._breakers.refused(address, self.process.clock.now)
                self._do(flight, session.on_drafter_refusal(address, message))
                self._await_place(flight)

    def target_down(self, address: str) -> None:
        self.targets.down(address)
        lost = [f for f in self._flights.values() if f.session.target == address]
        for flight in lost:
            flight.seeking_since = self.process.clock.now
            self._do(flight, flight.session.on_target_gone(address))
        self._place(*(flight for flight in lost if flight.error is None))

    def drafter_down(self, address: str) -> None:
        self.drafters.down(address)
        self._breakers.forget(address)
        lost = [f for f in self._flights.values() if f.session.drafter == address]
        for flight in lost:
            self._do(flight, flight.session.on_drafter_gone(address))
        self._place(*lost)

    def _flight(self, message: object) -> Flight | None:
        return self._flights.get(getattr(message, "session", ""))

    def _note_answer(self, flight: Flight, verdict: Verdict) -> None:
        session, now = flight.session, self.process.clock.now
        name, drafter = session.generation.session, session.drafter
        if drafter and self._breakers.note(drafter, name, verdict.answer, session.has_drafted, now):
            self.given_up += 1
            self._move_off(drafter)

    # ------------------------------------------------------------ the slow loop

    def _place_waiting(self) -> None:
        self._place(*list(self._waiting.values()))

    def _await_place(self, flight: Flight) -> None:
        self._waiting[flight.session.generation.session] = flight
        self._tick_later()

    def _tick_later(self) -> None:
        if not self._ticking:
            self._ticking = True
            self.process.after(MEMBERSHIP_PERIOD_S, self._tick)

    def _tick(self) -> None:
        """Places what can be placed; gives up sessions that have waited too long for a target."""
        self._ticking = False
        self._place_waiting()
        for flight in list(self._waiting.values()):
            waited = self.process.clock.now - flight.seeking_since
            if flight.session.phase is Phase.SEEKING and waited > self._target_wait_s:
                self._do(flight, flight.session.fail(self._no_target(waited)))

    def _no_target(self, waited: float) -> SlipstreamError:
        if any(link.is_up for link in self.targets.links.values()):
            return CapacityError(f"every target replica has been full for {waited:.0f} s; try again later")
        return TargetLostError(f"no target replica could be reached for {waited:.0f} s")

    # ------------------------------------------------------------ streams

    def connect_target(self, network: Network, door: Door) -> None:
        """Keeps a stream to a target from now on."""
        address = door.process.address
        self.targets.links[address] = Link(
            network,
            self.process,
            door,
            live=lambda: self._live(lambda session: session.target == address),
            on_up=lambda: self._up(self.targets, address),
            on_frame=lambda frame: self.target_frame(address, frame),
            on_down=lambda: self.target_down(address),
        )

    def connect_drafter(self, network: Network, door: Door) -> None:
        """Keeps a stream to a drafter from now on."""
        address = door.process.address
        self.drafters.links[address] = Link(
            network,
            self.process,
            door,
            live=lambda: self._live(lambda session: session.drafter == address),
            on_up=lambda: self._up(self.drafters, address),
            on_frame=lambda frame: self.drafter_frame(address, frame),
            on_down=lambda: self.drafter_down(address),
        )

    def _up(self, peers: Peers, address: str) -> None:
        peers.up(address)
        self._place_waiting()

    def _live(self, is_there: Callable[[Session], bool]) -> Sequence[LiveSession]:
        here = [flight.session for flight in self._flights.values() if is_there(flight.session)]
        return [LiveSession(session.generation.session, session.attempt) for session in here]
