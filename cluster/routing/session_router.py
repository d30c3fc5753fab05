"""Session router: assigns a target and a drafter to each session, and replaces failed ones.

The router and the simulator both use `SessionRouter`. Callers pass in the time, then deliver the returned `Ready`
events and messages. A router ranks replicas by its own records:

* `Peers` ranks the replicas of one pool by the number of the router's sessions on each;
* `PrefixAffinity` records the cached prefixes of each target. The target of a conversation's previous request needs the
  shortest prefill for the next one;
* `Locality` prefers drafters on the target's node or in its zone.

Cached tokens and proximity count as extra sessions that a preferred replica may hold. Routers need not agree, because a
wrong record costs only a prefill. Page hashes are keyed, so clients cannot construct colliding prompts. Each hash also
covers all earlier pages.
"""

import logging
import secrets
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from types import MappingProxyType
from typing import Generic, TypeVar

from cluster.envelope import Send
from cluster.errors import CapacityError, SlipstreamError, TargetLostError
from cluster.page_allocator import page_hash
from cluster.routing.drafter_health import DrafterWatch
from cluster.routing.ledger import Command, CommittedTokens, Event, Phase, Session, ToDrafter, ToTarget
from cluster.routing.membership import Endpoint
from cluster.speculation.circuit_breaker import CircuitBreakers
from protos.messages import Leaving, LiveSession, Message, Refusal, RefusalReason, Verdict

MAX_HASHED_PAGES = 4096  # maximum number of hashed pages per text; its beginning suffices
TOKENS_PER_SESSION = 128  # cached tokens equivalent to one session of load


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """Options for the record of cached prefixes."""

    page_size: int = 16  # tokens per page of the targets' caches
    max_extra_sessions: float = 4.0  # maximum number of extra sessions for cached prefixes
    pages_per_target: int = 1 << 15  # number of most recent pages recorded per target


def page_keys(key: bytes, tokens: Sequence[int], page_size: int, salt: bytes = b"") -> list[bytes]:
    """Returns one key per whole page that a target can share.

    Excludes the last token, because a target always computes it. Targets share pages only between sessions with the
    same salt.
    """
    keys: list[bytes] = []
    parent = salt
    for start in range(0, min(len(tokens) - 1, MAX_HASHED_PAGES * page_size) - page_size + 1, page_size):
        parent = page_hash(key, parent, tokens[start : start + page_size])
        keys.append(parent)
    return keys


class PrefixAffinity:
    """A router's record of each target's cached prefixes."""

    def __init__(self, key: bytes, options: PrefixOptions) -> None:
        self._key = key
        self._options = options
        self._pages: dict[str, OrderedDict[bytes, None]] = {}  # by target, least recently used first

    def keys(self, tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
        """Returns the page keys of a text, as input for the other methods."""
        return page_keys(self._key, tokens, self._options.page_size, salt)

    def matches(self, keys: Sequence[bytes]) -> dict[str, int]:
        """Returns, by target, the number of tokens that are likely to be cached.

        Omits targets without cached tokens.
        """
        matches = {}
        for target, pages in self._pages.items():
            count = next((index for index, key in enumerate(keys) if key not in pages), len(keys))
            if count:
                matches[target] = count * self._options.page_size
        return matches

    def worth(self, keys: Sequence[bytes]) -> dict[str, float]:
        """Returns, by target, the number of extra sessions that the cached prefix is worth.

        The target with the longest cached prefix gets up to `max_extra_sessions`. For other targets, the missing tokens
        are deducted, so that a common system prompt alone has little weight.
        """
        matches = self.matches(keys)
        best = max(matches.values(), default=0)
        most = min(best / TOKENS_PER_SESSION, self._options.max_extra_sessions)
        behind = {target: (best - tokens) / TOKENS_PER_SESSION for target, tokens in matches.items()}
        return {target: most - lacking for target, lacking in behind.items() if lacking < most}

    def record(self, target: str, keys: Sequence[bytes]) -> None:
        """Records that a target has, or will soon have, these pages."""
        pages = self._pages.setdefault(target, OrderedDict())
        for key in reversed(keys):  # the first page becomes the most recent, so texts are dropped from the end
            pages[key] = None
            pages.move_to_end(key)
        while len(pages) > self._options.pages_per_target:
            pages.popitem(last=False)

    def forget(self, target: str) -> None:
        """Drops the record of a lost target."""
        self._pages.pop(target, None)


NO_WORTH: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Candidate:
    """A connected replica with its rank."""

    address: str
    sessions: int  # number of this router's sessions on the replica
    tie_breaker: int = 0  # tie-breaker among equally loaded candidates
    worth: float = 0.0  # bonus for the session in question, in sessions

    @property
    def rank(self) -> tuple[float, int, str]:
        """Sort key; the candidate with the lowest rank gets the next session."""
        return self.sessions - self.worth, self.tie_breaker, self.address


def tie_breaker(router: str, address: str) -> int:
    """Returns a replica's tie-breaker, which differs between routers.

    A router knows only its own sessions. With ties broken by address, all routers would assign their first session to
    the same replica.
    """
    return int.from_bytes(blake2b(f"{router} {address}".encode(), digest_size=4).digest())


def choose(candidates: Iterable[Candidate], avoid: frozenset[str] = frozenset()) -> str | None:
    """Returns the least loaded candidate, with ties broken by `tie_breaker`; candidates in `avoid` are the last resort.

    Returns None if there are no candidates.
    """
    best = min(candidates, key=lambda c: (c.address in avoid, c.rank), default=None)
    return best.address if best else None


class Peers:
    """A router's record of one pool: the replicas that accept sessions, and the router's session count on each."""

    def __init__(self, router: str) -> None:
        # Replicas that announced a shutdown and accept no new sessions; contains those of both pools.
        self.leaving: set[str] = set()
        self._router = router
        self._sessions: Counter[str] = Counter()
        self._up: dict[str, Candidate] = {}  # replicas that accept sessions, by address
        self._ranked: list[tuple[float, int, str]] = []  # ranks of replicas in `_up`, lowest first

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
        self._up[address] = one = Candidate(address, self._sessions[address], tie_breaker(self._router, address))
        insort(self._ranked, one.rank)

    def down(self, address: str) -> None:
        """Marks a replica as not accepting sessions; it may keep existing sessions."""
        one = self._up.pop(address, None)
        if one is not None:
            del self._ranked[bisect_left(self._ranked, one.rank)]

    def leaves(self, address: str) -> None:
        """Records a replica's announcement of its shutdown."""
        self.down(address)
        self.leaving.add(address)

    def gone(self, address: str) -> None:
        """Records the loss of a replica; a later replica at the same address counts as new."""
        self.down(address)
        self.leaving.discard(address)

    def moved(self, old: str | None, new: str | None) -> None:
        """Updates the session counts after a move; None stands for no replica."""
        for address, change in ((old, -1), (new, 1)):
            if address is not None:
                self._sessions[address] += change
                if not self._sessions[address]:
                    del self._sessions[address]  # drop counters of lost replicas
                if address in self._up:
                    self.up(address)

    def choose(
        self,
        takes: Callable[[str], bool],
        avoid: frozenset[str] = frozenset(),
        worth: Mapping[str, float] = NO_WORTH,
    ) -> str | None:
        """Returns the replica with the smallest load minus `worth`, in sessions, among replicas accepted by `takes`."""
        return choose([*self._ranked_candidates(takes, avoid), *self._preferred_candidates(takes, worth)], avoid)

    def idle_replica(self, avoid: frozenset[str]) -> str | None:
        """Returns a replica without sessions of this router; replicas in `avoid` qualify only if no other replica is
        up.
        """
        others = [one for one in self._up.values() if one.address not in avoid] or list(self._up.values())
        return choose(one for one in others if not one.sessions)

    def _preferred_candidates(self, takes: Callable[[str], bool], worth: Mapping[str, float]) -> Iterator[Candidate]:
        for address, sessions in worth.items():
            if address in self._up and takes(address):
                yield replace(self._up[address], worth=sessions)

    def _ranked_candidates(self, takes: Callable[[str], bool], avoid: frozenset[str]) -> Iterator[Candidate]:
        """Yields candidates by rank, up to the first outside `avoid`, so that large pools are not scanned."""
        for _, _, address in self._ranked:
            if takes(address):
                yield self._up[address]
                if address not in avoid:
                    return


SAME_NODE_WORTH = 4.0  # bonus of a drafter on the target's node, in sessions
SAME_ZONE_WORTH = 2.0


class Locality:
    """Preference for drafters near a target, by node and zone."""

    def __init__(self) -> None:
        self._targets: dict[str, Endpoint] = {}  # targets, by address
        self._by_node: dict[str, list[str]] = {}  # drafter addresses, by node
        self._by_zone: dict[str, list[str]] = {}

    def follow(self, targets: Iterable[Endpoint], drafters: Iterable[Endpoint]) -> None:
        """Replaces the members of both pools; an empty node or zone is unknown."""
        by_node: defaultdict[str, list[str]] = defaultdict(list)
        by_zone: defaultdict[str, list[str]] = defaultdict(list)
        for drafter in drafters:
            by_node[drafter.node].append(drafter.address)
            by_zone[drafter.zone].append(drafter.address)
        self._targets = {target.address: target for target in targets}
        self._by_node = {node: addresses for node, addresses in by_node.items() if node}
        self._by_zone = {zone: addresses for zone, addresses in by_zone.items() if zone}

    def worth(self, target: str | None) -> dict[str, float]:
        """Returns, by drafter address, the bonus for proximity to this target, in sessions."""
        endpoint = self._targets.get(target or "")
        if endpoint is None:
            return {}
        near = dict.fromkeys(self._by_zone.get(endpoint.zone, ()), SAME_ZONE_WORTH)
        return near | dict.fromkeys(self._by_node.get(endpoint.node, ()), SAME_NODE_WORTH)


PAGE_KEY_BYTES = 32  # key length of page hashes; each router draws its own key
FULL_TARGET_PAUSE_S = 1.0  # pause before a full target is tried again


class TargetChoice:
    """Chooses targets for sessions; tracks cached prefixes and full targets."""

    def __init__(self, targets: Peers, options: PrefixOptions) -> None:
        self.routed: Counter[str] = Counter()  # counts by reason: `prefix` (part of the text is cached) or `load`
        self._targets = targets
        self._prefixes = PrefixAffinity(secrets.token_bytes(PAGE_KEY_BYTES), options)
        self._prompts: dict[str, Sequence[bytes]] = {}  # page keys of prompts, by session
        self._full_until: dict[str, float] = {}  # end of the pause, by address of a full target

    def choose(self, session: Session, now: float) -> str | None:
        """Returns a target that accepts sessions now, or None.

        Returns a target that this session already failed on only as a last resort.
        """
        worth = self._prefixes.worth(self._prompt(session))
        return self._targets.choose(lambda target: self._has_room(target, now), session.failed_targets, worth)

    def are_full(self, now: float) -> bool:
        """Returns True if targets exist and all of them have just reported to be full."""
        return bool(self._targets) and self._targets.choose(lambda target: self._has_room(target, now)) is None

    def on_refusal(self, target: str, now: float) -> None:
        """Records a target's report that it is full."""
        self._full_until[target] = now + FULL_TARGET_PAUSE_S

    def on_move(self, session: Session, previous: str | None) -> None:
        """Records a move: the previous target has cached all committed tokens, the new one will cache the prompt."""
        if previous is not None and previous in self._targets:
            self._prefixes.record(previous, self._keys(session, session.tokens))
        if session.target is not None:
            prompt = self._prompt(session)
            self.routed["prefix" if session.target in self._prefixes.matches(prompt) else "load"] += 1
            self._prefixes.record(session.target, prompt)

    def forget(self, session: Session) -> None:
        """Drops an ended session."""
        self._prompts.pop(session.generation.session, None)

    def on_target_gone(self, target: str) -> None:
        """Drops the records of a lost target."""
        self._prefixes.forget(target)
        self._full_until.pop(target, None)

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
GONE_MESSAGE = "%s %s; %d sessions continue on other replicas or without a drafter"
PLANNED = "planned"  # reasons for a handover: announced shutdown, or loss
LOST = "lost"


@dataclass(eq=False)
class Assignment:
    """A session with its placement, from arrival to end."""

    session: Session
    seeking_since: float  # time of arrival, or of the loss or move that made it need another target
    counted_target: str | None = None  # replicas whose session counts include this session
    counted_drafter: str | None = None
    served_by: frozenset[str] = frozenset()  # all targets assigned so far

    @property
    def name(self) -> str:
        return self.session.generation.session


F = TypeVar("F", bound=Assignment)


@dataclass(slots=True)
class Ready(Generic[F]):
    """Work for the caller: deliver the events to clients, then send the messages."""

    events: list[tuple[F, Event]] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)


class SessionRouter(Generic[F]):
    """Assigns a target and a drafter to every session, and replaces failed ones.

    The caller keeps `targets` and `drafters` up to date.
    """

    def __init__(self, router: str, target_wait_s: float, prefixes: PrefixOptions = DEFAULT_PREFIX_OPTIONS) -> None:
        self.targets = Peers(router)
        self.drafters = Peers(router)
        self.locality = Locality()
        self._choice = TargetChoice(self.targets, prefixes)
        self.routed = self._choice.routed  # session counts by reason for the target's choice
        self.handovers: Counter[tuple[str, str]] = Counter()  # counts of moved sessions by (pool, reason)
        self._target_wait_s = target_wait_s
        self._ready: Ready[F] = Ready()  # output of the current call
        self._assignments: dict[str, F] = {}  # all sessions, by name
        self._waiting: dict[str, F] = {}  # sessions that may need a target or drafter
        self.breakers = CircuitBreakers()  # circuit breakers of all drafters
        self._watch = DrafterWatch(self.breakers)
        self.recoveries = self._watch.recoveries  # counts of recoveries by (drafter, kind)

    def __len__(self) -> int:
        return len(self._assignments)

    def __contains__(self, session: str) -> bool:
        return session in self._assignments

    def __iter__(self) -> Iterator[F]:
        return iter(list(self._assignments.values()))

    @property
    def awaits_tick(self) -> bool:
        """True if `tick` has work to do."""
        return bool(self._waiting) or self._watch.has_failed

    def are_targets_full(self, now: float) -> bool:
        """Returns True if targets exist and all of them have just reported to be full; a new session would wait."""
        return self._choice.are_full(now)

    # ------------------------------------------------------------ sessions

    def add(self, assignment: F, now: float) -> Ready[F]:
        """Adds a session and assigns its peers, after the targets of sessions that have waited longer."""
        if self.targets and not self.are_targets_full(now):
            self._place([one for one in self._waiting.values() if one.session.phase is Phase.SEEKING], now)
        self._assignments[assignment.name] = assignment
        self._place([assignment], now)
        return self._take_ready()

    def cancel(self, assignment: F) -> Ready[F]:
        """Removes a session that has ended or is no longer wanted."""
        self._carry_out(assignment, assignment.session.cancel())
        self.forget(assignment)
        return self._take_ready()

    def forget(self, assignment: F) -> None:
        """Drops a session that has ended and is closed on its peers."""
        self._assignments.pop(assignment.name, None)
        self._waiting.pop(assignment.name, None)
        self._choice.forget(assignment.session)

    def tick(self, now: float) -> Ready[F]:
        """Replaces failed drafters, assigns waiting sessions, and fails sessions that have waited too long for a
        target.
        """
        for drafter in self._watch.take_failed():
            self._move_sessions_off(drafter, now)
        for peer in [*self.targets.leaving]:
            self._move_sessions_off(peer, now)
        self._place(list(self._waiting.values()), now)
        for assignment in list(self._waiting.values()):
            waited = now - assignment.seeking_since
            if assignment.session.phase is Phase.SEEKING and waited > self._target_wait_s:
                self._carry_out(assignment, assignment.session.fail(_no_target(bool(self.targets), waited)))
        return self._take_ready()

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, messages: Iterable[Message], now: float) -> Ready[F]:
        """Handles the messages of one frame from a target or drafter."""
        for message in messages:
            if isinstance(message, Leaving):
                self._leaves(peer, now)
            elif assignment := self._assignments.get(getattr(message, "session", "")):
                self._on_message(assignment, peer, message, now)
        return self._take_ready()

    def _on_message(self, assignment: F, peer: str, message: Message, now: float) -> None:
        session = assignment.session
        if isinstance(message, Verdict):
            if peer == session.target:
                self._watch.on_verdict(session, message, now)
            commands = session.on_verdict(peer, message)
            if len(commands) == 1 and isinstance(commands[0], CommittedTokens):  # as in most rounds
                self._ready.events.append((assignment, commands[0]))
                return
        else:
            if isinstance(message, Refusal):
                self._note_refusal(peer, assignment, message, now)
            commands = session.receive(peer, message)
        self._carry_out(assignment, commands)

    def unreadable(self, target: str, session: str, attempt: int, now: float) -> Ready[F]:
        """Handles a malformed message about a session: moves the session to another target."""
        assignment = self._assignments.get(session)
        if assignment is not None and assignment.session.target == target:
            assignment.seeking_since = now
            self._carry_out(assignment, assignment.session.on_target_unreadable(target, attempt))
            self._place([assignment], now)
        return self._take_ready()

    def gone(self, peer: str, now: float) -> Ready[F]:
        """Handles a broken stream of a target or drafter.

        A peer that announced its shutdown does not count as lost.
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
        """Returns the sessions assigned to a target or drafter."""
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
        """Collects a session's messages and events, and updates the session counts of replicas."""
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

        The session is assigned at the next tick, so that the same peer is not tried again at once.
        """
        self._waiting[assignment.name] = assignment
        if refusal.reason is not RefusalReason.OVERLOADED:
            return
        if peer in self.drafters or peer == assignment.session.drafter:
            self.breakers.refused(peer, now)
        else:
            self._choice.on_refusal(peer, now)
        if peer in self.targets.leaving and peer == assignment.session.target:
            assignment.seeking_since = now
            self.handovers["target", PLANNED] += 1

    def _place(self, assignments: Iterable[F], now: float) -> None:
        """Assigns missing targets and drafters to sessions, as far as replicas accept them."""
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

    def _choose_drafter(self, session: Session, now: float) -> str | None:
        """Chooses a drafter by load and proximity to the session's target.

        If the breakers of all drafters are open, returns one of these, because its target will detect its recovery.
        """
        worth = self.locality.worth(session.target)
        choose = partial(self.drafters.choose, worth=worth)
        return choose(lambda one: self.breakers.takes(one, now)) or choose(lambda one: self.breakers.has_room(one, now))

    def _assign_drafter(self, assignment: F, drafter: str, now: float) -> None:
        self._carry_out(assignment, assignment.session.assign_drafter(drafter))
        self.breakers.placed(drafter, assignment.name, now)

    def _leaves(self, peer: str, now: float) -> None:
        """Handles a peer's announcement of its shutdown, which does not count as a failure."""
        self.targets.leaves(peer)
        self.drafters.leaves(peer)
        self._move_sessions_off(peer, now)

    def _move_sessions_off(self, address: str, now: float) -> None:
        """Moves sessions off a peer that is leaving or was given up; sessions without an alternative stay."""
        is_planned = address in self.targets.leaving
        for assignment in self:
            session = assignment.session
            if session.target == address and self._choice.choose(session, now):
                assignment.seeking_since = now
                self.handovers["target", PLANNED] += 1
                self._carry_out(assignment, session.leave_target())
            elif session.drafter == address and self.drafters.choose(lambda one: self.breakers.takes(one, now)):
                self.handovers["drafter", PLANNED] += is_planned
                self._carry_out(assignment, session.leave_drafter())
            else:
                continue
            self._place([assignment], now)


def _no_target(are_known: bool, waited: float) -> SlipstreamError:
    if are_known:
        return CapacityError(f"every target replica was full for {waited:.0f} s; try again later")
    return TargetLostError(f"no target replica was reachable for {waited:.0f} s; check the target pool")
