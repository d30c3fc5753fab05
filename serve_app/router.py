"""The router: keeps every session's ledger, gives it a target and a drafter, and commits what the target decides.

Many sessions are in flight at once; that is what lets one be drafted while another is verified. The router is in
no round: blocks go from drafter to target, verdicts come back to both. Knows nothing of text or HTTP.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

from actors.streams import Link
from cluster.breaker import Breakers
from cluster.errors import CapacityError, DrainingError, SlipstreamError, TargetLostError
from cluster.membership import Endpoint, Membership
from cluster.routing import Candidate, choose, turn
from cluster.session import Command, Emit, Ended, Failed, Generation, Phase, Session, ToDrafter, ToTarget
from cluster.timeline import Timeline
from protos import speculation_pb2 as pb
from protos.codec import Decoded
from protos.messages import Hello, LiveSession, Refusal, RefusalReason, Resync, Verdict
from protos.speculation_pb2_grpc import DraftServiceStub, TargetServiceStub

log = logging.getLogger(__name__)

MEMBERSHIP_PERIOD_S = 0.25
FULL_FOR_S = 1.0  # how long a target that said it is full is left alone


@dataclass(frozen=True, slots=True)
class Identity:
    """What peers must share to talk."""

    vocabulary: str
    target_model: str


@dataclass(frozen=True, slots=True)
class RouterLimits:
    max_sessions: int
    target_wait_s: float


@dataclass(eq=False)
class _Flight:
    """A session and whoever waits for its tokens."""

    session: Session
    seeking_since: float
    out: asyncio.Queue[Emit | Ended | Failed] = field(default_factory=asyncio.Queue)


class Router:
    """Implements `serve_app.generation.Generator`."""

    def __init__(
        self,
        membership: Membership,
        identity: Identity,
        limits: RouterLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.peer_id = f"router-{uuid.uuid4().hex[:12]}"
        self.timeline = Timeline(clock)
        self._membership, self._identity, self._limits, self._clock = membership, identity, limits, clock
        self._draining = False
        self._flights: dict[str, _Flight] = {}
        self._targets: dict[str, Link] = {}  # by address
        self._drafters: dict[str, Link] = {}
        self._present: frozenset[str] = frozenset()  # addresses that membership lists
        self._full_until: dict[str, float] = {}  # by address of a target that said it is full
        self._breakers = Breakers()  # of the drafters

    # ------------------------------------------------------------ one session

    async def generate(self, generation: Generation) -> AsyncGenerator[Emit | Ended, None]:
        """See `Generator`."""
        if self._draining:
            raise DrainingError("this server is stopping and takes no new requests; try again later")
        if len(self._flights) >= self._limits.max_sessions:
            raise CapacityError(f"{self._limits.max_sessions} sessions are in flight; try again later")
        flight = _Flight(Session(generation), self._clock())
        self._flights[generation.session] = flight
        try:
            self._place(flight)
            while True:
                event = await flight.out.get()
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Ended):
                    return
        finally:
            self._do(flight, flight.session.cancel())
            del self._flights[generation.session]

    def _place(self, *flights: _Flight) -> None:
        """Gives sessions the target and the drafter that they lack, as far as there are any."""
        targets, drafters = self._target_candidates(), self._drafter_candidates()
        for flight in flights:
            session = flight.session
            if session.phase is Phase.SEEKING and (target := choose(targets.values(), session.failed_targets)):
                targets[target] = targets[target].with_one_more()
                self._do(flight, session.assign_target(target))
            if session.wants_drafter:
                self._give_drafter(flight, drafters)

    def _give_drafter(self, flight: _Flight, drafters: dict[str, Candidate]) -> None:
        """The best of `drafters`, if there is any left; one on probation takes one session."""
        address = choose(drafters.values())
        if address is None:
            return
        drafters[address] = drafters[address].with_one_more()
        self._do(flight, flight.session.assign_drafter(address))
        now = self._clock()
        self._breakers.placed(address, flight.session.generation.session, now)
        if not self._breakers.takes(address, now):
            del drafters[address]

    def _move_off(self, address: str) -> None:
        """Gives a silent drafter's sessions to others; where there is none, they stay and go on without blocks."""
        lost = [f for f in self._flights.values() if f.session.drafter == address]
        log.warning("drafter %s is silent; %d sessions are to move", address, len(lost))
        drafters = self._drafter_candidates()
        for flight in lost:
            if not drafters:
                return
            self._do(flight, flight.session.leave_drafter())
            if flight.session.wants_drafter:
                self._give_drafter(flight, drafters)

    def _target_candidates(self) -> dict[str, Candidate]:
        now, found = self._clock(), self._candidates(self._targets, lambda session: session.target)
        return {address: one for address, one in found.items() if self._full_until.get(address, 0.0) <= now}

    def _drafter_candidates(self) -> dict[str, Candidate]:
        now, found = self._clock(), self._candidates(self._drafters, lambda session: session.drafter)
        return {address: one for address, one in found.items() if self._breakers.takes(address, now)}

    def _candidates(self, links: dict[str, Link], place: Callable[[Session], str | None]) -> dict[str, Candidate]:
        """Peers that are connected and not leaving."""
        busy = Counter(place(flight.session) for flight in self._flights.values())
        return {
            address: Candidate(address, busy[address], turn(self.peer_id, address))
            for address, link in links.items()
            if link.is_up and address in self._present
        }

    def _do(self, flight: _Flight, commands: list[Command]) -> None:
        """Carries out what the ledger asks for."""
        for command in commands:
            if isinstance(command, ToTarget):
                if link := self._targets.get(command.address):
                    link.send(command.message)
            elif isinstance(command, ToDrafter):
                if link := self._drafters.get(command.address):
                    link.send(command.message)
            else:
                flight.out.put_nowait(command)

    # ------------------------------------------------------------ what peers say

    def _target_frame(self, address: str, frame: Decoded) -> None:
        for message in frame.messages:
            flight = self._flights.get(getattr(message, "session", ""))
            if flight is None:
                continue
            if isinstance(message, Verdict):
                self._note_answer(address, flight, message)
                self._do(flight, flight.session.on_verdict(address, message))
                self.timeline.record("commit", message.session)
            elif isinstance(message, Refusal):
                log.info("target %s refuses a session: %s", address, message.message)
                if message.reason is RefusalReason.OVERLOADED:
                    self._full_until[address] = self._clock() + FULL_FOR_S
                self._do(flight, flight.session.on_target_refusal(address, message))
        self._log_malformed(address, frame)
        for item in frame.malformed:
            flight = self._flights.get(item.session)
            if flight is not None and flight.session.target == address:
                flight.seeking_since = self._clock()
                self._do(flight, flight.session.on_target_unreadable(address, item.attempt))
                self._place(flight)

    def _drafter_frame(self, address: str, frame: Decoded) -> None:
        for message in frame.messages:
            flight = self._flights.get(getattr(message, "session", ""))
            if flight is None:
                continue
            if isinstance(message, Resync):
                self._do(flight, flight.session.on_drafter_resync(address))
            elif isinstance(message, Refusal):
                log.info("drafter %s refuses a session: %s", address, message.message)
                if message.reason is RefusalReason.OVERLOADED:
                    self._breakers.refused(address, self._clock())
                self._do(flight, flight.session.on_drafter_refusal(address, message))
        self._log_malformed(address, frame)

    def _target_down(self, address: str) -> None:
        lost = [f for f in self._flights.values() if f.session.target == address]
        log.warning("target %s is lost; %d sessions move", address, len(lost))
        for flight in lost:
            flight.seeking_since = self._clock()
            self._do(flight, flight.session.on_target_gone(address))
        self._place(*lost)

    def _drafter_down(self, address: str) -> None:
        lost = [f for f in self._flights.values() if f.session.drafter == address]
        log.warning("drafter %s is lost; %d sessions go on without it", address, len(lost))
        self._breakers.forget(address)
        for flight in lost:
            self._do(flight, flight.session.on_drafter_gone(address))
        self._place(*lost)

    def _note_answer(self, address: str, flight: _Flight, verdict: Verdict) -> None:
        """Whether the drafter keeps up; one that is silent for too long is given up."""
        session = flight.session
        if session.target != address or verdict.attempt != session.attempt:
            return  # that drafter may have been another
        name, drafter = session.generation.session, session.drafter
        if drafter and self._breakers.note(drafter, name, verdict.answer, session.has_drafted, self._clock()):
            self._move_off(drafter)

    def _log_malformed(self, address: str, frame: Decoded) -> None:
        for item in frame.malformed:
            log.error("malformed %s from %s: %s", item.kind, address, item.why)

    # ------------------------------------------------------------ membership

    async def run(self) -> None:
        """Follows membership, and places sessions that wait, until cancelled."""
        while True:
            members = await self._membership.current()
            self._present = frozenset(endpoint.address for endpoint in (*members.targets, *members.drafters))
            await self._follow(members.targets, self._targets, self._dial_target, lambda s: s.target)
            await self._follow(members.drafters, self._drafters, self._dial_drafter, lambda s: s.drafter)
            self._place_waiting()
            await asyncio.sleep(MEMBERSHIP_PERIOD_S)

    async def close(self) -> None:
        for link in [*self._targets.values(), *self._drafters.values()]:
            await link.close()

    @property
    def reachable(self) -> frozenset[str]:
        """Addresses of the peers that are connected now."""
        return frozenset(a for links in (self._targets, self._drafters) for a, link in links.items() if link.is_up)

    def drain(self) -> None:
        """From now on running sessions are finished and new ones refused."""
        self._draining = True

    @property
    def is_ready(self) -> bool:
        """Whether new sessions are taken: some target can be reached, and nobody has said to drain."""
        return not self._draining and not self.reachable.isdisjoint(self._targets)

    @property
    def refusals(self) -> dict[str, str]:
        """Peers that will not talk to this router, and why."""
        links = [*self._targets.values(), *self._drafters.values()]
        return {link.address: link.refused for link in links if link.refused is not None}

    @property
    def is_idle(self) -> bool:
        return not self._flights

    async def _follow(
        self,
        endpoints: tuple[Endpoint, ...],
        links: dict[str, Link],
        dial: Callable[[str], Link],
        place: Callable[[Session], str | None],
    ) -> None:
        """Dials who is new; hangs up on who has left, once its last session here is over."""
        present = {endpoint.address for endpoint in endpoints}
        for address in present - links.keys():
            links[address] = dial(address)
        busy = {place(flight.session) for flight in self._flights.values()}
        for address in links.keys() - present:
            if address not in busy or not links[address].is_up:
                await links.pop(address).close()

    def _place_waiting(self) -> None:
        """Places what can be placed; gives up sessions that have waited too long for a target."""
        self._place_all()
        now = self._clock()
        for flight in list(self._flights.values()):
            waited = now - flight.seeking_since
            if flight.session.phase is Phase.SEEKING and waited > self._limits.target_wait_s:
                error: SlipstreamError = TargetLostError(f"no target replica could be reached for {waited:.0f} s")
                if not self.reachable.isdisjoint(self._targets):
                    error = CapacityError(f"every target replica has been full for {waited:.0f} s; try again later")
                self._do(flight, flight.session.fail(error))

    def _place_all(self) -> None:
        self._place(*self._flights.values())

    def _dial_target(self, address: str) -> Link:
        return Link(
            address,
            call=lambda channel: TargetServiceStub(channel).Drive(),
            frame_type=pb.RouterToTarget,
            hello=lambda: self._hello(address, lambda session: session.target),
            on_up=self._place_all,
            on_frame=lambda frame: self._target_frame(address, frame),
            on_down=lambda: self._target_down(address),
        )

    def _dial_drafter(self, address: str) -> Link:
        return Link(
            address,
            call=lambda channel: DraftServiceStub(channel).Drive(),
            frame_type=pb.RouterToDrafter,
            hello=lambda: self._hello(address, lambda session: session.drafter),
            on_up=self._place_all,
            on_frame=lambda frame: self._drafter_frame(address, frame),
            on_down=lambda: self._drafter_down(address),
        )

    def _hello(self, address: str, place: Callable[[Session], str | None]) -> Hello:
        """Lists what is alive at this peer; whatever else it holds of ours from an older stream, it frees."""
        here = [flight.session for flight in self._flights.values() if place(flight.session) == address]
        live = tuple(LiveSession(session.generation.session, session.attempt) for session in here)
        return Hello(self.peer_id, self._identity.vocabulary, self._identity.target_model, live)
