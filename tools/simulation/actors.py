"""Simulated router, drafter and target: real schedulers and an oracle in virtual time.

Each corresponds to a real process (`serve_app/router.py`, `actors/drafter.py`, `actors/target.py`). The target's engine
also checks that its inputs satisfy the requirements of a real KV cache.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cluster.costs import CostModel, DraftCost
from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.lookahead import ForwardTime, LookaheadSearch, proposals
from cluster.drafting.method import apply_updates
from cluster.drafting.requests import LookaheadRequest, Proposal
from cluster.drafting.scheduler import DraftScheduler
from cluster.envelope import Send, stream_name
from cluster.errors import SlipstreamError
from cluster.routing.ledger import CommittedTokens, Ended, Failed, Session
from cluster.routing.session_router import Assignment, Peers, Ready, SessionRouter
from cluster.verification.scheduler import VerificationScheduler
from cluster.verification.step import Outcome, Row, StepPlan
from protos.frozen import value
from protos.messages import Block, DraftRequest, Hello, Open
from tools.simulation.network import Endpoint, Frame, Network, Process, SimulatedLink, Wire
from tools.simulation.oracle import OracleMethod, ReferenceText


@value
class _Forward:
    """One or more uninterrupted forwards, and the earlier block lengths for undoing them."""

    began_s: float
    ends_s: float
    before: tuple[tuple[BlockDraft, int], ...] = ()

    def undo(self) -> None:
        for draft, tokens in self.before:
            del draft.drafted[tokens:]


@value
class _Pass:
    """Drafting pass in progress; its result is computed at its start."""

    began_s: float
    ready_s: float  # start of the first forward
    forwards: tuple[_Forward, ...]
    blocks: tuple[Proposal, ...] = ()  # result of an uninterruptible pass
    search: LookaheadSearch[BlockDraft] | None = None  # search of a pass ahead of verdicts

    @property
    def ends_s(self) -> float:
        return self.forwards[-1].ends_s if self.forwards else self.ready_s

    @property
    def proposals(self) -> Sequence[Proposal]:
        return self.blocks if self.search is None else proposals(self.search.drafts)

    def interrupted(self, now: float) -> "_Pass":
        """Returns the pass without forwards that begin after `now`; removes their tokens from the blocks."""
        made = tuple([forward for forward in self.forwards if forward.began_s < now])
        for forward in reversed(self.forwards[len(made) :]):
            forward.undo()
        return replace(self, forwards=made)


class SimulatedDrafter:
    """Runs the drafting loop. `dial` opens a link to a target; `limit` is the maximum number of sessions per pass."""

    def __init__(
        self,
        process: Process,
        scheduler: DraftScheduler,
        method: OracleMethod,
        cost: DraftCost,
        limit: int,
        dial: Callable[["SimulatedDrafter", str], SimulatedLink],
    ) -> None:
        self.process = process
        self.scheduler = scheduler
        self.busy_s = 0.0
        self._method = method
        self._cost = cost
        self._limit = limit
        self._dial = dial
        self._routers: dict[str, Wire] = {}  # by stream name
        self._targets: dict[str, SimulatedLink] = {}  # by address
        self._streams: Counter[str] = Counter()
        self._pass: _Pass | None = None
        self._is_leaving = False
        self._forward_time = ForwardTime()  # measured in forwards ahead of verdicts
        self.endpoint = Endpoint(process, self._router_up, self.receive, self._router_down)

    def draft_noise(self, seconds: float) -> None:
        """Drafts only wrong tokens for `seconds` seconds."""
        self._method.is_noise = True
        self.process.after(seconds, self._recover)

    def leave(self, limit_s: float, over: Callable[[], None]) -> None:
        """Announces a planned end, ends after `limit_s` seconds, and then calls `over`."""
        if not self._is_leaving:
            self._is_leaving = True
            self._send(self.scheduler.leave())
            self.process.after(limit_s, self.process.die)
            self.process.clock.after(limit_s, over)

    def _recover(self) -> None:
        self._method.is_noise = False

    # ------------------------------------------------------------ loop

    def _go_on(self) -> None:
        """Begins the next pass, if any; requested blocks interrupt a pass ahead of verdicts."""
        if self._pass is not None:
            is_ahead = self._pass.search is not None
            if is_ahead and (self.scheduler.has_requests or self.scheduler.is_lookahead_stale):
                self._begin(self._pass.interrupted(self.process.clock.now))
            return
        drafting = self.scheduler.next_pass(self._limit, self._limit)
        apply_updates(self._method, drafting.updates)
        if drafting.updates.closed:
            self._drop_unused_targets()
        if drafting.requests:
            self._begin(self._now(drafting.requests))
        elif drafting.lookahead:
            self._begin(self._ahead(drafting.lookahead))

    def _now(self, requests: Sequence[DraftRequest]) -> _Pass:
        blocks = self._method.draft(requests)
        longest = max(block.tree.depth for block in blocks)
        began_s = self.process.clock.now
        ready_s = began_s + self._per_pass_s
        ends_s = ready_s + self._cost.forwards(longest) * self._forward_s(len(requests), longest)
        return _Pass(began_s, ready_s, (_Forward(ready_s, ends_s),), tuple(blocks))

    def _ahead(self, requests: Sequence[LookaheadRequest]) -> _Pass:
        """Runs the real drafters' search, step by step in virtual time."""
        search = LookaheadSearch(self._method, requests, self._forward_time, never)
        began_s = self.process.clock.now
        ready_s = began_s + self._per_pass_s
        forwards: list[_Forward] = []
        now = ready_s
        while chosen := search.choose(now):
            before = tuple([(draft, len(draft.drafted)) for draft in chosen])
            seconds = self._forward_s(len(chosen), max(draft.missing for draft in chosen))
            search.extended(chosen, self._method.extend(chosen, never), seconds)
            forwards.append(_Forward(now, now + seconds, before))
            now += seconds
        return _Pass(began_s, ready_s, tuple(forwards), search=search)

    @property
    def _per_pass_s(self) -> float:
        return self.process.stalls_s + self.process.slowness * self._cost.per_pass_s

    def _forward_s(self, rows: int, tokens: int) -> float:
        return self.process.slowness * self._cost.forward_s(rows, tokens)

    def _begin(self, drafting: _Pass) -> None:
        """Starts a pass, or replaces it with the same pass with fewer forwards."""
        self._pass = drafting
        self.process.after(drafting.ends_s - self.process.clock.now, partial(self._end, drafting))

    def _end(self, drafting: _Pass) -> None:
        if drafting is not self._pass:
            return  # this pass was interrupted
        self.busy_s += drafting.ends_s - drafting.began_s
        self._send(self.scheduler.proposed(drafting.proposals, self.process.clock.now))
        self._pass = None
        self.process.after(0.0, self._go_on)  # first handle messages that arrived meanwhile

    def _send(self, sends: Sequence[Send]) -> None:
        for receiver, message in sends:
            if wire := self._routers.get(receiver):
                wire.put(message)
            elif link := self._targets.get(receiver):
                link.send(message)

    # ------------------------------------------------------------ streams

    def _router_up(self, hello: Hello, wire: Wire) -> str:
        self._streams[hello.peer_id] += 1
        stream = stream_name(hello.peer_id, self._streams[hello.peer_id])
        self._routers[stream] = wire
        self._send(self.scheduler.receive(stream, hello, self.process.clock.now))
        self._go_on()
        return stream

    def receive(self, peer: str, frame: Frame) -> None:
        """Handles one frame of messages from a router or a target."""
        for message in frame:
            sends = self.scheduler.receive(peer, message, self.process.clock.now)
            if isinstance(message, Open):
                self._connect(message.target_address)
            self._send(sends)
        self._go_on()

    def _router_down(self, stream: str) -> None:
        self._send(self.scheduler.gone(stream))
        del self._routers[stream]
        self._go_on()

    def _connect(self, address: str) -> None:
        if address not in self._targets:
            self._targets[address] = self._dial(self, address)

    def _drop_unused_targets(self) -> None:
        for address in sorted(self._targets.keys() - self.scheduler.targets):
            self._targets.pop(address).close()

    def target_up(self, address: str) -> None:
        self._send(self.scheduler.connected(address))
        self._go_on()

    def target_down(self, address: str) -> None:
        self.scheduler.gone(address)


def never() -> bool:
    """Returns False: searches always complete, and `_Pass.interrupted` cuts interrupted passes afterwards."""
    return False


ENDS_S = 0.5  # seconds to send pending messages before ending
NOTHING = -1  # marks empty positions of a page


class OracleEngine:
    """Computes steps from the reference texts; pages hold the fed tokens, like a cache."""

    def __init__(self, reference_texts: Mapping[str, ReferenceText], page_size: int) -> None:
        self._reference_texts = reference_texts
        self._page_size = page_size
        self._sessions: dict[str, list[list[int]]] = {}  # expected page contents, by session
        self._pages: dict[int, list[int]] = {}  # tokens, by page

    def step(self, plan: StepPlan) -> list[Outcome]:
        for name in plan.closes:
            self._sessions.pop(name, None)
        for request in plan.opens:
            assert request.session not in self._sessions, f"{request.session} was opened twice in one cache"
            self._sessions[request.session] = self._reference_texts[request.session].in_pages(self._page_size)
        size = self._page_size
        moved = [self._pages[move.source // size][move.source % size] for move in plan.moves]
        for move, token in zip(plan.moves, moved, strict=True):
            self._pages[move.to // size][move.to % size] = token
        for copy in plan.copies:
            self._pages[copy.to] = list(self._pages[copy.source])
        outcomes = [self._answer(row) for row in plan.rows]
        return [outcome for row, outcome in zip(plan.rows, outcomes, strict=True) if row.decide]

    @property
    def is_empty(self) -> bool:
        """Returns whether no session is open; pages keep their tokens until overwritten."""
        return not self._sessions

    def _answer(self, row: Row) -> Outcome:
        assert row.session in self._sessions, f"{row.session} is not open"
        reference_text = self._reference_texts[row.session]
        base = row.base_len
        self._write(row)
        assert self._has_cached(row, base), f"{row.session}: its cache differs from the committed text"
        path = row.draft.along(reference_text.tokens[base : base + row.drafted])
        return Outcome(row.session, path, reference_text.tokens[base + len(path)])

    def _has_cached(self, row: Row, length: int) -> bool:
        """Returns whether the row's pages hold the first `length` tokens of the reference text."""
        pages = [self._pages[page] for page in row.pages]
        known = self._sessions[row.session]
        whole, rest = divmod(length, self._page_size)
        return pages[:whole] == known[:whole] and (not rest or pages[whole][:rest] == known[whole][:rest])

    def _write(self, row: Row) -> None:
        """Writes the row's tokens into its pages."""
        size = self._page_size
        tokens = row.tokens
        written = 0
        while written < len(tokens):
            index, offset = divmod(row.start + written, size)
            name = row.pages[index]
            part = tokens[written : written + size - offset]
            if name not in self._pages:
                self._pages[name] = [NOTHING] * size
            self._pages[name][offset : offset + len(part)] = part
            written += len(part)


class SimulatedTarget:
    """Runs the verification loop."""

    def __init__(
        self, process: Process, scheduler: VerificationScheduler, engine: OracleEngine, costs: CostModel
    ) -> None:
        self.process = process
        self.scheduler = scheduler
        self.engine = engine
        self.busy_s = 0.0
        self.steps = 0
        self.received_tokens = 0  # draft tokens received in blocks
        self._costs = costs
        self._wires: dict[str, Wire] = {}  # by stream name
        self._streams: Counter[str] = Counter()
        self._in_step = False
        self._on_end: Callable[[], None] | None = None  # called after a planned end
        self._wakes_at: float | None = None
        self.endpoint = Endpoint(process, self._up, self._frame, self._down)

    # ------------------------------------------------------------ loop

    def _go_on(self) -> None:
        """Starts a step if one is due, else schedules a wake-up."""
        if self._in_step:
            return
        if self.scheduler.has_left:
            self._end()
        now = self.process.clock.now
        plan = self.scheduler.plan(now)
        if not self.scheduler.is_settled:
            self._send(self.scheduler.settle())
            plan = plan or self.scheduler.plan(now)
        if plan is None:
            self._wake_at(self.scheduler.next_due())
            return
        self._in_step = True
        outcomes = self.engine.step(plan)
        seconds = self.process.stalls_s + self.process.slowness * self._seconds(plan)
        self.busy_s += seconds
        self.steps += bool(plan.rows)
        self.process.after(seconds, partial(self._decided, outcomes, now))

    def _seconds(self, plan: StepPlan) -> float:
        rows = len(plan.rows)
        tokens = sum(len(row.tokens) for row in plan.rows)
        if rows == 0:
            return 0.0
        is_non_speculative = tokens == rows and not self.scheduler.is_drafted_for
        return self._costs.non_speculative_s(rows) if is_non_speculative else self._costs.step_s(rows, tokens)

    def _decided(self, outcomes: Sequence[Outcome], began: float) -> None:
        now = self.process.clock.now
        self.scheduler.commit(outcomes, now - began, now)
        self._in_step = False
        if self.scheduler.settles_first:
            self._send(self.scheduler.settle())
            self.process.after(0.0, self._go_on)  # first handle messages that arrived meanwhile
        else:
            self._go_on()

    def _wake_at(self, due: float | None) -> None:
        now = self.process.clock.now
        if due is None or (self._wakes_at is not None and now < self._wakes_at <= due):
            return
        self._wakes_at = max(due, now)
        self.process.after(self._wakes_at - now, self._go_on)

    def leave(self, limit_s: float, over: Callable[[], None]) -> None:
        """Announces a planned end. Ends after its sessions have moved or after `limit_s`, then calls `over`."""
        if not self.scheduler.is_leaving:
            self._on_end = over
            self._send(self.scheduler.leave())
            self.process.after(limit_s, self._end)
            self._go_on()

    def _end(self) -> None:
        if self._on_end is not None:
            self._send(self.scheduler.refuse_rest())
            self.process.after(ENDS_S, self.process.die)
            self.process.clock.after(ENDS_S, self._on_end)
            self._on_end = None

    def _send(self, sends: Sequence[Send]) -> None:
        for stream, message in sends:
            if wire := self._wires.get(stream):
                wire.put(message)

    # ------------------------------------------------------------ streams

    def _up(self, hello: Hello, wire: Wire) -> str:
        self._streams[hello.peer_id] += 1
        stream = stream_name(hello.peer_id, self._streams[hello.peer_id])
        self._wires[stream] = wire
        self.scheduler.receive(stream, hello, self.process.clock.now)
        self._go_on()
        return stream

    def _frame(self, stream: str, frame: Frame) -> None:
        now = self.process.clock.now
        for message in frame:
            if isinstance(message, Block):
                self.received_tokens += message.size
            self._send(self.scheduler.receive(stream, message, now))
        self._go_on()

    def _down(self, stream: str) -> None:
        self.scheduler.gone(stream, self.process.clock.now)
        del self._wires[stream]
        self._go_on()


MEMBERSHIP_PERIOD_S = 0.25


@dataclass(eq=False)
class SimulatedAssignment(Assignment):
    """One session, with its client's measurements."""

    arrived_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    error: SlipstreamError | None = None
    longest_gap_s: float = 0.0
    last_commit_s: float = 0.0  # time of the latest commit

    @property
    def latency_s(self) -> float | None:
        return self.ended_s - self.arrived_s if self.ended_s is not None else None

    @property
    def waited_s(self) -> float | None:
        """Returns the seconds to the first token; None before it."""
        return self.first_token_s - self.arrived_s if self.first_token_s is not None else None


class SimulatedRouter:
    """Runs one router. `on_commit` receives the number of committed tokens; `on_end` receives each ended session."""

    def __init__(
        self,
        process: Process,
        target_wait_s: float,
        on_commit: Callable[[int], None],
        on_end: Callable[[SimulatedAssignment], None],
    ) -> None:
        self.process = process
        self._on_commit = on_commit
        self._on_session_end = on_end
        self._assignments: SessionRouter[SimulatedAssignment] = SessionRouter(process.address, target_wait_s)
        self._links: dict[str, SimulatedLink] = {}  # by peer address
        self._ticking = False

    @property
    def assignments(self) -> list[SimulatedAssignment]:
        return list(self._assignments)

    @property
    def recoveries(self) -> Counter[str]:
        """Returns the number of recoveries from drafters without useful blocks, by kind."""
        counts: Counter[str] = Counter()
        for (_, kind), count in self._assignments.recoveries.items():
            counts[f"drafter {kind}"] += count
        return counts

    def generate(self, session: Session) -> None:
        now = self.process.clock.now
        assignment = SimulatedAssignment(session, now, arrived_s=now, last_commit_s=now)
        self._carry_out(self._assignments.add(assignment, now))

    def _carry_out(self, ready: Ready[SimulatedAssignment]) -> None:
        self._deliver(ready)
        self._send(ready.sends)

    def _deliver(self, ready: Ready[SimulatedAssignment]) -> None:
        for assignment, event in ready.events:
            if isinstance(event, CommittedTokens):
                self._commit(assignment, len(event.tokens))
            else:
                self._end(assignment, event)

    def _send(self, sends: Sequence[Send]) -> None:
        """Sends messages. Schedules a tick only if one is needed, so that the simulation can end."""
        for address, message in sends:
            self._links[address].send(message)
        if self._assignments.awaits_tick and not self._ticking:
            self._ticking = True
            self.process.after(MEMBERSHIP_PERIOD_S, self._tick)

    def _commit(self, assignment: SimulatedAssignment, tokens: int) -> None:
        now = self.process.clock.now
        if assignment.first_token_s is None:
            assignment.first_token_s = now
        else:
            assignment.longest_gap_s = max(assignment.longest_gap_s, now - assignment.last_commit_s)
        assignment.last_commit_s = now
        self._on_commit(tokens)

    def _end(self, assignment: SimulatedAssignment, end: Ended | Failed) -> None:
        assignment.ended_s = self.process.clock.now
        assignment.error = end.error if isinstance(end, Failed) else None
        self._assignments.forget(assignment)
        self._on_session_end(assignment)

    # ------------------------------------------------------------ peers

    def connect_target(self, network: Network, endpoint: Endpoint) -> None:
        """Connects to a target and keeps the stream open."""
        self._connect(network, endpoint, self._assignments.targets)

    def connect_drafter(self, network: Network, endpoint: Endpoint) -> None:
        """Connects to a drafter and keeps the stream open."""
        self._connect(network, endpoint, self._assignments.drafters)

    def _connect(self, network: Network, endpoint: Endpoint, pool: Peers) -> None:
        address = endpoint.process.address
        self._links[address] = SimulatedLink(
            network,
            self.process,
            endpoint,
            live=partial(self._assignments.live_at, address),
            on_up=partial(self._up, pool, address),
            on_frame=partial(self._frame, address),
            on_down=lambda: self._carry_out(self._assignments.gone(address, self.process.clock.now)),
        )

    def _up(self, pool: Peers, address: str) -> None:
        pool.up(address)
        self._carry_out(self._assignments.tick(self.process.clock.now))

    def _frame(self, address: str, frame: Frame) -> None:
        self._carry_out(self._assignments.receive(address, frame, self.process.clock.now))

    def _tick(self) -> None:
        self._ticking = False
        self._carry_out(self._assignments.tick(self.process.clock.now))
