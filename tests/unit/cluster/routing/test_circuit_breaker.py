"""Circuit breakers: when a drafter is counted on no more, tried again, and trusted again."""

from cluster.routing.circuit_breaker import (
    FIRST_BLOCK_S,
    FIRST_PAUSE_S,
    FIRST_PROBE_STEPS,
    LONGEST_PAUSE_S,
    SILENT_S,
    TRIP_MISSES,
    TRIP_STEPS,
    Breaker,
    Breakers,
    SilentDrafters,
)
from protos.messages import DraftAnswer


def misses(breaker: Breaker, begin: float, seconds: float, has_drafted: bool = True, count: int = 20) -> bool:
    """Misses spread over a time; whether the last of them opens the breaker, and none before it."""
    step = seconds / (count - 1)
    *before, last = [breaker.missed(begin + index * step, has_drafted) for index in range(count)]
    assert not any(before)
    return last


# ---------------------------------------------------------------- at the target


def test_a_drafter_is_silent_after_a_few_steps_and_any_block_ends_it():
    silent = SilentDrafters()
    for _ in range(TRIP_STEPS):
        assert not silent.is_silent("d")
        silent.missed({"d"})
    assert silent.is_silent("d")
    assert not silent.is_silent("other")
    silent.heard("d")
    assert not silent.is_silent("d")


def test_a_silent_drafter_is_probed_ever_more_seldom():
    silent = SilentDrafters()
    probed = []
    for step in range(1, 8 * FIRST_PROBE_STEPS + 1):
        silent.missed({"d"})
        if silent.is_probed("d"):
            probed.append(step)
    assert probed == [FIRST_PROBE_STEPS, 2 * FIRST_PROBE_STEPS, 4 * FIRST_PROBE_STEPS, 8 * FIRST_PROBE_STEPS]


# ---------------------------------------------------------------- at the router


def test_silence_opens_the_breaker_and_a_block_in_between_does_not_let_it():
    breaker = Breaker()
    assert not misses(breaker, 0.0, 0.9 * SILENT_S)
    breaker.answered("s")
    assert not misses(breaker, SILENT_S, 0.9 * SILENT_S)
    breaker.answered("s")
    assert breaker.takes(3 * SILENT_S)
    assert misses(breaker, 3 * SILENT_S, SILENT_S)
    assert not breaker.takes(4 * SILENT_S)


def test_few_misses_prove_nothing_however_far_apart():
    breaker = Breaker()
    assert not any(breaker.missed(at * SILENT_S, True) for at in range(TRIP_MISSES - 1))


def test_who_has_yet_to_read_a_prompt_gets_more_time():
    breaker = Breaker()
    assert not misses(breaker, 0.0, 0.9 * FIRST_BLOCK_S, has_drafted=False)
    assert breaker.missed(FIRST_BLOCK_S, has_drafted=False)


def test_one_probe_goes_through_after_the_pause_and_its_block_closes_the_breaker():
    breaker = Breaker()
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
    breaker = Breaker()
    breaker.refused(0.0)
    breaker.placed("probe", 2.0)
    assert not breaker.takes(1.9 + FIRST_BLOCK_S)
    assert breaker.takes(2.0 + FIRST_BLOCK_S)


def test_the_pause_doubles_while_probes_are_refused_and_refusals_of_one_moment_count_once():
    breaker = Breaker()
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
    breaker = Breaker()
    assert misses(breaker, 0.0, SILENT_S)
    breaker.answered("stayed")
    assert breaker.takes(SILENT_S)


def test_breakers_are_told_apart_by_address_and_a_new_stream_begins_anew():
    breakers = Breakers()
    breakers.refused("a", 0.0)
    assert (breakers.takes("a", 0.0), breakers.takes("b", 0.0)) == (False, True)
    assert not breakers.note("b", "s", DraftAnswer.NOT_ASKED, True, 0.0)
    breakers.placed("a", "s", FIRST_PAUSE_S)
    assert not breakers.note("a", "s", DraftAnswer.GIVEN, True, FIRST_PAUSE_S)
    assert breakers.takes("a", FIRST_PAUSE_S)
    missed = [breakers.note("b", "s", DraftAnswer.MISSED, True, at * SILENT_S) for at in range(TRIP_MISSES)]
    assert missed == [False] * (TRIP_MISSES - 1) + [True]
    end = TRIP_MISSES * SILENT_S - SILENT_S
    assert not breakers.takes("b", end)
    breakers.forget("b")
    assert breakers.takes("b", end)
