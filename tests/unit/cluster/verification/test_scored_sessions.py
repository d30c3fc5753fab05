"""Tests audits, and requests with scores, private caches and token rules."""

from dataclasses import replace

import pytest

from protos.messages import Finish, RefusalReason, Scoring, TokenRules, TokenScore, Verdict
from tests.scenarios.verification import DRAFTER, ROUTER, VOCABULARY, Target, only_verdict, refusals, text

PROMPT = tuple(range(8))


def scores(count: int) -> tuple[TokenScore, ...]:
    return tuple(TokenScore(-float(place), 1) for place in range(count))


def test_only_the_router_receives_scores_and_only_up_to_the_end_of_the_session():
    """The block continues after the stop id."""
    target = Target()
    tokens = text((1, 2, 3), 3)
    target.open(tokens=(1, 2, 3), stop_ids=(tokens[1],), scoring=Scoring(0, 0))
    target.attach((1, 2, 3))
    target.block((1, 2, 3), tokens)
    plan = target.scheduler.plan(target.now)
    assert plan is not None
    (outcome,) = target.compute(plan)
    assert outcome.accepted == 3
    sends = target.scheduler.apply([replace(outcome, scores=scores(4), prompt_scores=scores(2))], 0.1, target.now)
    verdict = only_verdict(sends)
    assert (verdict.tokens, verdict.finish) == (tokens[:2], Finish.STOP)
    assert (verdict.scores, verdict.prompt_scores) == (scores(2), scores(2))
    (drafters,) = [message for to, message in sends if to == DRAFTER and isinstance(message, Verdict)]
    assert (drafters.scores, drafters.prompt_scores) == ((), ())


def cached(target: Target, name: str, **changes: object) -> int:
    """Runs a session with the same prompt; returns its number of cached tokens."""
    target.open(name, tokens=PROMPT, max_len=9, **changes)
    target.finish()
    (row,) = target.rows[-1] or target.rows[-2]
    return row.start


def test_scored_prompts_are_computed_as_a_whole():
    target = Target()
    assert cached(target, "first") == 0
    assert cached(target, "unscored") == 4
    assert cached(target, "scored", scoring=Scoring(None, 0)) == 0
    assert cached(target, "generated tokens scored", scoring=Scoring(5)) == 4


def test_audits_neither_use_cached_pages_nor_leave_any():
    target = Target()
    assert cached(target, "audit", audit=True) == 0
    assert cached(target, "first") == 0
    assert cached(target, "second") == 4
    assert cached(target, "again", audit=True) == 0


def test_sessions_share_cached_text_only_with_sessions_of_the_same_salt():
    target = Target()
    assert cached(target, "mine", cache_salt="a") == 0
    assert cached(target, "yours", cache_salt="b") == 0
    assert cached(target, "unsalted") == 0
    assert cached(target, "mine again", cache_salt="a") == 4


@pytest.mark.parametrize("changes", [{"audit": True}, {"scoring": Scoring(None, 0)}], ids=["audit", "scored"])
def test_prompts_of_audits_and_scored_prompts_are_read_in_small_pieces(changes):
    """Requests must not wait long for an audit, and memory must hold the logits of a whole scored chunk."""
    target = Target(max_step_tokens=1000, max_context=1000, pages=400)
    target.open(tokens=(1,) * 600, max_len=601, **changes)
    target.finish()
    pieces = [len(row.tokens) for rows in target.rows for row in rows]
    assert sum(pieces) == 600
    assert 16 < max(pieces) < 200


@pytest.mark.parametrize(
    "rules",
    [
        TokenRules(logit_bias=((VOCABULARY, 1.0),)),
        TokenRules(allowed=(1, VOCABULARY)),
        TokenRules(bad_words=((1,), (1, VOCABULARY))),
    ],
    ids=["bias", "allowed", "bad words"],
)
def test_a_rule_for_a_token_outside_the_vocabulary_is_refused(rules):
    assert refusals(Target().open(tokens=(1, 2), rules=rules)) == [(ROUTER, "s", RefusalReason.INVALID)]
