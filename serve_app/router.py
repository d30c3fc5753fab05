"""A model's router: keeps every session's ledger, assigns a target and a drafter, and commits the target's verdicts.

Sessions are independent: drafting for one overlaps with verification of another. The router is not part of a round:
drafters send blocks to targets, and targets send verdicts to drafters and routers. It handles no text and no HTTP.
"""

import asyncio
import logging
import secrets
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from actors.net.credentials import Credentials, NoCredentials
from actors.net.streams import Link
from actors.tracing import NO_TRACING, SessionSpans
from cluster.audit import Audits
from cluster.envelope import Send
from cluster.errors import CapacityError, DrainingError
from cluster.learning import Example
from cluster.routing.ledger import CommittedTokens, Event, Failed, Generation, Phase, Session
from cluster.routing.membership import Endpoint, Membership
from cluster.routing.session_router import Assignment, PrefixOptions, Ready, SessionRouter
from cluster.telemetry import Timeline
from cluster.trust import KEY_BYTES, PeerRole
from protos import speculation_pb2 as pb
from protos.codec import Decoded
from protos.messages import Hello, Identity, LiveSession, Open, Refusal
from protos.speculation_pb2_grpc import DraftServiceStub, TargetServiceStub

log = logging.getLogger(__name__)

MEMBERSHIP_PERIOD_S = 0.25
SERVICES: Mapping[PeerRole, tuple[Any, Any]] = MappingProxyType(
    {
        PeerRole.TARGET: (TargetServiceStub, pb.RouterToTarget),
        PeerRole.DRAFTER: (DraftServiceStub, pb.RouterToDrafter),
    }
)
"""gRPC stub and frame type by peer role."""

CUT_SHORT_MESSAGE = "this server stopped before the answer was complete; send the request again later"


@dataclass(frozen=True, slots=True)
class RouterLimits:
    max_sessions: int
    target_wait_s: float
    prefixes: PrefixOptions = PrefixOptions()


@dataclass(frozen=True, slots=True)
class RouterActivity:
    """Current state and counters of the router."""

    seeking: int  # number of sessions without a target
    breakers: Mapping[str, bool]  # by drafter address; True: gets no sessions now


@dataclass(eq=False)
class ClientAssignment(Assignment):
    """A session, and the function that takes its events."""

    deliver: Callable[[Event], None] = field(kw_only=True)


class Router:
    """Routes sessions; implements `serve_app.api.generation.Generator`."""

    def __init__(
        self,
        membership: Membership,
        identity: Identity,
        limits: RouterLimits,
        audits: Audits,
        clock: Callable[[], float] = time.monotonic,
        credentials: Credentials | None = None,  # sent to targets and drafters
        tracer: SessionSpans = NO_TRACING,
        examples: Callable[[Example], None] | None = None,  # receives ended sessions for learning
        timeline: Timeline | None = None,  # shared by the routers of one process
    ) -> None:
        self.peer_id = f"router-{uuid.uuid4().hex[:12]}"
        self.timeline = timeline or Timeline(clock)
        self.audits = audits
        self._membership = membership
        self._identity = identity
        self._limits = limits
        self._clock = clock
        self._credentials = credentials or NoCredentials()
        self._tracer = tracer
        self._examples = examples
        self._draining = False
        self._ended = False
        self._end: asyncio.TimerHandle | None = None
        self.sessions: SessionRouter[ClientAssignment] = SessionRouter(
            self.peer_id, limits.target_wait_s, limits.prefixes
        )
        self._targets: dict[str, Link] = {}  # connections by address
        self._drafters: dict[str, Link] = {}
        self.drafts_are_translated = False  # True if any drafter translates, which excludes rejection sampling
        self._listed_addresses: frozenset[str] = frozenset()  # addresses listed by membership

    # ------------------------------------------------------------ one session

    def check_room(self, sessions: int) -> None:
        """Implements `Generator`."""
        if self._draining:
            raise DrainingError("this server is stopping and takes no new requests; try again later")
        if (running := len(self.sessions)) + sessions > self._limits.max_sessions:
            room = f"{running} sessions are in flight and {sessions} more would exceed {self._limits.max_sessions}"
            raise CapacityError(f"{room}; try again later")
        if self.sessions.are_targets_full(self._clock()):
            raise CapacityError("every target replica is full; try again later")

    def start(self, generation: Generation, deliver: Callable[[Event], None]) -> Callable[[], None]:
        """Implements `Generator`."""
        self.check_room(1)
        context = self._tracer.opened(generation.session, generation.traceparent, prompt_tokens=len(generation.prompt))
        session = Session(replace(generation, traceparent=context), secrets.token_bytes(KEY_BYTES))
        assignment = ClientAssignment(session, self._clock(), deliver=deliver)
        self._carry_out(self.sessions.add(assignment, self._clock()))
        return partial(self._end_session, assignment)

    def _end_session(self, assignment: ClientAssignment) -> None:
        """Ends a session that is over or no longer wanted; idempotent."""
        if assignment.name not in self.sessions:
            return
        self._tracer.ended(assignment.name, "cancelled")
        self._carry_out(self.sessions.cancel(assignment))
        if not self._draining:
            self.audits.ended(assignment.session, assignment.served_by)
        self._offer_example(assignment.session)

    def _offer_example(self, session: Session) -> None:
        """Offers an ended session as an example, if its request allows it.

        Includes partial answers (after a disconnect, a stop string or a failure), since they are the target's own text.
        """
        source = session.generation.learn_from
        if self._examples is not None and source is not None and session.committed:
            generation = session.generation
            self._examples(Example(generation.prompt, session.committed, source, generation.session))

    def _carry_out(self, ready: Ready[ClientAssignment]) -> None:
        """Sends messages, then delivers events, since a client may end its session on an event."""
        self._send(ready.sends)
        for assignment, event in ready.events:
            self._deliver(assignment, event)

    def _deliver(self, assignment: ClientAssignment, event: Event) -> None:
        if isinstance(event, Failed):
            self._tracer.ended(assignment.name, type(event.error).__name__)
        assignment.deliver(event)

    def _send(self, sends: list[Send]) -> None:
        for address, message in sends:
            if isinstance(message, Open):
                self._tracer.marked("given to", [message.session], address=address, attempt=message.attempt)
            if link := self._targets.get(address) or self._drafters.get(address):
                link.send(message)

    # ------------------------------------------------------------ messages of peers

    def _receive(self, address: str, frame: Decoded) -> None:
        """Handles one frame of messages from a target or drafter."""
        now = self._clock()
        for message in frame.messages:
            if isinstance(message, Refusal):
                extra = {"session": message.session}
                log.info("%s refuses session %r: %s", address, message.session, message.message, extra=extra)
            if self._tracer is not NO_TRACING:
                self._tracer.on_received(address, message)
            self._send(self.audits.receive(address, message, now))
        ready = self.sessions.receive(address, frame.messages, now)
        committed = [assignment.name for assignment, event in ready.events if isinstance(event, CommittedTokens)]
        if committed:
            self.timeline.record("commit", *committed)
        self._carry_out(ready)
        for item in frame.malformed:
            extra = {"session": item.session}
            log.error(
                "malformed %s from %s for session %r: %s", item.kind, address, item.session, item.why, extra=extra
            )
            self._carry_out(self.sessions.unreadable(address, item.session, item.attempt, now))
            self._send(self.audits.unreadable(address, item.session))

    def _on_peer_down(self, address: str) -> None:
        self._carry_out(self.sessions.gone(address, self._clock()))
        self.audits.gone(address)

    # ------------------------------------------------------------ membership

    async def run(self) -> None:
        """Follows membership, places waiting sessions, and runs audits when idle, until cancelled."""
        while True:
            members = await self._membership.current()
            self.drafts_are_translated = any(endpoint.translates for endpoint in members.drafters)
            self._listed_addresses = frozenset(endpoint.address for endpoint in (*members.targets, *members.drafters))
            await self._follow(members.targets, self._targets, PeerRole.TARGET, lambda one: one.session.target)
            await self._follow(
                members.drafters, self._drafters, PeerRole.DRAFTER, lambda assignment: assignment.session.drafter
            )
            self.sessions.locality.follow(members.targets, members.drafters)
            self._place_sessions()
            self._send(self.audits.tick(self.sessions.targets, self._clock()))
            await asyncio.sleep(MEMBERSHIP_PERIOD_S)

    async def close(self) -> None:
        for link in [*self._targets.values(), *self._drafters.values()]:
            await link.close()

    @property
    def reachable(self) -> frozenset[str]:
        """Returns the addresses of connected peers."""
        return frozenset(a for links in (self._targets, self._drafters) for a, link in links.items() if link.is_up)

    def drain(self, within_s: float | None = None) -> None:
        """Refuses new sessions. If given, `within_s` limits the time of running sessions."""
        self._draining = True
        self._send(self.audits.stop())
        if within_s is not None:
            self.end_after(within_s)

    def end_after(self, delay_s: float) -> None:
        """Ends all sessions after `delay_s`, unless `cancel_end` is called first. Further calls keep the first
        deadline.
        """
        if self._end is None:
            self._end = asyncio.get_running_loop().call_later(delay_s, self._end_sessions)

    def cancel_end(self) -> None:
        """Cancels `end_after`, unless the router is draining."""
        if self._end is not None and not self._draining and not self._ended:
            self._end.cancel()
            self._end = None

    def _end_sessions(self) -> None:
        """Fails all running sessions and refuses new ones from now on."""
        self._draining = self._ended = True
        for assignment in list(self.sessions):
            self._deliver(assignment, Failed(DrainingError(CUT_SHORT_MESSAGE)))

    @property
    def has_ended(self) -> bool:
        """Returns whether all sessions have been ended by `end_after`."""
        return self._ended

    @property
    def is_ready(self) -> bool:
        """Returns whether the router accepts sessions: it reaches a target and is not draining."""
        return not self._draining and not self.reachable.isdisjoint(self._targets)

    @property
    def refusals(self) -> dict[str, str]:
        """Returns peers' reasons for refusing this router, by address."""
        links = [*self._targets.values(), *self._drafters.values()]
        return {link.address: link.refused for link in links if link.refused is not None}

    @property
    def activity(self) -> RouterActivity:
        """Returns the router's current state and counters."""
        seeking = sum(one.session.phase is Phase.SEEKING for one in self.sessions)
        return RouterActivity(seeking, self.sessions.breakers.are_unavailable(self._clock()))

    @property
    def is_idle(self) -> bool:
        return not self.sessions

    async def _follow(
        self,
        endpoints: tuple[Endpoint, ...],
        links: dict[str, Link],
        role: PeerRole,
        peer_of: Callable[[ClientAssignment], str | None],
    ) -> None:
        """Connects to new peers. Disconnects from removed peers once no session uses them."""
        present = {endpoint.address for endpoint in endpoints}
        for address in present - links.keys():
            links[address] = self._dial(address, role)
        busy = {peer_of(assignment) for assignment in self.sessions}
        for address in links.keys() - present:
            if address not in busy or not links[address].is_up:
                await links.pop(address).close()

    def _place_sessions(self) -> None:
        """Assigns waiting sessions to connected peers listed by membership."""
        pools = ((self.sessions.targets, self._targets), (self.sessions.drafters, self._drafters))
        for peers, links in pools:
            for address, link in links.items():
                if link.is_up and address in self._listed_addresses:
                    peers.up(address)
                else:
                    peers.down(address)
        self._carry_out(self.sessions.tick(self._clock()))

    def _dial(self, address: str, role: PeerRole) -> Link:
        stub, frame_type = SERVICES[role]
        return Link(
            address,
            role,
            self._credentials,
            call=lambda channel, metadata: stub(channel).Drive(metadata=metadata),
            frame_type=frame_type,
            hello=lambda: self._hello(self.sessions.live_at(address)),
            on_up=self._place_sessions,
            on_frame=lambda frame: self._receive(address, frame),
            on_down=lambda: self._on_peer_down(address),
        )

    def _hello(self, live: tuple[LiveSession, ...]) -> Hello:
        """Returns the greeting for a peer, which frees this router's sessions missing from `live`."""
        return Hello(self.peer_id, self._identity.vocabulary, self._identity.target_model, live)
