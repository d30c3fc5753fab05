"""Drafter sessions follow targets and routers: blocks, gaps, resyncs, refusals and departures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scenarios.drafting import Drafter, read_tokens, written


def opened(draft_ahead: bool = False) -> Drafter:
    """Returns a drafter with the session `s` at the target `t1`."""
    drafter = Drafter(draft_ahead)
    drafter.run("router#1: Open s 1,2 -> t1 <- Attach s 1,2")
    return drafter


def test_a_session_is_drafted_for_once_and_again_after_its_verdict():
    opened().run("""
        draft -> s 1,2 max_tokens=4
        draft
        block s 1,2 :5,6 -> t1 <- Block s 1,2 :5,6
        t1: Step s 1,2 +5,7
        draft -> s 1,2,5,7 max_tokens=4
    """)


def test_a_block_that_a_verdict_overtook_is_not_sent():
    opened().run("""
        draft -> s 1,2 max_tokens=4
        t1: Step s 1,2 +9
        block s 1,2 :5,6
        show overtaken -> overtaken=1
    """)


def test_a_block_for_a_reopened_session_with_other_tokens_is_not_sent():
    opened().run("""
        draft -> s 1,2 max_tokens=4
        router#1: Open s 1,3 attempt=2 -> t1 <- Attach s 1,3
        # The text has the same length; only its hash differs.
        block s 1,2 :5
    """)


def test_an_empty_proposal_is_reported_as_no_draft():
    opened().run("""
        draft -> s 1,2 max_tokens=4
        block s 1,2 -> t1 <- NoDraft s 1,2
        show nothing_to_propose -> nothing_to_propose=1
    """)


def test_blocks_end_before_the_last_position():
    Drafter().run("""
        # A verdict brings one token more than its block.
        router#1: Open s 1,2 max_len=5 -> t1 <- Attach s 1,2
        draft -> s 1,2 max_tokens=2
        t1: Step s 1,2 +7,7
        draft
    """)


# ---------------------------------------------------------------- verdicts


def test_a_gap_is_requested_and_the_catch_up_verdict_closes_it():
    opened().run("""
        t1: Step s 1,2,3 +4 -> t1 <- Attach s 1,2
        t1: Step s 1,2 +3,4
        draft -> s 1,2,3,4 max_tokens=4
    """)


def test_overlapping_and_repeated_verdicts_add_only_new_tokens():
    opened().run("""
        # A catch-up verdict and ordinary verdicts may cross.
        t1: Step s 1,2 +3
        t1: Step s 1,2 +3,4,5
        t1: Step s 1,2 +3
        draft -> s 1,2,3,4,5 max_tokens=4
    """)


def test_after_a_contradiction_the_router_sends_the_ledger():
    opened().run("""
        t1: Step s 1,9 +4 -> router#1 <- Resync s 1,2
        router#1: Open s 1,9,4 -> t1 <- Attach s 1,9,4
        draft
            closed s
            s 1,9,4 max_tokens=4
    """)


def test_a_resync_stops_drafting_until_the_ledger_arrives():
    opened().run("""
        t1: Resync s 5,5,5,5,5 -> router#1 <- Resync s 1,2
        draft
        router#1: Open s 1,3 -> t1 <- Attach s 1,3
        draft
            closed s
            s 1,3 max_tokens=4
    """)


@pytest.mark.parametrize(
    "verdict",
    ["t2: Verdict s 1,2 +5", "t1: Verdict s 1,2 +5 attempt=0", "t1: Verdict unknown 1,2 +5"],
    ids=["another target", "an older attempt", "an unknown session"],
)
def test_a_foreign_verdict_is_counted_and_changes_nothing(verdict):
    opened().run(f"""
        {verdict}
        show verdict_unknown -> verdict_unknown=1
        draft -> s 1,2 max_tokens=4
    """)


def test_a_finished_session_is_freed_and_closed_in_the_method_once():
    opened().run("""
        t1: Step s 1,2 +0 finish=stop
        show is_idle -> is_idle=no
        ahead -> closed s
        ahead
        show is_idle -> is_idle=yes
    """)


def test_a_reopened_session_is_closed_in_the_method_once_and_starts_over():
    opened().run("""
        router#1: Close s -> t1 <- Detach s
        router#1: Open s 1,2 attempt=2 -> t1 <- Attach s 1,2
        router#1: Open s 1,2 attempt=3 -> t1 <- Attach s 1,2
        ahead -> closed s
        draft -> s 1,2 attempt=3 max_tokens=4
    """)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 4)), max_size=20))
def test_lost_repeated_and_reordered_verdicts_leave_a_prefix_of_the_targets_text(pieces):
    target_text = (1, 2, *range(3, 20))
    drafter = Drafter()
    drafter.do("router#1: Open s 1,2 max_len=50")
    for skip, count in pieces:
        begin = 2 + skip
        drafter.do(f"t1: Step s {written(target_text[:begin])} +{written(target_text[begin : begin + count])}")
        for request in drafter.do("draft"):  # the harness compares the hash
            text = read_tokens(request.split()[1])
            assert text == target_text[: len(text)]


# ---------------------------------------------------------------- requests


def test_nothing_is_drafted_while_the_target_requests_nothing():
    opened(draft_ahead=True).run("""
        t1: Step s 1,2 +3 max_tokens=0
        draft
        show has_requests -> has_requests=no
        t1: Step s 1,2,3 +4 max_tokens=1
        draft -> s 1,2,3,4 max_tokens=1
    """)


def test_a_new_session_of_a_target_that_requests_nothing_waits_for_its_request():
    Drafter().run("""
        # Reading a prompt takes long and is wasted where speculation does not pay.
        router#1: Open resting 1,2 -> t1 <- Attach resting 1,2
        t1: DraftRequest resting 1,2 max_tokens=0
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        draft
        show has_requests -> has_requests=no
        t1: DraftRequest s 1,2 max_tokens=3 least_chance=0.5
        draft -> s 1,2 max_tokens=3 least_chance=0.5
        router#1: Close resting -> t1 <- Detach resting
        router#1: Open elsewhere 1,2 target_address=t2 -> t2 <- Attach elsewhere 1,2
        t2: DraftRequest elsewhere 1,2 max_tokens=0
        router#1: Open again 1,2 -> t1 <- Attach again 1,2
        draft
            closed resting
            again 1,2 max_tokens=4
    """)


def test_a_target_that_reconnects_is_not_assumed_to_request_nothing():
    Drafter().run("""
        router#1: Open resting 1,2 -> t1 <- Attach resting 1,2
        t1: DraftRequest resting 1,2 max_tokens=0
        gone t1
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        draft -> s 1,2 max_tokens=4
    """)


def test_a_repeated_verdict_does_not_bring_back_an_old_request():
    opened().run("""
        t1: Step s 1,2 +3 max_tokens=2
        t1: Step s 1,2,3 +4 max_tokens=1
        t1: Step s 1,2 +3 max_tokens=2
        draft -> s 1,2,3,4 max_tokens=1
    """)


def test_updates_wait_for_a_pass_unless_a_session_has_ended():
    opened().run("""
        t1: DraftRequest s 1,2 max_tokens=0
        t1: Step s 1,2 +3 max_tokens=0
        pass
        router#1: Open t 1,2 -> t1 <- Attach t 1,2
        draft
        t1: DraftRequest t 1,2 max_tokens=4
        draft -> t 1,2 max_tokens=4
        t1: Step s 1,2,3 +4 max_tokens=0 finish=stop
        pass -> closed s
    """)


def test_has_requests_while_a_session_waits_for_a_block():
    drafter = Drafter(draft_ahead=True)

    def has_requests(*events: str) -> bool:
        for event in events:
            drafter.do(event)
        return drafter.scheduler.has_requests

    assert not has_requests()
    assert has_requests("router#1: Open s 1,2")
    assert not has_requests("draft")
    assert has_requests("t1: Step s 1,2 +7")
    assert not has_requests("gone t1")
    assert has_requests("connected t1")
    assert not has_requests("t1: Step s 1,2,7 +0 finish=stop")


def test_the_longest_unserved_session_comes_first():
    Drafter().run("""
        router#1: Open a 1,2 -> t1 <- Attach a 1,2
        router#1: Open b 1,2 -> t1 <- Attach b 1,2
        router#1: Open c 1,2 -> t1 <- Attach c 1,2
        draft 2
            a 1,2 max_tokens=4
            b 1,2 max_tokens=4
        t1: Step a 1,2 +7
        draft
            c 1,2 max_tokens=4
            a 1,2,7 max_tokens=4
    """)


# ---------------------------------------------------------------- routers and targets


def test_refusals_give_the_reason():
    Drafter().run("""
        router#1: Open s0 1,2 -> t1 <- Attach s0 1,2
        router#1: Open s1 1,2 -> t1 <- Attach s1 1,2
        router#1: Open s2 1,2 -> t1 <- Attach s2 1,2
        router#1: Open new 1,2 -> router#1 <- Refusal new attempt=1 overloaded "this drafter is full with 3 sessions"
        router#1: Open new 50 -> router#1 <- Refusal new attempt=1 invalid "token id 50 is outside the vocabulary of 50"
        router#1: Open new 1,2 max_len=101
            router#1 <- Refusal new attempt=1 invalid "max_len is 101, expected at most 100, the drafter's context"
        router#1: Open new 1,2 target_address=
            router#1 <- Refusal new attempt=1 invalid "target_address is empty"
        # A full drafter still reopens its own sessions.
        router#1: Open s0 1,2 attempt=2 -> t1 <- Attach s0 1,2
    """)


def test_a_session_at_an_unknown_target_is_refused_until_the_target_is_known(caplog):
    known = {"t1"}
    drafter = Drafter(known_targets=lambda _: frozenset(known))
    drafter.run("""
        router#1: Open a 1,2 -> t1 <- Attach a 1,2
        # The drafter's membership may lag behind the router's, so the router may retry.
        router#1: Open b 1,2 target_address=t2
            router#1 <- Refusal b attempt=1 overloaded "target_address is not known yet; retry"
        router#1: Open b 1,2 target_address=t2 attempt=2
            router#1 <- Refusal b attempt=2 overloaded "target_address is not known yet; retry"
        show targets -> targets=t1
    """)
    assert drafter.scheduler.refusals.counts == {"an Open with an unknown target": 2}
    (logged,) = caplog.records
    assert "t2" in logged.getMessage()
    known.add("t2")
    drafter.run("""
        router#1: Open b 1,2 target_address=t2 attempt=3 -> t2 <- Attach b 1,2
    """)


def test_a_target_that_is_no_longer_listed_is_drafted_for_while_it_serves():
    known = {"t1"}
    drafter = Drafter(known_targets=lambda _: frozenset(known))
    drafter.run("""
        router#1: Open a 1,2 -> t1 <- Attach a 1,2
    """)
    known.clear()
    drafter.run("""
        router#1: Open a 1,2 attempt=2 -> t1 <- Attach a 1,2
        router#1: Close a attempt=2 -> t1 <- Detach a
        router#1: Open b 1,2 -> router#1 <- Refusal b attempt=1 overloaded "target_address is not known yet; retry"
    """)


def test_an_older_open_and_a_foreign_close_change_nothing():
    Drafter().run("""
        router#1: Open s 1,2 attempt=2 -> t1 <- Attach s 1,2
        router#1: Open s 9,9 attempt=1
        router#1: Close s attempt=1
        other#1: Close s attempt=9
        router#1: Close unknown attempt=9
        draft -> s 1,2 attempt=2 max_tokens=4
    """)


def test_a_broken_stream_to_the_target_stops_drafting_until_it_reconnects():
    opened().run("""
        gone t1
        draft
        connected t2
        connected t1 -> t1 <- Attach s 1,2
        draft -> s 1,2 max_tokens=4
    """)


def test_sessions_of_a_lost_router_and_those_its_hello_omits_are_freed():
    Drafter().run("""
        router#1: Open a 1,2 -> t1 <- Attach a 1,2
        router#1: Open b 1,2 -> t1 <- Attach b 1,2
        other#1: Open c 1,2 -> t1 <- Attach c 1,2
        router#2: Hello a -> t1 <- Detach b
        ahead -> closed b
        # The old stream's end arrives late.
        gone router#1
        ahead
        gone router#2 -> t1 <- Detach a
        ahead -> closed a
        show targets sessions -> targets=t1 sessions=1
    """)


def test_a_session_whose_target_decides_an_unknown_token_is_dropped_and_detached():
    opened().run("""
        t1: Step s 1,2 +50 -> t1 <- Detach s
        pass -> closed s
    """)


def test_a_closed_session_is_detached_from_its_target():
    opened().run("""
        router#2: Close s
        router#1: Close s -> t1 <- Detach s
        router#1: Close s
    """)


def test_another_routers_open_does_not_replace_a_session():
    drafter = opened()
    drafter.run("""
        other#1: Open s 5,6 attempt=2 target_address=elsewhere -> other#1 <- Refusal s attempt=2 invalid "not permitted"
        show targets -> targets=t1
    """)
    assert drafter.scheduler.refusals.counts == {"an Open of another router's session": 1}


def test_an_attach_carries_the_assignment_token_of_the_open():
    Drafter().run("""
        router#1: Open s 1,2 assignment_token=3 -> t1 <- Attach s 1,2 assignment_token=3
        connected t1 -> t1 <- Attach s 1,2 assignment_token=3
    """)
