"""Tests the target's scheduler over many rounds: silent and bad drafters, delays, long prompts, nonfinite logits."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.draft_quality import BlockKind
from cluster.envelope import Send
from cluster.speculation.controller import Adaptive
from cluster.speculation.estimators import AcceptanceCounts, StepCost
from cluster.verification.block_buffer import BufferLimits
from cluster.verification.sequence import cut_at_end
from cluster.verification.step import Outcome
from protos.codec import encoded_bytes
from protos.draft_tree import NO_TREE, DraftTree, SparseProbs
from protos.messages import (
    Acceptance,
    Detach,
    DraftAnswer,
    DraftRequest,
    Finish,
    NoDraft,
    Refusal,
    RefusalReason,
    Resync,
    Sampling,
    Verdict,
)
from protos.prefix import Prefix
from tests.scenarios.verification import DRAFTER, ROUTER, VOCABULARY, Target, Tokens, next_token, only_verdict, text
from tests.unit.cluster.samples import KEY, a_block

PROMPT = (1, 2, 3)
REJECTION: dict[str, Any] = {"acceptance": Acceptance.REJECTION, "sampling": Sampling(1.0)}


def verdicts(sends: list[Send], receiver: str = ROUTER) -> dict[str, Verdict]:
    """Returns the receiver's verdicts by session."""
    return {m.session: m for to, m in sends if to == receiver and isinstance(m, Verdict)}


def attached(**options: object) -> tuple[Target, Tokens]:
    """Returns a target with a decoding session and its drafter, and the session's text."""
    target = Target(max_context=1000, pages=1000, **options)
    target.open(max_len=900)
    tokens = PROMPT + only_verdict(target.step()).tokens
    target.attach(tokens)
    return target, tokens


SETTLED = {
    "no end": ((5, 6, 7, 8), 3, 99, (), ((5, 6, 7, 8), 3, Finish.NONE)),
    "stop inside the accepted part": ((5, 0, 7, 8), 3, 99, (0,), ((5, 0), 2, Finish.STOP)),
    "stop at the recovered token": ((5, 0), 1, 99, (0,), ((5, 0), 1, Finish.STOP)),
    "stop at the bonus token": ((5, 6, 7, 0), 3, 99, (0,), ((5, 6, 7, 0), 3, Finish.STOP)),
    "stop in a non-speculative step": ((0,), 0, 99, (0,), ((0,), 0, Finish.STOP)),
    "first of several stops": ((5, 9, 0, 8), 3, 99, (0, 9), ((5, 9), 2, Finish.STOP)),
    "limit inside the accepted part": ((5, 6, 7, 8), 3, 12, (), ((5, 6), 2, Finish.LENGTH)),
    "limit at the recovered token": ((5, 6), 1, 12, (), ((5, 6), 1, Finish.LENGTH)),
    "limit at the bonus token": ((5, 6, 7, 8), 3, 14, (), ((5, 6, 7, 8), 3, Finish.LENGTH)),
    "stop at the limit": ((5, 0, 7, 8), 3, 12, (0,), ((5, 0), 2, Finish.STOP)),
    "stop beyond the limit": ((5, 6, 0, 8), 3, 12, (0,), ((5, 6), 2, Finish.LENGTH)),
}


@pytest.mark.parametrize(("tokens", "accepted", "max_len", "stops", "expected"), SETTLED.values(), ids=SETTLED)
def test_settle(tokens, accepted, max_len, stops, expected):
    assert cut_at_end(tokens, accepted, base_len=10, max_len=max_len, stop_ids=frozenset(stops)) == expected


# ---------------------------------------------------------------- draft probabilities


@pytest.mark.parametrize("steps", [0, 1], ids=["in time", "late"])
def test_rows_carry_the_draft_probs_of_their_tokens(steps):
    """An off-by-one error would weigh every token by another token's distribution."""
    right = text((1, 2), 3)
    probs = SparseProbs(tuple((token,) for token in right), ((1,), (2,), (3,)))
    target = Target()
    target.open(tokens=(1, 2), **REJECTION)
    for _ in range(steps):
        target.step()
    target.block((1, 2), DraftTree.chain(right, probs))
    target.step()
    (row,) = target.rows[-1]
    assert row.draft.tokens == right[steps:]
    assert row.draft.probs == SparseProbs(probs.token_ids[steps:], probs.weights[steps:])
    target.step()
    assert target.rows[-1][0].draft.probs is None


@pytest.mark.parametrize(
    "changes",
    [{"acceptance": Acceptance.COUPLED, "sampling": Sampling(1.0)}, {"acceptance": Acceptance.REJECTION}],
    ids=["coupled", "greedy"],
)
def test_draft_probs_are_dropped_where_verification_does_not_read_them(changes):
    right = text((1, 2), 1)
    target = Target()
    target.open(tokens=(1, 2), **changes)
    target.block((1, 2), DraftTree.chain(right, SparseProbs((right,), ((1,),))))
    target.step()
    (row,) = target.rows[-1]
    assert row.draft == DraftTree.chain(right)


def test_waiting_blocks_of_a_session_are_bounded_in_bytes():
    probs = SparseProbs((tuple(range(VOCABULARY)),), ((1,) * VOCABULARY,))
    block = DraftTree.chain((9,), probs)
    target = Target(buffer=BufferLimits(bytes=2 * encoded_bytes(a_block((1,), block)) - 1))
    target.open(tokens=(1, 2), **REJECTION)
    for guess in range(4):
        target.block((1, 2, guess), block)
    assert target.dropped == {"buffer_full": 2}
    target.block((1, 2), block)
    assert target.dropped == {"buffer_full": 2}, "the current block always fits"
    target.step()
    dropped = target.dropped["buffer_full"]
    before = (1, 2, *text((1, 2), 1))
    target.block((*before, 5), block)
    assert target.dropped["buffer_full"] == dropped, "the step freed the space"


def test_a_draft_prob_outside_the_vocabulary_is_refused_even_if_all_tokens_are_inside():
    """Such an id would index the target's row out of range."""
    target = Target()
    target.open(tokens=(1, 2))
    target.block((1, 2), DraftTree.chain((9,), SparseProbs(((9, VOCABULARY),), ((1, 1),))))
    assert target.dropped == {"out_of_vocabulary": 1}


# ---------------------------------------------------------------- silent drafters


def test_a_silent_drafter_is_rarely_waited_for_until_its_next_block():
    target, tokens = attached(patience=1.0)
    waits = []
    for _ in range(60):
        due = target.scheduler.next_due()
        assert due is not None
        waits.append(due - target.now)
        target.now = due
        verdict = only_verdict(target.step())
        assert verdict.answer is DraftAnswer.MISSED
        tokens += verdict.tokens
    assert waits[0] == 1.0
    assert sum(waits) < 10.0
    target.block(tokens, (1,))
    target.step()
    assert target.scheduler.plan(target.now) is None, "it is waited for again"


def no_draft(tokens: Tokens) -> NoDraft:
    return NoDraft("s", len(tokens), Prefix(KEY, tokens).hash)


def test_a_drafter_that_answers_without_a_block_is_not_silent():
    target, tokens = attached(patience=1.0)
    for _ in range(30):
        assert target.scheduler.plan(target.now) is None
        target.scheduler.receive(DRAFTER, no_draft(tokens), target.now)
        verdict = only_verdict(target.step())
        assert verdict.answer is DraftAnswer.GIVEN
        tokens += verdict.tokens


def test_a_drafter_without_blocks_gets_few_requests():
    """Otherwise an unconfident draft model would stay busy."""
    target, tokens = attached(policy=Adaptive())
    requested = []
    for _ in range(300):
        target.now += 0.05
        target.scheduler.receive(DRAFTER, no_draft(tokens), target.now)
        target.now += 0.1
        sends = target.step()
        tokens += only_verdict(sends).tokens
        wanted = [message.max_tokens for _, message in sends if isinstance(message, DraftRequest)]
        requested.append((wanted or requested[-1:])[-1])
    assert requested[0] > 0
    assert 0 < sum(tokens > 0 for tokens in requested[100:]) < 40


def test_an_answer_without_a_block_during_a_step_shows_a_live_drafter_but_no_delay():
    """The step did not wait for the answer, so its delay says nothing about the drafter's speed."""
    target, tokens = attached(waits=False)
    target.block(tokens, text(tokens, 1))
    tokens += only_verdict(target.step(), DRAFTER).tokens
    delay_s = target.steady.seen[-1][0].delay_s
    for _ in range(20):
        plan = target.scheduler.plan(target.now)
        assert plan is not None
        target.now += 0.05
        target.scheduler.receive(DRAFTER, no_draft(tokens), target.now)
        verdict = only_verdict(target.scheduler.apply(target.compute(plan), 0.1, target.now), DRAFTER)
        assert verdict.answer is not DraftAnswer.MISSED
        tokens += verdict.tokens
    latest, _ = target.steady.seen[-1]
    assert (latest.delay_s, latest.missed) == (delay_s, 0)


def test_missed_rounds_are_counted_until_a_block_arrives():
    target, tokens = attached()
    for _ in range(3):
        tokens += only_verdict(target.step()).tokens
    assert target.steady.seen[-1][0].missed == 3
    target.block(tokens, text(tokens, 2))
    target.step()
    latest, _ = target.steady.seen[-1]
    assert (latest.missed, latest.accepted) == (0, 2)


def test_another_drafter_starts_without_the_value_of_the_previous_one():
    target, _ = attached()
    for _ in range(3):
        target.step()
    known = target.known["s"]
    target.attach(tuple(known), drafter="another#1")
    target.step()
    assert target.steady.seen[-1][0].missed <= 1


# ---------------------------------------------------------------- delays and costs


def a_round(target: Target, before: Tokens, delay_s: float) -> Tokens:
    """Sends a one-token block `delay_s` after the last verdict; returns the text after the next verdict."""
    target.now += delay_s
    target.block(before, (next_token(before),))
    return before + verdicts(target.step())["s"].tokens


def test_the_first_block_of_a_drafter_is_not_timed_because_it_includes_reading_the_prompt():
    target, tokens = attached()
    tokens = a_round(target, tokens, 5.0)
    assert target.scheduler.controller.blocks_timed == 0
    a_round(target, tokens, 0.01)
    assert target.steady.seen[-1][0].delay_s == pytest.approx(0.01)
    assert target.scheduler.controller.block_delay_s == pytest.approx(0.01)


def test_a_step_that_only_opens_and_closes_sessions_leaves_the_step_cost_unchanged():
    target = Target(hold=5.0)
    for name in "ab":
        target.open(name, tokens=(1, 2))
        target.attach((1, 2), name)
    for _ in range(2):
        target.step()
        target.now += 5.0
    cost = target.scheduler.controller.load.step.cost
    assert cost != StepCost().cost
    target.now -= 5.0
    target.close("b")
    target.step()
    assert target.rows[-1] == ()
    assert target.scheduler.controller.load.step.cost == cost


# ---------------------------------------------------------------- drafters whose blocks become bad


def drafted_rounds(
    target: Target, tokens: Tokens, rounds: int, right: bool, session: str = "s"
) -> tuple[Tokens, list[Verdict]]:
    """Runs rounds with one-token blocks; returns the resulting text and the router's verdicts."""
    found = []
    for _ in range(rounds):
        token = next_token(tokens)
        target.block(tokens, (token if right else (token + 1) % VOCABULARY,), session)
        verdict = only_verdict(target.step())
        tokens += verdict.tokens
        found.append(verdict)
    return tokens, found


def test_a_drafter_whose_blocks_become_bad_is_resynchronized_and_excluded_until_it_attaches_again():
    """The drafter's cache may be wrong even if its tokens are right."""
    target, tokens = attached()
    tokens, _ = drafted_rounds(target, tokens, 20, right=True)
    bad_blocks = 0
    while True:
        bad_blocks += 1
        assert bad_blocks < 40
        target.block(tokens, ((next_token(tokens) + 1) % VOCABULARY,))
        sends = target.step()
        tokens += only_verdict(sends).tokens
        if resync := [message for to, message in sends if to == DRAFTER and isinstance(message, Resync)]:
            break
    assert resync == [Resync("s", len(tokens), Prefix(KEY, tokens).hash)]
    assert bad_blocks > 1, "one bad block proves nothing"
    assert target.scheduler.draft_quality.desyncs == 1
    assert [receiver for receiver, _ in target.step()] == [ROUTER]
    tokens += text(tokens, 1)
    assert verdicts(target.attach(tokens), DRAFTER) == {}
    assert only_verdict(target.step(), DRAFTER).tokens == text(tokens, 1)


def test_the_router_gets_one_report_of_a_collapse():
    target, tokens = attached()
    tokens, good = drafted_rounds(target, tokens, 16, right=True)
    assert all(verdict.collapse is None for verdict in good)
    reports = []
    for _ in range(2):
        tokens, bad = drafted_rounds(target, tokens, 20, right=False)
        reports += [verdict.collapse for verdict in bad if verdict.collapse is not None]
        target.attach(tokens)
    (collapse,) = reports
    assert collapse.usual > 0.8
    assert target.scheduler.draft_quality.desyncs == 1


def test_blocks_are_counted_by_drafter_context_and_cached_prefix():
    target = Target(page_size=2)
    prompt = (1, 2, 3, 4, 5)
    for name in "ab":
        target.open(name, tokens=prompt, max_len=8)
        target.attach(prompt, name)
        drafted_rounds(target, prompt, 1, right=True, session=name)
        target.close(name)
    target.open("without a drafter", tokens=prompt, max_len=8)
    target.block(prompt, text(prompt, 1), "without a drafter")
    target.step()
    ((drafter, kinds),) = target.scheduler.draft_quality.acceptance.counts.items()
    assert DRAFTER.startswith(drafter + "#")
    once = AcceptanceCounts((1, 1), (1, 0))
    assert kinds == {BlockKind(4, False): once, BlockKind(4, True): once}


# ---------------------------------------------------------------- many sessions


def test_long_prompts_are_fed_in_chunks_beside_short_sessions():
    """A prompt of ten steps neither delays short sessions nor is delayed by them."""
    target = Target(max_step_tokens=8)
    prompts = {"long": tuple(range(40)), "short": (1, 2)}
    for name, prompt in prompts.items():
        target.open(name, tokens=prompt, max_len=90)
    decided: dict[str, Tokens] = dict.fromkeys(prompts, ())
    for _ in range(20):
        for name, verdict in verdicts(target.step()).items():
            decided[name] += verdict.tokens
    assert decided == {name: text(prompt, len(decided[name])) for name, prompt in prompts.items()}
    assert len(decided["long"]) >= 8
    assert len(decided["short"]) >= 15
    assert [row.session for row in target.rows[1]] == ["short", "long"], "the session that waited longest comes first"
    chunks = [row for rows in target.rows for row in rows if row.session == "long" and not row.decide]
    assert max(len(row.tokens) for row in chunks) <= 8


@given(
    prompts=st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=12), min_size=1, max_size=5),
    max_sessions=st.integers(1, 3),
    max_step_tokens=st.integers(1, 12),
    data=st.data(),
)
def test_every_session_gets_its_text_for_any_blocks(prompts, max_sessions, max_step_tokens, data):
    """Right, wrong, late, early and repeated blocks, in any batch and under any limits."""
    target = Target(max_sessions=max_sessions, max_step_tokens=max_step_tokens)
    tokens = {f"s{i}": tuple(prompt) for i, prompt in enumerate(prompts)}
    wanted = {name: prompt + text(prompt, 6) for name, prompt in tokens.items()}
    for name, prompt in tokens.items():
        target.open(name, tokens=prompt, max_len=len(prompt) + 6)
    for _ in range(400):
        name = data.draw(st.sampled_from(sorted(tokens)))
        ahead = data.draw(st.integers(0, 2))
        before = tokens[name] + text(tokens[name], ahead)
        draft = [*text(before, 3)][: data.draw(st.integers(1, 3))]
        if data.draw(st.booleans()):
            draft[-1] = data.draw(st.integers(0, VOCABULARY - 1))
        target.block(before, tuple(draft), name)
        for receiver, message in target.step():
            assert isinstance(message, Verdict)
            assert receiver == ROUTER
            so_far = tokens[message.session]
            assert (message.base_len, message.prefix_hash) == (len(so_far), Prefix(KEY, so_far).hash)
            tokens[message.session] += message.tokens
        if not any(target.scheduler.load().values()):
            break
    assert tokens == wanted


# ---------------------------------------------------------------- nonfinite logits


def broken(outcomes: list[Outcome], session: str) -> list[Outcome]:
    return [Outcome(one.session, (), 0, is_finite=False) if one.session == session else one for one in outcomes]


def test_nonfinite_logits_end_their_session_without_a_token_and_no_session_reads_its_pages(caplog):
    target = Target()
    prompts = {"a": (1, 2, 3, 4, 5), "bad": (6, 7, 8, 9, 10), "b": (3, 2, 1)}
    for name, prompt in prompts.items():
        target.open(name, tokens=prompt, max_len=12)
    target.step()
    first = prompts["bad"] + text(prompts["bad"], 1)
    target.attach(first, "bad")
    target.scheduler.receive(DRAFTER, NoDraft("bad", len(first), Prefix(KEY, first).hash), target.now)
    plan = target.scheduler.plan(target.now)
    sends = target.scheduler.apply(broken(target.compute(plan), "bad"), 0.1, target.now)
    ((receiver, refusal),) = [send for send in sends if isinstance(send[1], Refusal)]
    assert receiver == ROUTER
    assert (refusal.session, refusal.attempt, refusal.reason) == ("bad", 1, RefusalReason.NONFINITE_LOGITS)
    assert verdicts(sends).keys() == {"a", "b"}
    assert target.scheduler.counts.nonfinite == 1
    assert target.scheduler.admission.router_of("bad") is None
    assert "ended session 'bad' after 6 tokens" in caplog.text
    target.block(first, (1, 2), "bad")
    target.scheduler.receive(DRAFTER, Detach("bad"), target.now)
    assert target.open("bad", attempt=2, tokens=prompts["bad"], max_len=12) == []
    assert target.scheduler.plan(target.now).rows[-1].start == 0


@pytest.mark.parametrize("steps", [0, 1], ids=["beside the prompt", "after the prompt"])
def test_a_draft_with_nonfinite_logits_is_dropped_and_its_session_continues(steps):
    """The cause may be a draft token that would have been rejected."""
    target = Target()
    target.open(tokens=PROMPT, max_len=12)
    got: Tokens = ()
    for _ in range(steps):
        got += only_verdict(target.step()).tokens
    target.attach(PROMPT + got)
    target.block(PROMPT + got, (*text(PROMPT + got, 1), 0))
    plan = target.scheduler.plan(target.now)
    assert target.scheduler.apply(broken(target.compute(plan), "s"), 0.1, target.now) == []
    got += only_verdict(target.step()).tokens
    (drafted,), (alone,) = target.rows[-2:]
    assert drafted.drafted == 2
    assert alone == replace(drafted, tokens=drafted.tokens[:-2], draft=NO_TREE)
    target.block(PROMPT + got, text(PROMPT + got, 2))
    assert only_verdict(target.step()).tokens == text(PROMPT + got, 3)
    assert target.rows[-1][0].drafted == 2, "the drafter remains in use"


def test_sessions_beside_one_with_nonfinite_logits_get_their_texts():
    target = Target()
    prompts = {str(number): (number, 2, 3, 4, 5) for number in range(3)}
    for name, prompt in {**prompts, "bad": (0, 2, 3, 4, 5, 6)}.items():
        target.open(name, tokens=prompt, max_len=14)
    got: dict[str, Tokens] = dict.fromkeys([*prompts, "bad"], ())
    for step in range(3):
        plan = target.scheduler.plan(target.now)
        outcomes = target.compute(plan)
        sends = target.scheduler.apply(broken(outcomes, "bad") if step == 2 else outcomes, 0.1, target.now)
        for name, verdict in verdicts(sends).items():
            got[name] += verdict.tokens
    for name, rest in target.finish().items():
        got[name] += rest
    assert got.pop("bad") == text((0, 2, 3, 4, 5, 6), 2)
    assert got == {name: text(prompt, 9) for name, prompt in prompts.items()}


def test_nonfinite_logits_are_logged_once_a_minute(caplog):
    target = Target()
    for target.now in (0.0, 1.0, 59.0, 61.0):
        target.open(str(target.now))
        plan = target.scheduler.plan(target.now)
        target.scheduler.apply(broken(target.compute(plan), str(target.now)), 0.1, target.now)
    assert [record.args[0] for record in caplog.records] == ["0.0", "61.0"]
    assert target.scheduler.counts.nonfinite == 4


def test_a_verdict_carries_the_margin_over_the_rival():
    target = Target()
    target.open(tokens=(1, 2), max_len=3, audit=True, rival=7)
    plan = target.scheduler.plan(target.now)
    outcomes = [replace(outcome, margin=0.25) for outcome in target.compute(plan)]
    assert only_verdict(target.scheduler.apply(outcomes, 0.1, target.now)).margin == 0.25
