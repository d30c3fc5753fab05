"""Tests a single audit: its requests to targets and its conclusions from verdicts."""

from dataclasses import replace
from typing import Any

import pytest

from cluster.audit import Progress, Replay, is_repeatable
from cluster.routing.ledger import Generation
from protos.messages import Acceptance, Finish, Open, Sampling, Verdict
from protos.prefix import Prefix
from tests.unit.cluster.samples import GREEDY, KEY

PROMPT = (1, 2, 3)
TEXT = (10, 11, 12, 13)
NEAR_TIE = 0.1
GENERATION = Generation("s", PROMPT, 99, (0,), GREEDY, 7, 8, 1, KEY, Acceptance.COUPLED, 4)
ON, ANEW, ENDED = Progress


def a_replay(committed: tuple[int, ...] = TEXT, **changes: Any) -> Replay:
    return Replay(replace(GENERATION, **changes), committed, frozenset({"T"}), NEAR_TIE)


def a_verdict(request: Open, *tokens: int, after: tuple[int, ...] = (), **changes: Any) -> Verdict:
    """Returns a target's verdict after its opening tokens and the tokens `after` them."""
    here = Prefix(KEY, request.tokens + after)
    finish = Finish.LENGTH if len(here) + len(tokens) == request.max_len else Finish.NONE
    return replace(Verdict(request.session, request.attempt, len(here), here.hash, tokens, 0, 0, finish), **changes)


def test_an_audit_is_the_same_request_without_drafts_limited_to_the_answers_length():
    request = a_replay(sampling=Sampling(temperature=0.7)).open()
    assert (request.tokens, request.prompt_len, request.max_len) == (PROMPT, 3, 7)
    assert (request.sampling, request.seed, request.choice) == (Sampling(temperature=0.7), 7, 1)
    assert (request.stop_ids, request.acceptance) == ((0,), Acceptance.COUPLED)
    assert (request.audit, request.draft_tokens, request.rival) == (True, 0, None)
    assert request.session != "s", "the request may still be open where its Close has not arrived"


def test_the_target_confirms_its_own_text():
    replay = a_replay()
    request = replay.open()
    seen = [replay.receive(a_verdict(request, token, after=TEXT[:i])) for i, token in enumerate(TEXT)]
    assert seen == [ON, ON, ON, ENDED]
    assert not replay.differs
    assert replay.near_ties == []


def test_verdicts_that_a_ledger_ignores_are_ignored():
    replay = a_replay()
    request = replay.open()
    for void in (
        a_verdict(request, 10, attempt=0),
        a_verdict(request, 11, after=(10,)),
        a_verdict(request, 10, prefix_hash=0),
    ):
        assert replay.receive(void) is ON
    assert replay.open().tokens == PROMPT


def test_an_audit_continues_where_it_stopped_under_a_new_attempt():
    replay = a_replay()
    first = replay.open()
    replay.receive(a_verdict(first, 10))
    again = replay.open()
    assert (again.tokens, again.prompt_len, again.attempt) == ((*PROMPT, 10), 3, first.attempt + 1)
    assert replay.receive(a_verdict(first, 11, after=(10,))) is ON, "of the attempt before"
    assert replay.receive(a_verdict(again, 11, 12, 13)) is ENDED


def asked_after(replay: Replay, *tokens: int) -> Open:
    """Returns the audit's next question after non-speculative decoding gave these tokens, the last one different."""
    assert replay.receive(a_verdict(replay.open(), *tokens)) is ANEW
    return replay.open()


def test_the_margin_of_a_different_token_is_requested():
    question = asked_after(a_replay(), 10, 50)
    assert (question.tokens, question.rival, question.max_len) == ((*PROMPT, 10), 11, 5)


def test_after_a_near_tie_the_audit_continues_with_the_committed_token():
    replay = a_replay()
    question = asked_after(replay, 10, 50)
    assert replay.receive(a_verdict(question, 50, margin=0.05)) is ANEW
    rest = replay.open()
    assert (rest.tokens, rest.rival) == ((*PROMPT, 10, 11), None)
    assert replay.receive(a_verdict(rest, 12, 13)) is ENDED
    assert (replay.differs, replay.near_ties) == (False, [0.05])


def test_a_difference_after_a_near_tie_is_found():
    replay = a_replay()
    replay.receive(a_verdict(asked_after(replay, 10, 50), 50, margin=0.05))
    question = asked_after(replay, 60)
    assert replay.receive(a_verdict(question, 60, margin=3.0)) is ANEW
    assert replay.difference("U").position == 2


def test_a_near_tie_at_the_last_token_ends_the_audit():
    replay = a_replay()
    assert replay.receive(a_verdict(asked_after(replay, 10, 11, 12, 50), 50, margin=0.05)) is ENDED
    assert not replay.differs


@pytest.mark.parametrize("margin", [NEAR_TIE, 3.0, None])
def test_a_difference_records_the_continuation_of_non_speculative_decoding(margin):
    replay = a_replay()
    assert replay.receive(a_verdict(asked_after(replay, 10, 50), 50, margin=margin)) is ANEW
    rest = replay.open()
    assert (rest.tokens, rest.rival, rest.max_len) == ((*PROMPT, 10, 50), None, 7)
    assert replay.receive(a_verdict(rest, 51)) is ON
    assert replay.receive(a_verdict(rest, 52, after=(51,))) is ENDED
    found = replay.difference("U")
    assert (found.position, found.committed, found.plain, found.margin) == (1, (11, 12, 13), (50, 51, 52), margin)
    assert (found.served_by, found.audited_by, found.seed, found.prompt_len) == (("T",), "U", 7, 3)


def test_a_bounded_part_of_a_long_answer_is_recorded():
    replay = a_replay(committed=tuple(range(100, 300)))
    replay.receive(a_verdict(asked_after(replay, 100, 50), 50, margin=3.0))
    recorded = replay.difference("U").committed
    assert 8 <= len(recorded) <= 64
    assert recorded == tuple(range(101, 101 + len(recorded)))
    assert replay.open().max_len == len(PROMPT) + 1 + len(recorded)


@pytest.mark.parametrize(("committed", "plain"), [(TEXT[:2], 50), (TEXT, 0)], ids=["the answer's end", "a stop id"])
def test_a_difference_that_nothing_can_follow_ends_the_audit(committed, plain):
    replay = a_replay(committed=committed)
    question = asked_after(replay, 10, plain)
    assert replay.receive(a_verdict(question, plain, margin=3.0)) is ENDED
    assert replay.difference("U").plain == (plain,)


def test_if_a_fresh_target_confirms_the_committed_token_the_audits_own_token_is_measured():
    """A confirmed token means that the audit's own cache was wrong."""
    replay = a_replay()
    question = asked_after(replay, 10, 50)
    assert replay.receive(a_verdict(question, 11, margin=0.0)) is ANEW
    again = replay.open()
    assert (again.tokens, again.rival) == (question.tokens, 50)
    assert replay.receive(a_verdict(again, 11, margin=4.0)) is ANEW
    assert replay.differs


def test_an_unanswered_margin_request_is_repeated():
    replay = a_replay()
    question = asked_after(replay, 10, 50)
    assert not replay.differs, "the margin is unknown"
    again = replay.open()
    assert (again.tokens, again.rival) == (question.tokens, question.rival)


def test_a_text_that_depends_on_drafts_is_not_repeatable():
    sampled = Sampling(temperature=0.7)
    assert is_repeatable(replace(GENERATION, sampling=sampled))
    assert is_repeatable(replace(GENERATION, acceptance=Acceptance.REJECTION)), "greedy is greedy under both rules"
    assert not is_repeatable(replace(GENERATION, sampling=sampled, acceptance=Acceptance.REJECTION))
