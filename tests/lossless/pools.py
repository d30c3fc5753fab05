"""Several targets and drafters that are lost in mid-sentence, and come back: the text must not show it.

Who is lost either hangs, goes on with what it has and is heard late, or dies and comes back empty. The ledgers, the
schedulers, the methods and the acceptance are the real ones; where a session goes next is simply the next peer.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import torch

from actors.engine.executor import StepExecutor
from actors.methods.draft_model import DraftModel
from actors.methods.lookup_first import LookupFirst
from actors.methods.model.draft_cache import DraftCache
from actors.methods.model.limits import DraftingLimits
from actors.methods.prompt_lookup import PromptLookup
from cluster.costs import ForwardCost
from cluster.dispatch import Scheduler, Send
from cluster.drafting.method import DraftingMethod, make_pass, tell
from cluster.drafting.requests import Proposal
from cluster.routing.session import Command, Emit, Ended, Phase, Session, ToDrafter, ToTarget
from protos.messages import (
    Acceptance,
    Block,
    DraftRequest,
    Hello,
    LiveSession,
    Message,
    Refusal,
    Resync,
    Verdict,
)
from tests.lossless.history import HistoryRunner, NextLogits
from tests.lossless.parts import LATER_S, PAGE_SIZE, Setting, a_draft_scheduler, a_verification_scheduler, generations
from tests.lossless.world import HOP_S, PASS_S, STEP_S

ROUTER = "router#1"
TARGETS = ("target:1", "target:2")
DRAFTERS = ("drafter1#1", "drafter2#1")
HANG_S = 3 * STEP_S
HORIZON_S = 5 * STEP_S  # in which peers are lost


@dataclass(frozen=True)
class Pools:
    """What is there beside the sessions' own setting."""

    target: NextLogits
    draft: NextLogits
    lost_targets: int = 0  # a session is given up with its third
    lost_drafters: int = 0
    lookup_first: bool = False


class ToyTarget:
    """One life of a target replica."""

    def __init__(self, setting: Setting, pools: Pools, sessions: int) -> None:
        self.scheduler = a_verification_scheduler(setting, sessions)
        self.executor = StepExecutor(HistoryRunner(pools.target, setting.vocabulary), setting.vocabulary)
        self.is_busy = False


class ToyDrafter:
    """One life of a drafter."""

    def __init__(self, setting: Setting, pools: Pools, sessions: int, clock: Callable[[], float]) -> None:
        self.scheduler = a_draft_scheduler(setting, sessions)
        vocabulary = setting.vocabulary
        self.model = DraftModel(
            HistoryRunner(pools.draft, vocabulary),
            torch.arange(vocabulary),
            DraftCache(16 * sessions, PAGE_SIZE),
            DraftingLimits(top_k=vocabulary, weight_scale=setting.weight_scale),
            clock=clock,
        )
        lookup = PromptLookup(longest=3, shortest=1)
        self.method: DraftingMethod = LookupFirst(lookup, self.model) if pools.lookup_first else self.model
        self.is_busy = False


class PoolWorld:
    """Runs seeded sessions at once, over pools of which peers are lost at random times."""

    def __init__(self, setting: Setting, pools: Pools, sessions: int, seed: int) -> None:
        self._setting = setting
        self._pools = pools
        self._rng = random.Random(seed)
        self._count = sessions
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.counts: Counter[str] = Counter()
        self.sessions = {g.session: Session(g) for g in generations(setting, sessions, self._rng)}
        self.targets = {address: self._new_target() for address in TARGETS}
        self.drafters = {address: self._new_drafter() for address in DRAFTERS}

    def run(self) -> list[tuple[int, ...]]:
        for index, session in enumerate(self.sessions.values()):
            self._do(session.assign_target(TARGETS[index % len(TARGETS)]))
            if session.wants_drafter:
                self._do(session.assign_drafter(DRAFTERS[index // 2 % len(DRAFTERS)]))
        for lose, times in (
            (self._lose_target, self._pools.lost_targets),
            (self._lose_drafter, self._pools.lost_drafters),
        ):
            for _ in range(times):
                self._after(self._rng.uniform(0, HORIZON_S), lose)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            for address in self.targets:
                self._step(address)
            for address in self.drafters:
                self._draft(address)
        self._check_that_nothing_is_left()
        return [session.committed for session in self.sessions.values()]

    def _check_that_nothing_is_left(self) -> None:
        for target in self.targets.values():
            if (last := target.scheduler.plan(LATER_S)) is not None:
                target.scheduler.apply(target.executor.step(last), 0.0, LATER_S)
            assert target.scheduler.is_idle
            assert target.executor.is_idle
        for drafter in self.drafters.values():
            tell(drafter.method, drafter.scheduler.next_pass(0, 0).news)
            assert drafter.scheduler.is_idle
            assert drafter.model.is_idle

    # ------------------------------------------------------------ losses

    def _new_target(self) -> ToyTarget:
        return ToyTarget(self._setting, self._pools, self._count)

    def _new_drafter(self) -> ToyDrafter:
        return ToyDrafter(self._setting, self._pools, self._count, lambda: self._now)

    def _lose_target(self) -> None:
        """Its sessions go to the other one, under a new attempt."""
        lost = self._rng.choice(TARGETS)
        (other,) = set(TARGETS) - {lost}
        if self._rng.random() < 0.5:
            self.targets[lost] = self._new_target()
            for drafter in DRAFTERS:
                self.drafters[drafter].scheduler.gone(lost)
                self._route(drafter, self.drafters[drafter].scheduler.connected(lost))
        for session in self.sessions.values():
            if session.target == lost and session.phase is Phase.RUNNING:
                self._do(session.on_target_gone(lost))
                self._do(session.assign_target(other))
                self.counts["moved to another target"] += 1
        self._after(HANG_S, lambda: self._greet(lost))

    def _lose_drafter(self) -> None:
        """Its sessions go to the other one; the targets go on alone until that has a block."""
        lost = self._rng.choice(DRAFTERS)
        (other,) = set(DRAFTERS) - {lost}
        if self._rng.random() < 0.5:
            self.drafters[lost] = self._new_drafter()
            for target in TARGETS:
                self.targets[target].scheduler.gone(lost, self._now)
        for session in self.sessions.values():
            if session.drafter == lost:
                self._do(session.on_drafter_gone(lost))
                self._do(session.assign_drafter(other))
                self.counts["moved to another drafter"] += 1
        self._after(HANG_S, lambda: self._greet(lost))

    def _greet(self, peer: str) -> None:
        """The router reaches it again, and says which sessions it still has there."""
        live = [s for s in self.sessions.values() if s.phase is Phase.RUNNING and peer in (s.target, s.drafter)]
        hello = Hello("router", "", "", tuple(LiveSession(s.generation.session, s.attempt) for s in live))
        self._deliver(peer, ROUTER, [hello])

    # ------------------------------------------------------------ the two loops

    def _step(self, address: str) -> None:
        target = self.targets[address]
        if target.is_busy:
            return
        plan = target.scheduler.plan(self._now)
        if plan is None:
            if (due := target.scheduler.next_due()) is not None:
                self._after(due - self._now, lambda: None)
            return
        target.is_busy = True
        outcomes = target.executor.step(plan)
        cost = self._setting.step_cost or ForwardCost.linear(STEP_S)
        took_s = cost.seconds(len(plan.rows), sum(len(row.tokens) for row in plan.rows))

        def end() -> None:
            target.is_busy = False
            if self.targets[address] is target:
                self._route(address, target.scheduler.apply(outcomes, took_s, self._now))

        self._after(took_s, end)

    def _draft(self, address: str) -> None:
        drafter = self.drafters[address]
        if drafter.is_busy:
            return
        drafting = drafter.scheduler.next_pass(self._count, self._setting.ahead)
        if drafting.is_empty:
            return
        drafter.is_busy = True
        told: list[list[Proposal]] = []
        told.append(make_pass(drafter.method, drafting, self._is_interrupted, told.append))

        def offer(proposals: list[Proposal]) -> None:
            if self.drafters[address] is drafter:
                self._route(address, drafter.scheduler.proposed(proposals, self._now))

        def end() -> None:
            drafter.is_busy = False

        for index, proposals in enumerate(told, 1):
            self._after(PASS_S * index / len(told), lambda p=proposals: offer(p))
        self._after(PASS_S, end)

    def _is_interrupted(self) -> bool:
        return self._rng.random() < self._setting.interruption

    # ------------------------------------------------------------ transport

    def _after(self, delay: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._order), happen))

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, ToTarget | ToDrafter):
                self._after(HOP_S, lambda c=command: self._deliver(c.address, ROUTER, [c.message]))
            else:
                assert isinstance(command, Emit | Ended)

    def _route(self, sender: str, sends: list[Send]) -> None:
        """A verdict and what is wanted after it are one frame; the router's own links lose nothing."""
        frames: list[tuple[str, list[Message]]] = []
        for receiver, message in sends:
            self._note(message)
            if isinstance(message, DraftRequest) and frames and isinstance(frames[-1][1][-1], Verdict):
                frames[-1][1].append(message)
            else:
                frames.append((receiver, [message]))
        for receiver, frame in frames:
            delays = [HOP_S] if receiver == ROUTER else self._setting.schedule(frame[0], self._rng)
            for delay in delays:
                self._after(delay, lambda to=receiver, f=frame: self._deliver(to, sender, f))

    def _deliver(self, receiver: str, sender: str, frame: list[Message]) -> None:
        for message in frame:
            if receiver == ROUTER:
                self._tell_ledger(sender, message)
            else:
                self._route(receiver, self._scheduler(receiver).receive(sender, message, self._now))

    def _scheduler(self, address: str) -> Scheduler:
        peers: dict[str, ToyTarget | ToyDrafter] = {**self.targets, **self.drafters}
        return peers[address].scheduler

    def _tell_ledger(self, sender: str, message: Message) -> None:
        assert isinstance(message, Verdict | Refusal | Resync)
        session = self.sessions[message.session]
        self._do(session.receive(sender, message))
        if isinstance(message, Refusal) and session.wants_drafter:
            self._do(session.assign_drafter(self._rng.choice(DRAFTERS)))

    def _note(self, message: Message) -> None:
        """What the test has to have seen to have shown anything."""
        if isinstance(message, DraftRequest):
            self.counts["likely tokens asked for"] += message.least_chance > 0.05
        elif isinstance(message, Block):
            looked_up = self._setting.acceptance is Acceptance.RATIO and message.tree.probs is None
            self.counts["blocks looked up" if looked_up else "blocks"] += 1
