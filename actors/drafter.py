"""Drafter: a drafting loop that connects the scheduler, a drafting method, and the streams to routers and targets.

A pass drafts for all sessions that request a block, on the drafting thread, and sends the blocks directly to their
targets. Without requests, it drafts ahead of verdicts. A received frame starts the next pass if none is running. When a
pass ends, the event loop sends its blocks and starts the next pass. From verdict to block, the work changes threads
only twice.

Routers open and close sessions over their own streams; the drafter dials the targets named by these sessions. This
module is independent of Ray and of the drafting method.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from actors.net.credentials import Credentials, NoCredentials
from actors.net.streams import Link, Outbox
from actors.tracing import NO_TRACING, SessionSpans
from cluster.autoscaling import DraftReport
from cluster.costs import DraftCost, ForwardCost
from cluster.draft_quality import VersionWatch
from cluster.drafting.lookahead import DraftTiming
from cluster.drafting.method import DraftingMethod, DraftingPass, make_pass
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.drafting.scheduler import DraftReporter, DraftScheduler
from cluster.drafting.session_table import DrafterLimits
from cluster.envelope import Send, states_stream, stream_name
from cluster.telemetry import Timeline
from cluster.trust import PeerRole
from cluster.watchdog import TimeoutPolicy, Watchdog
from protos import speculation_pb2 as pb
from protos.codec import Decoded
from protos.messages import Block, DraftRequest, Hello, Identity, Open, Refusal, RefusalReason, Verdict, Welcome
from protos.speculation_pb2_grpc import TargetServiceStub

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingThread:
    """Settings of the drafting thread."""

    prepare: Callable[[], None] | None = None  # runs first on the thread
    clock: Callable[[], float] | None = None  # measures pass durations; default: the drafter's clock


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodFigures:
    """Measured and published figures of the drafting method."""

    cost: DraftCost = DraftCost(forward=ForwardCost.linear(0.0))
    first_token_acceptance: float | None = None  # published in the draft's folder
    version: int = 0  # version number of the learned draft; 0: the configured draft


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetAccess:
    """Targets that the drafter may dial, and the credentials presented to them."""

    credentials: Credentials = field(default_factory=NoCredentials)
    known: Callable[[str], frozenset[str]] | None = None  # allowed addresses by model; default: any


class Drafter:
    """Drafts for sessions of any number of routers, targets and models."""

    def __init__(
        self,
        method: DraftingMethod,
        limits: DrafterLimits,
        models: Mapping[str, Identity],  # targets' identities by model name
        draft_ahead: bool = True,
        clock: Callable[[], float] = time.monotonic,
        *,
        thread: DraftingThread = DraftingThread(),
        figures: MethodFigures = MethodFigures(),
        access: TargetAccess = TargetAccess(),
        tracer: SessionSpans = NO_TRACING,
    ) -> None:
        self.peer_id = f"drafter-{uuid.uuid4().hex[:12]}"
        self._models = models
        self._access = access
        self.scheduler = DraftScheduler(
            limits, draft_ahead, method.shapes, figures.first_token_acceptance, self._known_targets, figures.version
        )
        self.timeline = Timeline(clock)
        self.timing = DraftTiming(figures.cost)
        self._reporter = DraftReporter(figures.cost)
        self._progress = Watchdog(TimeoutPolicy())
        self.refused: Counter[str] = Counter()  # malformed messages by kind
        self.pass_s: defaultdict[str, float] = defaultdict(float)  # total duration of passes, by kind of pass
        self._tracer = tracer
        self._method = method
        self._limits = limits
        self._clock = clock
        self._working_clock = thread.clock or clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="drafting", initializer=thread.prepare)
        self._routers: dict[str, Outbox] = {}  # by stream
        self._targets: dict[str, Link] = {}  # by address
        self._feeds: dict[str, Link] = {}  # streams of hidden states by name, for methods that read them
        self._loop: asyncio.AbstractEventLoop | None = None  # None: not running
        self._failure: asyncio.Future[None] | None = None  # ends with the exception of a failed pass
        self._closing: set[asyncio.Task[None]] = set()  # links being closed
        self._pass: DraftingPass | None = None  # the pass on the drafting thread
        self._pass_began_s = 0.0
        self._left = asyncio.Event()  # set once all sessions have left a draining drafter
        self._interrupt = threading.Event()  # set to interrupt drafting ahead
        self._streams = 0

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Drafts until cancelled; raises the exception of a failed pass."""
        self._loop = asyncio.get_running_loop()
        self._failure = self._loop.create_future()
        self._start_pass()
        try:
            await self._failure
        finally:
            self._loop = None

    def _start_pass(self) -> None:
        """Hands the next pass to the drafting thread, unless one is running or nothing is due."""
        if self._loop is None or self._pass is not None:
            return
        try:
            limit = self._limits.max_sessions
            drafting = self.scheduler.next_pass(limit, limit)
            if not drafting.is_empty:
                self._begin(drafting, self._loop)
            elif self.scheduler.has_left:
                self._left.set()
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)

    def _begin(self, drafting: DraftingPass, loop: asyncio.AbstractEventLoop) -> None:
        def early(proposals: list[Proposal]) -> None:
            loop.call_soon_threadsafe(self._queue_proposals, proposals)

        def ended(proposals: Future[list[Proposal]]) -> None:
            loop.call_soon_threadsafe(self._end_pass, drafting, proposals)

        if drafting.updates.closed:
            self.timing = self.timing.without(tuple(drafting.updates.closed))
        if names := drafting.sessions:
            kind = "draft ahead" if drafting.lookahead else "draft"
            self.timeline.record(kind, *names)
            self._tracer.marked(kind, names)
        self._interrupt.clear()
        self._progress.begin_task(self._expected_s(drafting), self._working_clock())
        self._pass = drafting
        self._pass_began_s = self._clock()
        pending = self._thread.submit(make_pass, self._method, drafting, self._interrupt.is_set, early)
        pending.add_done_callback(ended)

    def _end_pass(self, drafting: DraftingPass, made: Future[list[Proposal]]) -> None:
        """Sends the blocks of a pass, then starts the next one."""
        self._progress.end_task()
        if self._loop is None:
            return
        took_s = self._clock() - self._pass_began_s
        if names := drafting.sessions:
            self.timeline.record("drafted", *names)
        try:
            proposals = made.result()
            self._queue_proposals(proposals)
        except Exception as error:  # noqa: BLE001 - `run` raises it
            self._fail(error)
        else:
            if drafting.requests:
                self._loop.call_soon(self._after_pass, drafting, proposals, took_s)
            else:
                self._after_pass(drafting, proposals, took_s)

    def _after_pass(self, drafting: DraftingPass, proposals: list[Proposal], took_s: float) -> None:
        self._record_pass(drafting, proposals, took_s)
        if drafting.updates.closed:
            self._drop_unused_targets()
        self._pass = None
        self._start_pass()

    def _record_pass(self, drafting: DraftingPass, proposals: list[Proposal], took_s: float) -> None:
        names = drafting.sessions
        if names:
            self.pass_s["ahead" if drafting.lookahead else "asked"] += took_s
        if drafting.requests:
            longest = max([len(proposal.tokens) for proposal in proposals], default=0)
            self._reporter.record_pass(len(names), longest, took_s)
            if not all(proposal.is_at_once for proposal in proposals):
                self.timing = self.timing.after(names, longest, took_s)

    def _fail(self, error: Exception) -> None:
        """Ends `run` with the error."""
        if self._failure is not None and not self._failure.done():
            self._failure.set_exception(error)

    async def exchange(
        self, exchange: Callable[[], object], version: int, published_acceptance: float | None = None
    ) -> object:
        """Exchanges the method's weights on the drafting thread between two passes; interrupts drafting ahead.

        `exchange` comes from `ExchangesWeights.prepare_weights`; returns its result. `published_acceptance` is the new
        version's first-token acceptance rate, if known. Later passes read all prompts again.
        """
        loop = asyncio.get_running_loop()
        self.timing = self.timing.without(self.timing.read)  # the new weights must read all texts again
        self._interrupt.set()
        earlier = await loop.run_in_executor(self._thread, exchange)
        self.timing = self.timing.without(self.timing.read)  # a running pass may have added some
        self.scheduler.exchanged(version, published_acceptance)
        return earlier

    async def leave(self, within_s: float) -> None:
        """Refuses new sessions; drafts for open ones until routers have moved them, for at most `within_s` seconds."""
        self._send(self.scheduler.leave())
        self._start_pass()
        try:
            async with asyncio.timeout(within_s):
                await self._left.wait()
        except TimeoutError:
            return  # the remaining sessions continue without speculation

    def _expected_s(self, drafting: DraftingPass) -> float | None:
        """Estimates a pass's duration from measured costs, counting each unread token as a row; None without
        measurements.
        """
        cost = self.timing.cost
        requests: tuple[DraftRequest | LookaheadRequest, ...] = drafting.requests or drafting.lookahead
        longest = max([request.max_tokens for request in requests], default=0)
        read = self.timing.read
        unread = sum([request.base_len for request in requests if request.session not in read])
        read_s = cost.forward.seconds(unread, unread) if unread else 0.0
        return cost.seconds(len(requests), longest) + read_s or None

    async def close(self) -> None:
        for link in [*self._targets.values(), *self._feeds.values()]:
            await link.close()
        self._targets.clear()
        self._feeds.clear()
        await asyncio.gather(*self._closing)
        self._thread.shutdown(wait=self.stuck_s is None)  # a stuck pass may never end

    def _queue_proposals(self, proposals: list[Proposal]) -> None:
        """Sends blocks, except blocks made obsolete by a verdict."""
        sends = self.scheduler.proposed(proposals, self._clock())
        if sent := dict.fromkeys(message.session for _, message in sends if isinstance(message, Block)):
            self.timeline.record("sent", *sent)  # a block drafted ahead is sent before its pass ends
        self._send(sends)

    def _send(self, sends: list[Send]) -> None:
        """Sends each message to a router's stream or a target's address."""
        for receiver, message in sends:
            self._tracer.on_sent(receiver, message)
            if outbox := self._routers.get(receiver):
                outbox.put(message)
            elif link := self._targets.get(receiver) or self._feeds.get(receiver):
                link.send(message)

    # ------------------------------------------------------------ routers

    def router_up(self, hello: Hello) -> tuple[str, Outbox]:
        """Handles a router's new stream; drops the router's sessions that its Hello does not list."""
        self._streams += 1
        stream = stream_name(hello.peer_id, self._streams)
        self._routers[stream] = outbox = Outbox()
        outbox.put(Welcome(self.peer_id))
        self._send(self.scheduler.receive(stream, hello, self._clock()))
        return stream, outbox

    def receive(self, peer: str, frame: Decoded) -> None:
        """Handles messages that arrived together from a router (by stream) or a target (by address)."""
        self._count_malformed(peer, frame)
        now = self._clock()
        if decided := [message.session for message in frame.messages if isinstance(message, Verdict)]:
            self.timeline.record("verdict", *decided)
        for message in frame.messages:
            self._tracer.on_received(peer, message)
            sends = self.scheduler.receive(peer, message, now)
            if isinstance(message, Open) and self.scheduler.has_accepted(message):
                self._dial(message.target_address, self._models[message.model])
            if sends:
                self._send(sends)
        if self._pass is None:
            self._start_pass()
        elif self.scheduler.has_requests or self.scheduler.is_lookahead_stale:
            self._interrupt.set()

    def router_down(self, stream: str) -> None:
        self._send(self.scheduler.gone(stream))
        self._tracer.gone(stream)
        del self._routers[stream]
        self._start_pass()

    def _count_malformed(self, peer: str, frame: Decoded) -> None:
        for item in frame.malformed:
            self.refused[item.kind] += 1
            self.scheduler.refusals.log_once(peer, f"a malformed {item.kind}", item.why)
            if item.kind == "Open":
                self._send([(peer, Refusal(item.session, item.attempt, RefusalReason.INVALID, item.why))])

    # ------------------------------------------------------------ targets

    @property
    def identities(self) -> tuple[Identity, ...]:
        """Identities that routers may present."""
        return tuple(self._models.values())

    def _known_targets(self, model: str) -> frozenset[str] | None:
        """Returns the addresses that sessions of a model may name; None: any."""
        if model not in self._models:
            return frozenset()
        return None if self._access.known is None else self._access.known(model)

    def _dial(self, address: str, target: Identity) -> None:
        if address in self._targets:
            return
        self._targets[address] = link = Link(
            address,
            PeerRole.TARGET,
            self._access.credentials,
            call=lambda channel, metadata: TargetServiceStub(channel).Verify(metadata=metadata),
            frame_type=pb.DrafterToTarget,
            hello=lambda: Hello(self.peer_id, target.vocabulary, target.target_model),
            on_up=lambda: self._target_up(address),
            on_frame=lambda frame: self.receive(address, frame),
            on_down=lambda: self._target_down(link),
        )
        if self._limits.states is not None:
            self._dial_feed(address, target)

    def _dial_feed(self, address: str, target: Identity) -> None:
        """Dials a target's stream for hidden states; sessions attach once it and the verification stream are up."""
        name = states_stream(address)
        self._feeds[name] = Link(
            address,
            PeerRole.TARGET,
            self._access.credentials,
            call=lambda channel, metadata: TargetServiceStub(channel).States(metadata=metadata),
            frame_type=pb.DrafterToTargetStates,
            hello=lambda: Hello(self.peer_id, target.vocabulary, target.target_model),
            on_up=lambda: self._feed_up(address),
            on_frame=lambda frame: self.receive(name, frame),
            on_down=lambda: None,
        )

    def _drop_unused_targets(self) -> None:
        for address in self._targets.keys() - self.scheduler.targets:
            self.scheduler.gone(address)
            for link in (self._targets.pop(address), self._feeds.pop(states_stream(address), None)):
                if link is not None:
                    closing = asyncio.create_task(link.close())
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)

    def _target_up(self, address: str) -> None:
        self._send(self.scheduler.connected(address))
        self._start_pass()

    def _target_down(self, link: Link) -> None:
        """Handles the end of a stream, unless its link was dropped: the next link to the target may be up already."""
        if self._targets.get(link.address) is link:
            self.scheduler.gone(link.address)

    def _feed_up(self, address: str) -> None:
        """Handles a new stream for hidden states: requests again what the previous stream may have lost."""
        target = self._targets.get(address)
        if target is not None and target.is_up:
            self._target_up(address)

    # ------------------------------------------------------------ inspection

    def report(self) -> DraftReport:
        """Returns the load since the previous report, for autoscaling."""
        late = self.scheduler.counts["blocks_late"]
        return self._reporter.report(late + self.scheduler.counts["blocks_in_time"], late, self._clock())

    @property
    def version_watch(self) -> VersionWatch:
        """Acceptance rates of the current and the previous version of the draft."""
        return self.scheduler.sessions.version_watch

    @property
    def stuck_s(self) -> float | None:
        """Seconds since the current pass exceeded its limit; None if it has not."""
        return self._progress.stuck_s(self._working_clock())

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_idle
