"""Verification of blocks: verdicts, and early, late, wrong or malformed blocks."""

import pytest

from cluster.verification.block_buffer import BufferLimits
from tests.scenarios.verification import Target, text


def test_a_session_without_a_drafter_is_decoded_without_speculation_from_its_first_step():
    Target().run("""
        router#1: Open s 1,2,3 max_len=6
        plan
            open s
            row s@0 1,2,3
        apply -> router#1 <- Verdict s 1,2,3 +45
        plan -> row s@3 45
        apply -> router#1 <- Verdict s 1,2,3,45 +11 answer=missed
        plan -> row s@4 11
        apply -> router#1 <- Verdict s 1,2,3,45,11 +39 finish=length
    """)


@pytest.mark.parametrize(
    "transcript",
    [
        """
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :23,35,31
        step -> router#1 <- Verdict s 1,2 +23,35,31,49 accepted=3 drafted=3 answer=given
        plan -> row s@5 49
        apply -> router#1 <- Verdict s 1,2,23,35,31,49 +43 answer=missed
        """,
        """
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :23,36,32
        step -> router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=3 answer=given
        plan -> row s@3 35
        apply -> router#1 <- Verdict s 1,2,23,35 +31 answer=missed
        """,
        """
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :24,36,32
        step -> router#1 <- Verdict s 1,2 +23 drafted=3 answer=given
        plan -> row s@2 23
        apply -> router#1 <- Verdict s 1,2,23 +35 answer=missed
        """,
    ],
    ids=["all", "some", "none"],
)
def test_after_a_block_the_next_row_feeds_only_uncached_tokens(transcript):
    """After a rejection the cache holds wrong tokens, after full acceptance one too few; both feed from there."""
    Target().run(transcript)


def test_acceptance_is_counted_by_position_as_far_as_a_block_could_go():
    """The target accepts two of three requested tokens; then the session has space for one."""
    Target(asked=3).run("""
        router#1: Open s 1,2 max_len=7
        drafter#1: Block s 1,2 :23,35,32
        step -> router#1 <- Verdict s 1,2 +23,35,31 accepted=2 drafted=3 answer=given
        show acceptance -> acceptance=AcceptanceCounts(reached=(1, 1, 1), accepted=(1, 1, 0))
        drafter#1: Block s 1,2,23,35,31 :49
        step -> router#1 <- Verdict s 1,2,23,35,31 +49,43 accepted=1 drafted=1 finish=length answer=given
        show acceptance -> acceptance=AcceptanceCounts(reached=(2, 1, 1), accepted=(2, 1, 0))
    """)


def test_non_speculative_steps_do_not_count_for_acceptance_but_a_missing_draft_does():
    Target(asked=2).run("""
        router#1: Open s 1,2
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=2
        step
            drafter#1 <- Verdict s 1,2 +23
            drafter#1 <- DraftRequest s 1,2,23 max_tokens=2
            router#1 <- Verdict s 1,2 +23
        show acceptance -> acceptance=AcceptanceCounts(reached=(), accepted=())
        drafter#1: NoDraft s 1,2,23
        step
            drafter#1 <- Verdict s 1,2,23 +35 answer=given
            drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=2
            router#1 <- Verdict s 1,2,23 +35 answer=given
        show acceptance -> acceptance=AcceptanceCounts(reached=(1, 0), accepted=(0, 0))
    """)


def test_a_stop_id_inside_the_accepted_part_ends_the_session_there():
    """The drafter receives the end too."""
    Target().run("""
        router#1: Open s 1,2 stop_ids=35
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        drafter#1: Block s 1,2 :23,35,31
        step
            drafter#1 <- Verdict s 1,2 +23,35 accepted=2 drafted=3 finish=stop answer=given
            router#1 <- Verdict s 1,2 +23,35 accepted=2 drafted=3 finish=stop answer=given
        plan -> close s
        apply
        show is_idle -> is_idle=yes
    """)


@pytest.mark.parametrize(
    "transcript",
    [
        """
        router#1: Open s 1,2 wants_rejected=yes
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        drafter#1: Block s 1,2 :23,24,25
        step
            drafter#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=3 answer=given
            drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4
            router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=3 answer=given rejected=24,25
        """,
        """
        router#1: Open s 1,2 wants_rejected=yes
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        drafter#1: Block s 1,2 :24,23,25,27/-1,-1,1,1
        step
            drafter#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=4 answer=given
            drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4
            router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=4 answer=given rejected=25
        """,
        """
        router#1: Open s 1,2 wants_rejected=yes
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        drafter#1: Block s 1,2 :23
        step
            drafter#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=1 answer=given
            drafter#1 <- DraftRequest s 1,2,23,35 max_tokens=4
            router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=1 answer=given
        """,
        """
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :23,35,32
        step -> router#1 <- Verdict s 1,2 +23,35,31 accepted=2 drafted=3 answer=given
        """,
        """
        router#1: Open s 1,2 wants_rejected=yes stop_ids=35
        drafter#1: Block s 1,2 :23,35,32
        step -> router#1 <- Verdict s 1,2 +23,35 accepted=2 drafted=3 finish=stop answer=given
        """,
    ],
    ids=["a chain", "a tree's main path", "all accepted", "not requested", "the session ended before"],
)
def test_only_a_router_that_requests_them_receives_the_rejected_tokens(transcript):
    Target(asked=4).run(transcript)


def test_messages_to_drafters_come_first():
    """A round waits for its drafter but not for its router, even if an earlier session has no drafter."""
    Target().run("""
        router#1: Open a 1,2
        router#1: Open b 1,2
        drafter-b#1: Attach b 1,2 -> drafter-b#1 <- DraftRequest b 1,2 max_tokens=4
        router#1: Open c 1,2
        drafter-c#1: Attach c 1,2 -> drafter-c#1 <- DraftRequest c 1,2 max_tokens=4
        step
            drafter-b#1 <- Verdict b 1,2 +23
            drafter-b#1 <- DraftRequest b 1,2,23 max_tokens=4
            drafter-c#1 <- Verdict c 1,2 +23
            drafter-c#1 <- DraftRequest c 1,2,23 max_tokens=4
            router#1 <- Verdict a 1,2 +23
            router#1 <- Verdict b 1,2 +23
            router#1 <- Verdict c 1,2 +23
    """)


def test_a_session_that_is_closed_during_its_step_gets_no_verdict():
    Target().run("""
        router#1: Open s 1,2
        plan
            open s
            row s@0 1,2
        router#1: Close s
        apply
        plan -> close s
    """)


def test_a_session_that_is_reopened_during_its_step_starts_again():
    """The outcome belongs to the old attempt's tokens; applied to the new attempt, it would be wrong."""
    Target().run("""
        router#1: Open s 1,2
        plan
            open s
            row s@0 1,2
        router#1: Open s 4,5,6 attempt=2
        apply
        step -> router#1 <- Verdict s 4,5,6 +8 attempt=2
    """)


def test_an_older_or_equal_attempt_changes_nothing():
    Target().run("""
        router#1: Open s 4,5,6 attempt=2
        router#1: Open s 1,2 attempt=1
        router#1: Open s 1,2 attempt=2
        router#1: Close s
        step -> router#1 <- Verdict s 4,5,6 +8 attempt=2
    """)


def test_opening_and_closing_before_a_step_never_reaches_the_engine():
    Target().run("""
        router#1: Open s 1,2,3
        router#1: Close s
        plan -> nothing
        show is_idle -> is_idle=yes
    """)


def test_a_target_is_idle_while_it_has_sessions_and_makes_no_step():
    Target(patience=5.0, hold=5.0).run("""
        at 100
        router#1: Open s 1,2 max_len=5
        drafter#1: Attach s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2 +23
            drafter#1 <- DraftRequest s 1,2,23 max_tokens=4
            router#1 <- Verdict s 1,2 +23
        show step_s idle_s -> step_s=0.1 idle_s=0
        at 102
        plan -> nothing
        at 103
        drafter#1: Block s 1,2,23 :35
        step
            drafter#1 <- Verdict s 1,2,23 +35,31 accepted=1 drafted=1 finish=length answer=given
            router#1 <- Verdict s 1,2,23 +35,31 accepted=1 drafted=1 finish=length answer=given
        show step_s idle_s -> step_s=0.2 idle_s=3
    """)


def test_a_target_without_sessions_is_not_idle_but_out_of_work():
    Target().run("""
        router#1: Open s 1,2 max_len=3
        step -> router#1 <- Verdict s 1,2 +23 finish=length
        plan -> close s
        apply
        at 50
        router#1: Open t 1,2 max_len=3
        at 51
        step -> router#1 <- Verdict t 1,2 +23 finish=length
        show idle_s -> idle_s=1
    """)


# ---------------------------------------------------------------- the block buffer


def test_under_rejection_sampling_the_first_arrival_for_a_prefix_stays():
    """Choosing between two blocks by the second would bias the text."""
    Target().run("""
        router#1: Open s 1,2 acceptance=rejection sampling=1
        drafter#1: Block s 1,2 :9
        drafter#1: Block s 1,2 :23
        step -> router#1 <- Verdict s 1,2 +23 drafted=1 answer=given
        show dropped -> dropped=duplicate:1
    """)


@pytest.mark.parametrize(
    "transcript",
    [
        """
        router#1: Open s 1,2 acceptance=coupled sampling=1
        drafter#1: Block s 1,2 :9
        drafter#1: Block s 1,2 :23
        drafter#1: Block s 1,2 :23
        step -> router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=1 answer=given
        show dropped -> dropped=duplicate:1
        """,
        """
        router#1: Open s 1,2 acceptance=rejection sampling=0
        drafter#1: Block s 1,2 :9
        drafter#1: Block s 1,2 :23
        drafter#1: Block s 1,2 :23
        step -> router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=1 answer=given
        show dropped -> dropped=duplicate:1
        """,
    ],
    ids=["coupled", "greedy"],
)
def test_without_rejection_sampling_a_later_different_block_replaces_an_earlier_one(transcript):
    Target().run(transcript)


def test_a_block_waits_for_its_prefix_and_is_used_there():
    """The next block arrives before the verdict that it builds on."""
    Target().run("""
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :23,35
        drafter#1: Block s 1,2,23,35,31 :49,43
        step -> router#1 <- Verdict s 1,2 +23,35,31 accepted=2 drafted=2 answer=given
        step -> router#1 <- Verdict s 1,2,23,35,31 +49,43,45 accepted=2 drafted=2 answer=given
        show dropped -> dropped=none
    """)


def test_unused_blocks_are_counted_by_cause():
    Target().run("""
        router#1: Open s 1,2
        # 49 is another token than the target will decide.
        drafter#1: Block s 1,2,49 :5
        drafter#1: Block s 1,2,23 :35
        step -> router#1 <- Verdict s 1,2 +23
        show dropped -> dropped=wrong_guess:1
        step -> router#1 <- Verdict s 1,2,23 +35,31 accepted=1 drafted=1 answer=given
        drafter#1: Block s 1,2 :23
        show dropped -> dropped=stale:1,wrong_guess:1
        drafter#1: Block s 1,2,49,48,47 :5
        show dropped -> dropped=other_prefix:1,stale:1,wrong_guess:1
    """)


def test_a_block_that_did_not_fit_into_a_step_is_verified_from_the_current_length():
    """The block's first token is the token decided in the meantime."""
    Target(max_step_tokens=4).run("""
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :23,35,31
        step -> router#1 <- Verdict s 1,2 +23 answer=given
        step -> router#1 <- Verdict s 1,2,23 +35,31,49 accepted=2 drafted=2 answer=given
        show rebased dropped -> rebased=1 dropped=none
    """)


def test_a_block_that_arrives_late_is_verified_from_the_current_length():
    """The block's token at the already decided position is wasted."""
    Target().run("""
        router#1: Open s 1,2
        step -> router#1 <- Verdict s 1,2 +23
        drafter#1: Block s 1,2 :23,35,31
        show accepted_tokens wasted_tokens -> accepted_tokens=0 wasted_tokens=1
        step -> router#1 <- Verdict s 1,2,23 +35,31,49 accepted=2 drafted=2 answer=given
        show accepted_tokens wasted_tokens -> accepted_tokens=2 wasted_tokens=1
    """)


def test_draft_tokens_count_as_wasted_once_they_are_rejected():
    """A non-speculative step wastes nothing."""
    Target().run("""
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :23,36,5
        show accepted_tokens wasted_tokens -> accepted_tokens=0 wasted_tokens=0
        step -> router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=3 answer=given
        show accepted_tokens wasted_tokens -> accepted_tokens=1 wasted_tokens=2
        step -> router#1 <- Verdict s 1,2,23,35 +31 answer=missed
        show accepted_tokens wasted_tokens -> accepted_tokens=1 wasted_tokens=2
    """)


def test_all_tokens_of_blocks_that_were_passed_by_or_replaced_are_wasted():
    Target().run("""
        router#1: Open s 1,2
        # Another token than the target will decide.
        drafter#1: Block s 1,2,49 :5,6
        drafter#1: Block s 1,2,23 :35,5,5,6/-1,0,1,-1
        # Better than the one before.
        drafter#1: Block s 1,2,23 :35,31
        step -> router#1 <- Verdict s 1,2 +23
        show accepted_tokens wasted_tokens -> accepted_tokens=0 wasted_tokens=6
        step -> router#1 <- Verdict s 1,2,23 +35,31,49 accepted=2 drafted=2 answer=given
        show accepted_tokens wasted_tokens -> accepted_tokens=2 wasted_tokens=6
    """)


def test_tokens_beyond_the_requested_draft_length_are_wasted():
    Target(asked=1).run("""
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :23,35,31
        step -> router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=1 answer=given
        show accepted_tokens wasted_tokens -> accepted_tokens=1 wasted_tokens=2
    """)


def test_the_block_of_a_closed_session_is_wasted():
    Target().run("""
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :5,6
        router#1: Close s
        show accepted_tokens wasted_tokens -> accepted_tokens=0 wasted_tokens=2
        drafter#1: Block s 1,2 :5
        show dropped -> dropped=ended:1
        show accepted_tokens wasted_tokens -> accepted_tokens=0 wasted_tokens=3
    """)


def test_a_late_block_does_not_replace_the_one_that_was_drafted_for_this_prefix():
    Target(max_step_tokens=4).run("""
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :23,35,31
        drafter#1: Block s 1,2,23 :35
        step -> router#1 <- Verdict s 1,2 +23 answer=given
        step -> router#1 <- Verdict s 1,2,23 +35,31 accepted=1 drafted=1 answer=given
    """)


def test_a_late_block_with_other_tokens_is_stale():
    """The second block is right, but all of its tokens are already decided."""
    Target().run("""
        router#1: Open s 1,2
        step -> router#1 <- Verdict s 1,2 +23
        drafter#1: Block s 1,2 :24,35,31
        drafter#1: Block s 1,2 :23
        show dropped -> dropped=stale:2
        step -> router#1 <- Verdict s 1,2,23 +35 answer=missed
    """)


@pytest.mark.parametrize(
    "transcript",
    [
        """
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :50
        show dropped -> dropped=out_of_vocabulary:1
        step -> router#1 <- Verdict s 1,2 +23
        """,
        """
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :3,3 base_len=99
        show dropped -> dropped=beyond_context:1
        step -> router#1 <- Verdict s 1,2 +23
        """,
        """
        router#1: Open s 1,2
        drafter#1: Block s 1,2 :3,3,3,3,3
        show dropped -> dropped=too_long:1
        step -> router#1 <- Verdict s 1,2 +23
        """,
    ],
    ids=["out of vocabulary", "beyond context", "too long"],
)
def test_a_block_that_can_never_be_verified_is_dropped(transcript):
    Target().run(transcript)


def test_a_block_that_reaches_its_sessions_end_is_dropped():
    """In a cache for a single such session, the block would wait forever for a missing page."""
    Target(pages=2).run("""
        router#1: Open s 1,2,3,4,5,6 max_len=8
        drafter#1: Block s 1,2,3,4,5,6 :3,25,1
        show dropped -> dropped=too_long:1
        drafter#1: Block s 1,2,3,4,5,6 :3
        step -> router#1 <- Verdict s 1,2,3,4,5,6 +3,25 accepted=1 drafted=1 finish=length answer=given
        plan -> close s
        apply
        show is_idle -> is_idle=yes
    """)


def test_sessions_without_speculation_accept_no_blocks():
    Target().run("""
        router#1: Open s 1,2 draft_tokens=0
        drafter#1: Block s 1,2 :5
        show dropped -> dropped=too_long:1
    """)


def test_the_block_buffer_of_a_session_is_bounded():
    Target(buffer=BufferLimits(blocks=2)).run("""
        router#1: Open s 1,2
        drafter#1: Block s 1,2,0 :5
        drafter#1: Block s 1,2,1 :5
        drafter#1: Block s 1,2,2 :5
        drafter#1: Block s 1,2,3 :5
        drafter#1: Block s 1,2,4 :5
        show dropped -> dropped=buffer_full:3
    """)


def test_guesses_that_fill_the_buffer_do_not_keep_out_the_block_that_is_due():
    Target(buffer=BufferLimits(blocks=2)).run("""
        router#1: Open s 1,2
        drafter#1: Block s 1,2,0 :5
        drafter#1: Block s 1,2,1 :5
        drafter#1: Block s 1,2,2 :5
        drafter#1: Block s 1,2,3 :5
        drafter#1: Block s 1,2 :23
        show dropped -> dropped=buffer_full:2
        step -> router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=1 answer=given
    """)


# ---------------------------------------------------------------- messages before the Open


def test_a_block_and_an_attach_that_come_before_the_open_are_used():
    """Drafter and router use separate streams, which have no common order."""
    Target().run("""
        drafter#1: Attach s 1,2
        drafter#1: Block s 1,2 :23,35
        router#1: Open s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2 +23,35,31 accepted=2 drafted=2 answer=given
            drafter#1 <- DraftRequest s 1,2,23,35,31 max_tokens=4
            router#1 <- Verdict s 1,2 +23,35,31 accepted=2 drafted=2 answer=given
    """)


def test_an_early_block_waits_though_another_drafter_attaches_before_the_open():
    """The target does not know the assigned drafter yet; it verifies and rejects the block."""
    Target().run("""
        drafter#1: Block s 1,2 :5,6
        other#1: Attach s 1,2
        show dropped -> dropped=none
        router#1: Open s 1,2 -> other#1 <- DraftRequest s 1,2 max_tokens=4
        step
            other#1 <- Verdict s 1,2 +23 drafted=2 answer=given
            other#1 <- DraftRequest s 1,2,23 max_tokens=4
            router#1 <- Verdict s 1,2 +23 drafted=2 answer=given
        show accepted_tokens wasted_tokens -> accepted_tokens=0 wasted_tokens=2
    """)


def test_messages_for_an_open_that_never_comes_are_freed_when_the_drafter_leaves():
    Target(buffer=BufferLimits(age_s=5)).run("""
        drafter#1: Attach s 1,2
        drafter#1: Block s 1,2 :5
        gone drafter#1
        show dropped is_idle -> dropped=drafter_gone:1 is_idle=yes
        show accepted_tokens wasted_tokens -> accepted_tokens=0 wasted_tokens=1
    """)


def test_messages_for_an_open_that_never_comes_expire():
    """Otherwise late blocks of ended sessions would remain, and the replica would never become idle."""
    Target(buffer=BufferLimits(age_s=5)).run("""
        drafter#1: Attach s 1,2
        drafter#1: Block s 1,2 :5
        due -> 5
        at 4.9
        plan -> nothing
        show is_idle -> is_idle=no
        at 5
        plan -> nothing
        show dropped is_idle -> dropped=expired:1 is_idle=yes
        show accepted_tokens wasted_tokens -> accepted_tokens=0 wasted_tokens=1
    """)


def test_expiry_goes_by_age_though_several_wait_for_one_session():
    """A second drafter's newer messages neither protect older messages nor expire with them."""
    Target(buffer=BufferLimits(age_s=5)).run("""
        drafter#1: Attach a 1
        at 1
        drafter#1: Attach b 1
        at 4
        other#1: Attach a 1
        due -> 5
        at 5.5
        plan -> nothing
        due -> 6
        at 6.5
        plan -> nothing
        due -> 9
    """)


def test_a_drafter_that_floods_unknown_sessions_fills_only_its_own_space():
    Target(buffer=BufferLimits(sessions=3, blocks=2)).run("""
        drafter#1: Block unknown0 1,2 :5
        drafter#1: Block unknown1 1,2 :5
        drafter#1: Block unknown2 1,2 :5
        drafter#1: Block unknown3 1,2 :5
        drafter#1: Block unknown4 1,2 :5
        drafter#1: Block unknown5 1,2 :5
        drafter#1: Block unknown0 1,2 :5
        drafter#1: Block unknown0 1,2 :5
        drafter#1: Block unknown0 1,2 :5
        show dropped -> dropped=buffer_full:5
        other#1: Attach s 1,2
        router#1: Open s 1,2 -> other#1 <- DraftRequest s 1,2 max_tokens=4
        step
            other#1 <- Verdict s 1,2 +23
            other#1 <- DraftRequest s 1,2,23 max_tokens=4
            router#1 <- Verdict s 1,2 +23
    """)


def test_a_drafter_that_leaves_a_session_has_space_for_the_next_one():
    """Short sessions often end before their drafter attaches."""
    Target(buffer=BufferLimits(sessions=1)).run("""
        router#1: Open ended 1,2 max_len=3
        step -> router#1 <- Verdict ended 1,2 +23 finish=length
        drafter#1: Attach ended 1,2
        drafter#1: Block ended 1,2 :5
        drafter#1: Detach ended
        drafter#1: Attach unopened 1,2
        drafter#1: Detach unopened
        drafter#1: Attach s 1,2
        router#1: Open s 1,2 -> drafter#1 <- DraftRequest s 1,2 max_tokens=4
        show dropped -> dropped=ended:1
    """)


def test_blocks_of_a_drafter_that_leaves_before_the_open_stay_valid():
    Target().run("""
        drafter#1: Attach s 1,2
        drafter#1: Block s 1,2 :23
        drafter#1: Detach s
        router#1: Open s 1,2
        step -> router#1 <- Verdict s 1,2 +23,35 accepted=1 drafted=1 answer=given
    """)


# ---------------------------------------------------------------- trees


def test_an_accepted_path_of_a_tree_is_not_fed_again():
    target = Target()
    target.run("""
        router#1: Open s 1,2,3 max_len=20
        drafter#1: Attach s 1,2,3 -> drafter#1 <- DraftRequest s 1,2,3 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2,3 +45
            drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=4
            router#1 <- Verdict s 1,2,3 +45
        drafter#1: Block s 1,2,3,45 :12,9,11,39/-1,0,-1,2
        step
            drafter#1 <- Verdict s 1,2,3,45 +11,39,13 accepted=2 drafted=4 answer=given
            drafter#1 <- DraftRequest s 1,2,3,45,11,39,13 max_tokens=4
            router#1 <- Verdict s 1,2,3,45 +11,39,13 accepted=2 drafted=4 answer=given
        drafter#1: Block s 1,2,3,45,11,39,13 :5
        plan
            move 6 to 4
            move 7 to 5
            row s@6 13 :5
        apply
            drafter#1 <- Verdict s 1,2,3,45,11,39,13 +5,41 accepted=1 drafted=1 answer=given
            drafter#1 <- DraftRequest s 1,2,3,45,11,39,13,5,41 max_tokens=4
            router#1 <- Verdict s 1,2,3,45,11,39,13 +5,41 accepted=1 drafted=1 answer=given
    """)
    assert target.finish() == {"s": text((1, 2, 3), 17)[6:]}


def test_the_first_nodes_of_a_block_that_has_become_too_long_are_verified():
    """The drafter sends the likeliest nodes first."""
    Target(asked=2).run("""
        router#1: Open s 1,2,3 max_len=20
        drafter#1: Attach s 1,2,3 -> drafter#1 <- DraftRequest s 1,2,3 max_tokens=2
        step
            drafter#1 <- Verdict s 1,2,3 +45
            drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=2
            router#1 <- Verdict s 1,2,3 +45
        drafter#1: Block s 1,2,3,45 :12,11,39/-1,-1,1
        step
            drafter#1 <- Verdict s 1,2,3,45 +11,39 accepted=1 drafted=2 answer=given
            drafter#1 <- DraftRequest s 1,2,3,45,11,39 max_tokens=2
            router#1 <- Verdict s 1,2,3,45 +11,39 accepted=1 drafted=2 answer=given
    """)


def test_the_part_of_a_late_tree_after_the_decided_tokens_is_verified():
    Target().run("""
        router#1: Open s 1,2,3 max_len=20
        drafter#1: Attach s 1,2,3 -> drafter#1 <- DraftRequest s 1,2,3 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2,3 +45
            drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=4
            router#1 <- Verdict s 1,2,3 +45
        step
            drafter#1 <- Verdict s 1,2,3,45 +11 answer=missed
            drafter#1 <- DraftRequest s 1,2,3,45,11 max_tokens=4
            router#1 <- Verdict s 1,2,3,45 +11 answer=missed
        drafter#1: Block s 1,2,3,45 :12,11,39,40/-1,-1,1,1
        step
            drafter#1 <- Verdict s 1,2,3,45,11 +39,13 accepted=1 drafted=2 answer=given
            drafter#1 <- DraftRequest s 1,2,3,45,11,39,13 max_tokens=4
            router#1 <- Verdict s 1,2,3,45,11 +39,13 accepted=1 drafted=2 answer=given
        show rebased -> rebased=1
    """)


def test_trees_are_neither_requested_nor_accepted_under_rejection_sampling():
    Target().run("""
        router#1: Open s 1,2,3 acceptance=rejection sampling=1
        drafter#1: Attach s 1,2,3 -> drafter#1 <- DraftRequest s 1,2,3 max_tokens=4 shape=chain
        step
            drafter#1 <- Verdict s 1,2,3 +45
            drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=4 shape=chain
            router#1 <- Verdict s 1,2,3 +45
        drafter#1: Block s 1,2,3,45 :7,8/-1,-1
        show dropped -> dropped=tree:1
    """)


def test_trees_are_neither_requested_nor_accepted_if_the_engine_cannot_verify_them():
    Target(trees=False).run("""
        router#1: Open s 1,2,3
        drafter#1: Attach s 1,2,3 -> drafter#1 <- DraftRequest s 1,2,3 max_tokens=4 shape=chain
        step
            drafter#1 <- Verdict s 1,2,3 +45
            drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=4 shape=chain
            router#1 <- Verdict s 1,2,3 +45
        drafter#1: Block s 1,2,3,45 :7,8/-1,-1
        show dropped -> dropped=tree:1
    """)


def test_all_nodes_of_a_tree_count_towards_its_length():
    Target().run("""
        router#1: Open s 1,2,3 max_len=20
        drafter#1: Attach s 1,2,3 -> drafter#1 <- DraftRequest s 1,2,3 max_tokens=4
        step
            drafter#1 <- Verdict s 1,2,3 +45
            drafter#1 <- DraftRequest s 1,2,3,45 max_tokens=4
            router#1 <- Verdict s 1,2,3 +45
        drafter#1: Block s 1,2,3,45 :1,2,3,4,5/-1,-1,-1,-1,-1
        show dropped -> dropped=too_long:1
        drafter#1: Block s 1,2,3,45 :1,2,3,50/-1,-1,-1,-1
        show dropped -> dropped=out_of_vocabulary:1,too_long:1
    """)


def test_trees_are_requested_with_penalties_too():
    Target().run("""
        router#1: Open s 1,2,3 sampling=0,presence_penalty=1
        drafter#1: Attach s 1,2,3 -> drafter#1 <- DraftRequest s 1,2,3 max_tokens=4
    """)
