"""The target's scheduler: what goes into a step, what comes out of it, and what becomes of blocks."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.draft_quality import PROOF, BlockKind
from cluster.envelope import Send
from cluster.page_allocator import SlotMove
from cluster.speculation.circuit_breaker import PROBE_AFTER, SILENT_STEPS
from cluster.speculation.controller import Awaited, DraftingDecision
from cluster.speculation.estimators import AcceptanceCounts, Load, ReplicaStats, SessionStats, StepCost
from cluster.verification.block_buffer import BufferLimits
from cluster.verification.scheduler import VerificationLimits, VerificationScheduler
from cluster.verification.sequence import AUDIT_STEP_TOKENS, MISSED_ROUNDS, settle
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import DraftTree, SparseProbs
from protos.messages import (
    Acceptance,
    Attach,
    Close,
    Detach,
    DraftAnswer,
    DraftRequest,
    Finish,
    Hello,
    LiveSession,
    NoDraft,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    Shape,
    Verdict,
)
from protos.prefix import Prefix
from tests.unit.cluster.samples import KEY, a_block, an_open
from tests.unit.cluster.token_memory import TokenMemory

VOCABULARY = 50
LIMITS = VerificationLimits(VOCABULARY, max_context=100, max_sessions=4, max_step_tokens=64, pages=100, page_size=4)
ROUTER = "router#1"
DRAFTER = "drafter#1"


def next_token(tokens: Sequence[int]) -> int:
    """The model of these tests: what follows is a function of everything before."""
    return (sum(tokens) * 7 + len(tokens)) % VOCABULARY


def text(prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Plain decoding."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tuple(tokens[len(prompt) :])


@dataclass(frozen=True)
class Steady:
    """Pacing that tests decide on: asks for all there may be unless told otherwise."""

    patience: Callable[[SessionStats], float]
    hold: float = 0.0
    asked: int | None = None
    waits: bool = True
    asked_next: Callable[[], int] | None = None

    def decide(
        self, blocks: SessionStats, fleet: ReplicaStats, limit: int, load: Load, may_try: bool
    ) -> DraftingDecision:
        tokens = self.asked_next() if self.asked_next else self.asked
        wanted = limit if tokens is None else tokens
        return DraftingDecision(wanted, hold_step=self.waits, skip_for_s=self.patience(blocks))

    def hold_for_s(self, awaited: Sequence[Awaited], load: Load) -> float:
        return self.hold


class Desk:
    """A scheduler with an engine that checks what it is asked for as a real cache would, and reads every page of it."""

    def __init__(
        self,
        patience: Callable[[SessionStats], float] = lambda _: 0.0,
        hold: float = 0.0,
        asked: int | None = None,
        waits: bool = True,
        **limits: Any,
    ) -> None:
        self.limits = replace(LIMITS, **limits)
        self.scheduler = VerificationScheduler(self.limits, Steady(patience, hold, asked, waits))
        self.now = 0.0
        self.known: dict[str, list[int]] = {}  # all that the engine was told of each session
        self.rows: list[tuple[Row, ...]] = []  # of every step
        self._memory = TokenMemory(self.limits.page_size)

    def open(self, session: str = "s", router: str = ROUTER, **changes: Any) -> list[Send]:
        return self.scheduler.receive(router, an_open(session, **changes), self.now)

    def attach(self, tokens: tuple[int, ...], session: str = "s", drafter: str = DRAFTER) -> list[Send]:
        return self.scheduler.receive(drafter, Attach(session, len(tokens), Prefix(KEY, tokens).hash), self.now)

    def block(self, before: tuple[int, ...], tokens: tuple[int, ...] | DraftTree, session: str = "s") -> None:
        self.scheduler.receive(DRAFTER, a_block(before, tokens, session), self.now)

    def step(self) -> list[Send]:
        plan = self.scheduler.plan(self.now)
        assert plan is not None, "nothing was due"
        return self.scheduler.apply(self.compute(plan), 0.1, self.now)

    def compute(self, plan: StepPlan) -> list[Outcome]:
        for name in plan.closes:
            del self.known[name]
        for request in plan.opens:
            assert request.session not in self.known
            self.known[request.session] = list(request.tokens)
        assert len({row.session for row in plan.rows}) == len(plan.rows) <= self.limits.max_sessions
        assert sum(len(row.tokens) for row in plan.rows) <= self.limits.max_step_tokens
        self.rows.append(plan.rows)
        self._memory.move(plan.moves)
        self._memory.copy(plan.copies)
        for row in plan.rows:
            assert row.tokens
            assert max(row.pages) < self.limits.pages
            self._memory.write(row.tokens, row.start, row.pages)
        return [outcome for row in plan.rows if (outcome := self._run(row)) is not None]

    def _run(self, row: Row) -> Outcome | None:
        """Decides a row from what its pages hold after all rows are written, so that wrong writes show."""
        known = self.known[row.session]
        cached = self._memory.read(row.start + len(row.tokens), row.pages)
        assert row.start <= len(known), "a row begins beyond what is known of its session"
        base = row.base_len
        known[row.start : base] = row.tokens[: row.known]
        assert cached == (*known[:base], *row.draft.tokens), "the pages hold another text than the session's"
        if not row.decide:
            return None
        del known[base:]
        path: list[int] = []
        while (node := self._child(row, path, next_token(tuple(known)))) is not None:
            path.append(node)
            known.append(row.draft.tokens[node])
        assert len(known) == base + len(path)
        return Outcome(row.session, tuple(path), next_token(tuple(known)))

    def _child(self, row: Row, path: list[int], token: int) -> int | None:
        """The node after this path that has this token."""
        parent = path[-1] if path else -1
        nodes = enumerate(zip(row.draft.parents, row.draft.tokens, strict=True))
        return next((node for node, child in nodes if child == (parent, token)), None)

    @property
    def dropped(self) -> Counter[str]:
        """Causes for which a block was dropped."""
        return +self.scheduler.counts.dropped

    def finish(self) -> dict[str, tuple[int, ...]]:
        """Steps until nobody is left; what each session got. The scheduler itself checks its pages when idle."""
        got: dict[str, tuple[int, ...]] = {}
        for _ in range(2000):
            plan = self.scheduler.plan(self.now)
            if plan is None:
                break
            for receiver, message in self.scheduler.apply(self.compute(plan), 0.1, self.now):
                if receiver == ROUTER:
                    assert isinstance(message, Verdict)
                    got[message.session] = got.get(message.session, ()) + message.tokens
        assert self.scheduler.is_idle
        assert not self.known, "the engine still remembers a session"
        return got


def only_verdict(sends: list[Send], receiver: str = ROUTER) -> Verdict:
    (verdict,) = (message for to, message in sends if to == receiver and not isinstance(message, DraftRequest))
    assert isinstance(verdict, Verdict)
    return verdict


def verdicts(sends: list[Send]) -> list[Verdict]:
    return [message for _, message in sends if isinstance(message, Verdict)]


def only_request(sends: list[Send]) -> DraftRequest:
    """Returns the request that the drafter receives after all verdicts."""
    (request,) = (message for _, message in sends if isinstance(message, DraftRequest))
    assert [message for to, message in sends if to == DRAFTER][-1] is request
    return request


# ---------------------------------------------------------------- settle


@pytest.mark.parametrize(
    ("tokens", "accepted", "max_len", "stops", "expected"),
    [
        ((5, 6, 7, 8), 3, 99, (), ((5, 6, 7, 8), 3, Finish.NONE)),
        ((5, 0, 7, 8), 3, 99, (0,), ((5, 0), 2, Finish.STOP)),
        ((5, 0), 1, 99, (0,), ((5, 0), 1, Finish.STOP)),
        ((5, 6, 7, 0), 3, 99, (0,), ((5, 6, 7, 0), 3, Finish.STOP)),
        ((0,), 0, 99, (0,), ((0,), 0, Finish.STOP)),
        ((5, 9, 0, 8), 3, 99, (0, 9), ((5, 9), 2, Finish.STOP)),
        ((5, 6, 7, 8), 3, 12, (), ((5, 6), 2, Finish.LENGTH)),
        ((5, 6), 1, 12, (), ((5, 6), 1, Finish.LENGTH)),
        ((5, 6, 7, 8), 3, 14, (), ((5, 6, 7, 8), 3, Finish.LENGTH)),
        ((5, 0, 7, 8), 3, 12, (0,), ((5, 0), 2, Finish.STOP)),
        ((5, 6, 0, 8), 3, 12, (0,), ((5, 6), 2, Finish.LENGTH)),
    ],
    ids=[
        "no end",
        "stop inside the accepted part",
        "stop at the recovered token",
        "stop at the bonus token",
        "stop in a plain step",
        "first of several stops",
        "limit inside the accepted part",
        "limit at the recovered token",
        "limit at the bonus token",
        "stop at the limit",
        "stop beyond the limit",
    ],
)
def test_settle(tokens, accepted, max_len, stops, expected):
    assert settle(tokens, accepted, base_len=10, max_len=max_len, stop_ids=stops) == expected


# ---------------------------------------------------------------- one session


def test_a_session_without_a_drafter_is_decoded_plainly_from_its_first_step():
    desk = Desk()
    desk.open(tokens=(1, 2, 3), max_len=6)
    verdicts = [only_verdict(desk.step()) for _ in range(3)]
    assert tuple(v.tokens[0] for v in verdicts) == text((1, 2, 3), 3)
    assert [v.base_len for v in verdicts] == [3, 4, 5]
    assert verdicts[1].prefix_hash == Prefix(KEY, (1, 2, 3, verdicts[0].tokens[0])).hash
    assert [v.finish for v in verdicts] == [Finish.NONE, Finish.NONE, Finish.LENGTH]
    assert [[len(row.tokens) for row in rows] for rows in desk.rows] == [[3], [1], [1]]


@pytest.mark.parametrize(("wrong_from", "accepted"), [(3, 3), (1, 1), (0, 0)], ids=["all", "some", "none"])
def test_a_block_is_verified_and_only_what_it_lacks_is_fed_next(wrong_from, accepted):
    """After a rejection the cache holds wrong tokens, after full acceptance one too few; both feed from there."""
    desk = Desk()
    desk.open(tokens=(1, 2))
    right = text((1, 2), 5)
    draft = right[:wrong_from] + tuple((token + 1) % VOCABULARY for token in right[wrong_from:3])
    desk.block((1, 2), draft)
    verdict = only_verdict(desk.step())
    assert (verdict.tokens, verdict.accepted, verdict.drafted) == (right[: accepted + 1], accepted, 3)
    assert only_verdict(desk.step()).tokens == (right[accepted + 1],)
    (row,) = desk.rows[-1]
    assert (row.start, row.tokens) == (2 + accepted, (right[accepted],))


def test_acceptance_is_counted_by_position_as_far_as_a_block_could_go():
    """Two of three requested tokens are accepted; then the session has room for one."""
    desk = Desk(asked=3)
    desk.open(tokens=(1, 2), max_len=7)
    right = text((1, 2), 4)
    desk.block((1, 2), (*right[:2], (right[2] + 1) % VOCABULARY))
    desk.step()
    assert desk.scheduler.acceptance == AcceptanceCounts(reached=(1, 1, 1), accepted=(1, 1, 0))
    desk.block((1, 2, *right[:3]), right[3:4])
    desk.step()
    assert desk.scheduler.acceptance == AcceptanceCounts(reached=(2, 1, 1), accepted=(2, 1, 0))


def test_plain_steps_say_nothing_of_acceptance_and_a_drafter_with_nothing_to_offer_does():
    desk = Desk(asked=2)
    desk.open(tokens=(1, 2))
    desk.attach((1, 2))
    desk.step()
    assert desk.scheduler.acceptance == AcceptanceCounts()
    tokens = (1, 2, *text((1, 2), 1))
    desk.scheduler.receive(DRAFTER, NoDraft("s", len(tokens), Prefix(KEY, tokens).hash), desk.now)
    desk.step()
    assert desk.scheduler.acceptance == AcceptanceCounts(reached=(1, 0), accepted=(0, 0))


def test_a_stop_id_inside_the_accepted_part_ends_the_session_there():
    right = text((1, 2), 3)
    desk = Desk()
    desk.open(tokens=(1, 2), stop_ids=(right[1],))
    desk.attach((1, 2))
    desk.block((1, 2), right)
    sends = desk.step()
    verdict = only_verdict(sends)
    assert (verdict.tokens, verdict.accepted, verdict.finish) == (right[:2], 2, Finish.STOP)
    assert only_verdict(sends, DRAFTER) == verdict, "the drafter hears of the end too"
    assert desk.scheduler.plan(desk.now) == StepPlan(("s",), (), ())
    desk.scheduler.apply([], 0.0, desk.now)
    assert desk.scheduler.is_idle


@pytest.mark.parametrize(
    ("draft", "rejected"),
    [
        (DraftTree.chain((0, 1, 2)), (1, 2)),
        (DraftTree((1, 0, 2, 4), (-1, -1, 1, 1)), (2,)),
        (DraftTree.chain((0,)), ()),
    ],
    ids=["a chain after its first token", "a tree's likeliest path", "all stand"],
)
def test_a_router_that_asks_is_told_what_the_draft_had_after_the_accepted_tokens(draft, rejected):
    """Tokens of drafts are told as 0: the right one; else: so far from it."""
    right = text((1, 2), 1)[0]
    tree = DraftTree(tuple((right + token) % VOCABULARY for token in draft.tokens), draft.parents)
    desk = Desk(asked=4, trees=True)
    desk.open(tokens=(1, 2), wants_rejected=True)
    desk.attach((1, 2))
    desk.block((1, 2), tree)
    sends = desk.step()
    verdict = only_verdict(sends)
    assert (verdict.accepted, verdict.tokens[0]) == (1, right)
    assert verdict.rejected == tuple((right + token) % VOCABULARY for token in rejected)
    assert only_verdict(sends, DRAFTER) == replace(verdict, rejected=()), "a drafter knows its block"


def test_nothing_is_told_as_rejected_unasked_nor_where_the_session_ended_before_it():
    right = text((1, 2), 3)
    wrong = (right[2] + 1) % VOCABULARY
    for changes in ({}, {"wants_rejected": True, "stop_ids": (right[1],)}):
        desk = Desk()
        desk.open(tokens=(1, 2), **changes)
        desk.block((1, 2), (*right[:2], wrong))
        verdict = only_verdict(desk.step())
        assert (verdict.accepted, verdict.rejected) == (2, ())


def test_drafters_are_told_first():
    """A round waits for its drafter, not for its router; also where an earlier session has none."""
    desk = Desk()
    for session, drafter in (("a", None), ("b", "drafter-b#1"), ("c", "drafter-c#1")):
        desk.open(session, tokens=(1, 2))
        if drafter is not None:
            desk.attach((1, 2), session, drafter)
    told = [(receiver, type(message)) for receiver, message in desk.step()]
    both = [(drafter, kind) for drafter in ("drafter-b#1", "drafter-c#1") for kind in (Verdict, DraftRequest)]
    assert told == [*both, *[(ROUTER, Verdict)] * 3]


def test_a_session_that_is_closed_during_its_step_gets_no_verdict():
    desk = Desk()
    desk.open(tokens=(1, 2))
    plan = desk.scheduler.plan(0.0)
    assert plan is not None
    desk.scheduler.receive(ROUTER, Close("s", 1), 0.0)
    assert desk.scheduler.apply(desk.compute(plan), 0.1, 0.0) == []
    assert desk.scheduler.plan(0.0) == StepPlan(("s",), (), ())


def test_a_session_that_is_reopened_during_its_step_starts_anew():
    """The outcome belongs to the old attempt's tokens: applied to the new one it would be a wrong verdict."""
    desk = Desk()
    desk.open(tokens=(1, 2))
    plan = desk.scheduler.plan(0.0)
    assert plan is not None
    desk.open(tokens=(4, 5, 6), attempt=2)
    assert desk.scheduler.apply(desk.compute(plan), 0.1, 0.0) == []
    verdict = only_verdict(desk.step())
    assert (verdict.attempt, verdict.base_len, verdict.tokens) == (2, 3, text((4, 5, 6), 1))


def test_an_older_or_equal_attempt_changes_nothing():
    desk = Desk()
    desk.open(tokens=(4, 5, 6), attempt=2)
    assert desk.open(tokens=(1, 2), attempt=1) == []
    assert desk.open(tokens=(1, 2), attempt=2) == []
    desk.scheduler.receive(ROUTER, Close("s", 1), 0.0)
    assert only_verdict(desk.step()).base_len == 3


def test_opening_and_closing_before_a_step_never_reaches_the_engine():
    desk = Desk()
    desk.open()
    desk.scheduler.receive(ROUTER, Close("s", 1), 0.0)
    assert desk.scheduler.plan(0.0) is None
    assert desk.scheduler.is_idle


def test_a_row_carries_its_blocks_draft_probs():
    desk = Desk()
    desk.open(tokens=(1, 2))
    probs = SparseProbs(((9,),), ((1,),))
    desk.scheduler.receive(DRAFTER, a_block((1, 2), DraftTree.chain((9,), probs)), 0.0)
    desk.step()
    assert desk.rows[0][0].draft.probs == probs
    desk.step()
    assert desk.rows[1][0].draft.probs is None


def test_a_target_is_idle_while_it_has_sessions_and_makes_no_step():
    desk = Desk(patience=lambda _: 5.0, hold=5.0)
    desk.now = 100.0
    desk.open(tokens=(1, 2), max_len=5)
    desk.attach((1, 2))
    desk.step()  # at once, for it feeds the prompt; it takes 0.1 s up to now
    assert (desk.scheduler.counts.step_s, desk.scheduler.counts.idle_s) == (0.1, 0.0)
    desk.now = 102.0
    assert desk.scheduler.plan(desk.now) is None, "its block is waited for"
    desk.now = 103.0
    desk.block((1, 2, *text((1, 2), 1)), text((1, 2), 2)[1:])
    assert only_verdict(desk.step()).finish is Finish.LENGTH
    assert (desk.scheduler.counts.step_s, desk.scheduler.counts.idle_s) == (0.2, 3.0)


def test_a_target_without_sessions_is_not_idle_but_out_of_work():
    desk = Desk()
    desk.open(tokens=(1, 2), max_len=3)
    desk.step()
    assert desk.scheduler.plan(desk.now) == StepPlan(("s",), (), ())
    desk.scheduler.apply([], 0.0, desk.now)
    desk.known.clear()
    desk.now = 50.0
    desk.open("t", tokens=(1, 2), max_len=3)
    desk.now = 51.0
    desk.step()
    assert desk.scheduler.counts.idle_s == 1.0


# ---------------------------------------------------------------- the block buffer


def test_under_ratio_the_first_arrival_for_a_prefix_stays():
    """Choosing between two blocks by the second would bias the text."""
    desk = Desk()
    desk.open(tokens=(1, 2), acceptance=Acceptance.REJECTION, sampling=Sampling())
    desk.block((1, 2), (9,))
    desk.block((1, 2), text((1, 2), 1))
    assert only_verdict(desk.step()).accepted == 0
    assert desk.dropped == {"duplicate": 1}


@pytest.mark.parametrize(
    "rules",
    [
        {"acceptance": Acceptance.COUPLED, "sampling": Sampling()},
        {"acceptance": Acceptance.REJECTION, "sampling": Sampling(temperature=0.0)},
    ],
    ids=["coupled", "greedy"],
)
def test_elsewhere_a_drafter_may_think_again(rules):
    desk = Desk()
    desk.open(tokens=(1, 2), **rules)
    for block in ((9,), text((1, 2), 1), text((1, 2), 1)):
        desk.block((1, 2), block)
    assert only_verdict(desk.step()).accepted == 1
    assert desk.dropped == {"duplicate": 1}, "of the same twice, one is heard"


def test_a_block_waits_for_its_prefix_and_is_used_there():
    """Pre-submission: the next block is there before the verdict that it builds on."""
    desk = Desk()
    desk.open(tokens=(1, 2))
    right = text((1, 2), 5)
    desk.block((1, 2), right[:2])
    desk.block((1, 2, *right[:3]), right[3:])
    assert only_verdict(desk.step()).tokens == right[:3]
    assert only_verdict(desk.step()).tokens[:2] == right[3:]
    assert not desk.dropped


def test_blocks_that_were_passed_by_are_counted_by_cause():
    desk = Desk()
    desk.open(tokens=(1, 2))
    right = text((1, 2), 3)
    desk.block((1, 2, 49), (5,))  # another token than the target will decide
    desk.block((1, 2, right[0]), (right[1],))
    desk.step()
    assert desk.dropped == {"wrong_guess": 1}
    desk.step()
    desk.block((1, 2), (right[0],))
    assert desk.dropped["stale"] == 1
    desk.block((1, 2, 49, 48, 47), (5,))
    assert desk.dropped["other_prefix"] == 1


def test_a_block_that_waited_too_long_is_verified_from_where_the_target_has_got_to():
    """Its first token is what the target decided meanwhile: the rest is as good as a new block."""
    desk = Desk(max_step_tokens=4)
    desk.open(tokens=(1, 2))
    desk.block((1, 2), text((1, 2), 3))  # does not fit into this step
    assert only_verdict(desk.step()).drafted == 0
    assert only_verdict(desk.step()).accepted == 2
    assert desk.scheduler.counts.rebased == 1
    assert not desk.dropped


def settled(desk: Desk) -> tuple[int, int]:
    """Draft tokens that were accepted, and that were wasted."""
    return desk.scheduler.counts.accepted_tokens, desk.scheduler.counts.wasted_tokens


def test_draft_tokens_are_wasted_where_they_are_rejected_and_not_before_that_is_known():
    desk = Desk()
    desk.open(tokens=(1, 2))
    right = text((1, 2), 2)
    desk.block((1, 2), (right[0], (right[1] + 1) % VOCABULARY, 5))
    assert settled(desk) == (0, 0)
    desk.step()
    assert settled(desk) == (1, 2)
    desk.step()
    assert settled(desk) == (1, 2), "a plain step wastes nothing"


def test_all_tokens_of_blocks_that_were_passed_by_or_replaced_are_wasted():
    desk = Desk()
    desk.open(tokens=(1, 2))
    right = text((1, 2), 3)
    desk.block((1, 2, 49), (5, 6))  # another token than the target will decide
    desk.block((1, 2, right[0]), DraftTree((right[1], 5, 5, 6), (-1, 0, 1, -1)))
    desk.block((1, 2, right[0]), right[1:])  # better than the one before
    desk.step()
    assert settled(desk) == (0, 2 + 4)
    desk.step()
    assert settled(desk) == (2, 2 + 4)


def test_what_a_late_block_says_of_tokens_that_are_decided_is_wasted():
    desk = Desk()
    desk.open(tokens=(1, 2))
    desk.step()
    desk.block((1, 2), text((1, 2), 3))
    assert settled(desk) == (0, 1)
    desk.step()
    assert settled(desk) == (2, 1)


def test_tokens_beyond_what_pays_by_now_are_wasted():
    desk = Desk(asked=1)
    desk.open(tokens=(1, 2))
    desk.block((1, 2), text((1, 2), 3))
    assert only_verdict(desk.step()).drafted == 1
    assert settled(desk) == (1, 2)


def test_with_its_session_a_block_is_wasted():
    desk = Desk()
    desk.open(tokens=(1, 2))
    desk.block((1, 2), (5, 6))
    desk.scheduler.receive(ROUTER, Close("s", 1), desk.now)
    assert settled(desk) == (0, 2)
    desk.block((1, 2), (5,))
    assert desk.dropped == {"ended": 1}
    assert settled(desk) == (0, 3)


def test_what_one_drafter_sent_waits_though_another_comes_before_the_session_is_opened():
    """Nobody can tell yet whose drafter it will be: the other one may be anybody."""
    desk = Desk()
    desk.block((1, 2), (5, 6))
    desk.attach((1, 2), "s", "other#1")
    assert desk.dropped == {}
    desk.open(tokens=(1, 2))
    desk.step()
    assert settled(desk) == (0, 2), "it was verified"


def test_a_block_that_arrives_too_late_is_verified_from_where_the_target_has_got_to():
    desk = Desk()
    desk.open(tokens=(1, 2))
    desk.step()
    desk.block((1, 2), text((1, 2), 3))
    assert only_verdict(desk.step()).accepted == 2


def test_a_late_blocks_draft_probs_stay_with_their_tokens():
    """One row off, and every token would be weighed against another's distribution."""
    right = text((1, 2), 4)
    probs = SparseProbs(tuple((token,) for token in right[:3]), ((1,), (2,), (3,)))
    desk = Desk()
    desk.open(tokens=(1, 2))
    desk.step()
    desk.scheduler.receive(DRAFTER, a_block((1, 2), DraftTree.chain(right[:3], probs)), desk.now)
    desk.step()
    (row,) = desk.rows[-1]
    assert row.tokens[-row.drafted :] == right[1:3]
    assert row.draft.probs == SparseProbs(probs.token_ids[1:], probs.weights[1:])


def test_a_late_block_does_not_push_out_the_one_that_was_drafted_for_this_prefix():
    right = text((1, 2), 4)
    desk = Desk(max_step_tokens=4)
    desk.open(tokens=(1, 2))
    desk.block((1, 2), right[:3])
    desk.block((1, 2, right[0]), (right[1],))
    desk.step()
    assert only_verdict(desk.step()).drafted == 1


def test_a_late_block_that_guessed_otherwise_is_stale():
    desk = Desk()
    desk.open(tokens=(1, 2))
    right = text((1, 2), 3)
    desk.step()
    desk.block((1, 2), ((right[0] + 1) % VOCABULARY, *right[1:]))
    desk.block((1, 2), right[:1])  # right, but nothing is left of it
    assert desk.dropped == {"stale": 2}
    assert only_verdict(desk.step()).drafted == 0


BAD_BLOCKS = {
    "out_of_vocabulary": a_block((1, 2), (VOCABULARY,)),
    "beyond_context": replace(a_block((1, 2), (3, 3)), base_len=99),
    "too_long": a_block((1, 2), (3,) * 5),
}


@pytest.mark.parametrize("cause", BAD_BLOCKS)
def test_what_can_never_be_verified_is_dropped_and_disturbs_nothing(cause):
    desk = Desk()
    desk.open(tokens=(1, 2))
    desk.scheduler.receive(DRAFTER, BAD_BLOCKS[cause], 0.0)
    assert desk.dropped == {cause: 1}
    assert only_verdict(desk.step()).tokens == text((1, 2), 1)


def test_a_block_that_reaches_its_sessions_end_is_dropped():
    """A cache with room for just one such session lacks the page it would need, so it would wait forever."""
    desk = Desk(pages=2)
    desk.open(tokens=(1, 2, 3, 4, 5, 6), max_len=8)
    desk.block((1, 2, 3, 4, 5, 6), text((1, 2, 3, 4, 5, 6), 3))
    assert desk.dropped == {"too_long": 1}
    desk.block((1, 2, 3, 4, 5, 6), text((1, 2, 3, 4, 5, 6), 1))
    assert desk.finish() == {"s": text((1, 2, 3, 4, 5, 6), 2)}
    assert len(desk.rows) == 2


def test_a_draft_prob_outside_the_vocabulary_is_refused_though_no_token_is():
    """It would index the target's row out of range, and end the replica."""
    desk = Desk()
    desk.open(tokens=(1, 2))
    probs = SparseProbs(((9, VOCABULARY),), ((1, 1),))
    desk.scheduler.receive(DRAFTER, a_block((1, 2), DraftTree.chain((9,), probs)), 0.0)
    assert desk.dropped == {"out_of_vocabulary": 1}


def test_plain_sessions_take_no_blocks():
    desk = Desk()
    desk.open(tokens=(1, 2), draft_tokens=0)
    desk.block((1, 2), (5,))
    assert desk.dropped == {"too_long": 1}


def test_the_room_of_a_session_is_bounded():
    desk = Desk(buffer=BufferLimits(blocks=2))
    desk.open(tokens=(1, 2))
    for token in range(5):
        desk.block((1, 2, token), (5,))
    assert desk.dropped == {"buffer_full": 3}


def test_guesses_that_fill_the_room_do_not_keep_out_the_block_that_is_due():
    desk = Desk(buffer=BufferLimits(blocks=2))
    desk.open(tokens=(1, 2))
    for token in range(4):
        desk.block((1, 2, token), (5,))
    right = text((1, 2), 1)
    desk.block((1, 2), right)
    assert desk.dropped == {"buffer_full": 2}
    assert only_verdict(desk.step()).accepted == 1


# ---------------------------------------------------------------- what comes before its Open


def test_a_block_and_an_attach_that_come_before_the_open_are_used():
    """Drafter and router have streams of their own: nothing orders them."""
    desk = Desk()
    right = text((1, 2), 3)
    assert desk.attach((1, 2)) == []
    desk.block((1, 2), right[:2])
    desk.open(tokens=(1, 2))
    sends = desk.step()
    assert only_verdict(sends).tokens == right
    assert only_verdict(sends, DRAFTER).tokens == right


@pytest.mark.parametrize("gone", [True, False], ids=["the drafter left", "time passed"])
def test_what_waits_for_an_open_that_never_comes_is_freed(gone):
    """Otherwise late blocks of ended sessions stay, and a replica that has nothing to do is never idle."""
    desk = Desk(buffer=BufferLimits(age_s=5))
    desk.attach((1, 2))
    desk.block((1, 2), (5,))
    if gone:
        desk.scheduler.gone(DRAFTER, desk.now)
    else:
        due = desk.scheduler.next_due()
        assert due == 5.0, "the loop must wake for it"
        assert desk.scheduler.plan(due - 0.1) is None
        assert not desk.scheduler.is_idle
        assert desk.scheduler.plan(due) is None
    assert desk.dropped == {"drafter_gone" if gone else "expired": 1}
    assert desk.scheduler.is_idle
    assert settled(desk) == (0, 1)


def test_expiry_goes_by_age_though_several_wait_for_one_session():
    """A second drafter's messages are younger; they neither shield older ones nor expire with them."""
    desk = Desk(buffer=BufferLimits(age_s=5))
    desk.attach((1,), "a")
    desk.now = 1.0
    desk.attach((1,), "b")
    desk.now = 4.0
    desk.attach((1,), "a", drafter="other#1")
    assert desk.scheduler.next_due() == 5.0
    desk.scheduler.plan(5.5)
    assert desk.scheduler.next_due() == 6.0
    desk.scheduler.plan(6.5)
    assert desk.scheduler.next_due() == 9.0


def test_a_drafter_that_floods_unknown_sessions_fills_only_its_own_room():
    desk = Desk(buffer=BufferLimits(sessions=3, blocks=2))
    for number in range(6):
        desk.block((1, 2), (5,), f"unknown{number}")
    for _ in range(3):
        desk.block((1, 2), (5,), "unknown0")
    assert desk.dropped == {"buffer_full": 5}
    assert desk.attach((1, 2), "s", "other#1") == []
    desk.open(tokens=(1, 2))
    assert only_verdict(desk.step(), "other#1").tokens == text((1, 2), 1)


# ---------------------------------------------------------------- attaching


def test_a_drafter_that_attaches_late_gets_what_it_missed_as_one_verdict():
    desk = Desk()
    desk.open(tokens=(1, 2))
    desk.step()
    desk.step()
    missed = only_verdict(desk.attach((1, 2)), DRAFTER)
    assert (missed.base_len, missed.prefix_hash, missed.tokens) == (2, Prefix(KEY, (1, 2)).hash, text((1, 2), 2))
    again = desk.attach((1, 2, *missed.tokens))
    assert verdicts(again) == [], "nothing was missed"
    assert only_request(again).base_len == 2 + len(missed.tokens)


@pytest.mark.parametrize("tokens", [(1, 3), (1, 2, 3)], ids=["other tokens", "more tokens"])
def test_a_drafter_with_other_tokens_is_told_to_resynchronise_and_gets_no_verdicts(tokens):
    desk = Desk()
    desk.open(tokens=(1, 2))
    assert desk.attach(tokens) == [(DRAFTER, Resync("s", 2, Prefix(KEY, (1, 2)).hash))]
    assert [receiver for receiver, _ in desk.step()] == [ROUTER]


def test_a_drafter_that_left_is_told_nothing_and_waited_for_no_more():
    desk = Desk(patience=lambda *_: 9.0)
    desk.open(tokens=(1, 2))
    desk.attach((1, 2))
    desk.step()
    desk.scheduler.gone(DRAFTER, desk.now)
    assert [receiver for receiver, _ in desk.step()] == [ROUTER]


# ---------------------------------------------------------------- patience


def test_a_session_is_waited_for_until_its_patience_ends_and_then_decoded_plainly():
    desk = Desk(patience=lambda *_: 2.0)
    desk.open(tokens=(1, 2))
    desk.attach((1, 2))
    desk.step()  # the prompt is fed at once
    assert desk.scheduler.plan(1.9) is None
    assert desk.scheduler.next_due() == 2.0
    desk.now = 2.0
    assert only_verdict(desk.step()).drafted == 0


def test_a_block_ends_the_wait_at_once():
    desk = Desk(patience=lambda *_: 2.0)
    desk.open(tokens=(1, 2))
    desk.attach((1, 2))
    decided = only_verdict(desk.step()).tokens
    desk.block((1, 2, *decided), (5,))
    assert desk.scheduler.next_due() == 0.0
    assert only_verdict(desk.step()).drafted == 1


def test_requests_without_speculation_do_not_shorten_its_pauses():
    """Or whoever turns it off would have it tried more often for all others."""
    desk = Desk(max_context=1000, pages=1000)
    desk.scheduler = VerificationScheduler(desk.limits)

    def run(session: str, draft_tokens: int, steps: int) -> list[bool]:
        """Returns at each step whether speculation was on; steps take twice as long with it."""
        desk.open(session, draft_tokens=draft_tokens, max_len=900)
        desk.attach((1, 2, 3), session)
        on = []
        for _ in range(steps):
            on.append(bool(desk.scheduler.speculation["on"]))
            desk.now += 0.2 if on[-1] and draft_tokens else 0.1
            desk.step()
        desk.scheduler.receive(ROUTER, Close(session, 1), desk.now)
        return on

    lost = run("a", 4, 120)
    assert lost[0]
    assert not any(lost[-40:])
    assert not any(run("b", 0, 800))
    assert any(run("c", 4, 800))


def test_a_drafter_of_which_nothing_is_asked_hears_no_verdicts_until_something_is():
    """It costs the target a message a token otherwise, and the drafter the reading."""
    asks = iter([0, 0, 0, 2, 2, 0])
    desk = Desk()
    desk.scheduler = VerificationScheduler(desk.limits, Steady(lambda _: 0.0, asked_next=lambda: next(asks, 0)))
    desk.open(tokens=(1, 2), max_len=11)
    assert [(to, message.max_tokens) for to, message in desk.attach((1, 2))] == [(DRAFTER, 0)]
    told = [[message for to, message in desk.step() if to == DRAFTER] for _ in range(9)]
    whole = (1, 2, *text((1, 2), 9))
    nothing, still_nothing, caught_up, second, paused, *quiet, (last,) = told
    assert nothing == still_nothing == []
    assert not any(quiet)
    assert [len(verdict.tokens) for verdict, _ in (caught_up, second, paused)] == [3, 1, 1]
    assert caught_up[0].prefix_hash == Prefix(KEY, whole[:2]).hash
    assert [request.max_tokens for _, request in (caught_up, second, paused)] == [2, 2, 0]
    assert last.finish is Finish.LENGTH
    assert last.tokens == whole[last.base_len :], "the end is told, with all before it"


def test_nothing_is_waited_for_before_the_last_token_or_with_speculation_off():
    """A block there could not bring anything: one plain step ends the session."""
    desk = Desk(patience=lambda *_: 2.0)
    desk.open("last", tokens=(1, 2), max_len=4)
    desk.open("plain", tokens=(1, 2), draft_tokens=0)
    for name in ("last", "plain"):
        desk.attach((1, 2), name)
    desk.step()
    assert len([send for send in desk.step() if send[0] == ROUTER]) == 2


def test_waiting_in_vain_is_remembered_and_a_block_forgives():
    seen: list[SessionStats] = []

    def patience(blocks: SessionStats) -> float:
        seen.append(replace(blocks))
        return 0.0

    desk = Desk(patience)
    desk.open(tokens=(1, 2))
    desk.attach((1, 2))
    for _ in range(4):
        desk.step()
    assert seen[-1].missed_rounds == 3, "of four steps the first one fed the prompt"
    tokens = (1, 2, *text((1, 2), 4))
    desk.block((1, 2, 0), (9,))
    desk.step()
    assert seen[-1].missed_rounds == 3, "whoever sends a block that is of no use is alive"
    desk.block((*tokens, *text(tokens, 1)), text(tokens, 3)[1:])
    desk.step()
    assert seen[-1].missed_rounds == 0
    assert seen[-1].chances.accepted[1] > 0, "and what it brought is remembered, too"


def test_a_silent_drafter_is_waited_for_by_nobody_after_a_few_steps():
    """Not even by a session that was opened meanwhile; a block for any of its sessions ends that."""
    desk = Desk(patience=lambda _: 1.0, max_context=200)
    desk.open(max_len=150)
    desk.step()
    desk.attach((1, 2, 3, *text((1, 2, 3), 1)))
    for _ in range(SILENT_STEPS):
        assert desk.scheduler.plan(desk.now) is None
        desk.now += 1.0
        assert only_verdict(desk.step()).answer is DraftAnswer.MISSED
    desk.step()
    desk.open("new", tokens=(7,), max_len=150)
    desk.step()
    desk.attach((7, *text((7,), 1)), "new")
    assert len(verdicts(desk.step())) == 4, "both, at once, for router and drafter"
    desk.block((7, *text((7,), 2)), (1,), "new")
    assert [row.session for row in desk.rows[-1]] == ["s", "new"]
    desk.step()
    assert desk.scheduler.plan(desk.now) is None, "it is waited for again"


def test_a_silent_drafter_is_probed_for_the_time_of_a_step():
    desk = Desk(patience=lambda _: 1.0, max_context=200)
    desk.open(max_len=150)
    desk.step()
    desk.attach((1, 2, 3, *text((1, 2, 3), 1)))
    waits = []
    first = SILENT_STEPS - 1 + PROBE_AFTER
    second = first + 2 * PROBE_AFTER
    for step in range(second + 1):
        due = desk.scheduler.next_due()
        assert due is not None
        if step >= SILENT_STEPS:
            waits.append((step, round(due - desk.now, 3)))
        desk.now = due
        desk.step()
    assert [wait for wait in waits if wait[1] > 0] == [(first, 0.1), (second, 0.1)]


def test_a_drafter_with_nothing_to_offer_is_not_waited_for_and_not_taken_for_silent():
    desk = Desk(patience=lambda _: 1.0)
    desk.open()
    tokens = (1, 2, 3)
    tokens += only_verdict(desk.step()).tokens
    desk.attach(tokens)
    for _ in range(2 * SILENT_STEPS):
        assert desk.scheduler.plan(desk.now) is None
        desk.scheduler.receive(DRAFTER, NoDraft("s", len(tokens), Prefix(KEY, tokens).hash), desk.now)
        verdict = only_verdict(desk.step())
        assert verdict.answer is DraftAnswer.GIVEN
        tokens += verdict.tokens


def test_a_drafter_that_never_has_anything_to_offer_is_soon_asked_no_more():
    """Or it would be kept busy for ever by a draft model that is sure of nothing."""
    desk = Desk(max_context=1000, pages=1000)
    desk.scheduler = VerificationScheduler(desk.limits)
    desk.open(max_len=900)
    tokens: tuple[int, ...] = (1, 2, 3)
    wanted = [only_request(desk.attach(tokens)).max_tokens]  # what was said last stands
    asked = []
    for _ in range(300):
        desk.now += 0.05
        desk.scheduler.receive(DRAFTER, NoDraft("s", len(tokens), Prefix(KEY, tokens).hash), desk.now)
        desk.now += 0.1
        sends = desk.step()
        tokens += only_verdict(sends).tokens
        wanted += [message.max_tokens for _, message in sends if isinstance(message, DraftRequest)]
        asked.append(wanted[-1] > 0)
    assert asked[0]
    assert 0 < sum(asked[100:]) < 20


def test_nothing_to_offer_for_a_step_under_way_says_that_the_drafter_lives_and_not_how_long_blocks_take():
    """The step did not wait for it, so whoever had nothing ahead need not have hurried to say so."""
    seen: list[SessionStats] = []

    def patience(blocks: SessionStats) -> float:
        seen.append(replace(blocks))
        return 0.0

    desk = Desk(patience, waits=False, max_context=200)
    desk.open(max_len=150)
    tokens: tuple[int, ...] = (1, 2, 3)
    tokens += only_verdict(desk.step()).tokens
    desk.attach(tokens)
    desk.block(tokens, text(tokens, 1))
    tokens += only_verdict(desk.step(), DRAFTER).tokens
    before = seen[-1]
    for _ in range(2 * MISSED_ROUNDS):
        plan = desk.scheduler.plan(desk.now)
        assert plan is not None
        desk.now += 0.05
        desk.scheduler.receive(DRAFTER, NoDraft("s", len(tokens), Prefix(KEY, tokens).hash), desk.now)
        verdict = only_verdict(desk.scheduler.apply(desk.compute(plan), 0.1, desk.now), DRAFTER)
        assert verdict.answer is not DraftAnswer.MISSED
        tokens += verdict.tokens
    assert (seen[-1].delay_s, seen[-1].missed_rounds) == (before.delay_s, 0)


def test_having_nothing_to_offer_for_another_prefix_says_nothing():
    desk = Desk(patience=lambda _: 1.0)
    desk.open()
    tokens = (1, 2, 3, *only_verdict(desk.step()).tokens)
    desk.attach(tokens)
    desk.scheduler.receive(DRAFTER, NoDraft("s", len(tokens), 1), desk.now)
    desk.scheduler.receive(DRAFTER, NoDraft("s", 3, Prefix(KEY, (1, 2, 3)).hash), desk.now)
    desk.scheduler.receive(DRAFTER, NoDraft("unknown", 3, 1), desk.now)
    assert desk.scheduler.plan(desk.now) is None


def test_a_drafter_that_detaches_is_not_waited_for_and_another_ones_detach_is_void():
    desk = Desk(patience=lambda _: 1.0)
    desk.open()
    tokens = (1, 2, 3, *only_verdict(desk.step()).tokens)
    desk.attach(tokens)
    desk.scheduler.receive("drafter#2", Detach("s"), desk.now)
    assert desk.scheduler.plan(desk.now) is None
    desk.scheduler.receive(DRAFTER, Detach("s"), desk.now)
    ((receiver, verdict),) = desk.step()
    assert isinstance(verdict, Verdict)
    assert (receiver, verdict.answer) == (ROUTER, DraftAnswer.MISSED), "the router knows whether it assigned anybody"


def test_a_verdict_says_what_came_of_the_block_that_was_asked_for():
    desk = Desk()
    desk.open()
    first = only_verdict(desk.step())
    tokens = (1, 2, 3, *first.tokens)
    desk.attach(tokens)
    missed = only_verdict(desk.step())
    tokens += missed.tokens
    desk.block(tokens, text(tokens, 2))
    given = only_verdict(desk.step())
    answers = [first.answer, missed.answer, given.answer]
    assert answers == [DraftAnswer.NOT_ASKED, DraftAnswer.MISSED, DraftAnswer.GIVEN]


def test_a_step_waits_for_blocks_and_then_goes_on_without_them():
    """All together: a step for both costs less than two."""
    desk = Desk(hold=1.0)
    for name in "ab":
        desk.open(name, tokens=(1, 2))
        desk.attach((1, 2), name)
    decided = text((1, 2), 1)
    desk.step()
    desk.block((1, 2, *decided), (5,), "a")
    assert desk.scheduler.next_due() == 1.0
    desk.now = 1.0
    desk.step()
    assert sorted((row.session, row.drafted) for row in desk.rows[-1]) == [("a", 1), ("b", 0)]


def test_blocks_that_are_not_waited_for_are_used_if_they_are_there():
    desk = Desk(hold=1.0, waits=False)
    desk.open(tokens=(1, 2))
    desk.attach((1, 2))
    request = only_request(desk.step())
    assert (request.max_tokens, request.hold_step) == (4, False)
    assert desk.scheduler.next_due() == desk.now
    verdict = only_verdict(desk.step(), DRAFTER)
    assert verdict.answer is DraftAnswer.NOT_ASKED, "nothing was missed"
    tokens = (1, 2, *text((1, 2), 3))
    desk.block(tokens, text(tokens, 1))
    desk.step()
    desk.step()
    assert desk.rows[-1][0].drafted == 1


def test_only_steps_that_compute_anything_say_what_steps_cost():
    """While blocks are awaited, plans may only open and close sessions."""
    desk = Desk(hold=5.0)
    for name in "ab":
        desk.open(name, tokens=(1, 2))
        desk.attach((1, 2), name)
    for _ in range(2):
        desk.step()
        desk.now += 5.0
    cost = desk.scheduler.step_cost
    assert cost.cost != StepCost.profiled(None).cost, "steps were measured"
    desk.now -= 5.0
    desk.scheduler.receive(ROUTER, Close("b", 1), desk.now)
    desk.step()
    assert desk.rows[-1] == ()
    assert desk.scheduler.step_cost == cost


def test_a_step_begins_as_soon_as_the_last_block_that_it_waits_for_is_there():
    desk = Desk(patience=lambda _: 9.0, hold=5.0)
    for name in "ab":
        desk.open(name, tokens=(1, 2))
        desk.attach((1, 2), name)
    decided = text((1, 2), 1)
    desk.step()
    desk.block((1, 2, *decided), (5,), "a")
    assert desk.scheduler.plan(desk.now) is None
    desk.now = 1.0
    desk.block((1, 2, *decided), (6,), "b")
    assert len(verdicts(desk.step())) == 4, "a verdict for each, for router and drafter"
    assert [row.session for row in desk.rows[-1]] == ["a", "b"]


# ---------------------------------------------------------------- what the drafter is asked for


def test_a_verdict_says_how_much_to_draft_next_and_who_is_asked_for_nothing_is_not_waited_for():
    desk = Desk(patience=lambda _: 9.0, asked=2)
    desk.open(tokens=(1, 2))
    desk.attach((1, 2))
    assert only_request(desk.step()).max_tokens == 2
    assert desk.scheduler.plan(desk.now) is None
    plain = Desk(patience=lambda _: 9.0, asked=0)
    plain.open(tokens=(1, 2))
    assert only_request(plain.attach((1, 2))).max_tokens == 0
    assert only_verdict(plain.step(), ROUTER).tokens == text((1, 2), 1)
    assert only_verdict(plain.step(), ROUTER).tokens == text((1, 2), 2)[1:]


def test_a_drafter_whose_good_blocks_turn_bad_is_told_to_begin_anew():
    """Its cache may be out of step though its tokens are right: only its acceptance says so."""
    desk = Desk()
    tokens: tuple[int, ...] = (1, 2)
    desk.open(tokens=tokens, max_len=100)
    desk.attach(tokens)
    resync: list[Resync] = []
    for round_number in range(2 * PROOF):
        right = text(tokens, 1)
        desk.block(tokens, right if round_number < PROOF else ((right[0] + 1) % VOCABULARY,))
        sends = desk.step()
        tokens += only_verdict(sends).tokens
        resync += [message for receiver, message in sends if isinstance(message, Resync) and receiver == DRAFTER]
        if resync:
            break
    assert resync == [Resync("s", len(tokens), Prefix(KEY, tokens).hash)]
    assert round_number > PROOF, "one bad block is no proof"
    assert desk.scheduler.sentinel.desyncs == 1
    assert [receiver for receiver, _ in desk.step()] == [ROUTER], "nothing more until it attaches again"
    tokens += text(tokens, 1)
    assert verdicts(desk.attach(tokens)) == []
    assert only_verdict(desk.step(), DRAFTER).tokens == text(tokens, 1)


def drafted_rounds(desk: Desk, tokens: tuple[int, ...], rounds: int, right: bool, session: str = "s") -> list[Verdict]:
    """Returns the router's messages in rounds with blocks of one token."""
    heard = []
    for _ in range(rounds):
        token = text(tokens, 1)[0]
        desk.block(tokens, (token if right else (token + 1) % VOCABULARY,), session)
        verdict = only_verdict(desk.step(), ROUTER)
        tokens += verdict.tokens
        heard.append(verdict)
    return heard


def after_rounds(tokens: tuple[int, ...], heard: list[Verdict]) -> tuple[int, ...]:
    return tokens + tuple(token for verdict in heard for token in verdict.tokens)


def test_the_router_is_told_of_a_collapse_and_again_if_beginning_anew_was_in_vain():
    desk = Desk()
    tokens: tuple[int, ...] = (1, 2)
    desk.open(tokens=tokens, max_len=100)
    desk.attach(tokens)
    good = drafted_rounds(desk, tokens, 2 * PROOF, right=True)
    tokens = after_rounds(tokens, good)
    told = []
    for _ in range(2):
        bad = drafted_rounds(desk, tokens, 20, right=False)
        tokens = after_rounds(tokens, bad)
        told += [verdict.collapse for verdict in bad if verdict.collapse is not None]
        desk.attach(tokens)
    assert [verdict.collapse for verdict in good] == [None] * len(good)
    assert [collapse.is_resynced for collapse in told] == [False, True]
    assert [(collapse.usual > 0.8, collapse.latest) for collapse in told] == [(True, 0.0)] * 2
    assert desk.scheduler.sentinel.desyncs == 1


def test_a_session_that_begins_with_a_drafter_that_became_bad_has_something_to_fall_short_of():
    desk = Desk()
    tokens: tuple[int, ...] = (1, 2)
    desk.open(tokens=tokens, max_len=100)
    desk.attach(tokens)
    tokens = after_rounds(tokens, drafted_rounds(desk, tokens, 2 * PROOF, right=True))
    drafted_rounds(desk, tokens, 20, right=False)
    desk.scheduler.receive(ROUTER, Close("s", 1), desk.now)
    for drafter, is_suspected in ((DRAFTER, True), ("another#1", False)):
        desk.open(drafter, tokens=(1, 2), max_len=100)
        desk.attach((1, 2), drafter, drafter)
        heard = drafted_rounds(desk, (1, 2), 30, right=False, session=drafter)
        assert any(verdict.collapse is not None for verdict in heard) == is_suspected
        desk.scheduler.receive(ROUTER, Close(drafter, 1), desk.now)


def test_blocks_are_counted_by_drafter_context_and_whether_the_prefix_was_cached():
    desk = Desk(page_size=2)
    prompt = (1, 2, 3, 4, 5)
    for name in "ab":
        desk.open(name, tokens=prompt, max_len=8)
        desk.attach(prompt, name)
        drafted_rounds(desk, prompt, 1, right=True, session=name)
        desk.scheduler.receive(ROUTER, Close(name, 1), desk.now)
    desk.open("c", tokens=prompt, max_len=8)
    desk.block(prompt, text(prompt, 1), "c")
    desk.step()
    ((drafter, kinds),) = desk.scheduler.sentinel.tally.counts.items()
    assert DRAFTER.startswith(drafter + "#")
    once = AcceptanceCounts((1, 1), (1, 0))
    assert kinds == {BlockKind(4, False): once, BlockKind(4, True): once}, "c has no drafter, so its block is nobody's"


def test_verdicts_tell_how_much_of_what_was_opened_was_cached():
    desk = Desk(page_size=2)
    for name, cached in (("a", 0), ("b", 4)):
        desk.open(name, tokens=(1, 2, 3, 4, 5), max_len=8)
        verdicts = [message for _, message in desk.step() if isinstance(message, Verdict)]
        assert {verdict.prefix_cached for verdict in verdicts} == {cached}
        desk.scheduler.receive(ROUTER, Close(name, 1), desk.now)


# ---------------------------------------------------------------- many sessions


def test_sessions_beyond_the_cache_queue_in_order_and_come_in_between_steps():
    desk = Desk(max_sessions=2)
    for name in "abcd":
        desk.open(name, tokens=(1, 2), max_len=3 if name == "a" else 5)
    desk.step()
    assert [row.session for row in desk.rows[0]] == ["a", "b"]
    assert desk.scheduler.load() == {"sessions": 2.0, "queued": 1.0}, "a has ended, and c has its place"
    desk.scheduler.receive(ROUTER, Close("b", 1), 0.0)
    desk.step()
    assert [row.session for row in desk.rows[1]] == ["c", "d"]


def test_a_queued_session_can_be_attached_closed_and_replaced():
    desk = Desk(max_sessions=1)
    desk.open("a", tokens=(1, 2), max_len=3)
    desk.open("b", tokens=(1, 2))
    desk.open("c", tokens=(1, 2))
    desk.open("b", tokens=(3, 4), attempt=2)
    desk.attach((3, 4), "b")
    desk.scheduler.receive(ROUTER, Close("c", 1), 0.0)
    desk.step()
    verdict = only_verdict(desk.step(), DRAFTER)
    assert (verdict.session, verdict.tokens) == ("b", text((3, 4), 1))


def test_the_drafter_of_a_queued_session_is_asked_for_its_first_block_so_that_it_reads_the_prompt():
    desk = Desk(max_sessions=1, asked=3)
    desk.open("a", tokens=(1, 2))
    desk.open("b", tokens=(3, 4))
    assert only_request(desk.attach((3, 4), "b")).max_tokens == 3


def test_a_full_queue_is_refused_and_so_is_what_can_never_be_served():
    desk = Desk(max_sessions=1, max_queued=1)
    desk.open("a")
    desk.open("b")
    for changes, reason in (
        ({}, RefusalReason.OVERLOADED),
        ({"tokens": (VOCABULARY,)}, RefusalReason.INVALID),
        ({"max_len": 101}, RefusalReason.INVALID),
    ):
        ((receiver, refusal),) = desk.open("c", attempt=3, **changes)
        assert isinstance(refusal, Refusal)
        assert (receiver, refusal.session, refusal.attempt, refusal.reason) == (ROUTER, "c", 3, reason)


def test_long_prompts_are_fed_in_chunks_and_nobody_starves():
    """A prompt of ten steps must not keep short sessions waiting, nor they it."""
    desk = Desk(max_step_tokens=8)
    desk.open("long", tokens=tuple(range(40)), max_len=90)
    desk.open("short", tokens=(1, 2))
    decided: dict[str, list[int]] = {"long": [], "short": []}
    for _ in range(20):
        for _, message in desk.step():
            assert isinstance(message, Verdict)
            decided[message.session] += message.tokens
    assert tuple(decided["long"]) == text(tuple(range(40)), len(decided["long"]))
    assert tuple(decided["short"]) == text((1, 2), len(decided["short"]))
    assert len(decided["long"]) >= 8
    assert len(decided["short"]) >= 15
    assert [row.session for row in desk.rows[1]] == ["short", "long"], "whoever waited longest comes first"
    chunks = [row for rows in desk.rows for row in rows if row.session == "long" and not row.decide]
    assert max(len(row.tokens) for row in chunks) <= 8


def test_more_sessions_than_a_step_has_room_for_take_turns():
    desk = Desk(max_step_tokens=2)
    for name in "abcd":
        desk.open(name, tokens=(1,))
    served = [message.session for _ in range(8) for _, message in desk.step()]
    assert sorted(served) == sorted("abcd" * 4)


@given(
    prompts=st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=5),
    max_sessions=st.integers(1, 3),
    max_step_tokens=st.integers(1, 12),
    data=st.data(),
)
def test_whatever_blocks_come_every_session_gets_its_plain_text(prompts, max_sessions, max_step_tokens, data):
    """Right, wrong, late, early and doubled blocks, in any batch, under any limits: the same tokens."""
    desk = Desk(max_sessions=max_sessions, max_step_tokens=max_step_tokens)
    wanted = {f"s{i}": text(tuple(prompt), 6) for i, prompt in enumerate(prompts)}
    tokens = {f"s{i}": tuple(prompt) for i, prompt in enumerate(prompts)}
    for i, prompt in enumerate(prompts):
        desk.open(f"s{i}", tokens=tuple(prompt), max_len=len(prompt) + 6)
    for _ in range(400):
        name = data.draw(st.sampled_from(sorted(tokens)))
        ahead = data.draw(st.integers(0, 2))
        before = tokens[name] + text(tokens[name], ahead)
        draft = [*text(before, 3)][: data.draw(st.integers(1, 3))]
        if data.draw(st.booleans()):
            draft[-1] = data.draw(st.integers(0, VOCABULARY - 1))
        desk.block(before, tuple(draft), name)
        for receiver, message in desk.step():
            assert isinstance(message, Verdict)
            assert receiver == ROUTER
            assert (message.base_len, message.prefix_hash) == (
                len(tokens[message.session]),
                Prefix(KEY, tokens[message.session]).hash,
            )
            tokens[message.session] += message.tokens
        if not any(desk.scheduler.load().values()):
            break
    assert {name: whole[-6:] for name, whole in tokens.items()} == wanted


# ---------------------------------------------------------------- pages


def test_a_prompt_that_was_computed_for_another_session_begins_where_that_ended():
    """But for its last token, whose successor must be computed."""
    desk = Desk()
    prompt = tuple(range(11))
    desk.open("a", tokens=prompt)
    desk.step()
    desk.open("b", tokens=prompt)
    desk.open("c", tokens=(*prompt[:6], 40, 41, 42))
    desk.open("d", tokens=prompt[:8])
    by_session = {message.session: message for _, message in desk.step()}
    starts = {row.session: (row.start, len(row.tokens)) for row in desk.rows[-1]}
    assert starts == {"a": (11, 1), "b": (8, 3), "c": (4, 5), "d": (4, 4)}
    assert isinstance(by_session["b"], Verdict)
    assert by_session["b"].tokens == text(prompt, 1)


def test_a_prompt_outlives_its_session_as_long_as_nobody_needs_the_room():
    desk = Desk(pages=4)
    prompt = tuple(range(10))
    desk.open("a", tokens=prompt, max_len=11)
    desk.step()
    desk.open("b", tokens=prompt, max_len=11)
    desk.step()
    assert desk.rows[-1][0].start == 8
    desk.open("c", tokens=tuple(range(20, 33)), max_len=14)
    desk.step()
    desk.open("d", tokens=prompt, max_len=11)
    assert desk.finish()["d"] == text(prompt, 1)
    assert desk.rows[-2][0].start == 0


def test_drafts_are_never_published():
    """Whole pages of decided tokens only: a rejected draft is another text."""
    desk = Desk()
    wrong = tuple((token + 1) % VOCABULARY for token in text((1, 2, 3), 4))
    desk.open("a", tokens=(1, 2, 3))
    desk.block((1, 2, 3), wrong, "a")
    desk.step()
    desk.open("b", tokens=(1, 2, 3, *wrong, 9))
    desk.step()
    assert [row.start for row in desk.rows[-1] if row.session == "b"] == [0]


def test_a_rollback_gives_the_rejected_tokens_pages_back():
    """Two sessions that fit only if the first's rejected block holds nothing."""
    desk = Desk(pages=4)
    desk.open("a", tokens=(1, 2, 3), max_len=9)
    wrong = tuple((token + 1) % VOCABULARY for token in text((1, 2, 3), 4))
    desk.block((1, 2, 3), wrong, "a")
    desk.step()
    assert len(desk.rows[-1][0].pages) == 2
    desk.open("b", tokens=tuple(range(20, 27)), max_len=8)
    desk.step()
    assert {row.session for row in desk.rows[-1]} == {"a", "b"}
    assert desk.scheduler.preempted == 0


def test_a_session_queues_until_there_are_pages_for_it_and_those_behind_it_wait_too():
    """First come, first served: a small one that overtakes a large one again and again would starve it."""
    desk = Desk(pages=6)
    desk.open("a", tokens=tuple(range(12)), max_len=14)
    desk.open("large", tokens=tuple(range(20, 36)), max_len=20)
    desk.open("small", tokens=(1, 2), max_len=4)
    assert desk.scheduler.load() == {"sessions": 1.0, "queued": 2.0}
    got = desk.finish()
    assert got == {
        "a": text(tuple(range(12)), 2),
        "large": text(tuple(range(20, 36)), 4),
        "small": text((1, 2), 2),
    }
    served = [row.session for rows in desk.rows for row in rows]
    assert served.index("large") <= served.index("small")
    assert desk.scheduler.preempted == 0, "what a has yet to take was not promised to others"


def test_what_can_never_fit_is_refused_with_the_limit_and_what_just_fits_is_served():
    desk = Desk(pages=3)
    ((_, refusal),) = desk.open(tokens=(1, 2), max_len=13)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.INVALID
    assert "max_len is 13, the cache holds 12 tokens" in refusal.message
    desk.open(tokens=(1, 2), max_len=12)
    assert desk.finish() == {"s": text((1, 2), 10)}


def a_crowd() -> Desk:
    """Three sessions that grow beyond a pool in which all of them were admitted."""
    desk = Desk(pages=9)
    for name, first in zip("abc", (0, 10, 20), strict=True):
        desk.open(name, tokens=tuple(range(first, first + 4)), max_len=24)
    assert desk.scheduler.load()["sessions"] == 3.0
    return desk


def test_a_pool_that_runs_dry_preempts_the_youngest_and_nobody_loses_a_token():
    desk = a_crowd()
    got: dict[str, tuple[int, ...]] = {"a": (), "b": (), "c": ()}
    while not desk.scheduler.preempted:
        for _, message in desk.step():
            assert isinstance(message, Verdict)
            got[message.session] += message.tokens
    assert {row.session for row in desk.rows[-1]} == {"a", "b"}
    assert desk.scheduler.load() == {"sessions": 2.0, "queued": 1.0}
    for name, rest in desk.finish().items():
        got[name] += rest
    assert got == {name: text(tuple(range(i, i + 4)), 20) for name, i in zip("abc", (0, 10, 20), strict=True)}
    rows_of_c = [row for rows in desk.rows for row in rows if row.session == "c"]
    assert sum(row.start == 0 for row in rows_of_c) > 1, "what was lost is computed again"


def test_a_preempted_session_keeps_its_drafter_and_the_block_that_waits_for_it():
    desk = a_crowd()
    tokens: tuple[int, ...] = tuple(range(20, 24))
    desk.attach(tokens, "c")
    while not desk.scheduler.preempted:
        for receiver, message in desk.step():
            if receiver == DRAFTER and isinstance(message, Verdict):
                tokens += message.tokens
    desk.block(tokens, text(tokens, 2), "c")
    further: list[Verdict] = []
    while not further:
        further = [m for to, m in desk.step() if to == DRAFTER and isinstance(m, Verdict)]
    assert (further[0].base_len, further[0].accepted, further[0].tokens) == (len(tokens), 2, text(tokens, 3))


def test_a_preempted_session_that_is_closed_is_named_to_the_engine_once():
    desk = a_crowd()
    while not desk.scheduler.preempted:
        desk.step()
    desk.scheduler.receive(ROUTER, Close("c", 1), desk.now)
    desk.scheduler.receive(ROUTER, Close("c", 1), desk.now)
    closes: list[str] = []
    while (plan := desk.scheduler.plan(desk.now)) is not None:
        closes += plan.closes
        desk.scheduler.apply(desk.compute(plan), 0.1, desk.now)
    assert sorted(closes) == ["a", "b", "c"]
    assert desk.scheduler.is_idle


def test_a_preempted_session_that_is_opened_anew_replaces_itself_in_the_engine():
    desk = a_crowd()
    while not desk.scheduler.preempted:
        desk.step()
    desk.open("c", tokens=(30, 31), max_len=6, attempt=2)
    assert desk.finish()["c"] == text((30, 31), 4)


def test_copies_come_before_what_is_written_over_them():
    """A session that goes on from a page that another can still find writes into a copy of it."""
    desk = Desk()
    desk.open("a", tokens=tuple(range(8)))
    desk.step()
    desk.open("b", tokens=tuple(range(9)))
    desk.open("c", tokens=(*range(8), 30))
    by_session = {message.session: message for _, message in desk.step()}
    for name, tokens in (("b", tuple(range(9))), ("c", (*range(8), 30))):
        verdict = by_session[name]
        assert isinstance(verdict, Verdict)
        assert verdict.tokens == text(tokens, 1)
    assert desk.finish()


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=2, max_size=6),
    pages=st.integers(6, 14),
    max_step_tokens=st.integers(1, 16),
    seed=st.integers(0, 2**32),
)
def test_however_small_the_pool_every_session_gets_its_plain_text(prompts, pages, max_step_tokens, seed):
    """Shared, preempted, rolled back and closed in the middle; `Desk` reads every page of every row."""
    rng = random.Random(seed)
    desk = Desk(pages=pages, max_sessions=6, max_step_tokens=max_step_tokens)
    tokens = {f"s{i}": tuple(prompt) for i, prompt in enumerate(prompts)}
    wanted = {name: prompt + text(prompt, 9) for name, prompt in tokens.items()}
    waiting = sorted(tokens)
    for _ in range(1000):
        if waiting and rng.random() < 0.5:
            name = waiting.pop()
            desk.open(name, tokens=tokens[name], max_len=len(wanted[name]))
        for name in desk.known:
            draft = [*text(tokens[name], 3)]
            if rng.random() < 0.5:
                draft[rng.randrange(3)] = rng.randrange(VOCABULARY)
            if rng.random() < 0.5:
                desk.block(tokens[name], tuple(draft), name)
            if rng.random() < 0.01:
                desk.scheduler.receive(ROUTER, Close(name, 1), desk.now)
                wanted[name] = tokens[name]
        oldest = next(iter(desk.scheduler._admission.running), None)
        plan = desk.scheduler.plan(desk.now)
        assert oldest is None or oldest in desk.scheduler._admission.running, (
            "the oldest lost its pages to younger ones"
        )
        if plan is None and not waiting:
            break
        for _, message in desk.scheduler.apply(desk.compute(plan), 0.1, desk.now) if plan is not None else ():
            assert isinstance(message, Verdict)
            tokens[message.session] += message.tokens
    desk.scheduler.plan(desk.now + 3600)  # blocks for sessions that are over have expired by then
    assert desk.scheduler.is_idle
    assert not desk.known
    assert tokens == wanted


# ---------------------------------------------------------------- routers come and go


def test_a_router_that_is_gone_frees_its_sessions_and_no_others():
    desk = Desk(max_sessions=2)
    desk.open("a", tokens=(1, 2))
    desk.open("b", "other#2", tokens=(1, 2))
    desk.open("c", "other#2", tokens=(1, 2))
    desk.scheduler.gone(ROUTER, 0.0)
    assert {message.session for _, message in desk.step()} == {"b", "c"}
    desk.scheduler.gone("other#2", 0.0)
    assert desk.scheduler.plan(0.0) == StepPlan(("b", "c"), (), ())


def test_a_new_stream_of_a_router_frees_what_it_does_not_list():
    desk = Desk()
    for name in "abc":
        desk.open(name, tokens=(1, 2))
    desk.open("d", "other#1", tokens=(1, 2))
    desk.scheduler.receive(
        "router#5",
        Hello(
            "router",
            "",
            "",
            (
                LiveSession("a", 1),
                LiveSession("b", 2),
            ),
        ),
        0.0,
    )
    sends = desk.step()
    assert sorted((receiver, message.session) for receiver, message in sends) == [("other#1", "d"), ("router#5", "a")]
    desk.scheduler.gone(ROUTER, 0.0)
    assert desk.scheduler.load()["sessions"] == 2, "the old stream's end, heard late, is nothing to the new one"


def test_what_a_hello_frees_is_given_to_the_queue():
    """Nothing else may happen for a while: a queued session would wait beside free places."""
    desk = Desk(max_sessions=1)
    desk.open("a", tokens=(1, 2))
    desk.open("b", "other#1", tokens=(1, 2))
    desk.scheduler.receive("router#2", Hello("router", "", "", ()), 0.0)
    assert [message.session for _, message in desk.step()] == ["b"]


def test_another_router_cannot_close_a_session():
    desk = Desk()
    desk.open(tokens=(1, 2))
    desk.scheduler.receive("other#1", Close("s", 9), 0.0)
    assert desk.scheduler.load()["sessions"] == 1


def test_unknown_sessions_are_no_error():
    desk = Desk()
    desk.scheduler.receive(ROUTER, Close("unknown", 1), 0.0)
    desk.scheduler.gone("unknown#1", 0.0)
    desk.scheduler.gone("unknown#1", desk.now)
    desk.scheduler.receive("unknown#1", Hello("unknown", "", "", (LiveSession("unknown", 1),)), 0.0)
    assert desk.scheduler.is_idle
    assert desk.scheduler.plan(0.0) is None
    assert desk.scheduler.next_due() is None


def test_blocks_of_one_session_never_go_to_another():
    desk = Desk()
    desk.open("a", tokens=(1, 2))
    desk.open("b", tokens=(1, 2))
    right = text((1, 2), 2)
    desk.block((1, 2), right, "b")
    by_session = {message.session: message for _, message in desk.step()}
    assert isinstance(by_session["a"], Verdict)
    assert isinstance(by_session["b"], Verdict)
    assert (by_session["a"].drafted, by_session["b"].drafted) == (0, 2)


# ---------------------------------------------------------------- trees

PROMPT = (1, 2, 3)


def a_branching_desk(**changes: Any) -> tuple[Desk, tuple[int, ...]]:
    """One session past its prompt, and what was decided so far, prompt included."""
    desk = Desk(**changes)
    desk.open(tokens=PROMPT, max_len=20, draft_tokens=4)
    desk.attach(PROMPT)
    sends = desk.step()
    assert only_request(sends).shape is Shape.TREE
    return desk, PROMPT + only_verdict(sends, DRAFTER).tokens


def beside(token: int) -> int:
    return (token + 1) % VOCABULARY


def test_a_path_is_accepted_with_the_token_after_it_and_moved_to_where_it_stands():
    desk, before = a_branching_desk()
    right = text(before, 5)
    wrong = beside(right[0])
    desk.block(before, DraftTree((wrong, 9, right[0], right[1]), (-1, 0, -1, 2)))
    verdict = only_verdict(desk.step())
    assert (verdict.tokens, verdict.accepted, verdict.drafted) == (right[:3], 2, 4)
    desk.block((*before, *right[:3]), right[3:4])
    assert only_verdict(desk.step()).tokens == right[3:5]
    row = desk.rows[-1][0]
    assert (row.tokens, row.start) == (right[2:4], len(before) + 2), "nothing of the path is fed again"
    assert desk.finish() == {"s": text(PROMPT, 17)[len(before) + 2 :]}


def test_what_is_moved_is_moved_before_anything_else_is_done_to_the_cache_and_once():
    desk, before = a_branching_desk(page_size=2)
    right = text(before, 3)
    desk.block(before, DraftTree((beside(right[0]), right[0], right[1]), (-1, -1, 1)))
    desk.step()
    plan = desk.scheduler.plan(desk.now)
    assert plan is not None
    table = plan.rows[0].pages
    places = [table[at // 2] * 2 + at % 2 for at in range(len(before), len(before) + 3)]
    assert plan.moves == (SlotMove(places[1], places[0]), SlotMove(places[2], places[1]))
    desk.scheduler.apply(desk.compute(plan), 0.1, desk.now)
    assert (later := desk.scheduler.plan(desk.now)) is not None
    assert later.moves == ()


def test_the_first_nodes_of_a_block_that_has_become_too_long_are_verified():
    """The drafter has put first what it finds likeliest."""
    desk, before = a_branching_desk(asked=2)
    right = text(before, 2)
    desk.block(before, DraftTree((beside(right[0]), right[0], right[1]), (-1, -1, 1)))
    verdict = only_verdict(desk.step())
    assert (verdict.tokens, verdict.accepted, verdict.drafted) == (right[:2], 1, 2)


def test_of_a_late_tree_what_follows_the_decided_tokens_is_verified():
    desk, before = a_branching_desk()
    right = text(before, 3)
    desk.step()
    desk.block(before, DraftTree((beside(right[0]), right[0], right[1], beside(right[1])), (-1, -1, 1, 1)))
    verdict = only_verdict(desk.step())
    assert (verdict.tokens, verdict.accepted, verdict.drafted) == (right[1:3], 1, 2)
    assert desk.scheduler.counts.rebased == 1


@pytest.mark.parametrize(
    ("session", "limits"),
    [({"acceptance": Acceptance.REJECTION, "sampling": Sampling()}, {}), ({}, {"trees": False})],
    ids=["rejection", "an engine without"],
)
def test_trees_are_neither_asked_for_nor_taken_where_they_could_not_be_verified(session, limits):
    desk = Desk(**limits)
    desk.open(tokens=PROMPT, **session)
    desk.attach(PROMPT)
    sends = desk.step()
    assert only_request(sends).shape is Shape.CHAIN
    desk.block(PROMPT + only_verdict(sends).tokens, DraftTree((7, 8), (-1, -1)))
    assert desk.dropped == {"tree": 1}


def test_with_penalties_trees_are_asked_for_too():
    desk = Desk()
    desk.open(tokens=PROMPT, sampling=Sampling(temperature=0.0, presence_penalty=1.0))
    desk.attach(PROMPT)
    assert only_request(desk.step()).shape is Shape.TREE


def test_all_nodes_count_where_a_block_may_be_too_long():
    desk, before = a_branching_desk()
    desk.block(before, DraftTree((1, 2, 3, 4, 5), (-1,) * 5))
    assert desk.dropped == {"too_long": 1}
    desk.block(before, DraftTree((1, 2, 3, VOCABULARY), (-1,) * 4))
    assert desk.dropped == {"too_long": 1, "out_of_vocabulary": 1}


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("positions", [400, 48], ids=["pages for all", "preemption"])
def test_sessions_with_random_trees_go_on_with_the_same_text_whatever_becomes_of_their_pages(page_size, positions):
    """Shared prompts, pages that end within a path, preemption: what the pages hold is checked in every step."""
    desk = Desk(pages=positions // page_size, page_size=page_size)
    rng = random.Random(page_size)
    prompts = {"old": (1, 2, 3, 4), "twin": (1, 2, 3, 4), "young": (4, 5, 6)}
    for name, prompt in prompts.items():
        desk.open(name, tokens=prompt, max_len=30, draft_tokens=6)
        desk.attach(prompt, name)
    got: dict[str, tuple[int, ...]] = dict.fromkeys(prompts, ())
    branches = 0
    while desk.scheduler.load()["sessions"] or desk.scheduler.load()["queued"]:
        for receiver, message in desk.step():
            if receiver == ROUTER:
                branches += message.accepted > 1
                got[message.session] += message.tokens
                before = prompts[message.session] + got[message.session]
                room = min(6, 30 - len(before) - 1)
                if room > 0 and message.finish is Finish.NONE:
                    desk.block(before, a_likely_tree(rng, before, room), message.session)
    assert got == {name: text(prompt, 30 - len(prompt)) for name, prompt in prompts.items()}
    assert branches > 3, "hardly a path was accepted: this showed nothing"
    assert (desk.scheduler.preempted > 0) == (positions < 400)


def a_likely_tree(rng: random.Random, before: tuple[int, ...], nodes: int) -> DraftTree:
    """Some nodes have the token that is right after their path."""
    tokens: list[int] = []
    parents: list[int] = []
    texts: list[tuple[int, ...]] = []  # up to each node
    children: set[tuple[int, int]] = set()
    while len(tokens) < nodes:
        parent = rng.randrange(-1, len(tokens))
        line = texts[parent] if parent >= 0 else before
        token = next_token(line) if rng.random() < 0.5 else rng.randrange(VOCABULARY)
        if (parent, token) not in children:
            children.add((parent, token))
            parents.append(parent)
            tokens.append(token)
            texts.append((*line, token))
    return DraftTree(tuple(tokens), tuple(parents))


# ---------------------------------------------------------------- how long blocks take


def a_desk_that_tells(**limits: Any) -> tuple[Desk, list[ReplicaStats]]:
    """Returns a desk that records the policy's input about all sessions' blocks."""
    told: list[ReplicaStats] = []

    class ChoiceStream(Steady):
        def decide(
            self, blocks: SessionStats, fleet: ReplicaStats, limit: int, load: Load, may_try: bool
        ) -> DraftingDecision:
            told.append(fleet)
            return super().decide(blocks, fleet, limit, load, may_try)

    desk = Desk(**limits)
    desk.scheduler = VerificationScheduler(desk.limits, ChoiceStream(lambda _: 0.0))
    return desk, told


def a_round(desk: Desk, session: str, before: tuple[int, ...], delay_s: float) -> tuple[int, ...]:
    """A block of one token comes so long after the verdict before; all tokens after the next verdict."""
    desk.now += delay_s
    desk.block(before, (next_token(before),), session)
    verdicts = {m.session: m for to, m in desk.step() if to == ROUTER and isinstance(m, Verdict)}
    return before + verdicts[session].tokens


def test_the_first_block_of_a_drafter_does_not_say_how_long_blocks_take_for_it_read_the_prompt():
    desk, told = a_desk_that_tells()
    desk.open(tokens=PROMPT)
    desk.attach(PROMPT)
    tokens = PROMPT + only_verdict(desk.step()).tokens
    tokens = a_round(desk, "s", tokens, 5.0)
    assert told[-1].delay.weight == 0
    a_round(desk, "s", tokens, 0.01)
    assert told[-1].delay.base == pytest.approx(0.01)


def test_how_long_blocks_take_is_known_for_each_octave_of_sessions():
    desk, told = a_desk_that_tells(max_sessions=4)
    desk.open(tokens=PROMPT)
    desk.attach(PROMPT)
    tokens = PROMPT + only_verdict(desk.step()).tokens
    for _ in range(2):
        tokens = a_round(desk, "s", tokens, 0.01)
    for name in "abc":
        desk.open(name, tokens=(7, 8))
    desk.step()
    assert told[-1].delay.weight == 0, "with four at once nothing is known yet"
    for name in "abc":
        desk.scheduler.receive(ROUTER, Close(name, 1), desk.now)
    desk.step()
    assert told[-1].delay.base == pytest.approx(0.01)


# ---------------------------------------------------------------- audits


def refusals(sends: list[Send]) -> list[tuple[str, str, RefusalReason]]:
    return [(to, m.session, m.reason) for to, m in sends if isinstance(m, Refusal)]


def test_an_audit_has_no_place_beside_a_request():
    desk = Desk()
    desk.open("request")
    assert refusals(desk.open("audit", router="other#1", audit=True)) == [
        ("other#1", "audit", RefusalReason.OVERLOADED)
    ]
    assert set(desk.finish()) == {"request"}


@pytest.mark.parametrize("in_step", [False, True])
def test_a_request_ends_the_audits_of_all_routers_at_once(in_step):
    desk = Desk()
    for name, router in (("a", ROUTER), ("b", "other#1")):
        assert not refusals(desk.open(name, router=router, audit=True)), "audits have a place beside each other"
    plan = desk.scheduler.plan(desk.now) if in_step else None
    ended = desk.open("request", router="third#1")
    assert refusals(ended) == [(ROUTER, "a", RefusalReason.OVERLOADED), ("other#1", "b", RefusalReason.OVERLOADED)]
    if plan is not None:
        assert not desk.scheduler.apply(desk.compute(plan), 0.1, desk.now), "nobody hears of an audit that is over"
    desk.step()
    assert [row.session for row in desk.rows[-1]] == ["request"]


def test_an_audit_takes_over_no_pages_and_leaves_none():
    desk = Desk()
    prompt = tuple(range(8))

    def first_row(name: str, **changes: Any) -> int:
        desk.open(name, tokens=prompt, max_len=9, **changes)
        desk.finish()
        (row,) = desk.rows[-1] or desk.rows[-2]
        return row.start

    assert first_row("audit", audit=True) == 0
    assert first_row("first") == 0, "what an audit computed is not shared"
    assert first_row("second") == 4, "what requests computed is"
    assert first_row("again", audit=True) == 0


def test_an_audit_reads_its_prompt_in_small_pieces():
    desk = Desk(max_step_tokens=10 * AUDIT_STEP_TOKENS, max_context=1000, pages=400)
    desk.open(tokens=(1,) * (2 * AUDIT_STEP_TOKENS + 3), max_len=2 * AUDIT_STEP_TOKENS + 4, audit=True)
    desk.finish()
    assert [len(row.tokens) for rows in desk.rows for row in rows] == [AUDIT_STEP_TOKENS, AUDIT_STEP_TOKENS, 3]


def test_audits_are_no_load_that_a_pool_would_grow_for():
    desk = Desk()
    desk.open("audit", audit=True)
    assert desk.scheduler.load() == {"sessions": 0.0, "queued": 0.0}


def test_a_rival_outside_the_vocabulary_is_refused():
    desk = Desk()
    (sent,) = desk.open(tokens=(1, 2), max_len=3, audit=True, rival=VOCABULARY)
    assert refusals([sent]) == [(ROUTER, "s", RefusalReason.INVALID)]


def test_a_verdict_says_what_the_engine_found_of_the_rival():
    desk = Desk()
    desk.open(tokens=(1, 2), max_len=3, audit=True, rival=7)
    plan = desk.scheduler.plan(desk.now)
    assert plan is not None
    outcomes = [replace(outcome, margin=0.25) for outcome in desk.compute(plan)]
    assert only_verdict(desk.scheduler.apply(outcomes, 0.1, desk.now)).margin == 0.25


# ---------------------------------------------------------------- logits that are not finite


def broken(outcomes: list[Outcome], *sessions: str) -> list[Outcome]:
    return [Outcome(one.session, (), 0, is_finite=False) if one.session in sessions else one for one in outcomes]


def test_nonfinite_logits_end_their_session_with_the_reason_and_no_token(caplog):
    """The others are decided as without; its drafter has nothing more to say, and nobody finds its pages."""
    desk = Desk()
    prompts = {"a": (1, 2, 3, 4, 5), "bad": (6, 7, 8, 9, 10), "b": (3, 2, 1)}
    for name, prompt in prompts.items():
        desk.open(name, tokens=prompt, max_len=12)
    desk.step()
    first = (*prompts["bad"], next_token(prompts["bad"]))
    desk.attach(first, "bad")
    desk.block(first, text(first, 2), "bad")
    plan = desk.scheduler.plan(desk.now)
    sends = desk.scheduler.apply(broken(desk.compute(plan), "bad"), 0.1, desk.now)
    (refusal,) = [message for _, message in sends if isinstance(message, Refusal)]
    assert (refusal.session, refusal.attempt, refusal.reason) == ("bad", 1, RefusalReason.NONFINITE_LOGITS)
    assert {verdict.session for verdict in verdicts(sends)} == {"a", "b"}
    assert [receiver for receiver, message in sends if message is refusal] == [ROUTER]
    assert desk.scheduler.counts.nonfinite == 1
    assert desk.scheduler.router_of("bad") is None
    assert "ended session 'bad' after 6 tokens" in caplog.text
    desk.block(first, (1, 2), "bad")
    desk.scheduler.receive(DRAFTER, Detach("bad"), desk.now)
    again = desk.open("bad", attempt=2, tokens=prompts["bad"], max_len=12)
    assert again == []
    assert desk.scheduler.plan(desk.now).rows[-1].start == 0, "its prompt is computed anew"


def test_sessions_beside_a_broken_one_get_the_text_that_they_would_have():
    desk = Desk()
    for number in range(3):
        desk.open(str(number), tokens=(number, 2, 3, 4, 5), max_len=14)
    desk.open("bad", tokens=(0, 2, 3, 4, 5, 6), max_len=14)
    got: dict[str, tuple[int, ...]] = {}
    for step in range(200):
        plan = desk.scheduler.plan(desk.now)
        if plan is None:
            break
        outcomes = desk.compute(plan)
        for _, message in desk.scheduler.apply(broken(outcomes, "bad") if step == 2 else outcomes, 0.1, desk.now):
            if isinstance(message, Verdict):
                got[message.session] = got.get(message.session, ()) + message.tokens
    assert {name: found for name, found in got.items() if name != "bad"} == {
        str(number): text((number, 2, 3, 4, 5), 9) for number in range(3)
    }
    assert got["bad"] == text((0, 2, 3, 4, 5, 6), 2)
    assert desk.scheduler.is_idle
    assert not desk.known, "the engine still remembers a session"


def test_nonfinite_logits_are_logged_once_a_minute(caplog):
    desk = Desk()
    for desk.now in (0.0, 1.0, 59.0, 61.0):
        desk.open(str(desk.now))
        plan = desk.scheduler.plan(desk.now)
        desk.scheduler.apply(broken(desk.compute(plan), str(desk.now)), 0.1, desk.now)
    assert [record.args[0] for record in caplog.records] == ["0.0", "61.0"]
    assert desk.scheduler.counts.nonfinite == 4
