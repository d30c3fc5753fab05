"""After a weight exchange, acceptance counts for the version that drafted the block."""

from tests.scenarios.drafting import Drafter


def drafting(draft_ahead: bool = False) -> Drafter:
    drafter = Drafter(draft_ahead=draft_ahead)
    drafter.run("""
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        draft -> s 1,2 max_tokens=4
        block s 1,2 :5,6 confidence=0.8 -> t1 <- Block s 1,2 :5,6
    """)
    return drafter


def test_verified_blocks_count_for_the_version_in_use():
    drafting().run("""
        show version judged acceptance -> version=0 judged=0 acceptance=none
        t1: Step s 1,2 +5,7 accepted=1 drafted=2
        show judged acceptance -> judged=1 acceptance=0.5
        draft -> s 1,2,5,7 max_tokens=4
        block s 1,2,5,7 :8,8 -> t1 <- Block s 1,2,5,7 :8,8
        t1: Step s 1,2,5,7 +8,8,9 accepted=2 drafted=2
        show judged acceptance -> judged=2 acceptance=0.75
    """)


def test_a_block_that_was_not_verified_does_not_count():
    drafting().run("""
        t1: Step s 1,2 +5 accepted=0 drafted=0 answer=missed
        show judged -> judged=0
    """)


def test_blocks_of_the_earlier_weights_count_for_neither_version():
    """Only the block for 1,2 is under verification."""
    drafting().run("""
        exchange 3
        show version judged acceptance_before -> version=3 judged=0 acceptance_before=none
        t1: Step s 1,2 +5,7 accepted=1 drafted=2
        show judged checked -> judged=0 checked=0
        draft -> s 1,2,5,7 max_tokens=4
        block s 1,2,5,7 :8,8 confidence=0.8 -> t1 <- Block s 1,2,5,7 :8,8
        t1: Step s 1,2,5,7 +8,9 accepted=1 drafted=2
        show judged checked correct acceptance -> judged=1 checked=1 correct=1 acceptance=0.5
    """)


def test_blocks_that_the_earlier_weights_sent_ahead_count_for_neither_version():
    drafting(draft_ahead=True).run("""
        ahead -> s 1,2 unverified=5,6
        block s 1,2,5,6,7 :3,3 outcome=5,6,7 confidence=0.8 -> t1 <- Block s 1,2,5,6,7 :3,3
        exchange 3
        t1: Step s 1,2 +5,6,7 accepted=2 drafted=2
        t1: Step s 1,2,5,6,7 +3,4 accepted=1 drafted=2
        show guess_hit judged checked -> guess_hit=1 judged=0 checked=0
        draft -> s 1,2,5,6,7,3,4 max_tokens=4
        block s 1,2,5,6,7,3,4 :3 -> t1 <- Block s 1,2,5,6,7,3,4 :3
        t1: Step s 1,2,5,6,7,3,4 +3,4 accepted=1 drafted=1
        show judged acceptance -> judged=1 acceptance=1
    """)


def test_the_version_before_keeps_its_counts_and_the_load_check_begins_again():
    drafting().run("""
        t1: Step s 1,2 +5,7 accepted=1 drafted=2
        show checked judged -> checked=1 judged=1
        exchange 3
        show checked judged acceptance_before -> checked=0 judged=0 acceptance_before=0.5
    """)
