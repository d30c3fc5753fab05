"""A drafter stores the hidden states of its own text in order, and drafts once they are complete."""

import pytest

from cluster.drafting.hidden_state_receiver import StateBounds
from protos.messages import StateDtype, StatesFormat
from tests.scenarios.drafting import STATES, Drafter


def reading(**bounds: int) -> Drafter:
    """Returns a drafter whose method reads hidden states."""
    return Drafter(states=STATES, bounds=StateBounds(**bounds))


def opened() -> Drafter:
    """Returns a drafter with a session whose target knows that all states are missing."""
    drafter = reading()
    drafter.run("router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=0")
    return drafter


def test_a_session_is_drafted_for_once_its_states_have_arrived():
    """The target must not wait for the states, and the method may process them at once."""
    opened().run("""
        t1: DraftRequest s 5,6,7,8 -> t1 <- NoDraft s 5,6,7,8
        pass
        t1/states: States s 5,6 0 -> t1/states <- StatesAck s 2
        pass -> states s 0-2
        pass
        t1/states: States s 5,6,7 2 -> t1/states <- StatesAck s 3
        # The target has yet to read the last token.
        pass
            states s 2-3
            s 5,6,7,8 max_tokens=4
    """)


def test_a_method_that_reads_a_window_asks_for_no_more():
    reading(window=1).run("""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=2
        t1: DraftRequest s 5,6,7,8 -> t1 <- NoDraft s 5,6,7,8
        t1: Verdict s 5,6,7,8 +9
        t1: States s 5,6,7,8 2
        t1: DraftRequest s 5,6,7,8,9
        pass
            states s 2-4
            s 5,6,7,8,9 max_tokens=4
    """)
    reading(window=9).run("router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=0")


def test_states_may_begin_within_the_text_if_the_latest_are_enough():
    """After the first states, a gap is an error."""
    reading(min_states=1).run("""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=0 states_by=2
        t1/states: States s 5,6,7 2 -> t1/states <- StatesAck s 3
        t1: DraftRequest s 5,6,7,8
        pass
            states s 2-3
            s 5,6,7,8 max_tokens=4
        t1/states: States s 5,6,7 0 -> t1/states <- StatesAck s 3
        show states states_known -> states=1 states_known=1
        t1: States s 5,6,7,8,9 4
        t1: Verdict s 5,6,7,8 +9 -> t1 <- Attach s 5,6,7,8,9 states_from=3
    """)


@pytest.mark.parametrize(("enough", "by"), [(2, " states_by=1"), (3, ""), (9, "")])
def test_states_begin_early_enough(enough, by):
    reading(min_states=enough).run(f"""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=0{by}
        t1/states: States s 5,6,7 2 -> t1 <- Attach s 5,6,7,8 states_from=0{by}
        t1/states: States s 5 0 -> t1/states <- StatesAck s 1
        t1/states: States s 5,6,7 2 -> t1 <- Attach s 5,6,7,8 states_from=1
    """)


def test_a_session_whose_states_begin_within_the_text_takes_only_their_space():
    reading(min_states=1, max_states=5).run("""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=0 states_by=2
        t1/states: States s 5,6,7 2 -> t1/states <- StatesAck s 3
        router#1: Open t 1,2,3,4,5
            router#1 <- Refusal t attempt=1 overloaded "hidden states of 1 tokens are kept; the limit is 5"
        router#1: Open u 1,2,3,4 -> t1 <- Attach u 1,2,3,4 states_from=0 states_by=2
    """)


def test_states_sent_with_a_verdict_need_no_acknowledgement():
    opened().run("""
        t1/states: States s 5,6,7 0 -> t1/states <- StatesAck s 3
        t1: Verdict s 5,6,7,8 +9
        t1: States s 5,6,7,8 3
        t1: DraftRequest s 5,6,7,8,9
        pass
            states s 0-4
            s 5,6,7,8,9 max_tokens=4
    """)


def test_a_method_without_states_asks_for_none_and_waits_for_none():
    Drafter().run("""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8
        t1: DraftRequest s 5,6,7,8
        t1: States s 5,6,7 0
        show states_unfit -> states_unfit=1
        pass -> s 5,6,7,8 max_tokens=4
    """)


def test_states_that_precede_their_tokens_wait_for_the_verdict():
    """Messages on separate streams have no common order."""
    opened().run("""
        t1/states: States s 5,6,7,8 0 -> t1/states <- StatesAck s 4
        t1/states: States s 5,6,7,8,9 4 -> t1/states <- StatesAck s 4
        pass
            states s 0-4
            s 5,6,7,8 max_tokens=4
        t1: Verdict s 5,6,7,8 +9,10 -> t1/states <- StatesAck s 5
        pass
            states s 4-5
            s 5,6,7,8,9,10 max_tokens=4
    """)


def test_the_number_of_waiting_states_is_bounded():
    drafter = opened()
    for _ in range(1000):
        drafter.do("t1/states: States s 5,6,7,8,9,10,11 0")
    assert 0 < drafter.scheduler.counts["states_early"] < 1000


def test_states_of_another_text_are_dropped():
    opened().run("""
        t1/states: States s 5,6,9 0
        show states_mismatch states -> states_mismatch=1 states=0
        pass
    """)


@pytest.mark.parametrize("layout", [StatesFormat(4, STATES.dtype), StatesFormat(2, StateDtype.FLOAT8)])
def test_states_of_another_format_are_dropped(layout):
    Drafter(states=layout).run("""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=0
        t1/states: States s 5 0
        show states_unfit states -> states_unfit=1 states=0
    """)


@pytest.mark.parametrize("peer", ["t2", "t2/states", "router#1"])
def test_states_of_unknown_sessions_and_from_other_peers_are_dropped(peer):
    drafter = opened()
    drafter.run(f"""
        {peer}: States s 5,6,7 0
        t1/states: States unknown 5,6,7 0
        show states_unknown states -> states_unknown=2 states=0
    """)


def test_repeated_states_count_once_and_of_an_overlap_only_the_new_part_counts():
    """A lost acknowledgement causes repeated states."""
    opened().run("""
        t1/states: States s 5,6 0 -> t1/states <- StatesAck s 2
        t1/states: States s 5,6 0 -> t1/states <- StatesAck s 2
        t1/states: States s 5,6,7 1 -> t1/states <- StatesAck s 3
        pass
            states s 0-3
            s 5,6,7,8 max_tokens=4
        show states states_known -> states=3 states_known=1
    """)


def test_missing_states_are_requested_once_and_again_after_the_text_has_grown():
    opened().run("""
        t1/states: States s 5 0 -> t1/states <- StatesAck s 1
        t1/states: States s 5,6,7 2 -> t1 <- Attach s 5,6,7,8 states_from=1
        t1/states: States s 5,6,7,8 3 -> t1/states <- StatesAck s 1
        t1: Verdict s 5,6,7,8 +9
        t1/states: States s 5,6,7,8,9 4 -> t1 <- Attach s 5,6,7,8,9 states_from=1
        t1/states: States s 5,6,7,8,9 1 -> t1/states <- StatesAck s 5
        pass
            states s 0-5
            s 5,6,7,8,9 max_tokens=4
    """)


def test_missing_states_are_requested_on_a_new_stream():
    opened().run("""
        t1/states: States s 5,6 0 -> t1/states <- StatesAck s 2
        gone t1
        connected t1 -> t1 <- Attach s 5,6,7,8 states_from=2
    """)


def test_a_reopened_session_starts_without_states():
    opened().run("""
        t1/states: States s 5,6,7 0 -> t1/states <- StatesAck s 3
        t1: Resync s 5,6,7,8 -> router#1 <- Resync s 5,6,7,8
        router#1: Open s 5,6,7,8 attempt=2 -> t1 <- Attach s 5,6,7,8 states_from=0
        pass -> closed s
    """)


def test_a_session_without_space_for_its_states_is_refused_until_there_is_space():
    """A reopened session reuses its own space."""
    reading(max_states=7).run("""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=0
        t1/states: States s 5,6,7 0 -> t1/states <- StatesAck s 3
        router#1: Open t 1,2,3,4,5
            router#1 <- Refusal t attempt=1 overloaded "hidden states of 3 tokens are kept; the limit is 7"
        router#1: Open u 1,2,3,4 -> t1 <- Attach u 1,2,3,4 states_from=0
        router#1: Open s 5,6,7,8,9,10,11 attempt=2 -> t1 <- Attach s 5,6,7,8,9,10,11 states_from=0
        router#1: Close s attempt=2 -> t1 <- Detach s
        router#1: Close u -> t1 <- Detach u
        router#1: Open t 1,2,3,4,5 -> t1 <- Attach t 1,2,3,4,5 states_from=0
    """)


def test_a_session_that_grows_beyond_the_bound_is_given_up_and_another_continues():
    reading(max_states=5).run("""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=0
        router#1: Open t 1,2,3 -> t1 <- Attach t 1,2,3 states_from=0
        t1/states: States t 1,2 0 -> t1/states <- StatesAck t 2
        t1/states: States s 5,6,7 0 -> t1/states <- StatesAck s 3
        t1: Verdict s 5,6,7,8 +9
        t1/states: States s 5,6,7,8 3
            router#1 <- Refusal s attempt=1 overloaded "hidden states of 6 tokens are kept; the limit is 5"
            t1 <- Detach s
        show given_up -> given_up=1
        pass
            closed s
            states t 0-2
            t 1,2,3 max_tokens=4
        t1/states: States t 1,2,3 2 -> t1/states <- StatesAck t 3
    """)


def test_a_session_takes_at_most_the_space_of_the_window():
    reading(window=1, max_states=2).run("""
        router#1: Open s 5,6,7,8 -> t1 <- Attach s 5,6,7,8 states_from=2
        router#1: Open t 1,2,3,4,5 -> t1 <- Attach t 1,2,3,4,5 states_from=3
        router#1: Open u 1,2
            router#1 <- Refusal u attempt=1 overloaded "hidden states of 2 tokens are kept; the limit is 2"
    """)


def test_a_closed_session_keeps_no_states():
    opened().run("""
        t1/states: States s 5,6,7 0 -> t1/states <- StatesAck s 3
        t1/states: States s 5,6,7,8,9 3 -> t1/states <- StatesAck s 3
        router#1: Close s -> t1 <- Detach s
        ahead -> closed s
        show is_idle -> is_idle=yes
    """)
