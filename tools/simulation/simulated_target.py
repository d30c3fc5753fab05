"""Simulated target replica: the real scheduler, with an engine that uses the oracle and costs time.

The counterpart of `actors/target.py`. The engine checks its inputs as a real cache would require.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from cluster.costs import CostModel
from cluster.envelope import Send, stream_name
from cluster.verification.scheduler import VerificationScheduler
from cluster.verification.step import Outcome, Row, StepPlan
from protos.messages import Block, Hello
from tools.simulation.network import Door, Frame, Process, Wire
from tools.simulation.oracle import Script

ENDS_S = 0.5  # time to send pending messages to peers
NOTHING = -1  # in a page: no token was written here


class OracleEngine:
    """Answers steps from the scripts; its pages hold the tokens that were fed, as a cache would."""

    def __init__(self, scripts: Mapping[str, Script], page_size: int) -> None:
        self._scripts = scripts
        self._page_size = page_size
        self._sessions: dict[str, list[list[int]]] = {}  # expected page contents by session
        self._pages: dict[int, list[int]] = {}  # tokens by page

    def step(self, plan: StepPlan) -> list[Outcome]:
        for name in plan.closes:
            self._sessions.pop(name, None)
        for request in plan.opens:
            assert request.session not in self._sessions, f"{request.session} is opened twice in one cache"
            self._sessions[request.session] = self._scripts[request.session].in_pages(self._page_size)
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
        """True if no session is open; page contents stay until they are overwritten."""
        return not self._sessions

    def _answer(self, row: Row) -> Outcome:
        assert row.session in self._sessions, f"{row.session} was closed, or never opened"
        script = self._scripts[row.session]
        base = row.base_len
        self._write(row)
        assert self._has_cached(row, base), f"{row.session}: its cache is not what was decided"
        path = row.draft.along(script.tokens[base : base + row.drafted])
        return Outcome(row.session, path, script.tokens[base + len(path)])

    def _has_cached(self, row: Row, length: int) -> bool:
        """Returns whether the row's pages hold the first `length` tokens of the script."""
        pages = [self._pages[page] for page in row.pages]
        known = self._sessions[row.session]
        whole, rest = divmod(length, self._page_size)
        return pages[:whole] == known[:whole] and (not rest or pages[whole][:rest] == known[whole][:rest])

    def _write(self, row: Row) -> None:
        """Writes the row's tokens, page by page."""
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
    """The verification loop."""

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
        self._wires: dict[str, Wire] = {}  # by stream
        self._streams: Counter[str] = Counter()
        self._in_step = False
        self._over: Callable[[], None] | None = None  # callback for its planned end
        self._wakes_at: float | None = None
        self.door = Door(process, self._up, self._frame, self._down)

    # ------------------------------------------------------------ the loop

    def _go_on(self) -> None:
        """Plans a step if one is due, otherwise schedules a wake-up."""
        if self._in_step:
            return
        if self.scheduler.departure.is_complete:
            self._end()
        now = self.process.clock.now
        plan = self.scheduler.plan(now)
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
        is_plain = tokens == rows and not self.scheduler.is_drafted_for
        return self._costs.plain_s(rows) if is_plain else self._costs.target.seconds(rows, tokens)

    def _decided(self, outcomes: Sequence[Outcome], began: float) -> None:
        now = self.process.clock.now
        self._send(self.scheduler.apply(outcomes, now - began, now))
        self._in_step = False
        self.process.after(0.0, self._go_on)  # messages that arrived meanwhile are handled first

    def _wake_at(self, due: float | None) -> None:
        now = self.process.clock.now
        if due is None or (self._wakes_at is not None and now < self._wakes_at <= due):
            return
        self._wakes_at = max(due, now)
        self.process.after(self._wakes_at - now, self._go_on)

    def leave(self, within_s: float, over: Callable[[], None]) -> None:
        """Leaves as planned, once its sessions have moved or time is up; `over` is called then."""
        if not self.scheduler.departure.is_under_way:
            self._over = over
            self._send(self.scheduler.departure.begin())
            self.process.after(within_s, self._end)
            self._go_on()

    def _end(self) -> None:
        if self._over is not None:
            self._send(self.scheduler.departure.end())
            self.process.after(ENDS_S, self.process.die)
            self.process.clock.after(ENDS_S, self._over)
            self._over = None

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
