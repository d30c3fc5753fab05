"""The target's book: which sessions it serves, which blocks wait, what the next step computes, what it decided.

The lock-step of `plan` and `apply` is the whole verification loop; between them an engine computes. A block is
verified only at exactly the length and hash it was drafted for. Knows nothing of torch, gRPC or a clock: times
are handed in.
"""

import math
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from cluster.pacing import Adaptive, Cost, Load, Pacing, Yield, out_of_step
from cluster.pages import PageBook, PageCopy
from cluster.steps import Outcome, Row, StepPlan
from cluster.waiting_room import RoomLimits, WaitingRoom
from protos.messages import (
    Attach,
    Block,
    Close,
    Finish,
    LiveSession,
    Message,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    SparseProbs,
    Verdict,
)
from protos.prefix import Prefix

Send = tuple[str, Message]
"""A message and the stream it goes to."""


def stream_name(peer_id: str, count: int) -> str:
    """Name of a peer's stream: a peer that comes back has a new one."""
    return f"{peer_id}#{count}"


def peer_of(stream: str) -> str:
    """The peer whose stream this is."""
    return stream.rpartition("#")[0]


@dataclass(frozen=True, slots=True)
class VerifierLimits:
    """Bounds of one target replica."""

    vocabulary: int  # token ids are below this
    max_context: int
    max_sessions: int  # in the cache at once; further ones queue
    max_step_tokens: int
    pages: int = 4096  # of the cache
    page_size: int = 16  # positions
    max_queued: int = 1024
    room: RoomLimits = RoomLimits()  # for blocks that wait for a prefix or for a session


@dataclass(eq=False)
class _Session:
    open: Open
    router: str
    prefix: Prefix
    cached_len: int = 0  # tokens in the engine's cache that stand
    in_engine: bool = False  # whether the engine has heard of it
    drafter: str | None = None
    asked: int = 0  # longest block that the drafter was asked for
    waiting_since: float = 0.0  # when the session could last have gone into a step, had its block been there
    block_since: float = 0.0  # when the block that is ready came
    decided_at: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=8))  # latest lengths, and when
    blocks: Yield = field(default_factory=Yield)
    room: OrderedDict[tuple[int, int], Block] = field(default_factory=OrderedDict)  # by (base_len, prefix_hash)

    @property
    def unfed(self) -> int:
        return len(self.prefix) - self.cached_len

    def ready_block(self) -> Block | None:
        return self.room.get((len(self.prefix), self.prefix.hash))


def settle(
    tokens: Sequence[int], accepted: int, base_len: int, max_len: int, stop_ids: Iterable[int]
) -> tuple[tuple[int, ...], int, Finish]:
    """Cuts decided tokens where the session ends: after the first stop id, or at the length limit.

    Returns the tokens that stand, how many of them were drafted, and whether the session ended.
    """
    stops = frozenset(stop_ids)
    for index, token in enumerate(tokens):
        count = index + 1
        if token in stops:
            return tuple(tokens[:count]), min(accepted, count), Finish.STOP
        if base_len + count >= max_len:
            return tuple(tokens[:count]), min(accepted, count), Finish.LENGTH
    return tuple(tokens), accepted, Finish.NONE


class Verifier:
    """All sessions of one target replica."""

    def __init__(self, limits: VerifierLimits, pacing: Pacing | None = None, step_cost: Cost | None = None) -> None:
        self._limits = limits
        self._pacing = pacing or Adaptive()
        self._sessions: dict[str, _Session] = {}  # admitted: they have a place in the cache
        self._queue: dict[str, _Session] = {}  # opened, not admitted yet, in order
        self._opens: list[Open] = []  # for the engine, with the next plan
        self._closes: list[str] = []
        self._in_step: list[tuple[_Session, Row]] = []
        self._turn: deque[str] = deque()  # admitted sessions, longest unserved first
        self._load = Load(step_cost or Cost())
        self._busy_until = 0.0  # end of the latest step after which there was more to do
        self.rebased = 0  # blocks that came late and were verified from where the target had got to
        self.dropped: Counter[str] = Counter()  # blocks that were not verified, by cause
        self.desyncs = 0  # drafters that were told to begin a session anew because their blocks had become bad
        self.preempted = 0  # times that a session lost its pages to older ones
        self._unopened = WaitingRoom(limits.room, self.dropped)
        self._pages = PageBook(limits.pages, limits.page_size, secrets.token_bytes(16))

    # ------------------------------------------------------------ what a router says

    def hello(self, router: str, live: Iterable[LiveSession], now: float) -> None:
        """A router's stream is new: of what its older streams left, only the sessions that it lists stay."""
        wanted = {(item.session, item.attempt) for item in live}
        for session in [*self._sessions.values(), *self._queue.values()]:
            if peer_of(session.router) != peer_of(router):
                continue
            session.router = router
            if (session.open.session, session.open.attempt) not in wanted:
                self._forget(session.open.session)
        self._admit(now)

    def open(self, router: str, request: Open, now: float) -> list[Send]:
        """Serves a session from its ledger; an open one is replaced unless the request is older."""
        if refusal := self._refuse(request):
            return [(router, refusal)]
        known = self._find(request.session)
        if known is not None and known.open.attempt >= request.attempt:
            return []
        self._forget(request.session)
        session = _Session(request, router, Prefix(request.hash_key, request.tokens), waiting_since=now)
        self._queue[request.session] = session
        self._admit(now)
        waiting = self._unopened.take(request.session)
        if waiting is None:
            return []
        for block in waiting.blocks:
            self.block(waiting.drafter, block, now)
        return self.attach(waiting.drafter, waiting.attach, now) if waiting.attach else []

    def close(self, router: str, close: Close, now: float) -> None:
        """Forgets a session; an unknown one, another router's, or a newer attempt is left alone."""
        known = self._find(close.session)
        if known is not None and known.router == router and known.open.attempt <= close.attempt:
            self._forget(close.session)
            self._admit(now)

    def router_gone(self, router: str, now: float) -> None:
        """The stream broke: its sessions are nobody's."""
        for session in self._of_router(router):
            self._forget(session.open.session)
        self._admit(now)

    # ------------------------------------------------------------ what a drafter says

    def attach(self, drafter: str, attach: Attach, now: float) -> list[Send]:
        """Sends the session's verdicts to this drafter from now on, and first what it missed."""
        session = self._find(attach.session)
        if session is None:
            self._unopened.attach(drafter, attach, now)
            return []
        if not session.prefix.matches(attach.have_len, attach.have_hash):
            return [(drafter, Resync(attach.session, len(session.prefix), session.prefix.hash))]
        session.drafter = drafter
        missed = tuple(session.prefix.tokens[attach.have_len :])
        if not missed:
            return []
        catch_up = Verdict(
            attach.session,
            session.open.attempt,
            attach.have_len,
            attach.have_hash,
            missed,
            accepted=0,
            drafted=0,
            draft_tokens=session.asked,
        )
        return [(drafter, catch_up)]

    def block(self, drafter: str, block: Block, now: float) -> None:
        """Lets a block wait for its prefix; what can never be verified is dropped and counted."""
        if cause := self._unfit(block):
            self.dropped[cause] += 1
            return
        session = self._find(block.session)
        if session is None:
            self._unopened.block(drafter, block, now)
            return
        self._place(session, block, now)

    def drafter_gone(self, drafter: str) -> None:
        """The stream broke: its sessions go on plainly; blocks that arrived stay good."""
        for session in [*self._sessions.values(), *self._queue.values()]:
            if session.drafter == drafter:
                session.drafter = None
        self._unopened.drafter_gone(drafter)

    # ------------------------------------------------------------ the step

    def plan(self, now: float) -> StepPlan | None:
        """What to compute now, or None when nothing is due (see `next_due`)."""
        assert not self._in_step, "a step is planned while another is under way"
        self._unopened.expire(now)
        if self._start(now) <= now:
            copies = self._fill_step(now)
        else:
            copies = []
        if not (self._in_step or self._opens or self._closes):
            return None
        rows = tuple(row for _, row in self._in_step)
        plan = StepPlan(tuple(self._closes), tuple(self._opens), rows, tuple(copies))
        self._closes, self._opens = [], []
        return plan

    def next_due(self) -> float | None:
        """When a step or an expiry will be due if nothing else happens; None while nothing could be."""
        dues = [self._start(now=-math.inf)] if self._sessions else []
        expiry = self._unopened.next_expiry()
        return min(dues if expiry is None else [*dues, expiry], default=None)

    def apply(self, outcomes: Sequence[Outcome], seconds: float, now: float) -> list[Send]:
        """Turns what the engine computed into verdicts, for the router and for the drafter."""
        decided = {outcome.session: outcome for outcome in outcomes}
        sends: list[Send] = []
        for session, row in self._in_step:
            if self._sessions.get(row.session) is not session:
                continue  # closed or replaced while the engine computed
            session.cached_len = row.start + len(row.tokens)
            session.waiting_since = now
            # Before the verdict: a session may end with it, and what it was fed stays useful.
            self._pages.publish(row.session, session.prefix.tokens, min(session.cached_len, len(session.prefix)))
            if row.decide:
                sends += self._decide(session, row, decided[row.session], now)
            if self._sessions.get(row.session) is session:
                self._pages.truncate(row.session, session.cached_len)
        self._measure(outcomes, seconds, now)
        self._in_step = []
        self._admit(now)
        if self.is_idle:
            self._pages.check()
        return sends

    # ------------------------------------------------------------ inspection

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is held: no session, no waiting block, nothing due to the engine."""
        held = (self._sessions, self._queue, self._unopened, self._opens, self._closes, self._in_step, self._turn)
        return not any(held)

    def load(self) -> dict[str, float]:
        """Sessions in the cache and in the queue, for autoscaling."""
        return {"sessions": float(len(self._sessions)), "queued": float(len(self._queue))}

    @property
    def step_cost(self) -> Cost:
        """What steps cost here, by measurement."""
        return self._load.step

    # ------------------------------------------------------------ helpers

    def _find(self, name: str) -> _Session | None:
        return self._sessions.get(name) or self._queue.get(name)

    def _of_router(self, router: str) -> list[_Session]:
        return [s for s in [*self._sessions.values(), *self._queue.values()] if s.router == router]

    def _refuse(self, request: Open) -> Refusal | None:
        limits = self._limits
        reason, why = RefusalReason.INVALID, ""
        if max(request.tokens) >= limits.vocabulary:
            why = f"token id {max(request.tokens)} is outside the vocabulary of {limits.vocabulary}"
        elif request.max_len > limits.max_context:
            why = f"max_len is {request.max_len}, the context holds {limits.max_context} tokens"
        elif self._pages.pages_for(request.max_len) > limits.pages:
            why = f"max_len is {request.max_len}, the cache holds {limits.pages * limits.page_size} tokens"
        elif len(self._queue) >= limits.max_queued:
            reason, why = RefusalReason.OVERLOADED, f"{len(self._queue)} sessions are queued already"
        return Refusal(request.session, request.attempt, reason, why) if why else None

    def _unfit(self, block: Block) -> str | None:
        ids = list(block.tokens)
        if block.draft_probs is not None:
            ids += [token for row in block.draft_probs.token_ids for token in row]
        if max(ids) >= self._limits.vocabulary:
            return "out_of_vocabulary"
        if block.base_len + len(block.tokens) > self._limits.max_context:
            return "beyond_context"
        return None

    def _place(self, session: _Session, block: Block, now: float) -> None:
        self._note_arrival(session, block, now)
        if block.base_len < len(session.prefix):
            late, block = block, self._rebased(session, block) or block
            if block is late:
                self.dropped["stale"] += 1
                return
        address = (block.base_len, block.prefix_hash)
        # A verdict brings one token more than its block: what would leave no room for it needs pages that nobody has.
        beyond_end = block.base_len + len(block.tokens) >= session.open.max_len
        if len(block.tokens) > session.open.max_draft_tokens or beyond_end:
            self.dropped["too_long"] += 1
        elif address in session.room:
            self.dropped["duplicate"] += 1
        elif len(session.room) >= self._limits.room.blocks:
            self.dropped["room_full"] += 1
        elif block.base_len == len(session.prefix) and block.prefix_hash != session.prefix.hash:
            self.dropped["other_prefix"] += 1
        else:
            session.room[address], session.block_since = block, now

    def _rebased(self, session: _Session, block: Block) -> Block | None:
        """What a block that comes too late is still good for: the target decided its first tokens just so.

        Exact under ratio too: given the tokens decided, the rest follows the draft_probs sent, and neither whether
        nor at what length it is used depends on the rest.
        """
        gap = len(session.prefix) - block.base_len
        decided = tuple(session.prefix.tokens[block.base_len :])
        agrees = session.prefix.matches(block.base_len, block.prefix_hash) and block.tokens[:gap] == decided
        if gap >= len(block.tokens) or not agrees:
            return None
        self.rebased += 1
        probs = block.draft_probs
        rest = SparseProbs(probs.token_ids[gap:], probs.weights[gap:]) if probs is not None else None
        return Block(block.session, len(session.prefix), session.prefix.hash, block.tokens[gap:], rest)

    def _note_arrival(self, session: _Session, block: Block, now: float) -> None:
        """How long after the verdict it came; a block drafted ahead counts once its guess has proved right."""
        decided = next((at for length, at in session.decided_at if length == block.base_len), None)
        if decided is not None and session.prefix.matches(block.base_len, block.prefix_hash):
            delay_s = now - decided
            session.blocks = session.blocks.after_arrival(delay_s)
            self._load = replace(self._load, draft=self._load.draft.after(len(block.tokens), delay_s))

    def _forget(self, name: str) -> None:
        self._unopened.ended(name)
        session = self._find(name)
        if session is None:
            return
        if self._queue.pop(name, None) is None:
            self._leave(name)
        pending = [request for request in self._opens if request.session != name]
        if session.in_engine and len(pending) == len(self._opens):
            self._closes.append(name)
        self._opens = pending

    def _leave(self, name: str) -> None:
        """Takes a session out of the cache."""
        del self._sessions[name]
        self._turn.remove(name)
        self._pages.close(name)

    def _admit(self, now: float) -> None:
        """Lets queued sessions into the cache, first come first served, as long as there is room."""
        while self._queue and len(self._sessions) < self._limits.max_sessions:
            name, session = next(iter(self._queue.items()))
            session.cached_len = self._pages.open(name, session.prefix.tokens)
            # A page for each running session to grow into keeps the newcomer from being preempted at once.
            owed = sum(max(1, self._missing(running)) for running in self._sessions.values())
            if self._sessions and self._missing(session) + owed > self._pages.available:
                self._pages.close(name)
                return
            del self._queue[name]
            session.waiting_since = now
            self._sessions[name] = session
            self._turn.append(name)
            self._ask(session)
            if not session.in_engine:
                session.in_engine = True
                self._opens.append(session.open)

    def _missing(self, session: _Session) -> int:
        """Pages that a session has yet to take for the tokens that it has, and one more."""
        return self._pages.pages_for(len(session.prefix) + 1) - len(self._pages.table(session.open.session))

    def _reserve(self, session: _Session, row: Row) -> list[PageCopy] | None:
        """Pages for a row, at the cost of younger sessions when there are too few; None when itself is the youngest.

        None, too, when all that are younger are in the step already: in the next one it comes before them.
        """
        name = session.open.session
        end = row.start + len(row.tokens)
        while (copies := self._pages.reserve(name, row.start, end)) is None:
            in_step = {planned.open.session for planned, _ in self._in_step}
            youngest = next(n for n in reversed(self._sessions) if n not in in_step)
            if youngest != name or name == next(reversed(self._sessions)):
                self._preempt(youngest)
            if youngest == name:
                return None
        return copies

    def _preempt(self, name: str) -> None:
        """Back to the head of the queue; what is lost of its cache is computed again from its tokens."""
        self.preempted += 1
        session = self._sessions[name]
        self._leave(name)
        self._queue = {name: session, **self._queue}

    def _start(self, now: float) -> float:
        """When the next step begins, if no further block comes.

        Sessions that are ready wait a little for others whose blocks are expected; `now` is when this is asked.
        """
        dues = {session: self._due(session) for session in self._sessions.values()}
        first = min(dues.values(), default=math.inf)
        hold_until = first + self._pacing.hold_s(self._load)
        late = [s for s, due in dues.items() if due > now and due > first and self._is_awaited(s, hold_until)]
        return min(hold_until, max(dues[s] for s in late)) if late else first

    def _is_awaited(self, session: _Session, until: float) -> bool:
        """Whether the others wait for a session's block: not if it is late as a rule, nor for one on trial."""
        return session.waiting_since + session.blocks.delay_s <= until and not session.blocks.is_on_trial

    def _fill_step(self, now: float) -> list[PageCopy]:
        """Takes the sessions that are due into the step, longest unserved first, up to the token budget."""
        budget = self._limits.max_step_tokens
        copies: list[PageCopy] = []
        for name in list(self._turn):
            session = self._sessions.get(name)  # None: preempted by one before it
            if session is None or budget <= 0 or self._due(session) > now:
                continue
            row = self._row(session, budget)
            reserved = self._reserve(session, row)
            if reserved is None:
                continue
            copies += reserved
            budget -= len(row.tokens)
            self._in_step.append((session, replace(row, pages=self._pages.table(name))))
            self._turn.remove(name)
            self._turn.append(name)
        return copies

    def _due(self, session: _Session) -> float:
        """When the session goes into a step: at once, unless waiting for its block may pay."""
        if session.unfed > 1 or session.drafter is None or session.asked == 0:
            return session.waiting_since
        if len(session.prefix) + 1 >= session.open.max_len:
            return session.waiting_since
        if session.ready_block() is not None:
            return max(session.waiting_since, session.block_since)
        return session.waiting_since + self._pacing.patience_s(session.blocks, session.asked, self._load)

    def _measure(self, outcomes: Sequence[Outcome], seconds: float, now: float) -> None:
        """What the step cost and brought; steps that fed prompts say nothing of the rate."""
        if not self._in_step:
            return
        tokens = sum(len(row.tokens) for _, row in self._in_step)
        load = replace(self._load, step=self._load.step.after(tokens, seconds))
        if all(row.decide and len(row.tokens) == row.draft_len + 1 for _, row in self._in_step):
            committed = sum(outcome.accepted + 1 for outcome in outcomes)
            plain_s = load.step.base_s + load.step.token_s * len(outcomes)  # for a token each
            took_s = now - max(self._busy_until, now - 2 * seconds)  # with the wait before it, if it was one
            gain = committed / len(outcomes) * plain_s / max(1e-6, took_s)
            load = replace(load, gain=0.95 * load.gain + 0.05 * gain)
        self._load, self._busy_until = load, now

    def _row(self, session: _Session, budget: int) -> Row:
        tail = tuple(session.prefix.tokens[session.cached_len :])
        if len(tail) > budget:
            return Row(session.open.session, tail[:budget], session.cached_len, decide=False, pages=())
        block = session.ready_block() if session.asked else None
        if block is None or len(tail) + len(block.tokens) > max(budget, len(tail)):
            return Row(session.open.session, tail, session.cached_len, decide=True, pages=())
        # By now fewer tokens may pay than when it was drafted; under ratio that may not depend on which they are.
        block = block.first(session.asked)
        draft_len, tokens = len(block.tokens), tail + block.tokens
        return Row(session.open.session, tokens, session.cached_len, True, (), draft_len, block.draft_probs)

    def _decide(self, session: _Session, row: Row, outcome: Outcome, now: float) -> list[Send]:
        request, base_len, base_hash = session.open, len(session.prefix), session.prefix.hash
        drafted = row.tokens[len(row.tokens) - row.draft_len :]
        raw = (*drafted[: outcome.accepted], outcome.next_token)
        tokens, accepted, finish = settle(raw, outcome.accepted, base_len, request.max_len, request.stop_ids)
        if row.draft_len > 0:
            del session.room[(base_len, base_hash)]
            fared = (session.asked, row.draft_len, outcome.accepted)
            session.blocks = session.blocks.after_block(*fared)
            self._load = replace(self._load, fleet=self._load.fleet.after_block(*fared))
        elif len(row.tokens) == 1 and session.drafter is not None:
            session.blocks = session.blocks.after_plain_round()
        session.prefix.extend(tokens)
        session.decided_at.append((len(session.prefix), now))
        session.cached_len = base_len + min(outcome.accepted, len(tokens))  # the last token was not fed
        self._clear_room(session, now)
        self._ask(session)
        verdict = Verdict(
            request.session,
            request.attempt,
            base_len,
            base_hash,
            tokens,
            accepted,
            row.draft_len,
            finish,
            session.asked,
        )
        sends: list[Send] = [(session.router, verdict)]
        if session.drafter is not None:
            sends.append((session.drafter, verdict))
            sends += self._alarm(session, session.drafter)
        if finish is not Finish.NONE:
            self._forget(request.session)
        return sends

    def _ask(self, session: _Session) -> None:
        """Decides how long a block the drafter is asked for next."""
        limit = session.open.max_draft_tokens
        self._load = replace(self._load, sessions=max(1, len(self._sessions)))
        if limit > 0:
            session.asked, session.blocks = self._pacing.draft_tokens(session.blocks, limit, self._load)

    def _alarm(self, session: _Session, drafter: str) -> list[Send]:
        """Has a drafter begin the session anew whose blocks were good and are all rejected now."""
        if not out_of_step(session.blocks):
            return []
        self.desyncs += 1
        session.blocks = session.blocks.after_alarm()
        session.drafter = None
        return [(drafter, Resync(session.open.session, len(session.prefix), session.prefix.hash))]

    def _clear_room(self, session: _Session, now: float) -> None:
        """Keeps the block for the prefix that the session has now; the others guessed otherwise or came too late.

        What a late one is still good for is kept too. Nothing in the room can be for a later prefix: a drafter guesses
        at one verdict at a time.
        """
        length, room = len(session.prefix), session.room
        ready = room.pop((length, session.prefix.hash), None)
        late = [block for block in room.values() if session.prefix.matches(block.base_len, block.prefix_hash)]
        if len(room) > len(late):
            self.dropped["wrong_guess"] += len(room) - len(late)
        room.clear()
        if ready is not None:
            session.blocks = session.blocks.after_hit()
        for block in late:
            rebased = self._rebased(session, block)
            if rebased is None:
                self.dropped["late"] += 1
            ready = ready or rebased
        if ready is not None:
            room[(length, session.prefix.hash)], session.block_since = ready, now
