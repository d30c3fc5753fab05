"""Router, drafter and target in one process with a virtual clock, and with real ledgers, schedulers and methods.

Only time and transport are simulated: a schedule sets the arrival times and copies of each block and verdict.
"""

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import TypeVar

import torch

from actors.drafters.model.draft_model import DraftModel
from actors.engine.executor import StepExecutor
from cluster.costs import ForwardCost
from cluster.drafting.method import DraftingMethod, apply_updates, make_pass
from cluster.drafting.requests import Proposal
from cluster.drafting.scheduler import DraftScheduler
from cluster.envelope import Send, states_stream
from cluster.reference_loop import DRAFTER, ROUTER, TARGET
from cluster.routing.ledger import Command, CommittedTokens, Ended, Session, ToDrafter, ToTarget
from cluster.verification.scheduler import VerificationScheduler
from cluster.verification.step import Outcome, Row, StepPlan
from protos.messages import Block, DraftRequest, Message, Refusal, Resync, States, Verdict
from tests.lossless.parts import (
    EOS,
    LATER_S,
    PAGE_SIZE,
    STEP_S,
    Setting,
    a_draft_model,
    a_draft_scheduler,
    a_translated_method,
    a_verification_scheduler,
    an_executor,
    generations,
)
from tests.lossless.states import ReadingMethod
from tests.unit.cluster.token_memory import TokenMemory

TOKEN_KEY = b"no secret here"
HOP_S = 0.001
PASS_S = 0.004


def calm(message: Message, rng: random.Random) -> list[float]:
    return [HOP_S]


def lossy_delays(message: Message, rng: random.Random) -> list[float]:
    """Loses, duplicates, delays and reorders messages; delays are above and below the target's wait limit."""
    copies = rng.choices((0, 1, 2), weights=(20, 60, 20))[0]
    return [rng.uniform(0.0, 1.2 * STEP_S) for _ in range(copies)]


def near_patience(message: Message, rng: random.Random) -> list[float]:
    """Delivers blocks just before or just after the target stops waiting."""
    return [rng.uniform(0.0, 2 * STEP_S)] if isinstance(message, Block) else [HOP_S]


def only_with_eos_in_time(message: Message, rng: random.Random) -> list[float]:
    """Violates the rules: the use of a block depends on the block's own tokens."""
    late = isinstance(message, Block) and EOS not in message.tree.tokens
    return [100 * STEP_S] if late else [HOP_S]


@dataclass(eq=False)
class ToyTarget:
    """Target replica from start to failure, with a simulated cache."""

    scheduler: VerificationScheduler
    executor: StepExecutor
    is_busy: bool = False
    _memory: TokenMemory = field(default_factory=lambda: TokenMemory(PAGE_SIZE))
    _texts: dict[str, tuple[int, ...]] = field(default_factory=dict)  # committed tokens fed so far, by session

    def step(self, plan: StepPlan) -> list[Outcome]:
        """Runs a step; fails if a row's pages contain another session's text."""
        for name in plan.closes:
            del self._texts[name]
        self._texts |= {request.session: request.tokens for request in plan.opens}
        outcomes = self.executor.step(plan)
        self._memory.move(plan.moves)
        self._memory.copy(plan.copies)
        for row in plan.rows:
            self._memory.write(row.tokens, row.start, row.pages)
        for row in plan.rows:
            known = self._texts[row.session][: row.start] + row.tokens[: row.known]
            assert len(known) == row.base_len
            assert self._memory.read(row.start + len(row.tokens), row.pages) == known + row.draft.tokens
            self._texts[row.session] = known + self._texts[row.session][row.base_len :]
        for outcome in outcomes:
            row = next(row for row in plan.rows if row.session == outcome.session)
            self._texts[row.session] = self._texts[row.session][: row.base_len] + outcome.tokens_of(row)
        return outcomes


@dataclass(eq=False)
class ToyDrafter:
    """Drafter replica from start to failure."""

    scheduler: DraftScheduler
    method: DraftingMethod
    model: DraftModel
    is_busy: bool = False


class World:
    """Runs `sessions` concurrent seeded sessions on one target and one drafter, and collects the committed tokens."""

    def __init__(
        self,
        setting: Setting,
        sessions: int,
        seed: int,
        targets: Sequence[str] = (TARGET,),
        drafters: Sequence[str] = (DRAFTER,),
    ) -> None:
        self._setting = setting
        self._count = sessions
        self._rng = random.Random(seed)
        self._chance = random.Random(seed + 1)
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._alarms: set[float] = set()  # times at which timeouts are checked
        self.branches_accepted = 0  # accepted paths outside the main path
        self.steps: list[tuple[Row, ...]] = []  # rows of every target step
        self.sessions = {g.session: Session(g, TOKEN_KEY) for g in generations(setting, sessions, self._rng)}
        self.targets = {address: self._new_target() for address in targets}
        self.drafters = {address: self._new_drafter() for address in drafters}

    @torch.inference_mode()
    def run(self) -> list[tuple[int, ...]]:
        """Runs all events; asserts that no session, page or message remains."""
        for index, session in enumerate(self.sessions.values()):
            self._do(session.assign_target(list(self.targets)[index % len(self.targets)]))
            if session.wants_drafter:
                self._do(session.assign_drafter(list(self.drafters)[index // 2 % len(self.drafters)]))
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            for address in self.targets:
                self._step(address)
            for address in self.drafters:
                self._draft(address)
        self._check_that_nothing_is_left()
        return [session.committed for session in self.sessions.values()]

    @property
    def accepted(self) -> int:
        """Returns the number of accepted draft tokens in all sessions."""
        return sum(session.counts.accepted for session in self.sessions.values())

    @property
    def drafted(self) -> int:
        """Returns the number of verified draft tokens in all sessions."""
        return sum(session.counts.drafted for session in self.sessions.values())

    @property
    def verification(self) -> VerificationScheduler:
        """Returns the only target's scheduler."""
        (target,) = self.targets.values()
        return target.scheduler

    @property
    def drafting(self) -> DraftScheduler:
        """Returns the only drafter's scheduler."""
        (drafter,) = self.drafters.values()
        return drafter.scheduler

    def _new_target(self) -> ToyTarget:
        return ToyTarget(a_verification_scheduler(self._setting, self._count), an_executor(self._setting))

    def _new_drafter(self) -> ToyDrafter:
        scheduler = a_draft_scheduler(self._setting, self._count)
        if self._setting.translator is not None:
            translated = a_translated_method(self._setting, self._count, lambda: self._now, self._setting.translator)
            return ToyDrafter(scheduler, *translated)
        model = a_draft_model(self._setting, self._count, clock=lambda: self._now)
        method = ReadingMethod(model, self._setting.enough_states) if self._setting.reads_states else model
        return ToyDrafter(scheduler, method, model)

    def _check_that_nothing_is_left(self) -> None:
        for target in self.targets.values():
            if (last := target.scheduler.plan(LATER_S)) is not None:
                target.scheduler.apply(target.step(last), 0.0, LATER_S)
            assert target.scheduler.is_idle
            target.scheduler.admission.pages.check()
            assert target.executor.is_idle
        for drafter in self.drafters.values():
            apply_updates(drafter.method, drafter.scheduler.next_pass(0, 0).updates)
            assert drafter.scheduler.is_idle
            assert drafter.model.is_idle

    # ------------------------------------------------------------ the two loops

    def _step(self, address: str) -> None:
        target = self.targets[address]
        if target.is_busy:
            return
        if target.scheduler.settles_first:
            self._route(address, target.scheduler.settle())
        while (asked := target.scheduler.feeds.next_read()) is not None:
            self._route(address, target.scheduler.feeds.sent(asked, target.executor.read(asked)))
        plan = target.scheduler.plan(self._now)
        if not target.scheduler.is_settled:
            self._route(address, target.scheduler.settle())
            plan = plan or target.scheduler.plan(self._now)
        if plan is None:
            if (due := target.scheduler.next_due()) is not None and due not in self._alarms:
                self._alarms.add(due)  # once; otherwise each earlier event would set another alarm
                self._at(due, lambda: None)
            return
        target.is_busy = True
        if plan.rows:
            self.steps.append(plan.rows)
        outcomes = target.step(plan)
        self.branches_accepted += sum(outcome.path != tuple(range(outcome.accepted)) for outcome in outcomes)
        cost = self._setting.step_cost or ForwardCost.linear(STEP_S)
        took_s = cost.seconds(len(plan.rows), sum(len(row.tokens) for row in plan.rows))

        def end() -> None:
            target.is_busy = False
            if self.targets[address] is target:
                target.scheduler.commit(outcomes, took_s, self._now)

        self._after(took_s, end)

    def _draft(self, address: str) -> None:
        drafter = self.drafters[address]
        if drafter.is_busy:
            return
        drafting = drafter.scheduler.next_pass(self._count, self._setting.ahead)
        if drafting.is_empty:
            return
        drafter.is_busy = True
        early_proposals: list[list[Proposal]] = []
        early_proposals.append(make_pass(drafter.method, drafting, self._interruption(), early_proposals.append))

        def offer(proposals: list[Proposal]) -> None:
            if self.drafters[address] is drafter:
                self._route(address, drafter.scheduler.proposed(proposals, self._now))

        def end() -> None:
            drafter.is_busy = False

        for index, proposals in enumerate(early_proposals, 1):
            self._after(PASS_S * index / len(early_proposals), lambda p=proposals: offer(p))
        self._after(PASS_S, end)

    def _interruption(self) -> Callable[[], bool]:
        """Returns a function that draws whether to interrupt a pass, independently of the drafted tokens.

        An interruption lasts until the pass ends.
        """
        is_interrupted = False

        def draw() -> bool:
            nonlocal is_interrupted
            is_interrupted = is_interrupted or self._chance.random() < self._setting.interruption
            return is_interrupted

        return draw

    # ------------------------------------------------------------ transport

    def _after(self, delay: float, happen: Callable[[], None]) -> None:
        self._at(self._now + delay, happen)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), happen))

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, ToTarget | ToDrafter):
                self._after(HOP_S, lambda c=command: self._deliver(c.address, ROUTER, [c.message]))
            else:
                assert isinstance(command, CommittedTokens | Ended)

    def _route(self, sender: str, sends: list[Send]) -> None:
        """Delivers a message: router links are reliable; the schedule controls links between drafter and target.

        A verdict, the states of its tokens and the next request share a frame, so they arrive or are lost together.
        """
        frames: list[tuple[str, list[Message]]] = []
        for receiver, message in sends:
            if self._setting.altered is not None and isinstance(message, Block):
                message = self._setting.altered(message, self._rng)
            follows = isinstance(message, DraftRequest | States) and frames and frames[-1][0] == receiver
            if follows and isinstance(frames[-1][1][-1], Verdict | States):
                frames[-1][1].append(message)
            else:
                frames.append((receiver, [message]))
        for receiver, frame in frames:
            delays = [HOP_S] if receiver == ROUTER else self._setting.schedule(frame[0], self._rng)
            for delay in delays:
                self._after(delay, lambda to=receiver, f=frame: self._deliver(to, sender, f))

    def _deliver(self, receiver: str, sender: str, frame: list[Message]) -> None:
        for address in [*self.targets, *self.drafters]:
            if receiver == states_stream(address):
                receiver = address
                sender = states_stream(sender) if sender in self.targets else sender
        for message in frame:
            if receiver == ROUTER:
                self._tell_ledger(sender, message)
            else:
                peer = self.targets.get(receiver) or self.drafters[receiver]
                self._route(receiver, peer.scheduler.receive(sender, message, self._now))

    def _tell_ledger(self, sender: str, message: Message) -> None:
        assert isinstance(message, Verdict | Refusal | Resync)
        session = self.sessions[message.session]
        self._do(session.receive(sender, message))
        if isinstance(message, Refusal):
            self._after(STEP_S, lambda: self._seek_drafter(session))

    def _seek_drafter(self, session: Session) -> None:
        """Assigns a drafter to the session, possibly the previous one."""
        if session.wants_drafter:
            self._do(session.assign_drafter(self._rng.choice(list(self.drafters))))


W = TypeVar("W", bound=World)


def run_worlds(
    setting: Setting,
    at_once: int,
    prompts: Iterable[Sequence[int]],
    kind: Callable[[Setting, int, int], W] = World,  # type: ignore[assignment]
) -> list[W]:
    """Runs a world of `at_once` sessions for each prompt, each with its own seed."""
    worlds = [kind(replace(setting, prompt=tuple(prompt)), at_once, seed) for seed, prompt in enumerate(prompts)]
    for world in worlds:
        world.run()
    return worlds


def texts(worlds: Iterable[World]) -> list[tuple[int, ...]]:
    """Returns the committed texts of all sessions."""
    return [session.committed for world in worlds for session in world.sessions.values()]


def accepted(worlds: Iterable[World]) -> int:
    """Returns the number of accepted draft tokens of all worlds."""
    return sum(world.accepted for world in worlds)
