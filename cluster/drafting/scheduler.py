"""Draft scheduler: selects the sessions for each drafting pass, and the blocks to send.

`DraftScheduler` forwards messages to the `SessionTable`, builds passes for the drafting method, and sends proposed
blocks unless a newer verdict has made them obsolete. `DraftReporter` collects load metrics for autoscaling.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from cluster.autoscaling import CounterDeltas, DraftReport, share
from cluster.costs import DraftCost
from cluster.draft_quality import LoadCheck, VersionWatch
from cluster.drafting.draft_sequence import DraftSequence
from cluster.drafting.method import DraftingPass
from cluster.drafting.requests import LookaheadRequest, Proposal, SessionUpdates, max_draft_tokens
from cluster.drafting.session_table import DrafterLimits, SessionTable
from cluster.envelope import Send
from cluster.trust import Refusals, ownership_refusal
from protos.draft_tree import DraftTree
from protos.messages import Block, DraftRequest, Message, NoDraft, Open, Refusal, RefusalReason, Shape

log = logging.getLogger(__name__)


KnownTargets = Callable[[str], frozenset[str] | None]
"""Returns a model's current target addresses: none if the drafter does not serve it, None if any is allowed."""


def _any_target(_: str) -> None:
    return None


class DraftScheduler:
    """Schedules all sessions of one drafter."""

    def __init__(
        self,
        limits: DrafterLimits,
        draft_ahead: bool = True,
        shapes: frozenset[Shape] = frozenset(Shape),
        published_acceptance: float | None = None,  # published acceptance rate of first tokens, if known
        known_targets: KnownTargets = _any_target,
        version: int = 0,  # version of the learned draft; 0: the configured draft
    ) -> None:
        self.counts: Counter[str] = Counter()  # counts by event; `passes` excludes lookahead passes
        self.refusals = Refusals(log)
        self._draft_ahead = draft_ahead
        self._shapes = shapes  # shapes supported by the method
        self._known_targets = known_targets
        self.sessions = SessionTable(
            limits, draft_ahead, self.counts, LoadCheck(published_acceptance), VersionWatch(version)
        )

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a router (stream name) or target (address); returns the messages to send.

        Refuses an Open for another router's session or with an unknown target.
        """
        if isinstance(message, Open):
            if self._is_owned_by_another(peer, message.session):
                self.refusals.note(peer, "an Open of another router's session", message.session)
                return [(peer, ownership_refusal(message))]
            if not self._is_known(message):
                self.refusals.note(peer, "an Open with an unknown target", message.target_address)
                return [(peer, _not_known(message))]
        return self.sessions.receive(peer, message, now)

    def has_accepted(self, request: Open) -> bool:
        """Returns True if the session continues from this Open."""
        session = self.sessions.all.get(request.session)
        return session is not None and session.open is request

    def connected(self, target: str) -> list[Send]:
        """Handles a new stream to `target`: attaches all sessions of that target."""
        return self.sessions.connected(target)

    def gone(self, peer: str) -> list[Send]:
        """Handles a broken stream; returns the messages to send.

        Drops the sessions of a lost router. Sessions of a lost target wait until the target returns or their router
        moves them.
        """
        return self.sessions.gone(peer)

    def leave(self) -> list[Send]:
        """Stops accepting sessions; drafts for existing ones until their routers have moved them."""
        return self.sessions.leave()

    def exchanged(self, version: int, published_acceptance: float | None) -> None:
        """Records that the method's weights were replaced with `version`, and its published acceptance rate."""
        self.sessions.exchanged(version, LoadCheck(published_acceptance))

    # ------------------------------------------------------------ the drafting pass

    def next_pass(self, limit: int, lookahead_limit: int) -> DraftingPass:
        """Returns the next pass: up to `limit` sessions that need a block now, or else up to `lookahead_limit` for
        lookahead.
        """
        requests = self.requests(limit)
        lookahead = () if requests else self.lookahead_requests(lookahead_limit)
        pending = self.sessions.updates
        is_due = requests or lookahead or pending.closed or pending.states  # work, caches to free, or states to process
        return DraftingPass(pending.take() if is_due else SessionUpdates(), requests, lookahead)

    def requests(self, limit: int) -> tuple[DraftRequest, ...]:
        """Returns requests for up to `limit` sessions that need a block now, longest unserved first."""
        requests: list[DraftRequest] = []
        for name, session in list(self.sessions.all.items()):
            if len(requests) == limit:
                break
            if session.wants_block:
                session.served_len = session.prefix.length
                self.sessions.all.move_to_end(name)
                requests.append(self._request(session))
        self.counts["passes"] += bool(requests)
        return tuple(requests)

    def lookahead_requests(self, limit: int) -> tuple[LookaheadRequest, ...]:
        """Returns lookahead requests for up to `limit` sessions whose current step has none yet.

        Call this only when no session needs a block now, because lookahead blocks may turn out useless.
        """
        requests: list[LookaheadRequest] = []
        for session in self.sessions.all.values() if self._draft_ahead else ():
            if len(requests) == limit:
                break
            if session.unverified is not None and session.may_go_on:
                requests.append(self._lookahead_request(session, session.unverified))
                session.unverified = None
        self.sessions.lookahead = {request.session for request in requests}
        self.counts["passes_ahead"] += bool(requests)
        return tuple(requests)

    @property
    def has_requests(self) -> bool:
        """True if a session needs a block for its current length."""
        return any(session.wants_block for session in self.sessions.all.values())

    @property
    def is_lookahead_stale(self) -> bool:
        """True once all verdicts awaited by the latest lookahead requests have arrived."""
        return not self.sessions.lookahead

    def proposed(self, proposals: Sequence[Proposal], now: float) -> list[Send]:
        """Returns the blocks to send; drops blocks made obsolete by a verdict during drafting."""
        sends: list[Send] = []
        for proposal in proposals:
            session = self.sessions.all.get(proposal.session)
            if session is None or not proposal.tokens:
                self.counts["nothing_to_propose"] += 1
                sends += _no_draft(session, proposal) if session is not None else []
            elif proposal.outcome:
                sends += self._send_lookahead(session, proposal)
            elif session.address != (proposal.base_len, proposal.prefix_hash):
                self.counts["overtaken"] += 1
                sends += self.sessions.note_block(late=True)
            else:
                session.sent(proposal)
                session.step_began_s = now
                sends.append(self._block(session, proposal))
        return sends

    # ------------------------------------------------------------ inspection

    @property
    def targets(self) -> frozenset[str]:
        """Addresses of the targets of this drafter's sessions."""
        return frozenset(session.target for session in self.sessions.all.values())

    @property
    def is_idle(self) -> bool:
        """True if there are no sessions and no caches to free."""
        return not self.sessions.all and not self.sessions.updates.closed

    @property
    def has_left(self) -> bool:
        """True if the drafter is leaving and all sessions have been moved."""
        return self.sessions.is_leaving and not self.sessions.all

    def load(self) -> dict[str, float]:
        """Returns the number of sessions."""
        return {"sessions": float(len(self.sessions.all))}

    # ------------------------------------------------------------ helpers

    def _is_owned_by_another(self, router: str, session: str) -> bool:
        sequence = self.sessions.all.get(session)
        return sequence is not None and sequence.router != router

    def _is_known(self, request: Open) -> bool:
        """Returns True for a listed target of the session's model and for targets of existing sessions.

        A target that is shutting down serves its sessions for a while after it is removed from the list.
        """
        known = self._known_targets(request.model)
        existing = ((session.target, session.open.model) for session in self.sessions.all.values())
        target = request.target_address
        return known is None or target in known or (target, request.model) in existing

    def _request(self, session: DraftSequence) -> DraftRequest:
        """Returns the target's request, limited to the session's remaining length."""
        length = session.prefix.length
        return DraftRequest(
            session=session.open.session,
            attempt=session.open.attempt,
            base_len=length,
            prefix_hash=session.prefix.hash,
            max_tokens=min(session.requested_tokens, max_draft_tokens(session.open, length)),
            least_chance=session.least_chance,
            shape=self._shape(session),
        )

    def _lookahead_request(self, session: DraftSequence, unverified: DraftTree) -> LookaheadRequest:
        return LookaheadRequest(
            session=session.open.session,
            base_len=session.prefix.length,
            prefix_hash=session.prefix.hash,
            max_tokens=session.requested_tokens,
            unverified=unverified,
            until=self.sessions.verdict_due(session),
            least_chance=session.least_chance,
            shape=self._shape(session),
            chances=session.chances,
        )

    def _shape(self, session: DraftSequence) -> Shape:
        return session.shape if session.shape in self._shapes else Shape.CHAIN

    def _send_lookahead(self, session: DraftSequence, proposal: Proposal) -> list[Send]:
        """Sends a block drafted ahead, unless it was already sent or a verdict with another outcome has arrived."""
        address = (proposal.base_len, proposal.prefix_hash)
        if session.guesses.get(address) == proposal:
            return []
        self.counts["guesses"] += 1
        if address == session.address:
            if not session.lacks_block:
                return []
            self.sessions.hit(session, proposal)
        elif session.prefix.length > proposal.base_len - len(proposal.outcome):
            return []  # a verdict with another outcome has arrived
        else:
            session.guesses[address] = proposal
        return [self._block(session, proposal)]

    def _block(self, session: DraftSequence, proposal: Proposal) -> Send:
        self.counts["blocks"] += 1
        p = proposal
        block = Block(p.session, p.base_len, p.prefix_hash, p.tree)
        self.counts["draft_tokens"] += block.size
        return session.target, block


def _not_known(request: Open) -> Refusal:
    """Refuses an Open as OVERLOADED, so that the router retries: it may have learned of a new target first."""
    why = "target_address is not known yet; retry"
    return Refusal(request.session, request.attempt, RefusalReason.OVERLOADED, why)


def _no_draft(session: DraftSequence, proposal: Proposal) -> list[Send]:
    """Returns a NoDraft for the target; none for lookahead, because the block can still be requested."""
    if proposal.outcome:
        return []
    return [(session.target, NoDraft(proposal.session, proposal.base_len, proposal.prefix_hash))]


class DraftReporter:
    """Collects a drafter's pass times and block counts between autoscaling reports."""

    def __init__(self, profile: DraftCost) -> None:
        self._profile = profile
        self._growth = CounterDeltas()
        self._shared_s = 0.0

    def record_pass(self, sessions: int, tokens: int, seconds: float) -> None:
        """Records a requested pass for `sessions` sessions; `tokens` is the length of the longest block.

        Counts only the time in excess of a single-session pass, because more drafters could save no more than that.
        Without a profile, assumes equal time per session.
        """
        whole_s = self._profile.seconds(sessions, tokens)
        alone = self._profile.seconds(1, tokens) / whole_s if whole_s else 1 / sessions
        self._shared_s += seconds * max(0.0, 1 - alone)

    def report(self, blocks: int, late: int, now: float) -> DraftReport:
        """Returns the report for the time since the previous one.

        `blocks` and `late` are cumulative counts; `now` is in seconds.
        """
        grown = self._growth.of(now=now, shared=self._shared_s, blocks=blocks, late=late)
        return DraftReport(share(grown["shared"], grown["now"]), share(grown["late"], grown["blocks"]))
