"""Simulated drafter: the real scheduler and search ahead, with a drafting method that uses the oracle and costs time.

The counterpart of `actors/drafter.py`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from cluster.costs import DraftCost
from cluster.drafting.draft_state import BlockDraft
from cluster.drafting.lookahead import AheadSearch, proposals
from cluster.drafting.method import tell
from cluster.drafting.requests import AheadRequest, Proposal
from cluster.drafting.scheduler import DraftScheduler
from cluster.drafting.timing.forward_time import ForwardTime
from cluster.envelope import Send, stream_name
from protos.frozen import value
from protos.messages import DraftRequest, Hello, Open
from tools.simulation.network import Door, Frame, Process, SimulatedLink, Wire
from tools.simulation.oracle import OracleMethod


@value
class _Forward:
    """A forward, or several without anything in between, and the lengths of its blocks before it."""

    began_s: float
    ends_s: float
    before: tuple[tuple[BlockDraft, int], ...] = ()

    def undo(self) -> None:
        for draft, tokens in self.before:
            del draft.drafted[tokens:]


@value
class _Pass:
    """A drafting pass in progress; its result is known from the beginning."""

    began_s: float
    ready_s: float  # start of its first forward
    forwards: tuple[_Forward, ...]
    blocks: tuple[Proposal, ...] = ()  # of a pass that cannot be interrupted
    search: AheadSearch[BlockDraft] | None = None  # of a pass ahead of verdicts

    @property
    def ends_s(self) -> float:
        return self.forwards[-1].ends_s if self.forwards else self.ready_s

    @property
    def proposals(self) -> Sequence[Proposal]:
        return self.blocks if self.search is None else proposals(self.search.drafts)

    def interrupted(self, now: float) -> "_Pass":
        """Returns the pass cut after the forward that is running at `now`, with the blocks made up to there."""
        made = tuple([forward for forward in self.forwards if forward.began_s < now])
        for forward in reversed(self.forwards[len(made) :]):
            forward.undo()
        return replace(self, forwards=made)


class SimulatedDrafter:
    """The drafting loop. `dial` opens a link to a target, `limit` is the most sessions of one pass."""

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
        self._routers: dict[str, Wire] = {}  # by stream
        self._targets: dict[str, SimulatedLink] = {}  # by address
        self._streams: Counter[str] = Counter()
        self._pass: _Pass | None = None
        self._is_leaving = False
        self._forward_time = ForwardTime()  # of forwards ahead of verdicts
        self.door = Door(process, self._router_up, self.receive, self._router_down)

    def draft_noise(self, seconds: float) -> None:
        """Drafts only wrong tokens for `seconds`."""
        self._method.is_noise = True
        self.process.after(seconds, self._recover)

    def leave(self, within_s: float, over: Callable[[], None]) -> None:
        """Leaves as planned after `within_s`; `over` is called then."""
        if not self._is_leaving:
            self._is_leaving = True
            self._send(self.scheduler.leave())
            self.process.after(within_s, self.process.die)
            self.process.clock.after(within_s, over)

    def _recover(self) -> None:
        self._method.is_noise = False

    # ------------------------------------------------------------ the loop

    def _go_on(self) -> None:
        """Begins a pass if there is something to draft; requested blocks interrupt drafting ahead."""
        if self._pass is not None:
            is_ahead = self._pass.search is not None
            if is_ahead and (self.scheduler.has_requests or self.scheduler.is_ahead_vain):
                self._begin(self._pass.interrupted(self.process.clock.now))
            return
        drafting = self.scheduler.next_pass(self._limit, self._limit)
        tell(self._method, drafting.news)
        if drafting.news.closed:
            self._drop_unused_targets()
        if drafting.requests:
            self._begin(self._now(drafting.requests))
        elif drafting.ahead:
            self._begin(self._ahead(drafting.ahead))

    def _now(self, requests: Sequence[DraftRequest]) -> _Pass:
        blocks = self._method.draft(requests)
        longest = max(block.tree.depth for block in blocks)
        began_s = self.process.clock.now
        ready_s = began_s + self._per_pass_s
        ends_s = ready_s + self._cost.forwards(longest) * self._forward_s(len(requests), longest)
        return _Pass(began_s, ready_s, (_Forward(ready_s, ends_s),), tuple(blocks))

    def _ahead(self, requests: Sequence[AheadRequest]) -> _Pass:
        """Runs the search of real drafters, at the virtual times at which they would."""
        search = AheadSearch(self._method, requests, self._forward_time, never)
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
        """Starts a pass, or replaces it by the same pass with less to do."""
        self._pass = drafting
        self.process.after(drafting.ends_s - self.process.clock.now, partial(self._end, drafting))

    def _end(self, drafting: _Pass) -> None:
        if drafting is not self._pass:
            return  # it was interrupted
        self.busy_s += drafting.ends_s - drafting.began_s
        self._send(self.scheduler.proposed(drafting.proposals, self.process.clock.now))
        self._pass = None
        self.process.after(0.0, self._go_on)  # messages that arrived meanwhile are handled first

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
        self.scheduler.receive(stream, hello, self.process.clock.now)
        self._go_on()
        return stream

    def receive(self, peer: str, frame: Frame) -> None:
        """Handles everything that a router or a target sent at one instant."""
        for message in frame:
            sends = self.scheduler.receive(peer, message, self.process.clock.now)
            if isinstance(message, Open):
                self._connect(message.target_address)
            self._send(sends)
        self._go_on()

    def _router_down(self, stream: str) -> None:
        self.scheduler.gone(stream)
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
    """Never interrupts: a search runs to its end, and is cut afterwards if it turns out to have been interrupted."""
    return False
