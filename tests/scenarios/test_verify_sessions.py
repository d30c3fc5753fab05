"""Sessions of a target: attaching and detaching drafters, waiting for blocks, queues, routers and audits."""

from itertools import chain, repeat

import pytest

from tests.scenarios.verification import Target

# ---------------------------------------------------------------- attaching


def test_a_drafter_that_attaches_late_receives_the_tokens_it_missed_as_one_verdict():
    Target().run("""
        router#1: Open s 1,2
        step -> router#1 <- Verdict s 1,2 +23
        step -> router#1 <- Verdict s 1,2,23 +35 answer=missed
        drafter#1: Attach s 1,2
            drafter#1 <- Verdict s 1,2 +23,35
            drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4
        drafter#1: Attach s 1,2,23,35 -> drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4
    """)


@pytest.mark.parametrize("have", ["1,3", "1,2,3"], ids=["other tokens", "more tokens"])
def test_a_drafter_with_other_tokens_is_resynchronized_and_gets_no_verdicts(have):
    Target().run(f"""
        router#1: Open s 1,2
        drafter#1: Attach s {have} -> drafter#1 <- Resync s 1,2
        step -> router#1 <- Verdict s 1,2 +23
    """)


def test_a_drafter_that_left_receives_nothing_and_is_not_waited_for():
    Target(patience=9.0).run("""
        router#1: Open s 1,2
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2 +23
            drafter#1 <- DraftRequest s 1,2,23 max_tokens=4
            router#1 <- Verdict s 1,2 +23
        gone drafter#1
        step -> router#1 <- Verdict s 1,2,23 +35 answer=missed
    """)


def test_only_the_attached_drafter_can_detach():
    """The target does not wait for a detached drafter. The router knows whether it has assigned a drafter."""
    Target(patience=1.0).run("""
        router#1: Open s 1,2,3
        step -> router#1 <- Verdict s 1,2,3 +45
        drafter#1: Attach s 1,2,3,45 -> drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=4
        drafter#2: Detach s
        plan -> nothing
        drafter#1: Detach s
        step -> router#1 <- Verdict s 1,2,3,45 +11 answer=missed
    """)


# ---------------------------------------------------------------- waiting for blocks


def test_a_session_waits_for_its_block_and_then_goes_on_without():
    """The prompt is fed immediately."""
    Target(patience=2.0).run("""
        router#1: Open s 1,2
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2 +23
            drafter#1 <- DraftRequest s 1,2,23 max_tokens=4
            router#1 <- Verdict s 1,2 +23
        at 1.9
        plan -> nothing
        due -> 2
        at 2
        step
            drafter#1 <- Verdict s 1,2,23 +35 answer=missed
            drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4
            router#1 <- Verdict s 1,2,23 +35 answer=missed
    """)


def test_a_block_ends_the_wait_at_once():
    Target(patience=2.0).run("""
        router#1: Open s 1,2
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2 +23
            drafter#1 <- DraftRequest s 1,2,23 max_tokens=4
            router#1 <- Verdict s 1,2 +23
        drafter#1: Block s 1,2,23 :5
        due -> 0
        step
            drafter#1 <- Verdict s 1,2,23 +35 drafted=1 answer=given
            drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4
            router#1 <- Verdict s 1,2,23 +35 drafted=1 answer=given
    """)


def test_no_step_waits_before_the_last_token_or_with_speculation_off():
    """One non-speculative step ends the session, so a block would gain nothing."""
    Target(patience=2.0).run("""
        router#1: Open last 1,2 max_len=4
        router#1: Open baseline 1,2 draft_tokens=0
        drafter#1: Attach last 1,2 -> drafter#1 <- DraftRequest last 1,2 max_tokens=4
        drafter#1: Attach baseline 1,2 -> drafter#1 <- DraftRequest baseline 1,2 max_tokens=0 hold_step=no
        step
            drafter#1 <- Verdict last 1,2 +23
            drafter#1 <- DraftRequest last 1,2,23 max_tokens=4
            router#1 <- Verdict last 1,2 +23
            router#1 <- Verdict baseline 1,2 +23
        step
            drafter#1 <- Verdict last 1,2,23 +35 finish=length
            router#1 <- Verdict last 1,2,23 +35 finish=length
            router#1 <- Verdict baseline 1,2,23 +35
    """)


def test_no_draft_for_another_prefix_does_not_end_the_wait():
    Target(patience=1.0).run("""
        router#1: Open s 1,2,3
        step -> router#1 <- Verdict s 1,2,3 +45
        drafter#1: Attach s 1,2,3,45 -> drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=4
        drafter#1: NoDraft s 1,2,3,45 prefix_hash=1
        drafter#1: NoDraft s 1,2,3
        drafter#1: NoDraft unknown 1,2,3 prefix_hash=1
        plan -> nothing
    """)


def test_a_verdict_reports_the_drafters_answer():
    Target().run("""
        router#1: Open s 1,2,3
        step -> router#1 <- Verdict s 1,2,3 +45
        drafter#1: Attach s 1,2,3,45 -> drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2,3,45 +11 answer=missed
            drafter#1 <- DraftRequest s 1,2,3,45,11 max_tokens=4
            router#1 <- Verdict s 1,2,3,45 +11 answer=missed
        drafter#1: Block s 1,2,3,45,11 :39,13
        step
            drafter#1 <- Verdict s 1,2,3,45,11 +39,13,5 accepted=2 drafted=2 answer=given
            drafter#1 <- DraftRequest s 1,2,3,45,11,39,13,5 max_tokens=4
            router#1 <- Verdict s 1,2,3,45,11 +39,13,5 accepted=2 drafted=2 answer=given
    """)


def test_a_step_waits_for_blocks_and_then_goes_on_without_them():
    """One step for both sessions costs less than two."""
    Target(hold=1.0).run("""
        router#1: Open a 1,2
        drafter#1: Attach a 1,2 -> drafter#1 <- DraftRequest a 1,2 max_tokens=4
        router#1: Open b 1,2
        drafter#1: Attach b 1,2 -> drafter#1 <- DraftRequest b 1,2 max_tokens=4
        step
            drafter#1 <- Verdict a 1,2 +23
            drafter#1 <- DraftRequest a 1,2,23 max_tokens=4
            drafter#1 <- Verdict b 1,2 +23
            drafter#1 <- DraftRequest b 1,2,23 max_tokens=4
            router#1 <- Verdict a 1,2 +23
            router#1 <- Verdict b 1,2 +23
        drafter#1: Block a 1,2,23 :5
        due -> 1
        at 1
        plan
            row a@2 23 :5
            row b@2 23
    """)


def test_a_step_begins_as_soon_as_the_last_awaited_block_arrives():
    Target(patience=9.0, hold=5.0).run("""
        router#1: Open a 1,2
        drafter#1: Attach a 1,2 -> drafter#1 <- DraftRequest a 1,2 max_tokens=4
        router#1: Open b 1,2
        drafter#1: Attach b 1,2 -> drafter#1 <- DraftRequest b 1,2 max_tokens=4
        step
            drafter#1 <- Verdict a 1,2 +23
            drafter#1 <- DraftRequest a 1,2,23 max_tokens=4
            drafter#1 <- Verdict b 1,2 +23
            drafter#1 <- DraftRequest b 1,2,23 max_tokens=4
            router#1 <- Verdict a 1,2 +23
            router#1 <- Verdict b 1,2 +23
        drafter#1: Block a 1,2,23 :5
        plan -> nothing
        at 1
        drafter#1: Block b 1,2,23 :6
        plan
            row a@2 23 :5
            row b@2 23 :6
        apply
            drafter#1 <- Verdict a 1,2,23 +35 drafted=1 answer=given
            drafter#1 <- DraftRequest a 1,2,23,35 max_tokens=4
            drafter#1 <- Verdict b 1,2,23 +35 drafted=1 answer=given
            drafter#1 <- DraftRequest b 1,2,23,35 max_tokens=4
            router#1 <- Verdict a 1,2,23 +35 drafted=1 answer=given
            router#1 <- Verdict b 1,2,23 +35 drafted=1 answer=given
    """)


def test_blocks_that_are_not_waited_for_are_used_if_they_have_arrived():
    """A block counts as missed only if the step waited for it."""
    Target(hold=1.0, waits=False).run("""
        router#1: Open s 1,2
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4 hold_step=no
        step
            drafter#1 <- Verdict s 1,2 +23
            drafter#1 <- DraftRequest s 1,2,23 max_tokens=4 hold_step=no
            router#1 <- Verdict s 1,2 +23
        due -> 0
        step
            drafter#1 <- Verdict s 1,2,23 +35
            drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4 hold_step=no
            router#1 <- Verdict s 1,2,23 +35
        drafter#1: Block s 1,2,23,35,31 :49
        step
            drafter#1 <- Verdict s 1,2,23,35 +31
            drafter#1 <- DraftRequest s 1,2,23,35,31 max_tokens=4 hold_step=no
            router#1 <- Verdict s 1,2,23,35 +31
        plan -> row s@4 31 :49
        apply
            drafter#1 <- Verdict s 1,2,23,35,31 +49,43 accepted=1 drafted=1 answer=given
            drafter#1 <- DraftRequest s 1,2,23,35,31,49,43 max_tokens=4 hold_step=no
            router#1 <- Verdict s 1,2,23,35,31 +49,43 accepted=1 drafted=1 answer=given
    """)


def test_a_verdict_requests_the_next_block():
    Target(patience=9.0, asked=2).run("""
        router#1: Open s 1,2
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=2
        step
            drafter#1 <- Verdict s 1,2 +23
            drafter#1 <- DraftRequest s 1,2,23 max_tokens=2
            router#1 <- Verdict s 1,2 +23
        plan -> nothing
    """)


def test_a_drafter_without_a_request_is_not_waited_for():
    Target(patience=9.0, asked=0).run("""
        router#1: Open s 1,2
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=0
        step -> router#1 <- Verdict s 1,2 +23
        step -> router#1 <- Verdict s 1,2,23 +35
    """)


def test_a_drafter_without_requests_gets_no_verdicts_until_tokens_are_requested():
    """Verdicts would cost a message per token on both sides. The end of the session is always sent."""
    Target(asked=chain([0, 0, 0, 2, 2], repeat(0))).run("""
        router#1: Open s 1,2 max_len=11
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=0
        step -> router#1 <- Verdict s 1,2 +23
        step -> router#1 <- Verdict s 1,2,23 +35
        step
            drafter#1 <- Verdict s 1,2 +23,35,31
            drafter#1 <- DraftRequest s 1,2,23,35,31 max_tokens=2
            router#1 <- Verdict s 1,2,23,35 +31
        step
            drafter#1 <- Verdict s 1,2,23,35,31 +49 answer=missed
            drafter#1 <- DraftRequest s 1,2,23,35,31,49 max_tokens=2
            router#1 <- Verdict s 1,2,23,35,31 +49 answer=missed
        step
            drafter#1 <- Verdict s 1,2,23,35,31,49 +43 answer=missed
            drafter#1 <- DraftRequest s 1,2,23,35,31,49,43 max_tokens=0
            router#1 <- Verdict s 1,2,23,35,31,49 +43 answer=missed
        step -> router#1 <- Verdict s 1,2,23,35,31,49,43 +45
        step -> router#1 <- Verdict s 1,2,23,35,31,49,43,45 +11
        step -> router#1 <- Verdict s 1,2,23,35,31,49,43,45,11 +39
        step
            drafter#1 <- Verdict s 1,2,23,35,31,49,43 +45,11,39,13 finish=length
            router#1 <- Verdict s 1,2,23,35,31,49,43,45,11,39 +13 finish=length
    """)


# ---------------------------------------------------------------- queue


def test_sessions_beyond_the_cache_queue_in_order_and_are_admitted_between_steps():
    Target(max_sessions=2).run("""
        router#1: Open a 1,2 max_len=3
        router#1: Open b 1,2 max_len=5
        router#1: Open c 1,2 max_len=5
        router#1: Open d 1,2 max_len=5
        plan
            open a
            open b
            row a@0 1,2
            row b@0 1,2
        apply
            router#1 <- Verdict a 1,2 +23 finish=length
            router#1 <- Verdict b 1,2 +23
        show sessions queued -> sessions=2 queued=1
        router#1: Close b
        plan
            close a
            close b
            open c
            open d
            row c@0 1,2
            row d@0 1,2
    """)


def test_a_queued_session_can_be_attached_closed_and_replaced():
    Target(max_sessions=1).run("""
        router#1: Open a 1,2 max_len=3
        router#1: Open b 1,2
        router#1: Open c 1,2
        router#1: Open b 3,4 attempt=2
        drafter#1: Attach b 3,4 -> drafter#1 <- DraftRequest b 3,4 max_tokens=4 attempt=2
        router#1: Close c
        step -> router#1 <- Verdict a 1,2 +23 finish=length
        step
            drafter#1 <- Verdict b 3,4 +1 attempt=2
            drafter#1 <- DraftRequest b 3,4,1 max_tokens=4 attempt=2
            router#1 <- Verdict b 3,4 +1 attempt=2
    """)


def test_a_queued_session_requests_its_first_block():
    """The drafter has therefore read the prompt when the session is admitted."""
    Target(max_sessions=1, asked=3).run("""
        router#1: Open a 1,2
        router#1: Open b 3,4
        drafter#1: Attach b 3,4 -> drafter#1 <- DraftRequest b 3,4 max_tokens=3
    """)


def test_queued_sessions_are_admitted_by_priority_and_then_by_arrival():
    Target(max_sessions=1).run("""
        router#1: Open running 1,2 max_len=3 priority=5
        router#1: Open late 1,2 max_len=3 priority=3
        router#1: Open first 1,2 max_len=3 priority=-2
        router#1: Open second 1,2 max_len=3 priority=-2
        router#1: Open usual 1,2 max_len=3
        step -> router#1 <- Verdict running 1,2 +23 finish=length
        step -> router#1 <- Verdict first 1,2 +23 finish=length
        step -> router#1 <- Verdict second 1,2 +23 finish=length
        step -> router#1 <- Verdict usual 1,2 +23 finish=length
        step -> router#1 <- Verdict late 1,2 +23 finish=length
    """)


def test_requests_that_exceed_the_queue_or_a_limit_are_refused():
    Target(max_sessions=1, max_queued=1).run("""
        router#1: Open a 1,2,3
        router#1: Open b 1,2,3
        router#1: Open c 1,2,3 attempt=3
            router#1 <- Refusal c overloaded "the queue is full with 1 sessions" attempt=3
        router#1: Open c 50 attempt=3
            router#1 <- Refusal c invalid "token id 50 is outside the vocabulary of 50" attempt=3
        router#1: Open c 1,2,3 attempt=3 max_len=101
            router#1 <- Refusal c invalid "max_len is 101, expected at most 100, the target's context" attempt=3
    """)


# ---------------------------------------------------------------- routers


def test_a_lost_router_frees_only_its_sessions():
    Target(max_sessions=2).run("""
        router#1: Open a 1,2
        other#2: Open b 1,2
        other#2: Open c 1,2
        gone router#1
        step
            other#2 <- Verdict b 1,2 +23
            other#2 <- Verdict c 1,2 +23
        gone other#2
        plan
            close b
            close c
    """)


def test_a_new_stream_of_a_router_frees_the_sessions_it_does_not_list():
    """A late report of the old stream's end does not affect the new stream."""
    Target().run("""
        router#1: Open a 1,2
        router#1: Open b 1,2
        router#1: Open c 1,2
        other#1: Open d 1,2
        router#5: Hello a b/2
        step
            router#5 <- Verdict a 1,2 +23
            other#1 <- Verdict d 1,2 +23
        gone router#1
        show sessions -> sessions=2
    """)


def test_a_hello_that_frees_a_session_admits_a_queued_one():
    Target(max_sessions=1).run("""
        router#1: Open a 1,2
        other#1: Open b 1,2
        router#2: Hello
        step -> other#1 <- Verdict b 1,2 +23
    """)


def test_unknown_sessions_are_no_error():
    Target().run("""
        router#1: Close unknown
        gone unknown#1
        gone unknown#1
        unknown#1: Hello unknown
        show is_idle -> is_idle=yes
        plan -> nothing
        due -> never
    """)


def test_blocks_of_one_session_never_go_to_another():
    Target().run("""
        router#1: Open a 1,2
        router#1: Open b 1,2
        drafter#1: Block b 1,2 :23,35
        step
            router#1 <- Verdict a 1,2 +23
            router#1 <- Verdict b 1,2 +23,35,31 accepted=2 drafted=2 answer=given
    """)


# ---------------------------------------------------------------- audits


def test_an_audit_is_refused_while_requests_are_served():
    Target().run("""
        router#1: Open request 1,2,3 max_len=4
        other#1: Open audit 1,2,3 audit=yes
            other#1 <- Refusal audit overloaded "this target is serving requests; retry the audit later"
        step -> router#1 <- Verdict request 1,2,3 +45 finish=length
        plan -> close request
        apply
        show is_idle -> is_idle=yes
    """)


def test_a_request_ends_the_audits_of_all_routers_at_once():
    Target().run("""
        router#1: Open a 1,2,3 audit=yes
        other#1: Open b 1,2,3 audit=yes
        third#1: Open request 1,2,3
            router#1 <- Refusal a overloaded "this target is serving requests; retry the audit later"
            other#1 <- Refusal b overloaded "this target is serving requests; retry the audit later"
        plan
            open request
            row request@0 1,2,3
    """)


def test_an_audit_that_a_request_ended_during_its_step_gets_no_verdict():
    Target().run("""
        router#1: Open a 1,2,3 audit=yes
        other#1: Open b 1,2,3 audit=yes
        plan
            open a
            open b
            row a@0 1,2,3
            row b@0 1,2,3
        third#1: Open request 1,2,3
            router#1 <- Refusal a overloaded "this target is serving requests; retry the audit later"
            other#1 <- Refusal b overloaded "this target is serving requests; retry the audit later"
        apply
        plan
            close a
            close b
            open request
            row request@0 1,2,3
    """)


def test_audits_do_not_count_as_load():
    Target().run("""
        router#1: Open audit 1,2,3 audit=yes
        show sessions queued -> sessions=0 queued=0
    """)


def test_a_rival_outside_the_vocabulary_is_refused():
    Target().run("""
        router#1: Open s 1,2 max_len=3 audit=yes rival=50
            router#1 <- Refusal s invalid "token id 50 is outside the vocabulary of 50"
    """)


def test_an_unknown_adapter_is_refused():
    Target(adapters=frozenset({"sql"})).run("""
        router#1: Open a 1,2 adapter=sql
        router#1: Open b 1,2 adapter=chat
            router#1 <- Refusal b invalid "this target does not have the adapter 'chat'; add it to target.adapters"
    """)


# ---------------------------------------------------------------- planned departure

SERVING = """
        router#1: Open a 1,2
        router#1: Open b 1,2
        other#1: Open c 1,2
        leave
            router#1 <- Leaving
            other#1 <- Leaving
"""


def test_a_leaving_target_refuses_new_sessions_and_serves_existing_ones_until_they_move():
    """Each router receives one Leaving, and the router of a new session receives another."""
    Target(max_sessions=1).run(f"""
        show has_left -> has_left=no
        {SERVING.strip()}
        third#1: Open d 1,2
            third#1 <- Refusal d overloaded "this target replica is shutting down"
            third#1 <- Leaving
        step -> router#1 <- Verdict a 1,2 +23
        router#1: Close a
        router#1: Close b
        show has_left -> has_left=no
        other#1: Close c
        show has_left -> has_left=yes
    """)


def test_a_leaving_target_finally_returns_its_sessions_even_during_a_step():
    Target(max_sessions=1).run(f"""
        {SERVING.strip()}
        plan
            open a
            row a@0 1,2
        end
            router#1 <- Refusal a overloaded "this target replica is shutting down"
            router#1 <- Refusal b overloaded "this target replica is shutting down"
            other#1 <- Refusal c overloaded "this target replica is shutting down"
        apply
        plan -> close a
        apply
        show is_idle -> is_idle=yes
    """)


def test_a_leaving_target_returns_audits_at_once():
    Target().run("""
        router#1: Open a 1,2 audit=yes
        leave -> router#1 <- Refusal a overloaded "this target replica is shutting down"
        show has_left -> has_left=yes
    """)
