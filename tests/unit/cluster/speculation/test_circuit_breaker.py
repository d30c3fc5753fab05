"""Circuit breakers open for silent or bad drafters, probe them, and close again."""

import itertools

from cluster.speculation.circuit_breaker import (
    COLLAPSES,
    FIRST_BLOCK_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MISSES,
    PROBE_AFTER,
    SILENT_S,
    SILENT_STEPS,
    CircuitBreaker,
    CircuitBreakers,
    SilentDrafters,
)
from protos.messages import DraftAnswer

PROBED_AFTER = SILENT_STEPS - 1 + PROBE_AFTER  # steps without a block


def misses(breaker: CircuitBreaker, begin: float, seconds: float, silence_s: float = SILENT_S, count: int = 20) -> bool:
    """Misses spread over a time; whether the last of them opens the breaker, and none before it."""
    step = seconds / (count - 1)
    *before, last = [breaker.missed(begin + index * step, silence_s) for index in range(count)]
    assert not any(before)
    return last


# ---------------------------------------------------------------- at the target


def test_a_drafter_is_silent_after_a_few_steps_and_any_block_ends_it():
    silent = SilentDrafters()
    for _ in range(SILENT_STEPS):
        assert not silent.is_silent("d")
        silent.missed({"d"})
    assert silent.is_silent("d")
    assert not silent.is_silent("other")
    silent.on_message("d")
    assert not silent.is_silent("d")


def test_a_silent_drafter_is_probed_ever_more_seldom():
    silent = SilentDrafters()
    probed = []
    for step in range(1, 8 * PROBED_AFTER + 1):
        silent.missed({"d"})
        if silent.is_probed("d"):
            probed.append(step)
    assert probed[0] == PROBED_AFTER
    gaps = [later - earlier for earlier, later in itertools.pairwise(probed)]
    assert gaps == [2 * PROBE_AFTER, 4 * PROBE_AFTER]


# ---------------------------------------------------------------- at the router


def test_silence_opens_the_breaker_and_a_block_in_between_does_not_let_it():
    breaker = CircuitBreaker()
    assert not misses(breaker, 0.0, 0.9 * SILENT_S)
    breaker.answered("s")
    assert not misses(breaker, SILENT_S, 0.9 * SILENT_S)
    breaker.answered("s")
    assert breaker.takes(3 * SILENT_S)
    assert misses(breaker, 3 * SILENT_S, SILENT_S)
    assert not breaker.takes(4 * SILENT_S)


def test_few_misses_prove_nothing_however_far_apart():
    breaker = CircuitBreaker()
    assert not any(breaker.missed(at * SILENT_S, SILENT_S) for at in range(MISSES - 1))


def test_who_has_yet_to_read_a_prompt_gets_more_time():
    breaker = CircuitBreaker()
    assert not misses(breaker, 0.0, 0.9 * FIRST_BLOCK_S, silence_s=FIRST_BLOCK_S)
    assert breaker.missed(FIRST_BLOCK_S, FIRST_BLOCK_S)


def test_one_probe_goes_through_after_the_pause_and_its_block_closes_the_breaker():
    breaker = CircuitBreaker()
    breaker.refused(0.0)
    assert not breaker.takes(0.9 * FIRST_PAUSE_S)
    assert breaker.takes(FIRST_PAUSE_S)
    breaker.placed("probe", FIRST_PAUSE_S)
    assert not breaker.takes(FIRST_PAUSE_S)
    breaker.answered("another, of those that it kept")
    assert not breaker.takes(FIRST_PAUSE_S)
    breaker.answered("probe")
    assert breaker.takes(FIRST_PAUSE_S)
    breaker.placed("next", FIRST_PAUSE_S)
    assert breaker.takes(FIRST_PAUSE_S)


def test_a_probe_that_came_to_nothing_makes_room_for_another():
    breaker = CircuitBreaker()
    breaker.refused(0.0)
    breaker.placed("probe", 2.0)
    assert not breaker.takes(1.9 + FIRST_BLOCK_S)
    assert breaker.takes(2.0 + FIRST_BLOCK_S)


def test_the_pause_doubles_while_probes_are_refused_and_refusals_of_one_moment_count_once():
    breaker = CircuitBreaker()
    now = 0.0
    pauses = []
    for _ in range(7):
        breaker.refused(now)
        breaker.refused(now + 0.01)
        began = now
        while not breaker.takes(now):
            now += 0.5
        pauses.append(now - began)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    assert (pauses[0], pauses[-1]) == (FIRST_PAUSE_S, LONGEST_PAUSE_S)


def test_who_was_silent_and_has_a_block_for_a_session_that_stayed_is_trusted_at_once():
    breaker = CircuitBreaker()
    assert misses(breaker, 0.0, SILENT_S)
    breaker.answered("stayed")
    assert breaker.takes(SILENT_S)


def test_breakers_are_told_apart_by_address_and_a_new_stream_begins_anew():
    breakers = CircuitBreakers()
    breakers.refused("a", 0.0)
    assert (breakers.takes("a", 0.0), breakers.takes("b", 0.0)) == (False, True)
    assert not breakers.note("b", "s", DraftAnswer.NOT_ASKED, True, 0.0)
    breakers.placed("a", "s", FIRST_PAUSE_S)
    assert not breakers.note("a", "s", DraftAnswer.GIVEN, True, FIRST_PAUSE_S)
    assert breakers.takes("a", FIRST_PAUSE_S)
    missed = [breakers.note("b", "s", DraftAnswer.MISSED, True, at * SILENT_S) for at in range(MISSES)]
    assert missed == [False] * (MISSES - 1) + [True]
    end = MISSES * SILENT_S - SILENT_S
    assert not breakers.takes("b", end)
    breakers.forget("b")
    assert breakers.takes("b", end)


# ---------------------------------------------------------------- blocks that become bad, session after session


def collapsed_to_the_end(breaker: CircuitBreaker, now: float) -> list[bool]:
    return [breaker.collapsed(now) for _ in range(COLLAPSES)]


def test_a_drafter_is_given_up_whose_sessions_collapse_one_after_the_other():
    breaker = CircuitBreaker()
    assert collapsed_to_the_end(breaker, 0.0) == [False] * (COLLAPSES - 1) + [True]
    assert not breaker.takes(0.9 * FIRST_PAUSE_S)


def test_a_session_that_ends_well_says_that_it_was_no_fault_of_the_drafter():
    breaker = CircuitBreaker()
    for _ in range(10):
        assert not any(breaker.collapsed(0.0) for _ in range(COLLAPSES - 1))
        breaker.ended_well()
    assert breaker.takes(0.0)


def test_blocks_in_time_do_not_close_the_breaker_of_a_bad_drafter_and_a_session_that_ends_well_does():
    breaker = CircuitBreaker()
    collapsed_to_the_end(breaker, 0.0)
    breaker.placed("probe", FIRST_PAUSE_S)
    breaker.answered("probe")
    assert not breaker.takes(FIRST_PAUSE_S)
    breaker.ended_well()
    assert breaker.takes(FIRST_PAUSE_S)
    assert not breaker.collapsed(FIRST_PAUSE_S), "it begins with a clean record"


def test_a_probe_that_collapses_too_doubles_the_pause():
    breaker = CircuitBreaker()
    collapsed_to_the_end(breaker, 0.0)
    breaker.placed("probe", FIRST_PAUSE_S)
    assert breaker.collapsed(FIRST_PAUSE_S)
    assert not breaker.takes(FIRST_PAUSE_S + 1.9 * FIRST_PAUSE_S)
    assert breaker.takes(FIRST_PAUSE_S + 2 * FIRST_PAUSE_S)


def test_all_breakers_hear_of_collapses_and_good_ends_by_address():
    breakers = CircuitBreakers()
    assert [breakers.collapsed("a", 0.0) for _ in range(COLLAPSES)][-1]
    assert (breakers.takes("a", 0.0), breakers.takes("b", 0.0)) == (False, True)
    breakers.ended_well("a")
    assert breakers.takes("a", 0.0)


def test_openings_are_counted_by_cause_and_breakers_that_are_open_are_told():
    breakers = CircuitBreakers()
    breakers.refused("a", 0.0)
    breakers.refused("a", 0.0)  # it is open already
    for _ in range(COLLAPSES):
        breakers.collapsed("b", 0.0)
    for at in range(MISSES):
        breakers.note("c", "s", DraftAnswer.MISSED, True, at * SILENT_S)
    assert +breakers.opened == {("a", "overloaded"): 1, ("b", "bad"): 1, ("c", "silent"): 1}
    now = (MISSES - 1) * SILENT_S
    assert breakers.takes("d", now)
    assert breakers.are_open(now) == {"a": False, "b": False, "c": True, "d": False}
