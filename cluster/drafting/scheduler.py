"""The drafter's scheduler: which sessions are drafted for, now or ahead, and which of the blocks drafted are sent."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from cluster.dispatch import Send
from cluster.drafting.drafted_session import DraftedSession
from cluster.drafting.following import DrafterLimits, FollowedSessions
from cluster.drafting.method import DraftingPass
from cluster.drafting.requests import AheadRequest, Proposal, max_block_len
from cluster.drafting.session_texts import News
from cluster.sentinel.load_check import LoadCheck
from cluster.trust.refusals import Refusals, not_permitted
from protos.draft_tree import DraftTree
from protos.messages import Block, DraftRequest, Message, NoDraft, Open, Refusal, RefusalReason, Shape

log = logging.getLogger(__name__)


class DraftScheduler:
    """All sessions of one drafter."""

    def __init__(
        self,
        limits: DrafterLimits,
        draft_ahead: bool = True,
        shapes: frozenset[Shape] = frozenset(Shape),
        published_acceptance: float | None = None,  # of first tokens, if the draft comes with a promise
        known_targets: Callable[[], frozenset[str]] | None = None,  # addresses, as of now; default: any is good
    ) -> None:
        self.counts: Counter[str] = Counter()  # of events; `passes` are for sessions that want a block, others ahead
        self.refusals = Refusals(log)
        self._draft_ahead = draft_ahead
        self._shapes = shapes  # that the method can make
        self._known_targets = known_targets
        self._sessions = FollowedSessions(limits, draft_ahead, self.counts, LoadCheck(published_acceptance))

    # ------------------------------------------------------------ what peers say

    def receive(self, peer: str, message: Message, now: float) -> list[Send]:
        """Takes a message from a router's stream or a target's address; returns what is to be sent for it."""
        if isinstance(message, Open) and self._is_anothers(peer, message.session):
            self.refusals.note(peer, "an Open of another router's session", message.session)
            return [(peer, not_permitted(message))]
        if isinstance(message, Open) and not self._is_known(message.target_address):
            self.refusals.note(peer, "an Open that names no known target", message.target_address)
            return [(peer, _not_known(message))]
        return self._sessions.receive(peer, message, now)

    def connected(self, target: str) -> list[Send]:
        """The stream to a target is new: attach every session that is verified there."""
        return self._sessions.connected(target)

    def gone(self, peer: str) -> None:
        """A stream broke. A router's sessions are nobody's; a target's wait until it is back or they move."""
        self._sessions.gone(peer)

    def leave(self) -> list[Send]:
        """From now on no session is taken; those there are drafted for until their routers have moved them."""
        return self._sessions.leave()

    # ------------------------------------------------------------ the drafting pass

    def next_pass(self, limit: int, ahead_limit: int) -> DraftingPass:
        """For up to `limit` sessions that want a block now; if there is none, for up to `ahead_limit` ahead."""
        requests = self.requests(limit)
        ahead = () if requests else self.ahead_requests(ahead_limit)
        collected = self._sessions.news
        is_news_due = requests or ahead or collected.has_closed or collected.has_states
        news = collected.take() if is_news_due else News()
        return DraftingPass(news, requests, ahead)

    def requests(self, limit: int) -> tuple[DraftRequest, ...]:
        """Of up to `limit` sessions without a block for their current length, longest unserved first."""
        found: list[DraftRequest] = []
        for name, session in list(self._sessions.all.items()):
            if len(found) == limit:
                break
            if session.wants_block:
                session.served_len = session.prefix.length
                self._sessions.all.move_to_end(name)
                found.append(self._request(session))
        self.counts["passes"] += bool(found)
        return tuple(found)

    def ahead_requests(self, limit: int) -> tuple[AheadRequest, ...]:
        """Of up to `limit` sessions whose block is under verification and that nothing was drafted ahead for yet.

        Asked for only when no session wants a block: what is not needed for sure comes last.
        """
        found: list[AheadRequest] = []
        for session in self._sessions.all.values() if self._draft_ahead else ():
            if len(found) == limit:
                break
            if session.unverified is not None and session.may_go_on:
                found.append(self._ahead_request(session, session.unverified))
                session.unverified = None
        self._sessions.ahead = {request.session for request in found}
        self.counts["passes_ahead"] += bool(found)
        return tuple(found)

    @property
    def has_requests(self) -> bool:
        """Whether some session wants a block for its current length."""
        return any(session.wants_block for session in self._sessions.all.values())

    @property
    def is_ahead_vain(self) -> bool:
        """Whether the verdicts are in that the latest requests ahead were for."""
        return not self._sessions.ahead

    def proposed(self, proposals: Sequence[Proposal], now: float) -> list[Send]:
        """Blocks to send, leaving out what was overtaken by a verdict while it was drafted."""
        sends: list[Send] = []
        for proposal in proposals:
            session = self._sessions.all.get(proposal.session)
            if session is None or not proposal.tokens:
                self.counts["nothing_to_propose"] += 1
                sends += _no_draft(session, proposal) if session is not None else []
            elif proposal.outcome:
                sends += self._send_ahead(session, proposal)
            elif session.address != (proposal.base_len, proposal.prefix_hash):
                self.counts["overtaken"] += 1
                sends += self._sessions.note_block(late=True)
            else:
                session.sent(proposal)
                session.step_began_s = now
                sends.append(self._block(session, proposal))
        return sends

    # ------------------------------------------------------------ inspection

    @property
    def targets(self) -> frozenset[str]:
        """Addresses of targets that verify for some session here."""
        return frozenset(session.target for session in self._sessions.all.values())

    @property
    def load_check(self) -> LoadCheck:
        """Whether the target takes its first tokens as often as is to be expected."""
        return self._sessions.load_check

    @property
    def is_idle(self) -> bool:
        """Whether nothing at all is held."""
        return not self._sessions.all and not self._sessions.news.has_closed

    @property
    def has_left(self) -> bool:
        """Whether it leaves, and every session has been moved."""
        return self._sessions.is_leaving and not self._sessions.all

    def load(self) -> dict[str, float]:
        """Sessions drafted for."""
        return {"sessions": float(len(self._sessions.all))}

    # ------------------------------------------------------------ helpers

    def _is_anothers(self, router: str, session: str) -> bool:
        known = self._sessions.all.get(session)
        return known is not None and known.router != router

    def _is_known(self, target: str) -> bool:
        """One that ends serves its sessions for a while, though it is listed no more: who drafts for it goes on."""
        return self._known_targets is None or target in self._known_targets() or target in self.targets

    def _request(self, session: DraftedSession) -> DraftRequest:
        """What the target asked for, as far as the session may still go on."""
        length = session.prefix.length
        return DraftRequest(
            session=session.open.session,
            attempt=session.open.attempt,
            base_len=length,
            prefix_hash=session.prefix.hash,
            max_tokens=min(session.asked, max_block_len(session.open, length)),
            least_chance=session.least_chance,
            shape=self._shape(session),
        )

    def _ahead_request(self, session: DraftedSession, unverified: DraftTree) -> AheadRequest:
        return AheadRequest(
            session=session.open.session,
            base_len=session.prefix.length,
            prefix_hash=session.prefix.hash,
            max_tokens=session.asked,
            unverified=unverified,
            until=self._sessions.verdict_due(session),
            least_chance=session.least_chance,
            shape=self._shape(session),
            chances=session.chances,
        )

    def _shape(self, session: DraftedSession) -> Shape:
        return session.shape if session.shape in self._shapes else Shape.CHAIN

    def _send_ahead(self, session: DraftedSession, proposal: Proposal) -> list[Send]:
        """Sends a block for a prefix that the target may be about to decide, or has decided meanwhile.

        Of one that was sent before only what is new.
        """
        address = (proposal.base_len, proposal.prefix_hash)
        if session.guesses.get(address) == proposal:
            return []
        self.counts["guesses"] += 1
        if address == session.address:
            if not session.lacks_block:
                return []
            self._sessions.hit(session, proposal)
        elif session.prefix.length > proposal.base_len - len(proposal.outcome):
            return []  # the verdict is in, and it is another
        else:
            session.guesses[address] = proposal
        return [self._block(session, proposal)]

    def _block(self, session: DraftedSession, proposal: Proposal) -> Send:
        self.counts["blocks"] += 1
        p = proposal
        block = Block(p.session, p.base_len, p.prefix_hash, p.tree)
        self.counts["draft_tokens"] += block.size
        return session.target, block


def _not_known(request: Open) -> Refusal:
    """The router may have heard of a target earlier: it is to try elsewhere, or again."""
    why = "the target that it names is not known here"
    return Refusal(request.session, request.attempt, RefusalReason.OVERLOADED, why)


def _no_draft(session: DraftedSession, proposal: Proposal) -> list[Send]:
    """Says that there is no block; what was drafted ahead and came to nothing may be asked for again."""
    if proposal.outcome:
        return []
    return [(session.target, NoDraft(proposal.session, proposal.base_len, proposal.prefix_hash))]
