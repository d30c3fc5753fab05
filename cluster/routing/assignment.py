"""Placement of all sessions of a router: the target and drafter of each, and their replacements.

Used by the router and the simulator: callers pass the time in and send the returned messages.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.envelope import Send
from cluster.errors import CapacityError, SlipstreamError, TargetLostError
from cluster.routing.balancing import Peers
from cluster.routing.drafter_recovery import Complaint, Remedies, Remedy, next_remedy
from cluster.routing.drafter_watch import DrafterWatch
from cluster.routing.ledger import Command, Ended, Event, Phase, Session, ToDrafter, ToTarget
from cluster.routing.locality import Nearness
from cluster.routing.prefix_affinity import PrefixOptions
from cluster.routing.target_choice import TargetChoice
from cluster.speculation.circuit_breaker import Breakers
from protos.messages import Leaving, LiveSession, Message, Refusal, RefusalReason, Verdict

log = logging.getLogger(__name__)

PREFIXES = PrefixOptions()
GONE = "%s %s; %d sessions go on elsewhere or without it"
PLANNED = "planned"  # reasons for a handover: the peer announced that it leaves
LOST = "lost"


@dataclass(eq=False)
class Assignment:
    """A session from its arrival to its end."""

    session: Session
    seeking_since: float  # time of its arrival or of the loss of its target
    target: str | None = None  # as counted in `targets`; the drafter likewise
    drafter: str | None = None
    was_replaced: bool = False  # True: it left a drafter whose blocks had become bad
    served_by: frozenset[str] = frozenset()  # all targets that it was assigned to

    @property
    def name(self) -> str:
        return self.session.generation.session


F = TypeVar("F", bound=Assignment)


class Assignments(Generic[F]):
    """Gives every session a target and a drafter, and replacements when they fail.

    Calls `tell` with events for clients. The caller keeps `targets` and `drafters` current: the replicas that may be
    given sessions.
    """

    def __init__(
        self, router: str, target_wait_s: float, tell: Callable[[F, Event], None], prefixes: PrefixOptions = PREFIXES
    ) -> None:
        self.targets = Peers(router)
        self.drafters = Peers(router)
        self.remedies = Remedies()  # against drafters whose blocks became bad
        self.nearness = Nearness()
        self._choice = TargetChoice(self.targets, prefixes)
        self.routed = self._choice.routed  # sessions by the reason for their target
        self.handovers: Counter[tuple[str, str]] = Counter()  # of sessions, by the pool that they left and the reason
        self._target_wait_s = target_wait_s
        self._tell = tell
        self._assignments: dict[str, F] = {}  # by session
        self._waiting: dict[str, F] = {}  # those that may lack a target or a drafter
        self.breakers = Breakers()  # one for each drafter
        self._watch = DrafterWatch(self.breakers)
        self.given_up = self._watch.given_up  # times that a drafter was silent too long

    def __len__(self) -> int:
        return len(self._assignments)

    def __contains__(self, session: str) -> bool:
        return session in self._assignments

    def __iter__(self) -> Iterator[F]:
        return iter(list(self._assignments.values()))

    @property
    def awaits_tick(self) -> bool:
        """True if `tick` has something to do."""
        return bool(self._waiting) or self._watch.has_news

    def are_targets_full(self, now: float) -> bool:
        """Returns True if there are targets and each has just reported that it is full, so that a new session would
        wait."""
        return self._choice.are_full(now)

    # ------------------------------------------------------------ sessions

    def add(self, assignment: F, now: float) -> list[Send]:
        """Adds a session and places it."""
        self._assignments[assignment.name] = assignment
        return self._place([assignment], now)

    def cancel(self, assignment: F) -> list[Send]:
        """Ends a session that is no longer wanted or is over."""
        sends = self._carry_out(assignment, assignment.session.cancel())
        self.forget(assignment)
        return sends

    def forget(self, assignment: F) -> None:
        """Drops a session that is over and closed at its peers."""
        self._assignments.pop(assignment.name, None)
        self._waiting.pop(assignment.name, None)
        self._watch.forget(assignment.name)
        self._choice.over(assignment.session)

    def tick(self, now: float) -> list[Send]:
        """Leaves silent and bad drafters, places waiting sessions, and fails those that have waited too long for a
        target."""
        sends = self._leave_silent(now)
        sends += self._heed_complaints(now)
        for peer in [*self.targets.leaving]:
            sends += self._move_off(peer, now)
        sends += self._place(list(self._waiting.values()), now)
        for assignment in list(self._waiting.values()):
            waited = now - assignment.seeking_since
            if assignment.session.phase is Phase.SEEKING and waited > self._target_wait_s:
                sends += self._carry_out(assignment, assignment.session.fail(_no_target(bool(self.targets), waited)))
        return sends

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a target's or a drafter's address; returns the messages to send in response."""
        if isinstance(message, Leaving):
            return self._leaves(peer, now)
        assignment = self._assignments.get(getattr(message, "session", ""))
        if assignment is None:
            return []
        if isinstance(message, Refusal):
            self._note_refusal(peer, assignment, message, now)
        elif isinstance(message, Verdict):
            self._watch.heard(assignment.session, message)
        drafter = assignment.session.drafter
        commands = assignment.session.receive(peer, message)
        if drafter is not None and any(isinstance(command, Ended) for command in commands):
            self._watch.ended(assignment.session, drafter)
        return self._carry_out(assignment, commands)

    def unreadable(self, target: str, session: str, attempt: int, now: float) -> list[Send]:
        """Handles a malformed message from a target about a session: the session leaves the target."""
        assignment = self._assignments.get(session)
        if assignment is None or assignment.session.target != target:
            return []
        assignment.seeking_since = now
        sends = self._carry_out(assignment, assignment.session.on_target_unreadable(target, attempt))
        return sends + self._place([assignment], now)

    def gone(self, peer: str, now: float) -> list[Send]:
        """Handles the broken stream of a target or drafter.

        A peer that announced its leaving is not counted as lost.
        """
        is_planned = peer in self.targets.leaving
        self.targets.gone(peer)
        self.drafters.gone(peer)
        self.breakers.forget(peer)
        self._choice.gone(peer)
        lost = [assignment for assignment in self if peer in (assignment.session.target, assignment.session.drafter)]
        how = "has left" if is_planned else "is lost"
        log.log(logging.INFO if is_planned else logging.WARNING, GONE, peer, how, len(lost))
        sends: list[Send] = []
        for assignment in lost:
            session = assignment.session
            if session.target == peer:
                assignment.seeking_since = now
                self.handovers["target", PLANNED if is_planned else LOST] += 1
                sends += self._carry_out(assignment, session.on_target_gone(peer, is_planned))
            else:
                self.handovers["drafter", PLANNED if is_planned else LOST] += 1
                sends += self._carry_out(assignment, session.on_drafter_gone(peer))
        return sends + self._place(lost, now)

    def live_at(self, peer: str) -> tuple[LiveSession, ...]:
        """Returns the sessions that the target or drafter should still hold."""
        sessions = [assignment.session for assignment in self._assignments.values()]
        return tuple(
            LiveSession(session.generation.session, session.attempt)
            for session in sessions
            if peer in (session.target, session.drafter)
        )

    # ------------------------------------------------------------ helpers

    def _carry_out(self, assignment: F, commands: list[Command]) -> list[Send]:
        """Turns a session's commands into messages and events, and updates the session counts of its peers."""
        session = assignment.session
        if assignment.target != session.target:
            self._choice.moved(session, assignment.target)
            self.targets.moved(assignment.target, session.target)
            assignment.target = session.target
            assignment.served_by |= {session.target} if session.target else set()
        if assignment.drafter != session.drafter:
            self.drafters.moved(assignment.drafter, session.drafter)
            assignment.drafter = session.drafter
        sends: list[Send] = []
        for command in commands:
            if isinstance(command, ToTarget | ToDrafter):
                sends.append((command.address, command.message))
            else:
                self._tell(assignment, command)
        return sends

    def _note_refusal(self, peer: str, assignment: F, refusal: Refusal, now: float) -> None:
        """Records a refusal.

        The session is placed at the next tick, so the refusing peer is not asked again at once.
        """
        self._waiting[assignment.name] = assignment
        if refusal.reason is not RefusalReason.OVERLOADED:
            return
        if peer in self.drafters:
            self.breakers.refused(peer, now)
        else:
            self._choice.refused(peer, now)
        if peer in self.targets.leaving and peer == assignment.session.target:
            assignment.seeking_since = now
            self.handovers["target", PLANNED] += 1

    def _place(self, assignments: Iterable[F], now: float) -> list[Send]:
        """Gives sessions the target and the drafter that they lack, if there are any."""
        sends: list[Send] = []
        for assignment in assignments:
            session = assignment.session
            if session.phase is Phase.SEEKING and (target := self._choice.choose(session, now)):
                sends += self._carry_out(assignment, session.assign_target(target))
            if session.wants_drafter and (drafter := self._choose_drafter(session, now)):
                sends += self._assign_drafter(assignment, drafter, now)
            if session.phase is Phase.SEEKING or session.wants_drafter:
                self._waiting[assignment.name] = assignment
            else:
                self._waiting.pop(assignment.name, None)
        return sends

    def _choose_drafter(self, session: Session, now: float, avoid: str | None = None) -> str | None:
        """Chooses a drafter by load and by distance from the session's target."""
        worth = self.nearness.worth(session.target)
        return self.drafters.choose(lambda one: one != avoid and self.breakers.takes(one, now), worth=worth)

    def _assign_drafter(self, assignment: F, drafter: str, now: float) -> list[Send]:
        sends = self._carry_out(assignment, assignment.session.assign_drafter(drafter))
        self.breakers.placed(drafter, assignment.name, now)
        return sends

    def _leave_silent(self, now: float) -> list[Send]:
        """Processes drafters' answers since the last tick; moves the sessions of drafters that were silent too long."""
        sends: list[Send] = []
        for drafter in self._watch.silent(now):
            log.warning("drafter %s is silent; its sessions go to others", drafter)
            sends += self._move_off(drafter, now)
        return sends

    def _heed_complaints(self, now: float) -> list[Send]:
        """Takes the next remedy for each session whose drafter's blocks became bad, and gives up bad drafters."""
        sends: list[Send] = []
        for complaint in self._watch.take_complaints():
            assignment = self._assignments.get(complaint.session)
            if assignment is not None and assignment.session.drafter == complaint.drafter:
                sends += self._remedy(assignment, complaint, now)
        return sends

    def _remedy(self, assignment: F, complaint: Complaint, now: float) -> list[Send]:
        left = complaint.drafter
        other = self._choose_drafter(assignment.session, now, avoid=left)
        remedy = next_remedy(complaint.collapse, assignment.was_replaced, other is not None)
        self.remedies.taken(complaint, remedy)
        if remedy is Remedy.RESYNCED:
            return []  # the target has sent the drafter a Resync
        assignment.was_replaced = True
        assignment.session.drafts = remedy is not Remedy.PLAIN
        sends = self._carry_out(assignment, assignment.session.leave_drafter())
        if other is not None and assignment.session.wants_drafter:
            sends += self._assign_drafter(assignment, other, now)
        if self.breakers.collapsed(left, now):
            self.remedies.given_up(left)
            sends += self._move_off(left, now)
        return sends

    def _leaves(self, peer: str, now: float) -> list[Send]:
        """Handles a peer's announcement that it ends soon, which is no failure of the peer or of its sessions."""
        self.targets.leaves(peer)
        self.drafters.leaves(peer)
        return self._move_off(peer, now)

    def _move_off(self, address: str, now: float) -> list[Send]:
        """Moves all sessions of a peer that leaves or was given up; those without an alternative stay."""
        is_planned = address in self.targets.leaving
        sends: list[Send] = []
        for assignment in self:
            session = assignment.session
            if session.target == address and self._choice.choose(session, now):
                self.handovers["target", PLANNED] += 1
                sends += self._carry_out(assignment, session.leave_target())
            elif session.drafter == address and self._choose_drafter(session, now):
                self.handovers["drafter", PLANNED] += is_planned
                sends += self._carry_out(assignment, session.leave_drafter())
            else:
                continue
            sends += self._place([assignment], now)
        return sends


def _no_target(are_known: bool, waited: float) -> SlipstreamError:
    if are_known:
        return CapacityError(f"every target replica has been full for {waited:.0f} s; try again later")
    return TargetLostError(f"no target replica could be reached for {waited:.0f} s")
