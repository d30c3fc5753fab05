"""All sessions of a router: which target and drafter each has, and what peers' words change.

Run by the router and by the simulator: the time is handed in, and what a ledger asks for is handed out. Knows nothing
of streams, of membership, or of who reads the tokens.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.errors import CapacityError, SlipstreamError, TargetLostError
from cluster.routing.balancing import Peers
from cluster.routing.circuit_breaker import Breakers
from cluster.routing.session import Command, Phase, Session
from protos.messages import LiveSession, Message, Refusal, RefusalReason, Resync, Verdict

FULL_FOR_S = 1.0  # how long a target that said it is full is left alone


@dataclass(eq=False)
class Assignment:
    """A session from its arrival to its end."""

    session: Session
    seeking_since: float  # when it arrived, or lost its target
    target: str | None = None  # as counted among the peers
    drafter: str | None = None

    @property
    def name(self) -> str:
        return self.session.generation.session


F = TypeVar("F", bound=Assignment)


class Assignments(Generic[F]):
    """Gives every session a target and a drafter, and others when they fail; `do` carries out a ledger's commands.

    Who may be given sessions is what `targets` and `drafters` are told.
    """

    def __init__(self, router: str, target_wait_s: float, do: Callable[[F, list[Command]], None]) -> None:
        self.targets = Peers(router)
        self.drafters = Peers(router)
        self.given_up = 0  # times that a drafter was given up as silent
        self._target_wait_s = target_wait_s
        self._do = do
        self._assignments: dict[str, F] = {}  # by session
        self._waiting: dict[str, F] = {}  # of them, those that may lack a target or a drafter
        self._full_until: dict[str, float] = {}  # by address of a target that said it is full
        self._breakers = Breakers()  # of the drafters

    def __len__(self) -> int:
        return len(self._assignments)

    def __contains__(self, session: str) -> bool:
        return session in self._assignments

    def __iter__(self) -> Iterator[F]:
        return iter(list(self._assignments.values()))

    @property
    def has_waiting(self) -> bool:
        """Whether some session may lack a peer, so that `tick` has something to do."""
        return bool(self._waiting)

    # ------------------------------------------------------------ sessions

    def add(self, assignment: F, now: float) -> None:
        """A session arrives."""
        self._assignments[assignment.name] = assignment
        self._place([assignment], now)

    def cancel(self, assignment: F) -> None:
        """Nobody wants it any more, or it is over."""
        self._carry_out(assignment, assignment.session.cancel())
        self.forget(assignment)

    def forget(self, assignment: F) -> None:
        """It is over, and its peers know."""
        self._assignments.pop(assignment.name, None)
        self._waiting.pop(assignment.name, None)

    def tick(self, now: float) -> None:
        """Places what can be placed; gives up sessions that have waited too long for a target."""
        self._place(list(self._waiting.values()), now)
        for assignment in list(self._waiting.values()):
            waited = now - assignment.seeking_since
            if assignment.session.phase is Phase.SEEKING and waited > self._target_wait_s:
                self._carry_out(assignment, assignment.session.fail(self._no_target(waited)))

    # ------------------------------------------------------------ what peers say

    def target_says(self, address: str, message: Message, now: float) -> str | None:
        """Returns the address of a drafter that is given up now, because the target has missed its blocks."""
        assignment = self._of(message)
        silent = None
        if assignment is None:
            return None
        if isinstance(message, Verdict):
            silent = self._note_answer(address, assignment, message, now)
            self._carry_out(assignment, assignment.session.on_verdict(address, message))
        elif isinstance(message, Refusal):
            if message.reason is RefusalReason.OVERLOADED:
                self._full_until[address] = now + FULL_FOR_S
            self._carry_out(assignment, assignment.session.on_target_refusal(address, message))
            self._await_place(assignment)
        return silent

    def target_unreadable(self, address: str, session: str, attempt: int, now: float) -> None:
        """What a target said of a session is malformed."""
        assignment = self._assignments.get(session)
        if assignment is not None and assignment.session.target == address:
            assignment.seeking_since = now
            self._carry_out(assignment, assignment.session.on_target_unreadable(address, attempt))
            self._place([assignment], now)

    def drafter_says(self, address: str, message: Message, now: float) -> None:
        assignment = self._of(message)
        if assignment is None:
            return
        if isinstance(message, Resync):
            self._carry_out(assignment, assignment.session.on_drafter_resync(address))
        elif isinstance(message, Refusal):
            if message.reason is RefusalReason.OVERLOADED:
                self._breakers.refused(address, now)
            self._carry_out(assignment, assignment.session.on_drafter_refusal(address, message))
            self._await_place(assignment)

    def target_lost(self, address: str, now: float) -> int:
        """Its stream broke; returns how many sessions it had."""
        self.targets.down(address)
        lost = [assignment for assignment in self if assignment.session.target == address]
        for assignment in lost:
            assignment.seeking_since = now
            self._carry_out(assignment, assignment.session.on_target_gone(address))
        self._place(lost, now)
        return len(lost)

    def drafter_lost(self, address: str, now: float) -> int:
        """Its stream broke; returns how many sessions it had."""
        self.drafters.down(address)
        self._breakers.forget(address)
        lost = [assignment for assignment in self if assignment.session.drafter == address]
        for assignment in lost:
            self._carry_out(assignment, assignment.session.on_drafter_gone(address))
        self._place(lost, now)
        return len(lost)

    # ------------------------------------------------------------ what peers are told

    def live_at_target(self, address: str) -> tuple[LiveSession, ...]:
        """What the router still wants of what the target may hold."""
        return _listed(assignment.session for assignment in self if assignment.session.target == address)

    def live_at_drafter(self, address: str) -> tuple[LiveSession, ...]:
        """What the router still wants of what the drafter may hold."""
        return _listed(assignment.session for assignment in self if assignment.session.drafter == address)

    # ------------------------------------------------------------ helpers

    def _of(self, message: Message) -> F | None:
        return self._assignments.get(getattr(message, "session", ""))

    def _carry_out(self, assignment: F, commands: list[Command]) -> None:
        """Also counts who has how many sessions now."""
        session = assignment.session
        if assignment.target != session.target:
            self.targets.moved(assignment.target, session.target)
            assignment.target = session.target
        if assignment.drafter != session.drafter:
            self.drafters.moved(assignment.drafter, session.drafter)
            assignment.drafter = session.drafter
        self._do(assignment, commands)

    def _place(self, assignments: Iterable[F], now: float) -> None:
        """Gives sessions the target and the drafter that they lack, as far as there are any."""
        for assignment in assignments:
            session = assignment.session
            if session.phase is Phase.SEEKING and (target := self._choose_target(session, now)):
                self._carry_out(assignment, session.assign_target(target))
            if session.wants_drafter and (drafter := self._choose_drafter(now)):
                self._assign_drafter(assignment, drafter, now)
            if session.phase is Phase.SEEKING or session.wants_drafter:
                self._waiting[assignment.name] = assignment
            else:
                self._waiting.pop(assignment.name, None)

    def _await_place(self, assignment: F) -> None:
        """With the next tick: whoever refused it is not asked again at once."""
        if assignment.name in self._assignments:
            self._waiting[assignment.name] = assignment

    def _choose_target(self, session: Session, now: float) -> str | None:
        return self.targets.choose(lambda address: self._full_until.get(address, 0.0) <= now, session.failed_targets)

    def _choose_drafter(self, now: float) -> str | None:
        return self.drafters.choose(lambda address: self._breakers.takes(address, now))

    def _assign_drafter(self, assignment: F, drafter: str, now: float) -> None:
        self._carry_out(assignment, assignment.session.assign_drafter(drafter))
        self._breakers.placed(drafter, assignment.name, now)

    def _note_answer(self, address: str, assignment: F, verdict: Verdict, now: float) -> str | None:
        """Whether the drafter keeps up; one that is silent for too long is given up."""
        session = assignment.session
        drafter = assignment.session.drafter
        if drafter is None or session.target != address or verdict.attempt != session.attempt:
            return None  # of an older attempt: that drafter may have been another
        if not self._breakers.note(drafter, assignment.name, verdict.answer, session.has_drafted, now):
            return None
        self.given_up += 1
        self._move_off(drafter, now)
        return drafter

    def _move_off(self, address: str, now: float) -> None:
        """Gives a silent drafter's sessions to others; where there is none, they stay and go on without blocks."""
        for assignment in [assignment for assignment in self if assignment.session.drafter == address]:
            if (drafter := self._choose_drafter(now)) is None:
                return
            self._carry_out(assignment, assignment.session.leave_drafter())
            if assignment.session.wants_drafter:
                self._assign_drafter(assignment, drafter, now)

    def _no_target(self, waited: float) -> SlipstreamError:
        if self.targets:
            return CapacityError(f"every target replica has been full for {waited:.0f} s; try again later")
        return TargetLostError(f"no target replica could be reached for {waited:.0f} s")


def _listed(sessions: Iterable[Session]) -> tuple[LiveSession, ...]:
    return tuple(LiveSession(session.generation.session, session.attempt) for session in sessions)
