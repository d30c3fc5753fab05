"""Placement of a router's sessions: chooses their targets and drafters, and replaces those that fail.

`SessionRouter` serves the router and the simulator: callers pass the time in and carry out what is `Ready`. A router
chooses replicas by its own records of them:

* `Peers` ranks one pool by the number of the router's sessions on each replica;
* `PrefixAffinity` records the prefixes that each target has computed. Targets share cache pages between sessions that
  begin with the same tokens, so the next request of a conversation is prefilled fastest where the last one was;
* `Locality` prefers drafters on a target's node or in its zone.

Cached tokens and short distances count as a number of sessions that a replica may have beyond the others. Routers need
not agree, because a wrong record costs only a prefill. Page hashes are keyed, so that no client can choose prompts that
collide, and each covers all earlier pages too.
"""

import logging
import secrets
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from types import MappingProxyType
from typing import Generic, TypeVar

from cluster.envelope import Send
from cluster.errors import CapacityError, SlipstreamError, TargetLostError
from cluster.page_allocator import page_hash
from cluster.routing.drafter_health import Complaint, DrafterWatch, RecoveryLog, RecoveryStep, next_remedy
from cluster.routing.ledger import Command, Ended, Event, Phase, Session, ToDrafter, ToTarget
from cluster.routing.membership import Endpoint
from cluster.speculation.circuit_breaker import CircuitBreakers
from protos.messages import Leaving, LiveSession, Message, Refusal, RefusalReason, Verdict

MAX_HASHED_PAGES = 4096  # most pages hashed per text; its beginning is enough to place it
TOKENS_PER_SESSION = 128  # cached tokens that count as much as one session of load


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """Size of a router's prefix record, and its weight against load."""

    page_size: int = 16  # tokens per page of the targets' caches
    max_extra_sessions: float = 4.0  # most extra sessions that a target may have over the least loaded one
    pages_per_target: int = 1 << 15  # most recent pages recorded per target


def page_keys(key: bytes, tokens: Sequence[int], page_size: int, salt: bytes = b"") -> list[bytes]:
    """Returns one key for each whole page that a target may share.

    No page contains the last token, because a target always computes it. Targets share pages only between sessions with
    the same salt.
    """
    keys: list[bytes] = []
    parent = salt
    for start in range(0, min(len(tokens) - 1, MAX_HASHED_PAGES * page_size) - page_size + 1, page_size):
        parent = page_hash(key, parent, tokens[start : start + page_size])
        keys.append(parent)
    return keys


class PrefixAffinity:
    """One router's record of the prefixes that each target has cached."""

    def __init__(self, key: bytes, options: PrefixOptions) -> None:
        self._key = key
        self._options = options
        self._pages: dict[str, OrderedDict[bytes, None]] = {}  # by target, least recently used first

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """Returns the keys of a text's pages, for the other methods."""
        return page_keys(self._key, tokens, self._options.page_size, salt)

    def matches(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Returns, by target, the number of the text's tokens that it is likely to have cached.

        Omits targets that have none.
        """
        matches = {}
        for target, pages in self._pages.items():
            count = next((index for index, key in enumerate(keys) if key not in pages), len(keys))
            if count:
                matches[target] = count * self._options.page_size
        return matches

    def worth(self, keys: Sequence[bytes]) -> dict[str, float]:
        """Returns, by target, how many extra sessions the cached part of this text outweighs.

        The target with the longest cached prefix gets at most `max_extra_sessions`. Others get less by the tokens that
        they lack, so a target with only the common beginning of many texts does not count like one with the whole text.
        """
        matches = self.matches(keys)
        best = max(matches.values(), default=0)
        most = min(best / TOKENS_PER_SESSION, self._options.max_extra_sessions)
        behind = {target: (best - tokens) / TOKENS_PER_SESSION for target, tokens in matches.items()}
        return {target: most - lacking for target, lacking in behind.items() if lacking < most}

    def record(self, target: str, keys: Sequence[bytes]) -> None:
        """Records that a target has these pages now or soon."""
        pages = self._pages.setdefault(target, OrderedDict())
        for key in reversed(keys):  # the first page becomes the most recent, so a text is dropped from its end
            pages[key] = None
            pages.move_to_end(key)
        while len(pages) > self._options.pages_per_target:
            pages.popitem(last=False)

    def forget(self, target: str) -> None:
        """Drops a target that is gone together with its cache."""
        self._pages.pop(target, None)


NO_WORTH: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected replica as the router sees it."""

    address: str
    sessions: int  # number of this router's sessions on the replica
    turn: int = 0  # rank among equally loaded candidates
    worth: float = 0.0  # extra sessions up to which it is still preferred for the session in question

    @property
    def rank(self) -> tuple[float, int, str]:
        """Sort key; the candidate with the lowest rank gets the next session."""
        return self.sessions - self.worth, self.turn, self.address


def turn(router: str, address: str) -> int:
    """Returns a replica's rank among equally loaded ones, which differs between routers.

    A router knows only its own sessions. If ties were broken by address, all routers would give their first session to
    the same replica while others are idle.
    """
    return int.from_bytes(blake2b(f"{router} {address}".encode(), digest_size=4).digest())


def choose(candidates: Iterable[Candidate], avoid: frozenset[str] = frozenset()) -> str | None:
    """Returns the least loaded candidate, with ties broken by `turn`; one in `avoid` only if there is no other.

    Returns None if there is no candidate at all.
    """
    best = min(candidates, key=lambda c: (c.address in avoid, c.rank), default=None)
    return best.address if best else None


class Peers:
    """A router's view of one pool: the replicas that accept sessions, and the number of its sessions on each."""

    def __init__(self, router: str) -> None:
        self.leaving: set[str] = set()  # announced that they end soon; they may keep sessions, but accept none
        self._router = router
        self._sessions: Counter[str] = Counter()
        self._up: dict[str, Candidate] = {}  # replicas that accept sessions, by address
        self._ranked: list[tuple[float, int, str]] = []  # ranks of the replicas in `_up`, lowest first

    def __bool__(self) -> bool:
        return bool(self._up)

    def __contains__(self, address: str) -> bool:
        """Returns True if the replica accepts sessions."""
        return address in self._up

    def up(self, address: str) -> None:
        """Marks a replica as accepting sessions, unless it is leaving."""
        self.down(address)
        if address in self.leaving:
            return
        self._up[address] = one = Candidate(address, self._sessions[address], turn(self._router, address))
        insort(self._ranked, one.rank)

    def down(self, address: str) -> None:
        """Marks a replica as accepting no more sessions; it may keep existing ones."""
        one = self._up.pop(address, None)
        if one is not None:
            del self._ranked[bisect_left(self._ranked, one.rank)]

    def leaves(self, address: str) -> None:
        """Records the replica's announcement that it will shut down soon."""
        self.down(address)
        self.leaving.add(address)

    def gone(self, address: str) -> None:
        """Records that the replica's stream broke; a replica that returns at this address counts as new."""
        self.down(address)
        self.leaving.discard(address)

    def moved(self, old: str | None, new: str | None) -> None:
        """Records that a session moved from one peer to another; None stands for no peer."""
        for address, change in ((old, -1), (new, 1)):
            if address is not None:
                self._sessions[address] += change
                if not self._sessions[address]:
                    del self._sessions[address]  # drop counters of replicas that are gone for good
                if address in self._up:
                    self.up(address)

    def choose(
        self,
        takes: Callable[[str], bool],
        avoid: frozenset[str] = frozenset(),
        worth: Mapping[str, float] = NO_WORTH,
    ) -> str | None:
        """Returns the replica, among those accepting sessions now, with the least load minus `worth`, in sessions."""
        return choose([*self._contenders(takes, avoid), *self._favoured(takes, worth)], avoid)

    def spare(self, avoid: frozenset[str]) -> str | None:
        """Returns a replica with none of the router's sessions; one in `avoid` only if there is no other at all."""
        others = [one for one in self._up.values() if one.address not in avoid] or list(self._up.values())
        return choose(one for one in others if not one.sessions)

    def _favoured(self, takes: Callable[[str], bool], worth: Mapping[str, float]) -> Iterator[Candidate]:
        for address, sessions in worth.items():
            if address in self._up and takes(address):
                yield replace(self._up[address], worth=sessions)

    def _contenders(self, takes: Callable[[str], bool], avoid: frozenset[str]) -> Iterator[Candidate]:
        """Yields candidates by rank, up to the first that need not be avoided, so that large fleets are not scanned."""
        for _, _, address in self._ranked:
            if takes(address):
                yield self._up[address]
                if address not in avoid:
                    return


SAME_NODE_WORTH = (
    4.0  # extra sessions up to which a drafter on the target's node is preferred: its drafts arrive sooner
)
SAME_ZONE_WORTH = 2.0


class Locality:
    """Preferences for drafters near each target, by node and zone."""

    def __init__(self) -> None:
        self._targets: dict[str, Endpoint] = {}  # targets, by address
        self._by_node: dict[str, list[str]] = {}  # drafter addresses
        self._by_zone: dict[str, list[str]] = {}

    def follow(self, targets: Iterable[Endpoint], drafters: Iterable[Endpoint]) -> None:
        """Replaces the pools; an empty node or zone is unknown."""
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        by_zone: defaultdict[str, list[str]] = defaultdict(list)
        for drafter in drafters:
            by_node[drafter.node].append(drafter.address)
            by_zone[drafter.zone].append(drafter.address)
        self._targets = {target.address: target for target in targets}
        self._by_node = {node: addresses for node, addresses in by_node.items() if node}
        self._by_zone = {zone: addresses for zone, addresses in by_zone.items() if zone}

    def worth(self, target: str | None) -> dict[str, float]:
        """Returns, by drafter address, the extra sessions up to which a drafter is still preferred for this target."""
        endpoint = self._targets.get(target or "")
        if endpoint is None:
            return {}
        near = dict.fromkeys(self._by_zone.get(endpoint.zone, ()), SAME_ZONE_WORTH)
        return near | dict.fromkeys(self._by_node.get(endpoint.node, ()), SAME_NODE_WORTH)


KEY_BYTES = 32  # length of the page hashes' key, which each router draws
FULL_PAUSE_S = 1.0  # pause before a target that reported to be full is tried again


class TargetChoice:
    """Chooses targets for one router; tracks session placement and each target's cached prefixes."""

    def __init__(self, targets: Peers, options: PrefixOptions) -> None:
        self.routed: Counter[str] = Counter()  # by reason: `prefix` if the target has part of the text, else `load`
        self._targets = targets
        self._prefixes = PrefixAffinity(secrets.token_bytes(KEY_BYTES), options)
        self._prompts: dict[str, Sequence[bytes]] = {}  # page keys of prompts, by session
        self._full_until: dict[str, float] = {}  # by address of a target that reported to be full

    def choose(self, session: Session, now: float) -> str | None:
        """Returns a target that accepts sessions now, or None.

        Returns one on which the session failed only as a last resort.
        """
        worth = self._prefixes.worth(self._prompt(session))
        return self._targets.choose(lambda target: self._has_room(target, now), session.failed_targets, worth)

    def are_full(self, now: float) -> bool:
        """Returns True if there are targets and each has just reported that it is full."""
        return bool(self._targets) and self._targets.choose(lambda target: self._has_room(target, now)) is None

    def on_refusal(self, target: str, now: float) -> None:
        """Records that a target reported that it is full."""
        self._full_until[target] = now + FULL_PAUSE_S

    def on_move(self, session: Session, left: str | None) -> None:
        """Records a session's move: its new target will cache the prompt, `left` has cached all committed tokens."""
        if left is not None and left in self._targets:
            self._prefixes.record(left, self._keys(session, session.tokens))
        if session.target is not None:
            prompt = self._prompt(session)
            self.routed["prefix" if session.target in self._prefixes.matches(prompt) else "load"] += 1
            self._prefixes.record(session.target, prompt)

    def forget(self, session: Session) -> None:
        """Drops a session that is over."""
        self._prompts.pop(session.generation.session, None)

    def on_target_gone(self, target: str) -> None:
        """Drops the record of a target whose cache is lost."""
        self._prefixes.forget(target)

    def _has_room(self, target: str, now: float) -> bool:
        return self._full_until.get(target, 0.0) <= now

    def _keys(self, session: Session, tokens: Sequence[int]) -> list[bytes]:
        return self._prefixes.keys(tokens, session.generation.cache_salt.encode())

    def _prompt(self, session: Session) -> Sequence[bytes]:
        name = session.generation.session
        if name not in self._prompts:
            self._prompts[name] = self._keys(session, session.generation.prompt)
        return self._prompts[name]


log = logging.getLogger(__name__)

DEFAULT_PREFIX_OPTIONS = PrefixOptions()
GONE_MESSAGE = "%s %s; %d sessions continue elsewhere or without it"
PLANNED = "planned"  # reasons for a handover: the peer announced that it leaves, or was lost
LOST = "lost"


@dataclass(eq=False)
class Assignment:
    """A session's peers and placement, from its arrival to its end."""

    session: Session
    seeking_since: float  # time of its arrival or of the loss of its target
    counted_target: str | None = None  # peers whose session counts include it
    counted_drafter: str | None = None
    was_replaced: bool = False  # whether it left a drafter whose blocks had become bad
    served_by: frozenset[str] = frozenset()  # all targets that it was ever assigned to

    @property
    def name(self) -> str:
        return self.session.generation.session


F = TypeVar("F", bound=Assignment)


@dataclass(slots=True)
class Ready(Generic[F]):
    """Work for the caller: deliver events to clients, then send messages."""

    events: list[tuple[F, Event]] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)


class SessionRouter(Generic[F]):
    """Gives every session a target and a drafter, and replacements when they fail.

    The caller keeps `targets` and `drafters` current: the replicas that accept sessions.
    """

    def __init__(self, router: str, target_wait_s: float, prefixes: PrefixOptions = DEFAULT_PREFIX_OPTIONS) -> None:
        self.targets = Peers(router)
        self.drafters = Peers(router)
        self.remedies = RecoveryLog()  # recovery from drafters whose blocks became bad
        self.locality = Locality()
        self._choice = TargetChoice(self.targets, prefixes)
        self.routed = self._choice.routed  # session counts, by why the target was chosen
        self.handovers: Counter[tuple[str, str]] = Counter()  # counts of moved sessions, by the pool left and reason
        self._target_wait_s = target_wait_s
        self._ready: Ready[F] = Ready()  # collected by the call under way
        self._assignments: dict[str, F] = {}  # all sessions, by name
        self._waiting: dict[str, F] = {}  # sessions that may lack a target or a drafter
        self.breakers = CircuitBreakers()  # one breaker per drafter
        self._watch = DrafterWatch(self.breakers)
        self.given_up = self._watch.given_up  # times that a drafter was given up as silent

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
        """Returns True if there are targets and each has just reported that it is full; a new session would wait."""
        return self._choice.are_full(now)

    # ------------------------------------------------------------ sessions

    def add(self, assignment: F, now: float) -> Ready[F]:
        """Adds a session and places it."""
        self._assignments[assignment.name] = assignment
        self._place([assignment], now)
        return self._take_ready()

    def cancel(self, assignment: F) -> Ready[F]:
        """Ends a session that is no longer wanted or is over."""
        self._carry_out(assignment, assignment.session.cancel())
        self.forget(assignment)
        return self._take_ready()

    def forget(self, assignment: F) -> None:
        """Drops a session that is over and closed at its peers."""
        self._assignments.pop(assignment.name, None)
        self._waiting.pop(assignment.name, None)
        self._watch.forget(assignment.name)
        self._choice.forget(assignment.session)

    def tick(self, now: float) -> Ready[F]:
        """Leaves silent and bad drafters, places waiting sessions, and fails those without a target for too long."""
        self._leave_silent(now)
        self._handle_complaints(now)
        for peer in [*self.targets.leaving]:
            self._move_off(peer, now)
        self._place(list(self._waiting.values()), now)
        for assignment in list(self._waiting.values()):
            waited = now - assignment.seeking_since
            if assignment.session.phase is Phase.SEEKING and waited > self._target_wait_s:
                self._carry_out(assignment, assignment.session.fail(_no_target(bool(self.targets), waited)))
        return self._take_ready()

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, message: Message, now: float) -> Ready[F]:
        """Handles a message from a target's or a drafter's address."""
        if isinstance(message, Leaving):
            self._leaves(peer, now)
        elif assignment := self._assignments.get(getattr(message, "session", "")):
            self._on_message(assignment, peer, message, now)
        return self._take_ready()

    def _on_message(self, assignment: F, peer: str, message: Message, now: float) -> None:
        if isinstance(message, Refusal):
            self._note_refusal(peer, assignment, message, now)
        elif isinstance(message, Verdict):
            self._watch.on_verdict(assignment.session, message)
        drafter = assignment.session.drafter
        commands = assignment.session.receive(peer, message)
        if drafter is not None and any(isinstance(command, Ended) for command in commands):
            self._watch.ended(assignment.session, drafter)
        self._carry_out(assignment, commands)

    def unreadable(self, target: str, session: str, attempt: int, now: float) -> Ready[F]:
        """Handles a malformed message from a target about a session: moves the session to another target."""
        assignment = self._assignments.get(session)
        if assignment is not None and assignment.session.target == target:
            assignment.seeking_since = now
            self._carry_out(assignment, assignment.session.on_target_unreadable(target, attempt))
            self._place([assignment], now)
        return self._take_ready()

    def gone(self, peer: str, now: float) -> Ready[F]:
        """Handles the broken stream of a target or drafter.

        A peer that announced that it leaves is not counted as lost.
        """
        is_planned = peer in self.targets.leaving
        self.targets.gone(peer)
        self.drafters.gone(peer)
        self.breakers.forget(peer)
        self._choice.on_target_gone(peer)
        lost = [assignment for assignment in self if peer in (assignment.session.target, assignment.session.drafter)]
        how = "has left" if is_planned else "is lost"
        log.log(logging.INFO if is_planned else logging.WARNING, GONE_MESSAGE, peer, how, len(lost))
        for assignment in lost:
            session = assignment.session
            if session.target == peer:
                assignment.seeking_since = now
                self.handovers["target", PLANNED if is_planned else LOST] += 1
                self._carry_out(assignment, session.on_target_gone(peer, is_planned))
            else:
                self.handovers["drafter", PLANNED if is_planned else LOST] += 1
                self._carry_out(assignment, session.on_drafter_gone(peer))
        self._place(lost, now)
        return self._take_ready()

    def live_at(self, peer: str) -> tuple[LiveSession, ...]:
        """Returns the sessions that the target or drafter should still hold."""
        sessions = [assignment.session for assignment in self._assignments.values()]
        return tuple(
            LiveSession(session.generation.session, session.attempt)
            for session in sessions
            if peer in (session.target, session.drafter)
        )

    # ------------------------------------------------------------ helpers

    def _take_ready(self) -> Ready[F]:
        ready = self._ready
        self._ready = Ready()
        return ready

    def _carry_out(self, assignment: F, commands: list[Command]) -> None:
        """Collects a session's messages and events, and updates the session counts of its peers."""
        session = assignment.session
        if assignment.counted_target != session.target:
            self._choice.on_move(session, assignment.counted_target)
            self.targets.moved(assignment.counted_target, session.target)
            assignment.counted_target = session.target
            assignment.served_by |= {session.target} if session.target else set()
        if assignment.counted_drafter != session.drafter:
            self.drafters.moved(assignment.counted_drafter, session.drafter)
            assignment.counted_drafter = session.drafter
        for command in commands:
            if isinstance(command, ToTarget | ToDrafter):
                self._ready.sends.append((command.address, command.message))
            else:
                self._ready.events.append((assignment, command))

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
            self._choice.on_refusal(peer, now)
        if peer in self.targets.leaving and peer == assignment.session.target:
            assignment.seeking_since = now
            self.handovers["target", PLANNED] += 1

    def _place(self, assignments: Iterable[F], now: float) -> None:
        """Gives sessions the targets and drafters that they lack, if any accepts them."""
        for assignment in assignments:
            session = assignment.session
            if session.phase is Phase.SEEKING and (target := self._choice.choose(session, now)):
                self._carry_out(assignment, session.assign_target(target))
            if session.wants_drafter and (drafter := self._choose_drafter(session, now)):
                self._assign_drafter(assignment, drafter, now)
            if session.phase is Phase.SEEKING or session.wants_drafter:
                self._waiting[assignment.name] = assignment
            else:
                self._waiting.pop(assignment.name, None)

    def _choose_drafter(self, session: Session, now: float, avoid: str | None = None) -> str | None:
        """Chooses a drafter by load and by distance from the session's target."""
        worth = self.locality.worth(session.target)
        return self.drafters.choose(lambda one: one != avoid and self.breakers.takes(one, now), worth=worth)

    def _assign_drafter(self, assignment: F, drafter: str, now: float) -> None:
        self._carry_out(assignment, assignment.session.assign_drafter(drafter))
        self.breakers.placed(drafter, assignment.name, now)

    def _leave_silent(self, now: float) -> None:
        """Processes drafters' answers since the last tick; moves the sessions of drafters that were silent too long."""
        for drafter in self._watch.silent(now):
            log.warning("drafter %s is silent; its sessions go to others", drafter)
            self._move_off(drafter, now)

    def _handle_complaints(self, now: float) -> None:
        """Takes the next remedy for each session whose drafter's blocks became bad, and gives up bad drafters."""
        for complaint in self._watch.take_complaints():
            assignment = self._assignments.get(complaint.session)
            if assignment is not None and assignment.session.drafter == complaint.drafter:
                self._remedy(assignment, complaint, now)

    def _remedy(self, assignment: F, complaint: Complaint, now: float) -> None:
        left = complaint.drafter
        other = self._choose_drafter(assignment.session, now, avoid=left)
        remedy = next_remedy(complaint.collapse, assignment.was_replaced, other is not None)
        self.remedies.record(complaint, remedy)
        if remedy is RecoveryStep.RESYNCED:
            return  # the target has sent the drafter a Resync
        assignment.was_replaced = True
        assignment.session.drafts = remedy is not RecoveryStep.NON_SPECULATIVE
        self._carry_out(assignment, assignment.session.leave_drafter())
        if other is not None and assignment.session.wants_drafter:
            self._assign_drafter(assignment, other, now)
        if self.breakers.collapsed(left, now):
            self.remedies.given_up(left)
            self._move_off(left, now)

    def _leaves(self, peer: str, now: float) -> None:
        """Handles a peer's announcement that it ends soon, which counts as no failure."""
        self.targets.leaves(peer)
        self.drafters.leaves(peer)
        self._move_off(peer, now)

    def _move_off(self, address: str, now: float) -> None:
        """Moves all sessions off a peer that leaves or was given up; those without an alternative stay."""
        is_planned = address in self.targets.leaving
        for assignment in self:
            session = assignment.session
            if session.target == address and self._choice.choose(session, now):
                self.handovers["target", PLANNED] += 1
                self._carry_out(assignment, session.leave_target())
            elif session.drafter == address and self._choose_drafter(session, now):
                self.handovers["drafter", PLANNED] += is_planned
                self._carry_out(assignment, session.leave_drafter())
            else:
                continue
            self._place([assignment], now)


def _no_target(are_known: bool, waited: float) -> SlipstreamError:
    if are_known:
        return CapacityError(f"every target replica has been full for {waited:.0f} s; try again later")
    return TargetLostError(f"no target replica could be reached for {waited:.0f} s")
