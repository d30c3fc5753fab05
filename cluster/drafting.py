"""The drafter's book: which sessions it drafts for, what they hold, which of them want a block.

A session here follows the target's verdicts; where it cannot, it asks the target for what it missed, and when
that fails the router for the ledger. Knows nothing of drafting methods, torch or gRPC.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.verifier import Send, peer_of
from protos.messages import (
    Attach,
    Block,
    Close,
    Finish,
    LiveSession,
    Open,
    Refusal,
    RefusalReason,
    Resync,
    SparseProbs,
    Verdict,
)
from protos.prefix import Prefix, extend_hash

AHEAD_SESSIONS = 2  # with more sessions, drafting one while another is verified fills the time anyway


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """Bounds of one drafter."""

    vocabulary: int
    max_context: int
    max_sessions: int


@dataclass(frozen=True, slots=True)
class Want:
    """A session that wants tokens drafted after `tokens`.

    With `ahead`, `tokens` end with a block whose verdict is not in: what is drafted first is a guess at the token
    that the target adds to that block, and the rest the block after it.
    """

    open: Open
    tokens: tuple[int, ...]  # everything before the drafted tokens
    prefix_hash: int
    max_tokens: int
    ahead: bool = False


@dataclass(frozen=True, slots=True)
class Proposal:
    """What a drafting method answers to a want; no tokens: it has nothing to offer here."""

    session: str
    base_len: int
    prefix_hash: int
    tokens: tuple[int, ...]
    draft_probs: SparseProbs | None = None
    ahead: bool = False

    def after_guess(self) -> "Proposal":
        """The block that follows an ahead proposal's first token, should the target decide for that one."""
        guess, probs = self.tokens[0], self.draft_probs
        rest = SparseProbs(probs.token_ids[1:], probs.weights[1:]) if probs is not None else None
        prefix_hash = extend_hash(self.prefix_hash, guess)
        return Proposal(self.session, self.base_len + 1, prefix_hash, self.tokens[1:], rest)


@dataclass(eq=False)
class _Session:
    open: Open
    router: str
    prefix: Prefix
    proposed_len: int = -1  # base length of the latest proposal
    unguessed: tuple[int, ...] = ()  # the block under verification, until something was drafted beyond it
    guessing_from: int = -1  # length that the tokens had when drafting ahead was last begun
    presubmitted: Proposal | None = None  # the block that was sent ahead
    attached: bool = False


class DraftBook:
    """All sessions of one drafter."""

    def __init__(self, limits: DrafterLimits, draft_ahead: bool = True) -> None:
        self._limits = limits
        self._draft_ahead = draft_ahead
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # longest without a block first
        self._closed: list[str] = []  # for the drafting method, with the next pass
        self.counts: Counter[str] = Counter()

    # ------------------------------------------------------------ what a router says

    def hello(self, router: str, live: Iterable[LiveSession]) -> None:
        """A router's stream is new: of what its older streams left, only the sessions that it lists stay."""
        wanted = {item.session for item in live}
        for name, session in list(self._sessions.items()):
            if peer_of(session.router) != peer_of(router):
                continue
            session.router = router
            if name not in wanted:
                self._forget(name)

    def open(self, router: str, request: Open) -> list[Send]:
        """Drafts for a session from its ledger; an open one is replaced unless the request is older.

        Answers with the Attach for its target, or a Refusal for the router.
        """
        if refusal := self._refuse(request):
            return [(router, refusal)]
        known = self._sessions.get(request.session)
        if known is not None and known.open.attempt > request.attempt:
            return []
        session = _Session(request, router, Prefix(request.hash_key, request.tokens))
        self._sessions[request.session] = session
        return [self._attach(session)]

    def close(self, router: str, close: Close) -> None:
        """Forgets a session; an unknown one, another router's, or a newer attempt is left alone."""
        known = self._sessions.get(close.session)
        if known is not None and known.router == router and known.open.attempt <= close.attempt:
            self._forget(close.session)

    def router_gone(self, router: str) -> None:
        """The stream broke: its sessions are nobody's."""
        for name in [n for n, s in self._sessions.items() if s.router == router]:
            self._forget(name)

    # ------------------------------------------------------------ what a target says

    def target_up(self, target: str) -> list[Send]:
        """The stream to a target is new: attach every session that is verified there."""
        return [self._attach(s) for s in self._sessions.values() if s.open.target_address == target]

    def target_gone(self, target: str) -> None:
        """The stream broke: nothing is drafted for its sessions until it is back or they are opened elsewhere."""
        for session in self._sessions.values():
            if session.open.target_address == target:
                session.attached = False

    def verdict(self, target: str, verdict: Verdict) -> list[Send]:
        """Follows the target; a gap is asked for, a contradiction goes to the router."""
        session = self._sessions.get(verdict.session)
        if session is None or session.open.target_address != target or verdict.attempt < session.open.attempt:
            self.counts["verdict_unknown"] += 1
            return []
        if verdict.base_len > len(session.prefix):
            self.counts["verdict_gap"] += 1
            return [self._attach(session)]
        if not session.prefix.matches(verdict.base_len, verdict.prefix_hash):
            self.counts["verdict_mismatch"] += 1
            return [self._resync(session)]
        new = verdict.tokens[len(session.prefix) - verdict.base_len :]
        if not new and verdict.finish is Finish.NONE:
            return []  # heard before
        if new and max(new) >= self._limits.vocabulary:
            self.counts["verdict_invalid"] += 1
            self._forget(verdict.session)
            return []
        session.prefix.extend(new)
        session.unguessed = ()
        if session.presubmitted is not None:
            self._settle_guess(session)
        if verdict.finish is not Finish.NONE:
            self._forget(verdict.session)
        return []

    def resync(self, target: str, resync: Resync) -> list[Send]:
        """The target says that our tokens are not its own."""
        session = self._sessions.get(resync.session)
        if session is None or session.open.target_address != target:
            return []
        self.counts["resync"] += 1
        session.attached = False
        return [self._resync(session)]

    # ------------------------------------------------------------ the drafting pass

    def wants(self, limit: int) -> list[Want]:
        """Up to `limit` sessions without a block for their current length, longest unserved first."""
        found: list[Want] = []
        for name in list(self._sessions):
            session = self._sessions[name]
            # A verdict may bring one token more than its block, so the last position needs no draft.
            room = session.open.max_len - len(session.prefix) - 1
            max_tokens = min(session.open.max_draft_tokens, room)
            if max_tokens > 0 and session.attached and session.proposed_len != len(session.prefix):
                session.proposed_len = len(session.prefix)
                self._sessions.move_to_end(name)
                tokens = tuple(session.prefix.tokens)
                found.append(Want(session.open, tokens, session.prefix.hash, max_tokens))
            if len(found) == limit:
                break
        return found

    def wants_ahead(self, limit: int) -> list[Want]:
        """Up to `limit` sessions whose block is under verification and that nothing was drafted ahead for yet.

        Asked for only when no session wants a block: what is not needed for sure comes last.
        """
        found: list[Want] = []
        # A pass cannot be interrupted: with more sessions the next real want is near, and would wait for it.
        few = self._draft_ahead and len(self._sessions) <= AHEAD_SESSIONS
        for session in self._sessions.values() if few else ():
            base = len(session.prefix) + len(session.unguessed)
            max_tokens = min(session.open.max_draft_tokens, session.open.max_len - base - 2) + 1
            if session.unguessed and max_tokens > 1 and len(found) < limit:
                tokens = (*session.prefix.tokens, *session.unguessed)
                prefix_hash = session.prefix.hash_after(session.unguessed)
                session.unguessed, session.guessing_from = (), len(session.prefix)
                found.append(Want(session.open, tokens, prefix_hash, max_tokens, ahead=True))
        return found

    def take_closed(self) -> list[str]:
        """Sessions that the drafting method may forget; each is named once."""
        closed, self._closed = self._closed, []
        return [name for name in closed if name not in self._sessions]

    def proposed(self, proposals: Sequence[Proposal]) -> list[Send]:
        """Blocks to send, leaving out what was overtaken by a verdict while it was drafted."""
        sends: list[Send] = []
        for proposal in proposals:
            session = self._sessions.get(proposal.session)
            if session is None or len(proposal.tokens) <= proposal.ahead:
                self.counts["nothing_to_propose"] += 1
            elif proposal.ahead:
                sends += self._presubmit(session, proposal.after_guess())
            elif (len(session.prefix), session.prefix.hash) != (proposal.base_len, proposal.prefix_hash):
                self.counts["overtaken"] += 1
            else:
                session.unguessed = proposal.tokens
                sends.append(self._block(session, proposal))
        return sends

    # ------------------------------------------------------------ inspection

    @property
    def targets(self) -> frozenset[str]:
        """Addresses of targets that verify for some session here."""
        return frozenset(s.open.target_address for s in self._sessions.values())

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is held."""
        return not self._sessions and not self._closed

    def load(self) -> dict[str, float]:
        """Sessions drafted for, for autoscaling."""
        return {"sessions": float(len(self._sessions))}

    # ------------------------------------------------------------ helpers

    def _presubmit(self, session: _Session, proposal: Proposal) -> list[Send]:
        """Sends a block for a prefix that the target may be about to decide, or has decided meanwhile."""
        verdict_is_in = len(session.prefix) != session.guessing_from
        session.presubmitted = proposal
        if verdict_is_in and not self._settle_guess(session):
            return []
        return [self._block(session, proposal)]

    def _settle_guess(self, session: _Session) -> bool:
        """Whether the block that was drafted ahead is the one that the session wants now."""
        guess, session.presubmitted = session.presubmitted, None
        assert guess is not None
        hit = (guess.base_len, guess.prefix_hash) == (len(session.prefix), session.prefix.hash)
        self.counts["guess_hit" if hit else "guess_miss"] += 1
        if hit:
            session.proposed_len, session.unguessed = len(session.prefix), guess.tokens
        return hit

    def _block(self, session: _Session, proposal: Proposal) -> Send:
        self.counts["blocks"] += 1
        self.counts["draft_tokens"] += len(proposal.tokens)
        p = proposal
        block = Block(p.session, p.base_len, p.prefix_hash, p.tokens, p.draft_probs)
        return session.open.target_address, block

    def _attach(self, session: _Session) -> Send:
        session.attached, session.proposed_len = True, -1  # what was sent before may have been lost
        name, prefix = session.open.session, session.prefix
        return session.open.target_address, Attach(name, len(prefix), prefix.hash)

    def _resync(self, session: _Session) -> Send:
        return session.router, Resync(session.open.session, len(session.prefix), session.prefix.hash)

    def _refuse(self, request: Open) -> Refusal | None:
        limits = self._limits
        reason, why = RefusalReason.INVALID, ""
        if max(request.tokens) >= limits.vocabulary:
            why = f"token id {max(request.tokens)} is outside the vocabulary of {limits.vocabulary}"
        elif request.max_len > limits.max_context:
            why = f"max_len is {request.max_len}, the drafter's context holds {limits.max_context} tokens"
        elif not request.target_address:
            why = "target_address is empty"
        elif len(self._sessions) >= limits.max_sessions and request.session not in self._sessions:
            reason, why = RefusalReason.OVERLOADED, f"{limits.max_sessions} sessions are drafted for already"
        return Refusal(request.session, request.attempt, reason, why) if why else None

    def _forget(self, name: str) -> None:
        del self._sessions[name]
        self._closed.append(name)
