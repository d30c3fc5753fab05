"""Circuit breakers open for silent or bad drafters, probe them, and close after success."""

from itertools import pairwise

from cluster.speculation.circuit_breaker import CircuitBreaker, CircuitBreakers, SilentDrafters
from protos.messages import DraftAnswer

SILENCE_S = 2.0
FOREVER_S = 3600.0


def misses(breaker: CircuitBreaker, begin: float, seconds: float) -> bool:
    """Returns whether twenty misses spread over `seconds` open the breaker; asserts that fewer do not."""
    *before, last = [breaker.missed(begin + index * seconds / 19, SILENCE_S) for index in range(20)]
    assert not any(before)
    return last


def end_of_pause(breaker: CircuitBreaker, begin: float) -> float:
    """Returns the first time, in half-second steps from `begin`, at which the breaker admits a session."""
    now = begin
    while not breaker.takes(now):
        now += 0.5
        assert now < begin + FOREVER_S
    return now


def collapses_until_open(breaker: CircuitBreaker | CircuitBreakers, *arguments: object) -> int:
    """Returns the number of collapsed sessions in a row that open the breaker."""
    return next(count for count in range(1, 32) if breaker.collapsed(*arguments))


def seconds_until_given_up(breakers: CircuitBreakers, address: str, has_drafted: bool = True) -> int:
    """Returns the seconds until a drafter that misses a block per second is given up."""
    missed = DraftAnswer.MISSED
    return next(now for now in range(64) if breakers.note(address, "s", missed, has_drafted, float(now)))


# ---------------------------------------------------------------- at the target


def steps_until_silent(silent: SilentDrafters) -> int:
    for steps in range(32):
        if silent.is_silent("d"):
            return steps
        silent.missed({"d"})
    raise AssertionError("the drafter is never silent")


def test_a_drafter_is_silent_after_a_few_steps_until_its_next_block():
    silent = SilentDrafters()
    assert steps_until_silent(silent) > 1
    assert not silent.is_silent("other")
    silent.on_message("d")
    assert not silent.is_silent("d")


def test_a_silent_drafter_is_probed_at_doubling_intervals():
    silent = SilentDrafters()
    first_silent = steps_until_silent(silent)
    probed = []
    for step in range(first_silent + 1, 1000):
        silent.missed({"d"})
        if silent.is_probed("d"):
            probed.append(step)
    assert probed[0] > 4 * first_silent
    gaps = [later - earlier for earlier, later in pairwise(probed)]
    assert len(gaps) > 1
    assert all(later == 2 * earlier for earlier, later in pairwise(gaps))


# ---------------------------------------------------------------- at the router


def test_silence_opens_the_breaker_unless_a_block_interrupts_it():
    breaker = CircuitBreaker()
    for begin in (0.0, SILENCE_S):
        assert not misses(breaker, begin, 0.9 * SILENCE_S)
        breaker.answered("s")
    assert breaker.takes(3 * SILENCE_S)
    assert misses(breaker, 3 * SILENCE_S, SILENCE_S)
    assert not breaker.takes(4 * SILENCE_S)


def test_a_few_misses_do_not_open_the_breaker_however_far_apart():
    breaker = CircuitBreaker()
    assert not any(breaker.missed(at * FOREVER_S, SILENCE_S) for at in range(3))


def test_a_drafter_that_has_yet_to_read_the_prompt_gets_more_time():
    breakers = CircuitBreakers()
    assert 1 < seconds_until_given_up(breakers, "a") < seconds_until_given_up(breakers, "b", has_drafted=False)


def test_after_the_pause_one_probe_passes_and_its_block_closes_the_breaker():
    breaker = CircuitBreaker()
    breaker.refused(0.0)
    now = end_of_pause(breaker, 0.0)
    assert now > 0
    breaker.placed("probe", now)
    assert not breaker.takes(now)
    breaker.answered("another, of those that it kept")
    assert not breaker.takes(now)
    breaker.answered("probe")
    assert breaker.takes(now)
    breaker.placed("next", now)
    assert breaker.takes(now)


def test_an_unanswered_probe_is_followed_by_another():
    breaker = CircuitBreaker()
    collapses_until_open(breaker, 0.0)
    now = end_of_pause(breaker, 0.0)
    breaker.placed("probe", now)
    assert end_of_pause(breaker, now) > now + 1


def test_a_full_drafter_gets_one_more_session_after_each_short_pause():
    """Its sessions end at any time, and while targets request no blocks, no answer shows that it has room."""
    breaker = CircuitBreaker()
    now = 0.0
    for session in range(12):
        breaker.refused(now)
        breaker.refused(now)  # a second session of the same moment
        assert not breaker.takes(now)
        now = end_of_pause(breaker, now)
        breaker.placed(f"refused {session}", now)
        assert not breaker.takes(now)
    began = now
    for session in range(4):
        now = end_of_pause(breaker, now)
        breaker.placed(f"accepted, without an answer {session}", now)
        assert not breaker.takes(now)
    assert now <= began + 4


def test_a_full_drafter_that_falls_silent_gets_no_sessions_for_longer():
    full = CircuitBreaker()
    full.refused(SILENCE_S)
    silent = CircuitBreaker()
    silent.refused(0.0)
    assert misses(silent, 0.0, SILENCE_S)
    assert end_of_pause(silent, SILENCE_S) > end_of_pause(full, SILENCE_S)


def test_the_pause_doubles_up_to_a_limit_and_events_of_one_moment_count_once():
    breaker = CircuitBreaker()
    now = 0.0
    pauses = []
    for _ in range(12):
        collapses_until_open(breaker, now)
        collapses_until_open(breaker, now + 0.01)
        began, now = now, end_of_pause(breaker, now)
        pauses.append(now - began)
    assert all(later == min(2 * earlier, pauses[-1]) for earlier, later in pairwise(pauses))
    assert 8 * pauses[0] < pauses[-2] == pauses[-1] < 300


def test_a_drafter_that_was_silent_for_long_is_tried_again_within_seconds():
    breaker = CircuitBreaker()
    now = 0.0
    for _ in range(12):
        misses(breaker, now, SILENCE_S)
        now = end_of_pause(breaker, now + SILENCE_S)
    assert misses(breaker, now, SILENCE_S)
    assert end_of_pause(breaker, now + SILENCE_S) - now - SILENCE_S < 5


def test_a_silent_drafter_is_trusted_again_at_a_block_for_a_session_that_it_kept():
    breaker = CircuitBreaker()
    assert misses(breaker, 0.0, SILENCE_S)
    breaker.answered("stayed")
    assert breaker.takes(SILENCE_S)


def test_breakers_are_separate_by_address_and_a_new_stream_starts_closed():
    breakers = CircuitBreakers()
    breakers.refused("a", 0.0)
    assert (breakers.takes("a", 0.0), breakers.takes("b", 0.0)) == (False, True)
    assert not breakers.note("b", "s", DraftAnswer.NOT_ASKED, True, 0.0)
    breakers.placed("a", "s", FOREVER_S)
    assert not breakers.note("a", "s", DraftAnswer.GIVEN, True, FOREVER_S)
    assert breakers.takes("a", FOREVER_S)
    now = float(seconds_until_given_up(breakers, "b"))
    assert not breakers.takes("b", now)
    breakers.forget("b")
    assert breakers.takes("b", now)


# ---------------------------------------------------------------- blocks that become bad in consecutive sessions


def test_a_drafter_whose_sessions_collapse_one_after_the_other_is_given_up():
    breaker = CircuitBreaker()
    assert collapses_until_open(breaker, 0.0) > 1
    assert not breaker.takes(0.0)


def test_a_session_that_ends_well_resets_the_count_of_collapses():
    needed = collapses_until_open(CircuitBreaker(), 0.0)
    breaker = CircuitBreaker()
    for _ in range(10):
        assert not any(breaker.collapsed(0.0) for _ in range(needed - 1))
        breaker.ended_well()
    assert breaker.takes(0.0)


def test_blocks_in_time_do_not_close_the_breaker_of_a_bad_drafter_but_a_session_that_ends_well_does():
    breaker = CircuitBreaker()
    collapses_until_open(breaker, 0.0)
    now = end_of_pause(breaker, 0.0)
    breaker.placed("probe", now)
    breaker.answered("probe")
    assert not breaker.takes(now)
    breaker.ended_well()
    assert breaker.takes(now)
    assert not breaker.collapsed(now), "the count starts again"


def test_a_probe_that_collapses_too_doubles_the_pause():
    breaker = CircuitBreaker()
    collapses_until_open(breaker, 0.0)
    first = end_of_pause(breaker, 0.0)
    breaker.placed("probe", first)
    assert breaker.collapsed(first)
    assert end_of_pause(breaker, first) == first + 2 * first


def test_collapses_and_good_ends_count_by_address():
    breakers = CircuitBreakers()
    collapses_until_open(breakers, "a", 0.0)
    assert (breakers.takes("a", 0.0), breakers.takes("b", 0.0)) == (False, True)
    breakers.ended_well("a")
    assert breakers.takes("a", 0.0)


def test_openings_are_counted_by_cause_and_open_breakers_are_listed():
    breakers = CircuitBreakers()
    breakers.refused("a", 0.0)
    breakers.refused("a", 0.0)  # already open
    collapses_until_open(breakers, "b", 0.0)
    now = float(seconds_until_given_up(breakers, "c"))
    assert +breakers.opened == {("a", "overloaded"): 1, ("b", "bad"): 1, ("c", "silent"): 1}
    assert breakers.takes("d", now)
    assert breakers.are_open(0.0) == {"a": True, "b": True, "c": True, "d": False}
    assert breakers.are_open(FOREVER_S) == {"a": False, "b": False, "c": False, "d": False}
