"""Router, drafter and target in one process under a virtual clock: the real ledger, schedulers, methods and acceptance.

Only time and transport are simulated: a schedule decides when each block and verdict arrives, and how often.
"""

import heapq
import random
from collections.abc import Callable
from itertools import count

from cluster.dispatch import Scheduler, Send
from cluster.drafting.method import make_pass, tell
from cluster.drafting.requests import Proposal
from cluster.lock_step import DRAFTER, ROUTER, TARGET
from cluster.routing.session import Command, Emit, Ended, Session, ToDrafter, ToTarget
from cluster.verification.step import Row, StepPlan
from protos.messages import Block, DraftRequest, Message, Refusal, Resync, Verdict
from tests.lossless.parts import (
    EOS,
    PAGE_SIZE,
    Setting,
    a_draft_model,
    a_draft_scheduler,
    a_verification_scheduler,
    an_executor,
    generations,
)
from tests.unit.cluster.token_memory import TokenMemory

HOP_S = 0.001
STEP_S = 0.010
PASS_S = 0.004


def calm(message: Message, rng: random.Random) -> list[float]:
    return [HOP_S]


def stormy(message: Message, rng: random.Random) -> list[float]:
    """Loses, doubles, delays and so reorders; the delays straddle the target's patience."""
    copies = rng.choices((0, 1, 2), weights=(20, 60, 20))[0]
    return [rng.uniform(0.0, 1.2 * STEP_S) for _ in range(copies)]


def near_patience(message: Message, rng: random.Random) -> list[float]:
    """Blocks arrive just before or just after the target stops waiting."""
    return [rng.uniform(0.0, 2 * STEP_S)] if isinstance(message, Block) else [HOP_S]


def only_with_eos_in_time(message: Message, rng: random.Random) -> list[float]:
    """What no honest system may do: whether a block is used depends on the block's own tokens."""
    late = isinstance(message, Block) and EOS not in message.tree.tokens
    return [100 * STEP_S] if late else [HOP_S]


class World:
    """Runs `sessions` seeded sessions at once and collects what the ledgers committed.

    Every step reads the target's pages and fails when they hold another text than the row's session.
    """

    def __init__(self, setting: Setting, sessions: int, seed: int) -> None:
        self._setting = setting
        self._rng = random.Random(seed)
        self._chance = random.Random(seed + 1)
        self.verification = a_verification_scheduler(setting, sessions)
        self.drafting = a_draft_scheduler(setting, sessions)
        self._executor = an_executor(setting)
        self._memory = TokenMemory(PAGE_SIZE)
        self._method = a_draft_model(setting, sessions, clock=lambda: self._now)
        self._now = 0.0
        self._order = count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._stepping = self._drafting = False
        self.branches_accepted = 0  # paths that a chain would not have had
        self.steps: list[tuple[Row, ...]] = []  # the target's
        self.sessions = {g.session: Session(g) for g in generations(setting, sessions, self._rng)}

    def run(self) -> list[tuple[int, ...]]:
        for session in self.sessions.values():
            self._do(session.assign_target(TARGET))
            if session.wants_drafter:
                self._do(session.assign_drafter(DRAFTER))
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
            self._step()
            self._draft()
        tell(self._method, self.drafting.next_pass(0, 0).news)
        assert self._method.is_idle
        self.verification.plan(self._now + 3600)  # what came too late for anybody has expired by then
        return [session.committed for session in self.sessions.values()]

    # ------------------------------------------------------------ the two loops

    def _step(self) -> None:
        if self._stepping:
            return
        plan = self.verification.plan(self._now)
        if plan is None:
            due = self.verification.next_due()
            if due is not None:
                self._after(due - self._now, lambda: None)
            return
        self._stepping = True
        if plan.rows:
            self.steps.append(plan.rows)
        outcomes = self._executor.step(plan)
        self.branches_accepted += sum(outcome.path != tuple(range(outcome.accepted)) for outcome in outcomes)
        self._check_pages(plan)

        def end() -> None:
            self._stepping = False
            self._route(TARGET, self.verification.apply(outcomes, STEP_S, self._now))

        self._after(STEP_S, end)

    def _check_pages(self, plan: StepPlan) -> None:
        self._memory.move(plan.moves)
        self._memory.copy(plan.copies)
        for row in plan.rows:
            self._memory.write(row.tokens, row.start, row.pages)
        for row in plan.rows:
            known = tuple(self._executor._sessions[row.session].tokens[: row.base_len])
            assert self._memory.read(row.start + len(row.tokens), row.pages) == known + row.draft.tokens

    def _draft(self) -> None:
        if self._drafting:
            return
        drafting = self.drafting.next_pass(len(self.sessions), self._setting.ahead)
        if drafting.is_empty:
            return
        self._drafting = True
        told: list[list[Proposal]] = []
        told.append(make_pass(self._method, drafting, self._is_interrupted, told.append))

        def end() -> None:
            self._drafting = False

        for index, proposals in enumerate(told, 1):
            self._after(PASS_S * index / len(told), lambda p=proposals: self._offer(p))
        self._after(PASS_S, end)

    def _offer(self, proposals: list[Proposal]) -> None:
        self._route(DRAFTER, self.drafting.proposed(proposals, self._now))

    def _is_interrupted(self) -> bool:
        """At random, and never for anything in the tokens that are drafted."""
        return self._chance.random() < self._setting.interruption

    # ------------------------------------------------------------ transport

    def _after(self, delay: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + delay, next(self._order), happen))

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, ToTarget | ToDrafter):
                receiver = self.verification if isinstance(command, ToTarget) else self.drafting
                self._after(HOP_S, lambda to=receiver, m=command.message: self._deliver(to, ROUTER, [m]))
            else:
                assert isinstance(command, Emit | Ended)

    def _route(self, sender: str, sends: list[Send]) -> None:
        """Router links are reliable; what drafter and target say to each other is up to the schedule.

        A verdict and what is wanted after it are one frame: they come or are lost together.
        """
        frames: list[tuple[str, list[Message]]] = []
        for receiver, message in sends:
            if self._setting.altered is not None and isinstance(message, Block):
                message = self._setting.altered(message, self._rng)
            if isinstance(message, DraftRequest) and frames and isinstance(frames[-1][1][-1], Verdict):
                frames[-1][1].append(message)
            else:
                frames.append((receiver, [message]))
        for receiver, frame in frames:
            if receiver == ROUTER:
                self._after(HOP_S, lambda f=frame: self._to_router(sender, f))
                continue
            scheduler = self.verification if receiver == TARGET else self.drafting
            for delay in self._setting.schedule(frame[0], self._rng):
                self._after(delay, lambda to=scheduler, f=frame: self._deliver(to, sender, f))

    def _deliver(self, scheduler: Scheduler, sender: str, frame: list[Message]) -> None:
        receiver = TARGET if scheduler is self.verification else DRAFTER
        for message in frame:
            self._route(receiver, scheduler.receive(sender, message, self._now))

    def _to_router(self, sender: str, frame: list[Message]) -> None:
        for message in frame:
            session = self.sessions[message.session]
            if isinstance(message, Verdict):
                self._do(session.on_verdict(sender, message))
            elif isinstance(message, Refusal):
                self._do(session.on_drafter_refusal(sender, message))
                self._after(STEP_S, lambda s=session: self._seek_drafter(s))
            else:
                assert isinstance(message, Resync)
                self._do(session.on_drafter_resync(sender))

    def _seek_drafter(self, session: Session) -> None:
        """There is only the one that gave it up."""
        if session.wants_drafter:
            self._do(session.assign_drafter(DRAFTER))
