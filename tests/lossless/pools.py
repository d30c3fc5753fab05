"""Worlds whose targets and drafters fail in the middle of a text and return, which must not change the text.

A failed peer either hangs, keeps its sessions and answers late, or dies and returns empty. Ledgers, schedulers, methods
and acceptance are real; a session simply moves to the next peer.
"""

from collections import Counter
from dataclasses import dataclass

from actors.drafters.lookup.hybrid import HybridDraft
from actors.drafters.lookup.ngram import NgramDraft
from actors.engine.executor import StepExecutor
from cluster.drafting.method import DraftingMethod
from cluster.envelope import Send
from cluster.reference_loop import ROUTER
from cluster.routing.ledger import Phase
from protos.messages import Acceptance, Block, DraftRequest, Hello, LiveSession, Message
from tests.lossless.history import HistoryRunner, NextLogits
from tests.lossless.parts import PAGE_SIZE, Setting, a_draft_scheduler, a_verification_scheduler
from tests.lossless.world import STEP_S, ToyDrafter, ToyTarget, World
from tests.toys import toy_draft_model

TARGETS = ("target:1", "target:2")
DRAFTERS = ("drafter1#1", "drafter2#1")
HANG_S = 3 * STEP_S
HORIZON_S = 5 * STEP_S  # period of peer failures


@dataclass(frozen=True)
class Pools:
    """Sizes and failures of the pools."""

    target: NextLogits
    draft: NextLogits
    lost_targets: int = 0  # the third loss ends a session
    lost_drafters: int = 0
    planned_moves: int = 0  # from leaving targets; a session survives any number
    hybrid: bool = False
    lookup_alone: bool = False


class PoolWorld(World):
    """World with pools whose peers fail at random times."""

    def __init__(self, setting: Setting, pools: Pools, sessions: int, seed: int) -> None:
        self._pools = pools
        self.counts: Counter[str] = Counter()
        super().__init__(setting, sessions, seed, TARGETS, DRAFTERS)

    def run(self) -> list[tuple[int, ...]]:
        for lose, times in (
            (self._lose_target, self._pools.lost_targets),
            (self._lose_drafter, self._pools.lost_drafters),
            (self._leave_target, self._pools.planned_moves),
        ):
            for _ in range(times):
                self._after(self._rng.uniform(0, HORIZON_S), lose)
        return super().run()

    def _new_target(self) -> ToyTarget:
        vocabulary = self._setting.vocabulary
        executor = StepExecutor(HistoryRunner(self._pools.target, vocabulary), vocabulary)
        return ToyTarget(a_verification_scheduler(self._setting, self._count), executor)

    def _new_drafter(self) -> ToyDrafter:
        runner = HistoryRunner(self._pools.draft, self._setting.vocabulary)
        scale = self._setting.weight_scale
        pages = 16 * self._count
        model = toy_draft_model(runner, pages, PAGE_SIZE, weight_scale=scale, clock=lambda: self._now)
        lookup = NgramDraft(longest=3, shortest=1)
        method: DraftingMethod = model
        if self._pools.hybrid:
            method = HybridDraft(lookup, model)
        elif self._pools.lookup_alone:
            method = lookup
        return ToyDrafter(a_draft_scheduler(self._setting, self._count), method, model)

    # ------------------------------------------------------------ losses

    def _lose_target(self) -> None:
        """Fails a target; its sessions move to the other target with a new attempt."""
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

    def _leave_target(self) -> None:
        """Moves sessions off a leaving target, which continues until it receives their Close."""
        left = self._rng.choice(TARGETS)
        (other,) = set(TARGETS) - {left}
        for session in self.sessions.values():
            if session.target == left and session.phase is Phase.RUNNING:
                self._do(session.leave_target())
                self._do(session.assign_target(other))
                self.counts["moved as planned"] += 1

    def _lose_drafter(self) -> None:
        """Fails a drafter; its sessions move to the other drafter, and targets continue without blocks until then."""
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
        """Reconnects the router to a peer; its Hello lists the remaining sessions."""
        live = [s for s in self.sessions.values() if s.phase is Phase.RUNNING and peer in (s.target, s.drafter)]
        hello = Hello("router", "", "", tuple(LiveSession(s.generation.session, s.attempt) for s in live))
        self._deliver(peer, ROUTER, [hello])

    # ------------------------------------------------------------ observed events

    def _route(self, sender: str, sends: list[Send]) -> None:
        for _, message in sends:
            self._note(message)
        super()._route(sender, sends)

    def _note(self, message: Message) -> None:
        """Records the events that a meaningful test requires."""
        if isinstance(message, DraftRequest):
            self.counts["likely tokens asked for"] += message.least_chance > 0.05
        elif isinstance(message, Block):
            looked_up = self._setting.acceptance is Acceptance.REJECTION and message.tree.probs is None
            self.counts["blocks looked up" if looked_up else "blocks"] += 1
