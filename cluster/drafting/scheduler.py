"""The draft scheduler: selects the sessions to draft for, now or ahead of verdicts, and the blocks to send.

`DraftScheduler` forwards messages to the `SessionTable`, builds passes for the drafting method, and sends the proposed
blocks that no verdict has overtaken. `DraftReporter` accumulates the load figures that size the draft pool.
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
from cluster.trust import Refusals, not_permitted
from protos.draft_tree import DraftTree
from protos.messages import Block, DraftRequest, Message, NoDraft, Open, Refusal, RefusalReason, Shape

log = logging.getLogger(__name__)


class DraftScheduler:
    """Schedules all sessions of one drafter."""

    def __init__(
        self,
        limits: DrafterLimits,
        draft_ahead: bool = True,
        shapes: frozenset[Shape] = frozenset(Shape),
        published_acceptance: float | None = None,  # acceptance of first tokens, if the draft's publisher states it
        known_targets: Callable[[], frozenset[str]] | None = None,  # current addresses; None: any target is accepted
        version: int = 0,  # version of a learned draft; 0: the configured draft
    ) -> None:
        self.counts: Counter[str] = Counter()  # counts by event; `passes` are those for blocks wanted now
        self.refusals = Refusals(log)
        self._draft_ahead = draft_ahead
        self._shapes = shapes  # shapes that the method can make
        self._known_targets = known_targets
        self.sessions = SessionTable(
            limits, draft_ahead, self.counts, LoadCheck(published_acceptance), VersionWatch(version)
        )

    # ------------------------------------------------------------ messages from peers

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Handles a message from a router's stream or a target's address; returns the messages to send in response.

        Refuses an Open of another router's session and one that names an unknown target.
        """
        if isinstance(message, Open) and self._is_anothers(peer, message.session):
            self.refusals.note(peer, "an Open of another router's session", message.session)
            return [(peer, not_permitted(message))]
        if isinstance(message, Open) and not self._is_known(message.target_address):
            self.refusals.note(peer, "an Open that names no known target", message.target_address)
            return [(peer, _not_known(message))]
        return self.sessions.receive(peer, message, now)

    def connected(self, target: str) -> list[Send]:
        """Handles a new stream to `target`: attaches every session that is verified there."""
        return self.sessions.connected(target)

    def gone(self, peer: str) -> None:
        """Handles a broken stream.

        A router's sessions are forgotten. A target's sessions wait until the target is back or they are moved.
        """
        self.sessions.gone(peer)

    def leave(self) -> list[Send]:
        """Stops accepting sessions; continues to draft for the existing ones until their routers have moved them."""
        return self.sessions.leave()

    def exchanged(self, version: int, published_acceptance: float | None) -> None:
        """Records that the method's weights were exchanged for `version`, with its own published acceptance."""
        self.sessions.exchanged(version, LoadCheck(published_acceptance))

    # ------------------------------------------------------------ the drafting pass

    def next_pass(self, limit: int, lookahead_limit: int) -> DraftingPass:
        """Returns a pass: up to `limit` sessions that want a block now, or else up to `lookahead_limit` ahead."""
        requests = self.requests(limit)
        lookahead = () if requests else self.lookahead_requests(lookahead_limit)
        pending = self.sessions.updates
        is_due = (
            requests or lookahead or pending.closed or pending.states
        )  # there are caches to free, or states to process while idle
        return DraftingPass(pending.take() if is_due else SessionUpdates(), requests, lookahead)

    def requests(self, limit: int) -> tuple[DraftRequest, ...]:
        """Returns requests for up to `limit` sessions without a block for their length, longest unserved first."""
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
        """Returns requests for up to `limit` sessions in a step that nothing was drafted beyond yet.

        Call it only when no session wants a block now: a block ahead may not be needed, so it comes last.
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
        """True if some session wants a block for its current length."""
        return any(session.wants_block for session in self.sessions.all.values())

    @property
    def is_lookahead_stale(self) -> bool:
        """True once every verdict that the latest requests anticipate has arrived."""
        return not self.sessions.lookahead

    def proposed(self, proposals: Sequence[Proposal], now: float) -> list[Send]:
        """Returns the blocks to send, without those that a verdict overtook while they were drafted."""
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
        """Addresses of the targets that verify this drafter's sessions."""
        return frozenset(session.target for session in self.sessions.all.values())

    @property
    def is_idle(self) -> bool:
        """True if the drafter holds no sessions and no caches to free."""
        return not self.sessions.all and not self.sessions.updates.closed

    @property
    def has_left(self) -> bool:
        """True if the drafter is leaving and every session has been moved."""
        return self.sessions.is_leaving and not self.sessions.all

    def load(self) -> dict[str, float]:
        """Returns the number of sessions drafted for."""
        return {"sessions": float(len(self.sessions.all))}

    # ------------------------------------------------------------ helpers

    def _is_anothers(self, router: str, session: str) -> bool:
        sequence = self.sessions.all.get(session)
        return sequence is not None and sequence.router != router

    def _is_known(self, target: str) -> bool:
        """Returns True for a listed target and for one that this drafter's sessions already use.

        A target that shuts down serves its sessions for a while after it is no longer listed; drafting for them
        continues.
        """
        return self._known_targets is None or target in self._known_targets() or target in self.targets

    def _request(self, session: DraftSequence) -> DraftRequest:
        """Returns the target's request, bounded by the session's remaining length."""
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
        """Sends a block drafted ahead, unless another outcome was decided or the same block was sent before."""
        address = (proposal.base_len, proposal.prefix_hash)
        if session.guesses.get(address) == proposal:
            return []
        self.counts["guesses"] += 1
        if address == session.address:
            if not session.lacks_block:
                return []
            self.sessions.hit(session, proposal)
        elif session.prefix.length > proposal.base_len - len(proposal.outcome):
            return []  # the verdict has arrived with another outcome
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
    """Refuses an Open as OVERLOADED: the router may learn of a target first and should retry, here or elsewhere."""
    why = "the target that it names is not known here"
    return Refusal(request.session, request.attempt, RefusalReason.OVERLOADED, why)


def _no_draft(session: DraftSequence, proposal: Proposal) -> list[Send]:
    """Reports to the target that there is no block. Sends nothing for a draft ahead, which may be requested again."""
    if proposal.outcome:
        return []
    return [(session.target, NoDraft(proposal.session, proposal.base_len, proposal.prefix_hash))]


class DraftReporter:
    """Accumulates a drafter's pass times and block counts between reports."""

    def __init__(self, profile: DraftCost) -> None:
        self._profile = profile
        self._growth = CounterDeltas()
        self._shared_s = 0.0

    def pass_made(self, sessions: int, tokens: int, seconds: float) -> None:
        """Records a requested pass for `sessions` sessions whose longest block had `tokens` tokens.

        Counts only the time beyond a pass for a single session, because another drafter could save no more. Without a
        profile, all sessions are assumed to take the same time.
        """
        whole_s = self._profile.seconds(sessions, tokens)
        alone = self._profile.seconds(1, tokens) / whole_s if whole_s else 1 / sessions
        self._shared_s += seconds * max(0.0, 1 - alone)

    def report(self, blocks: int, late: int, now: float) -> DraftReport:
        """Returns the report on the time since the previous one.

        `blocks` and `late` are totals so far; `now` is in seconds.
        """
        grown = self._growth.of(now=now, shared=self._shared_s, blocks=blocks, late=late)
        return DraftReport(share(grown["shared"], grown["now"]), share(grown["late"], grown["blocks"]))
