"""Drafters draft ahead of verdicts, for each likely outcome of the current step."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.drafting.requests import Proposal
from protos.draft_tree import DraftTree, SparseProbs
from protos.messages import Block, Shape
from tests.scenarios.drafting import Drafter, Tokens, read_tokens, written


def verifying() -> Drafter:
    """Returns a drafter whose block 5,6 for the text 1,2 is under verification."""
    drafter = Drafter(draft_ahead=True)
    drafter.run("""
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        draft -> s 1,2 max_tokens=4
        block s 1,2 :5,6 -> t1 <- Block s 1,2 :5,6
    """)
    return drafter


def not_held() -> Drafter:
    """Returns a drafter whose target continues from 1,2,3 without a block."""
    drafter = Drafter(draft_ahead=True)
    drafter.run("""
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        draft -> s 1,2 max_tokens=4
        block s 1,2 :9 -> t1 <- Block s 1,2 :9
        t1: Step s 1,2 +3 hold_step=no
    """)
    return drafter


def test_a_block_under_verification_is_drafted_ahead_for_once():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        ahead
        draft
    """)


def test_passes_are_counted_by_kind_and_only_with_requests():
    verifying().run("""
        show passes passes_ahead -> passes=1 passes_ahead=0
        ahead -> s 1,2 unverified=5,6
        draft
        ahead
        show passes passes_ahead -> passes=1 passes_ahead=1
    """)


def test_the_block_for_each_outcome_is_sent_for_its_own_text():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        block s 1,2,5,6,7 :3,3 outcome=5,6,7 -> t1 <- Block s 1,2,5,6,7 :3,3
        block s 1,2,5,6,8 :3,3 outcome=5,6,8 -> t1 <- Block s 1,2,5,6,8 :3,3
        block s 1,2,5,9 :3,3 outcome=5,9 -> t1 <- Block s 1,2,5,9 :3,3
        block s 1,2,4 :3,3 outcome=4 -> t1 <- Block s 1,2,4 :3,3
        show guesses blocks -> guesses=4 blocks=5
    """)


@pytest.mark.parametrize("outcome", ["5,6,7", "5,9", "4"], ids=["all accepted", "one accepted", "none accepted"])
def test_a_block_for_the_right_outcome_saves_a_draft_and_is_drafted_on_from(outcome):
    blocks = {"5,6,7": "17,27", "5,9": "19,29", "4": "14,24", "3": "13,23"}
    drafter = verifying()
    drafter.do("ahead")
    for guess, block in blocks.items():
        drafter.do(f"block s 1,2,{guess} :{block} outcome={guess}")
    drafter.run(f"""
        t1: Step s 1,2 +{outcome}
        draft
        show has_requests guess_hit guess_miss -> has_requests=no guess_hit=1 guess_miss=0
        ahead -> s 1,2,{outcome} unverified={blocks[outcome]}
        # After a miss a block is requested as usual.
        t1: Step s 1,2,{outcome} +0
        draft -> s 1,2,{outcome},0 max_tokens=4
    """)


def test_blocks_for_wrong_outcomes_are_forgotten_with_the_verdict():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        block s 1,2,5,6,7 :3 outcome=5,6,7 -> t1 <- Block s 1,2,5,6,7 :3
        block s 1,2,4 :3 outcome=4 -> t1 <- Block s 1,2,4 :3
        t1: Step s 1,2 +5,6,17
        show has_requests -> has_requests=yes
        draft -> s 1,2,5,6,17 max_tokens=4
        show guess_hit guess_miss -> guess_hit=0 guess_miss=1
        # A session without blocks ahead misses none.
        t1: Step s 1,2,5,6,17 +3
        show guess_miss -> guess_miss=1
    """)


def test_a_repeated_block_is_not_sent_and_the_last_one_counts():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        block s 1,2,5,6,7 :8 outcome=5,6,7 -> t1 <- Block s 1,2,5,6,7 :8
        block s 1,2,5,6,7 :8 outcome=5,6,7
        block s 1,2,5,6,7 :8,9 outcome=5,6,7 -> t1 <- Block s 1,2,5,6,7 :8,9
        block s 1,2,5,6,7 :3,9 outcome=5,6,7 -> t1 <- Block s 1,2,5,6,7 :3,9
        block s 1,2,5,6,7 :3,9 outcome=5,6,7
        t1: Step s 1,2 +5,6,7
        ahead -> s 1,2,5,6,7 unverified=3,9
    """)


def test_a_block_for_other_tokens_of_the_same_length_is_no_hit():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        block s 1,2,5,7 :3 outcome=5,7 -> t1 <- Block s 1,2,5,7 :3
        t1: Step s 1,2 +5,8
        draft -> s 1,2,5,8 max_tokens=4
    """)


def test_a_block_whose_verdict_arrives_meanwhile_is_sent_if_right():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        t1: Step s 1,2 +5,6,7
        block s 1,2,5,6,7 :8 outcome=5,6,7 -> t1 <- Block s 1,2,5,6,7 :8
        block s 1,2,4 :8 outcome=4
        show guess_hit -> guess_hit=1
        draft
    """)


def test_a_block_whose_verdict_arrives_meanwhile_is_not_sent_if_wrong():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        t1: Step s 1,2 +5,6,17
        block s 1,2,5,6,7 :8 outcome=5,6,7
        block s 1,2,4 :8 outcome=4
        show guess_hit -> guess_hit=0
        draft -> s 1,2,5,6,17 max_tokens=4
    """)


def test_a_late_right_block_is_not_sent_beside_the_requested_one():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        t1: Step s 1,2 +5,6,7
        draft -> s 1,2,5,6,7 max_tokens=4
        # The target would drop a second block as a duplicate.
        block s 1,2,5,6,7 :8 outcome=5,6,7
        block s 1,2,5,6,7 :8,9 -> t1 <- Block s 1,2,5,6,7 :8,9
        ahead -> s 1,2,5,6,7 unverified=8,9
    """)


# ---------------------------------------------------------------- targets that continue without a block


def test_a_target_that_goes_on_without_a_block_gets_blocks_for_what_its_step_may_bring():
    not_held().run("""
        draft
        ahead -> s 1,2,3 unverified=
        block s 1,2,3,4 :5,6 outcome=4 -> t1 <- Block s 1,2,3,4 :5,6
        t1: Step s 1,2,3 +4 hold_step=no
        ahead -> s 1,2,3,4 unverified=5,6
    """)


def test_a_late_block_is_sent_if_the_target_went_on():
    not_held().run("""
        ahead -> s 1,2,3 unverified=
        t1: Step s 1,2,3 +4 hold_step=no
        # The target's next verdict may bring the block's first token.
        block s 1,2,3,4 :5,6 outcome=4 -> t1 <- Block s 1,2,3,4 :5,6
        block s 1,2,3,8 :5,6 outcome=8
    """)


def test_without_lookahead_a_block_is_drafted_after_the_target_has_continued():
    Drafter(draft_ahead=False).run("""
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        draft -> s 1,2 max_tokens=4
        block s 1,2 :9 -> t1 <- Block s 1,2 :9
        t1: Step s 1,2 +3 hold_step=no
        draft -> s 1,2,3 max_tokens=4
    """)


def test_drafting_ahead_is_vain_once_all_its_verdicts_have_arrived():
    Drafter(draft_ahead=True).run("""
        router#1: Open a 1,2 -> t1 <- Attach a 1,2
        t1: Step a 1,2 +3 hold_step=no
        router#1: Open b 1,2 -> t1 <- Attach b 1,2
        t1: Step b 1,2 +3 hold_step=no
        show is_lookahead_stale -> is_lookahead_stale=yes
        ahead
            a 1,2,3 unverified=
            b 1,2,3 unverified=
        t1: Step a 1,2,3 +4 hold_step=no
        show is_lookahead_stale -> is_lookahead_stale=no
        t1: Step b 1,2,3 +4 hold_step=no
        show is_lookahead_stale -> is_lookahead_stale=yes
    """)


# ---------------------------------------------------------------- contents of lookahead requests


def test_a_request_ahead_gives_the_time_of_its_verdict_from_earlier_steps():
    Drafter(draft_ahead=True).run("""
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        draft -> s 1,2 max_tokens=4
        block s 1,2 :9 -> t1 <- Block s 1,2 :9
        # The first step lasts 0.5 s, the second 0.1 s.
        at 0.5
        t1: Step s 1,2 +3 hold_step=no
        at 0.6
        t1: Step s 1,2,3 +4 hold_step=no
        ahead -> s 1,2,3,4 unverified= until=1.000
    """)


def test_the_verdict_of_a_new_target_has_no_estimated_time():
    drafter = Drafter(draft_ahead=True)
    drafter.do("router#1: Open s 1,2")
    drafter.do("t1: Step s 1,2 +3 hold_step=no")
    (request,) = drafter.scheduler.next_pass(0, 9).lookahead
    assert request.until == math.inf


def test_requests_carry_the_target_s_draft_length():
    Drafter(draft_ahead=True).run("""
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        t1: Step s 1,2 +3 max_tokens=2
        draft -> s 1,2,3 max_tokens=2
        block s 1,2,3 :5,6 -> t1 <- Block s 1,2,3 :5,6
        ahead -> s 1,2,3 unverified=5,6 max_tokens=2
        # Never more than the session's Open allows.
        t1: Step s 1,2,3 +5 max_tokens=99
        draft -> s 1,2,3,5 max_tokens=4
    """)


def test_requests_carry_the_least_useful_acceptance_probability():
    Drafter(draft_ahead=True).run("""
        router#1: Open s 1,2 -> t1 <- Attach s 1,2
        t1: Step s 1,2 +3 least_chance=0.25
        draft -> s 1,2,3 max_tokens=4 least_chance=0.25
        t1: Step s 1,2,3 +4 least_chance=0.5 hold_step=no
        ahead -> s 1,2,3,4 unverified= least_chance=0.5
    """)


@pytest.mark.parametrize(("shapes", "suffix"), [({Shape.CHAIN}, ""), (set(Shape), " shape=tree")])
def test_requests_name_only_shapes_that_the_method_supports(shapes, suffix):
    Drafter(draft_ahead=True, shapes=frozenset(shapes)).run(f"""
        router#1: Open s 1,2 max_len=90 -> t1 <- Attach s 1,2
        t1: DraftRequest s 1,2 shape=tree
        draft -> s 1,2 max_tokens=4{suffix}
        block s 1,2 :5,6 -> t1 <- Block s 1,2 :5,6
        ahead -> s 1,2 unverified=5,6{suffix}
    """)


def test_a_block_drafted_ahead_carries_its_draft_probs():
    drafter = verifying()
    drafter.do("ahead")
    probs = SparseProbs(((7,), (8,)), ((1,), (2,)))
    address = drafter.address((1, 2, 5, 9))
    proposal = Proposal("s", *address, DraftTree.chain((7, 8), probs), (5, 9))
    ((_, block),) = drafter.scheduler.proposed([proposal], 0.0)
    assert isinstance(block, Block)
    assert block.tree.probs == probs


# ---------------------------------------------------------------- limits


def test_an_empty_block_and_one_of_a_closed_session_are_not_sent():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        block s 1,2,4 outcome=4
        router#1: Close s -> t1 <- Detach s
        block s 1,2,4 :3 outcome=4
        show nothing_to_propose -> nothing_to_propose=2
    """)


def test_a_reopened_session_keeps_no_blocks_sent_ahead():
    verifying().run("""
        ahead -> s 1,2 unverified=5,6
        block s 1,2,5,6,7 :3 outcome=5,6,7 -> t1 <- Block s 1,2,5,6,7 :3
        # Blocks sent under the old attempt may have been lost.
        router#1: Open s 1,2,5,6,7 attempt=2 -> t1 <- Attach s 1,2,5,6,7
        draft
            closed s
            s 1,2,5,6,7 attempt=2 max_tokens=4
    """)


@pytest.mark.parametrize(
    ("draft_ahead", "max_len", "requests"),
    [(True, 4, []), (True, 5, ["s 1,2 unverified=5"]), (False, 40, [])],
    ids=["at the end", "before the end", "switched off"],
)
def test_nothing_is_drafted_ahead_past_the_end_or_when_switched_off(draft_ahead, max_len, requests):
    """A verdict has at least one token, and at most one more than its block."""
    drafter = Drafter(draft_ahead=draft_ahead)
    drafter.do(f"router#1: Open s 1,2 max_len={max_len}")
    drafter.do("draft")
    drafter.do("block s 1,2 :5")
    assert drafter.do("ahead") == requests


def test_a_pass_ahead_serves_as_many_sessions_as_its_limit():
    drafter = Drafter(draft_ahead=True)
    for name in "abc":
        drafter.do(f"router#1: Open {name} 1,2")
    for name in "abc":
        drafter.do("draft")
        drafter.do(f"block {name} 1,2 :5,6")
    assert [len(drafter.do("ahead 2")) for _ in range(2)] == [2, 1]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.randoms(use_true_random=False))
def test_between_verdicts_no_text_gets_two_blocks_and_the_current_one_gets_one(steps: list[int], rng: random.Random):
    """Outcomes are right or wrong, blocks early or late, and the target decides anything."""
    drafter = Drafter(draft_ahead=True)
    drafter.do("router#1: Open s 1,2 max_len=100")
    text: Tokens = (1, 2)
    blocks: set[str] = set()  # texts with sent blocks
    late: list[str] = []

    def hand_in(block: str) -> None:
        for answer in drafter.do(block):
            _, _, kind, _, after, _ = answer.split()
            assert kind == "Block"
            assert after not in blocks
            blocks.add(after)

    for decided in steps:
        for request in drafter.do("draft"):
            hand_in(f"block s {request.split()[1]} :{rng.randrange(3)},{rng.randrange(3)}")
        assert written(text) in blocks
        for request in drafter.do("ahead"):
            _, before, unverified, *_ = request.split()
            accepted = read_tokens(unverified.removeprefix("unverified="))[: rng.randrange(3)]
            for token in rng.sample(range(3), 2):
                outcome = written((*accepted, token))
                block = f"block s {before},{outcome} outcome={outcome}"
                if rng.random() < 0.3:
                    late.append(f"{block} :1")
                else:
                    hand_in(f"{block} :{rng.randrange(3)}")
        new = tuple(rng.randrange(3) for _ in range(decided % 3 + 1))
        drafter.do(f"t1: Step s {written(text)} +{written(new)}")
        text += new
        blocks &= {written(text)}
        while late:
            hand_in(late.pop())
