"""Pages of a target's cache: shared prefixes, eviction, rollback, admission and moves."""

from tests.scenarios.verification import Target


def test_a_prompt_begins_after_the_whole_pages_that_are_cached():
    """The last token is always computed, because the next token depends on its output."""
    Target().run("""
        router#1: Open a 0,1,2,3,4,5,6,7,8,9,10
        step -> router#1 <- Verdict a 0,1,2,3,4,5,6,7,8,9,10 +46
        router#1: Open b 0,1,2,3,4,5,6,7,8,9,10
        router#1: Open c 0,1,2,3,4,5,40,41,42
        router#1: Open d 0,1,2,3,4,5,6,7
        plan
            open b
            open c
            open d
            row a@11 46
            row b@8 8,9,10
            row c@4 4,5,40,41,42
            row d@4 4,5,6,7
        apply
            router#1 <- Verdict a 0,1,2,3,4,5,6,7,8,9,10,46 +19 answer=missed
            router#1 <- Verdict b 0,1,2,3,4,5,6,7,8,9,10 +46 cached=8
            router#1 <- Verdict c 0,1,2,3,4,5,40,41,42 +25 cached=4
            router#1 <- Verdict d 0,1,2,3,4,5,6,7 +4 cached=4
    """)


def test_a_verdict_reports_how_much_of_the_text_was_cached():
    Target(page_size=2).run("""
        router#1: Open a 1,2,3,4,5 max_len=8
        step -> router#1 <- Verdict a 1,2,3,4,5 +10
        router#1: Close a
        router#1: Open b 1,2,3,4,5 max_len=8
        step -> router#1 <- Verdict b 1,2,3,4,5 +10 answer=missed cached=4
    """)


def test_a_cached_prompt_outlives_its_session_until_its_pages_are_needed():
    Target(pages=4).run("""
        router#1: Open a 0,1,2,3,4,5,6,7,8,9 max_len=11
        step -> router#1 <- Verdict a 0,1,2,3,4,5,6,7,8,9 +25 finish=length
        router#1: Open b 0,1,2,3,4,5,6,7,8,9 max_len=11
        plan
            close a
            open b
            row b@8 8,9
        apply -> router#1 <- Verdict b 0,1,2,3,4,5,6,7,8,9 +25 finish=length cached=8
        router#1: Open c 20,21,22,23,24,25,26,27,28,29,30,31,32 max_len=14
        step -> router#1 <- Verdict c 20,21,22,23,24,25,26,27,28,29,30,31,32 +29 finish=length
        router#1: Open d 0,1,2,3,4,5,6,7,8,9 max_len=11
        plan
            close c
            open d
            row d@0 0,1,2,3,4,5,6,7,8,9
        apply -> router#1 <- Verdict d 0,1,2,3,4,5,6,7,8,9 +25 finish=length
    """)


def test_pages_with_draft_tokens_are_not_shared():
    """A page with rejected draft tokens holds another text."""
    Target().run("""
        router#1: Open a 1,2,3
        drafter#1: Block a 1,2,3 :46,12,40,14
        step -> router#1 <- Verdict a 1,2,3 +45 drafted=4 answer=given
        router#1: Open b 1,2,3,46,12,40,14,9
        plan
            open b
            row a@3 45
            row b@0 1,2,3,46,12,40,14,9
    """)


def test_a_rollback_frees_the_pages_of_rejected_tokens():
    """Both sessions fit only if the rejected block's page is free."""
    Target(pages=4).run("""
        router#1: Open a 1,2,3 max_len=9
        drafter#1: Block a 1,2,3 :46,12,40,14
        step -> router#1 <- Verdict a 1,2,3 +45 drafted=4 answer=given
        router#1: Open b 20,21,22,23,24,25,26 max_len=8
        plan
            open b
            row a@3 45
            row b@0 20,21,22,23,24,25,26
        show preempted -> preempted=0
    """)


def test_a_session_that_arrives_during_a_step_gets_the_pages_of_its_rejected_tokens():
    Target(pages=4).run("""
        router#1: Open a 1,2,3 max_len=9
        drafter#1: Block a 1,2,3 :46,12,40,14
        plan
            open a
            row a@0 1,2,3 :46,12,40,14
        router#1: Open b 20,21,22,23,24,25,26 max_len=8
        apply -> router#1 <- Verdict a 1,2,3 +45 drafted=4 answer=given
        plan
            open b
            row a@3 45
            row b@0 20,21,22,23,24,25,26
        show preempted -> preempted=0
    """)


def test_sessions_queue_for_pages_in_order_of_arrival():
    """Small sessions that repeatedly overtake a large one would starve it."""
    Target(pages=6).run("""
        router#1: Open a 0,1,2,3,4,5,6,7,8,9,10,11 max_len=14
        router#1: Open large 20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35 max_len=18
        router#1: Open small 1,2 max_len=4
        show sessions queued -> sessions=1 queued=2
        step -> router#1 <- Verdict a 0,1,2,3,4,5,6,7,8,9,10,11 +24
        step -> router#1 <- Verdict a 0,1,2,3,4,5,6,7,8,9,10,11,24 +43 finish=length
        plan
            close a
            open large
            open small
            row large@0 20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35
            row small@0 1,2
        apply
            router#1 <- Verdict large 20,21,22,23,24,25,26,27,28,29,30,31,32,33,34,35 +46
            router#1 <- Verdict small 1,2 +23
        show preempted -> preempted=0
    """)


def test_a_session_that_can_never_fit_is_refused_and_one_that_just_fits_is_served():
    target = Target(pages=3)
    target.run("""
        router#1: Open s 1,2 max_len=13
            router#1 <- Refusal s invalid "max_len is 13, expected at most 12, the cache's size"
        router#1: Open s 1,2 max_len=12
    """)
    assert len(target.finish()["s"]) == 10


def test_sessions_beyond_the_token_budget_take_turns():
    Target(max_step_tokens=2).run("""
        router#1: Open a 1
        router#1: Open b 1
        router#1: Open c 1
        router#1: Open d 1
        step
            router#1 <- Verdict a 1 +8 answer=missed
            router#1 <- Verdict b 1 +8 answer=missed
        step
            router#1 <- Verdict c 1 +8 answer=missed
            router#1 <- Verdict d 1 +8 answer=missed
        step
            router#1 <- Verdict a 1,8 +15 answer=missed
            router#1 <- Verdict b 1,8 +15 answer=missed
        step
            router#1 <- Verdict c 1,8 +15 answer=missed
            router#1 <- Verdict d 1,8 +15 answer=missed
    """)


def test_sessions_decode_in_every_step_while_prompts_are_read():
    Target(max_step_tokens=6).run("""
        router#1: Open a 1
        step -> router#1 <- Verdict a 1 +8 answer=missed
        router#1: Open b 20,21,22,23,24,25,26,27
        router#1: Open c 30,31,32,33,34,35,36,37
        plan
            open b
            open c
            row a@1 8
            chunk b@0 20,21,22,23,24
        apply -> router#1 <- Verdict a 1,8 +15 answer=missed
        plan
            row a@2 15
            chunk c@0 30,31,32,33,34
        apply -> router#1 <- Verdict a 1,8,15 +21 answer=missed
        plan
            row a@3 21
            row b@5 25,26,27
            chunk c@5 35,36
        apply
            router#1 <- Verdict a 1,8,15,21 +19 answer=missed
            router#1 <- Verdict b 20,21,22,23,24,25,26,27 +24
    """)


def test_prompts_are_read_though_decoding_sessions_could_fill_every_step():
    target = Target(max_step_tokens=16, max_sessions=20)
    names = [f"s{index}" for index in range(19)]
    for name in names:
        target.open(name, tokens=(1,), max_len=100)
        target.step()
    target.open("prompt", tokens=tuple(range(1, 20)))
    target.rows.clear()
    for _ in range(9):
        target.step()
    assert all(len(rows) == 15 for rows in target.rows)
    assert all(sum(len(row.tokens) for row in rows if row.session == "prompt") == 2 for rows in target.rows)
    assert {row.session for rows in target.rows[:2] for row in rows} == {"prompt", *names}, "all take turns"


def test_accepted_nodes_move_between_pages_before_anything_is_written_and_once():
    Target(page_size=2).run("""
        router#1: Open s 1,2,3 max_len=20
        step -> router#1 <- Verdict s 1,2,3 +45
        drafter#1: Block s 1,2,3,45 :12,11,39/-1,-1,1
        step -> router#1 <- Verdict s 1,2,3,45 +11,39,13 accepted=2 drafted=3 answer=given
        plan
            move 5 to 4
            move 6 to 5
            row s@6 13
        apply -> router#1 <- Verdict s 1,2,3,45,11,39,13 +5 answer=missed
        plan -> row s@7 5
    """)
