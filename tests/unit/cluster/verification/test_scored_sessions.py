"""Requests with scores, priorities, private caches and token rules."""

from dataclasses import replace

import pytest

from cluster.verification.sequence import AUDIT_STEP_TOKENS
from protos.messages import Finish, RefusalReason, Scoring, TokenRules, TokenScore, Verdict
from tests.scenarios.verification import (
    DRAFTER,
    ROUTER,
    VOCABULARY,
    Target,
    only_verdict,
    refusals,
    text,
)

PROMPT = tuple(range(8))


def scored(count: int) -> tuple[TokenScore, ...]:
    return tuple(TokenScore(-float(place), 1) for place in range(count))


def test_scores_go_to_the_router_alone_and_end_with_the_session():
    """The drafter has no use for them, and a block goes on past the end."""
    desk = Target()
    told = text((1, 2, 3), 3)
    desk.open(tokens=(1, 2, 3), stop_ids=(told[1],), scoring=Scoring(0, 0))
    desk.attach((1, 2, 3))
    desk.block((1, 2, 3), told)
    plan = desk.scheduler.plan(desk.now)
    assert plan is not None
    (outcome,) = desk.compute(plan)
    assert outcome.accepted == 3
    sends = desk.scheduler.apply([replace(outcome, scores=scored(4), prompt_scores=scored(2))], 0.1, desk.now)
    verdict = only_verdict(sends)
    assert (verdict.tokens, verdict.finish) == (told[:2], Finish.STOP)
    assert (verdict.scores, verdict.prompt_scores) == (scored(2), scored(2))
    (drafters,) = [message for to, message in sends if to == DRAFTER and isinstance(message, Verdict)]
    assert (drafters.scores, drafters.prompt_scores) == ((), ())


def first_row(desk: Target, name: str, **changes: object) -> int:
    desk.open(name, tokens=PROMPT, max_len=9, **changes)
    desk.finish()
    (row,) = desk.rows[-1] or desk.rows[-2]
    return row.start


def test_all_of_a_prompt_that_is_scored_is_computed():
    desk = Target()
    assert first_row(desk, "first") == 0
    assert first_row(desk, "plain") == 4
    assert first_row(desk, "scored", scoring=Scoring(None, 0)) == 0
    assert first_row(desk, "tokens scored", scoring=Scoring(5)) == 4, "its answer's tokens are decided anyway"


def test_a_scored_prompt_is_read_in_small_pieces():
    """Logits of all of a piece are held at once."""
    desk = Target(max_step_tokens=10 * AUDIT_STEP_TOKENS, max_context=1000, pages=400)
    prompt = (1,) * (AUDIT_STEP_TOKENS + 3)
    desk.open(tokens=prompt, max_len=len(prompt) + 1, scoring=Scoring(None, 0))
    desk.finish()
    assert [len(row.tokens) for rows in desk.rows for row in rows] == [AUDIT_STEP_TOKENS, 3]


def test_sessions_share_cached_text_with_those_of_their_own_salt():
    desk = Target()
    assert first_row(desk, "mine", cache_salt="a") == 0
    assert first_row(desk, "yours", cache_salt="b") == 0
    assert first_row(desk, "nobody's") == 0
    assert first_row(desk, "mine again", cache_salt="a") == 4


def test_who_waits_comes_in_by_priority_and_then_by_time():
    desk = Target(max_sessions=1)
    for name, priority in (("running", 5), ("late", 3), ("first", -2), ("second", -2), ("usual", 0)):
        desk.open(name, tokens=(1, 2), max_len=3, priority=priority)
    order = []
    for _ in range(5):
        order.append(only_verdict(desk.step()).session)
    assert order == ["running", "first", "second", "usual", "late"]


@pytest.mark.parametrize(
    "rules",
    [
        TokenRules(logit_bias=((VOCABULARY, 1.0),)),
        TokenRules(allowed=(1, VOCABULARY)),
        TokenRules(bad_words=((1,), (1, VOCABULARY))),
    ],
)
def test_a_rule_about_a_token_outside_the_vocabulary_is_refused(rules):
    assert refusals(Target().open(tokens=(1, 2), rules=rules)) == [(ROUTER, "s", RefusalReason.INVALID)]
