"""Tests the target's scheduler where transcripts do not fit: many rounds, pages, measurements and random input."""

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.draft_quality import PROOF, BlockKind
from cluster.envelope import Send
from cluster.page_allocator import SlotMove
from cluster.speculation.circuit_breaker import PROBE_AFTER, SILENT_STEPS
from cluster.speculation.controller import DraftingDecision
from cluster.speculation.estimators import AcceptanceCounts, Load, ReplicaStats, SessionStats, StepCost
from cluster.verification.scheduler import VerificationScheduler
from cluster.verification.sequence import AUDIT_STEP_TOKENS, MISSED_ROUNDS, settle
from cluster.verification.step import Outcome
from protos.draft_tree import DraftTree, SparseProbs
from protos.messages import (
    Close,
    Detach,
    DraftAnswer,
    DraftRequest,
    Finish,
    NoDraft,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    Shape,
    Verdict,
)
from protos.prefix import Prefix
from tests.scenarios.verification import (
    DRAFTER,
    ROUTER,
    VOCABULARY,
    Steady,
    Target,
    next_token,
    only_verdict,
    text,
)
from tests.unit.cluster.samples import KEY, a_block


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


def test_a_row_carries_its_blocks_draft_probs():
    desk = Target()
    desk.open(tokens=(1, 2))
    probs = SparseProbs(((9,),), ((1,),))
    desk.scheduler.receive(DRAFTER, a_block((1, 2), DraftTree.chain((9,), probs)), 0.0)
    desk.step()
    assert desk.rows[0][0].draft.probs == probs
    desk.step()
    assert desk.rows[1][0].draft.probs is None


# ---------------------------------------------------------------- the block buffer


def test_a_late_blocks_draft_probs_stay_with_their_tokens():
    """One row off, and every token would be weighed against another's distribution."""
    right = text((1, 2), 4)
    probs = SparseProbs(tuple((token,) for token in right[:3]), ((1,), (2,), (3,)))
    desk = Target()
    desk.open(tokens=(1, 2))
    desk.step()
    desk.scheduler.receive(DRAFTER, a_block((1, 2), DraftTree.chain(right[:3], probs)), desk.now)
    desk.step()
    (row,) = desk.rows[-1]
    assert row.tokens[-row.drafted :] == right[1:3]
    assert row.draft.probs == SparseProbs(probs.token_ids[1:], probs.weights[1:])


def test_a_draft_prob_outside_the_vocabulary_is_refused_though_no_token_is():
    """It would index the target's row out of range, and end the replica."""
    desk = Target()
    desk.open(tokens=(1, 2))
    probs = SparseProbs(((9, VOCABULARY),), ((1, 1),))
    desk.scheduler.receive(DRAFTER, a_block((1, 2), DraftTree.chain((9,), probs)), 0.0)
    assert desk.dropped == {"out_of_vocabulary": 1}


# ---------------------------------------------------------------- what comes before its Open


# ---------------------------------------------------------------- attaching


# ---------------------------------------------------------------- patience


def test_requests_without_speculation_do_not_shorten_its_pauses():
    """Or whoever turns it off would have it tried more often for all others."""
    desk = Target(max_context=1000, pages=1000)
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
    desk = Target()
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


def test_waiting_in_vain_is_remembered_and_a_block_forgives():
    seen: list[SessionStats] = []

    def patience(blocks: SessionStats) -> float:
        seen.append(replace(blocks))
        return 0.0

    desk = Target(patience)
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
    desk = Target(patience=lambda _: 1.0, max_context=200)
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
    desk = Target(patience=lambda _: 1.0, max_context=200)
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
    desk = Target(patience=lambda _: 1.0)
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
    desk = Target(max_context=1000, pages=1000)
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

    desk = Target(patience, waits=False, max_context=200)
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


def test_only_steps_that_compute_anything_say_what_steps_cost():
    """Plans may only open and close sessions while blocks are awaited."""
    desk = Target(hold=5.0)
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


# ---------------------------------------------------------------- what the drafter is asked for


def test_a_drafter_whose_good_blocks_turn_bad_is_told_to_begin_anew():
    """Its cache may be out of step though its tokens are right: only its acceptance says so."""
    desk = Target()
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


def drafted_rounds(
    desk: Target, tokens: tuple[int, ...], rounds: int, right: bool, session: str = "s"
) -> list[Verdict]:
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
    desk = Target()
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
    desk = Target()
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
    desk = Target(page_size=2)
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
    desk = Target(page_size=2)
    for name, cached in (("a", 0), ("b", 4)):
        desk.open(name, tokens=(1, 2, 3, 4, 5), max_len=8)
        verdicts = [message for _, message in desk.step() if isinstance(message, Verdict)]
        assert {verdict.prefix_cached for verdict in verdicts} == {cached}
        desk.scheduler.receive(ROUTER, Close(name, 1), desk.now)


# ---------------------------------------------------------------- many sessions


def test_long_prompts_are_fed_in_chunks_and_nobody_starves():
    """A prompt of ten steps must not keep short sessions waiting, nor they it."""
    desk = Target(max_step_tokens=8)
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
    desk = Target(max_step_tokens=2)
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
    desk = Target(max_sessions=max_sessions, max_step_tokens=max_step_tokens)
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
    desk = Target()
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
    desk = Target(pages=4)
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
    desk = Target()
    wrong = tuple((token + 1) % VOCABULARY for token in text((1, 2, 3), 4))
    desk.open("a", tokens=(1, 2, 3))
    desk.block((1, 2, 3), wrong, "a")
    desk.step()
    desk.open("b", tokens=(1, 2, 3, *wrong, 9))
    desk.step()
    assert [row.start for row in desk.rows[-1] if row.session == "b"] == [0]


def test_a_rollback_gives_the_rejected_tokens_pages_back():
    """Two sessions that fit only if the first's rejected block holds nothing."""
    desk = Target(pages=4)
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
    desk = Target(pages=6)
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
    desk = Target(pages=3)
    ((_, refusal),) = desk.open(tokens=(1, 2), max_len=13)
    assert isinstance(refusal, Refusal)
    assert refusal.reason is RefusalReason.INVALID
    assert "max_len is 13, the cache holds 12 tokens" in refusal.message
    desk.open(tokens=(1, 2), max_len=12)
    assert desk.finish() == {"s": text((1, 2), 10)}


def a_crowd() -> Target:
    """Three sessions that grow beyond a pool in which all of them were admitted."""
    desk = Target(pages=9)
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
    desk = Target()
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
    """Shared, preempted, rolled back and closed in the middle; `Target` reads every page of every row."""
    rng = random.Random(seed)
    desk = Target(pages=pages, max_sessions=6, max_step_tokens=max_step_tokens)
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


# ---------------------------------------------------------------- trees

PROMPT = (1, 2, 3)


def a_branching_desk(**changes: Any) -> tuple[Target, tuple[int, ...]]:
    """One session past its prompt, and what was decided so far, prompt included."""
    desk = Target(**changes)
    desk.open(tokens=PROMPT, max_len=20, draft_tokens=4)
    desk.attach(PROMPT)
    sends = desk.step()
    assert only_request(sends).shape is Shape.TREE
    return desk, PROMPT + only_verdict(sends, DRAFTER).tokens


def beside(token: int) -> int:
    return (token + 1) % VOCABULARY


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


def test_with_penalties_trees_are_asked_for_too():
    desk = Target()
    desk.open(tokens=PROMPT, sampling=Sampling(temperature=0.0, presence_penalty=1.0))
    desk.attach(PROMPT)
    assert only_request(desk.step()).shape is Shape.TREE


@pytest.mark.parametrize("page_size", [1, 2, 3, 16])
@pytest.mark.parametrize("positions", [400, 48], ids=["pages for all", "preemption"])
def test_sessions_with_random_trees_go_on_with_the_same_text_whatever_becomes_of_their_pages(page_size, positions):
    """Shared prompts, pages that end within a path, preemption: what the pages hold is checked in every step."""
    desk = Target(pages=positions // page_size, page_size=page_size)
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


def a_desk_that_tells(**limits: Any) -> tuple[Target, list[ReplicaStats]]:
    """Returns a desk that records the policy's input about all sessions' blocks."""
    told: list[ReplicaStats] = []

    class ChoiceStream(Steady):
        def decide(
            self, blocks: SessionStats, fleet: ReplicaStats, limit: int, load: Load, may_try: bool
        ) -> DraftingDecision:
            told.append(fleet)
            return super().decide(blocks, fleet, limit, load, may_try)

    desk = Target(**limits)
    desk.scheduler = VerificationScheduler(desk.limits, ChoiceStream(lambda _: 0.0))
    return desk, told


def a_round(desk: Target, session: str, before: tuple[int, ...], delay_s: float) -> tuple[int, ...]:
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


def test_an_audit_takes_over_no_pages_and_leaves_none():
    desk = Target()
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
    desk = Target(max_step_tokens=10 * AUDIT_STEP_TOKENS, max_context=1000, pages=400)
    desk.open(tokens=(1,) * (2 * AUDIT_STEP_TOKENS + 3), max_len=2 * AUDIT_STEP_TOKENS + 4, audit=True)
    desk.finish()
    assert [len(row.tokens) for rows in desk.rows for row in rows] == [AUDIT_STEP_TOKENS, AUDIT_STEP_TOKENS, 3]


def test_a_verdict_says_what_the_engine_found_of_the_rival():
    desk = Target()
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
    desk = Target()
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
    desk = Target()
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
    desk = Target()
    for desk.now in (0.0, 1.0, 59.0, 61.0):
        desk.open(str(desk.now))
        plan = desk.scheduler.plan(desk.now)
        desk.scheduler.apply(broken(desk.compute(plan), str(desk.now)), 0.1, desk.now)
    assert [record.args[0] for record in caplog.records] == ["0.0", "61.0"]
    assert desk.scheduler.counts.nonfinite == 4
