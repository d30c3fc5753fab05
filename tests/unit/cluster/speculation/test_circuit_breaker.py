"""Tests that circuit breakers open for drafters without useful blocks, probe them, and close after success."""

from itertools import pairwise

from cluster.speculation.circuit_breaker import CircuitBreaker, CircuitBreakers

LIMIT_S = 2.0
FOREVER_S = 3600.0


def failures(breaker: CircuitBreaker, begin: float, seconds: float) -> bool:
    """Returns whether twenty failures spread over `seconds` open the breaker; asserts that fewer do not."""
    *before, last = [breaker.failed(begin + index * seconds / 19, LIMIT_S) for index in range(20)]
    assert not any(before)
    return last


def end_of_pause(breaker: CircuitBreaker, begin: float) -> float:
    """Returns the first time, in half-second steps from `begin`, at which the breaker admits a session."""
    now = begin
    while not breaker.takes(now):
        now += 0.5
        assert now < begin + FOREVER_S
    return now


def seconds_until_given_up(breakers: CircuitBreakers, address: str, has_drafted: bool = True) -> int:
    """Returns the seconds until a drafter without a useful block per second is given up."""
    return next(now for now in range(64) if breakers.note(address, "s", False, has_drafted, float(now)))


def test_time_without_useful_blocks_opens_the_breaker_unless_a_useful_block_interrupts_it():
    breaker = CircuitBreaker()
    for begin in (0.0, LIMIT_S):
        assert not failures(breaker, begin, 0.9 * LIMIT_S)
        breaker.useful("s")
    assert breaker.takes(3 * LIMIT_S)
    assert failures(breaker, 3 * LIMIT_S, LIMIT_S)
    assert not breaker.takes(4 * LIMIT_S)


def test_a_few_failures_do_not_open_the_breaker_however_far_apart():
    breaker = CircuitBreaker()
    assert not any(breaker.failed(at * FOREVER_S, LIMIT_S) for at in range(3))


def test_a_drafter_that_has_yet_to_read_the_prompt_gets_more_time():
    breakers = CircuitBreakers()
    assert 1 < seconds_until_given_up(breakers, "a") < seconds_until_given_up(breakers, "b", has_drafted=False)


def test_after_the_pause_one_probe_passes_and_its_useful_block_closes_the_breaker():
    breaker = CircuitBreaker()
    assert failures(breaker, 0.0, LIMIT_S)
    now = end_of_pause(breaker, LIMIT_S)
    assert now > LIMIT_S
    breaker.placed("probe", now)
    assert not breaker.takes(now)
    breaker.useful("probe")
    assert breaker.takes(now)
    breaker.placed("next", now)
    assert breaker.takes(now)


def test_an_unanswered_probe_is_followed_by_another():
    breaker = CircuitBreaker()
    assert failures(breaker, 0.0, LIMIT_S)
    now = end_of_pause(breaker, LIMIT_S)
    breaker.placed("probe", now)
    assert end_of_pause(breaker, now) > now + 1


def test_a_useful_block_for_a_session_that_the_drafter_kept_closes_the_breaker():
    breaker = CircuitBreaker()
    assert failures(breaker, 0.0, LIMIT_S)
    breaker.useful("stayed")
    assert breaker.takes(LIMIT_S)


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
        breaker.useful("another, of those that it kept")
        assert not breaker.takes(now)
    began = now
    for session in range(4):
        now = end_of_pause(breaker, now)
        breaker.placed(f"accepted, without an answer {session}", now)
        assert not breaker.takes(now)
    assert now <= began + 4
    breaker.useful("accepted, without an answer 3")
    now = end_of_pause(breaker, now)
    breaker.placed("next", now)
    assert breaker.takes(now), "it has room"


def test_the_pause_doubles_up_to_a_limit_and_failures_during_a_pause_do_not_extend_it():
    breaker = CircuitBreaker()
    now = 0.0
    pauses = []
    for _ in range(12):
        while not breaker.failed(now, LIMIT_S):
            now += 0.5
        opened = now
        for _ in range(20):
            breaker.failed(opened + 0.4, LIMIT_S)
        now = end_of_pause(breaker, opened)
        pauses.append(now - opened)
    assert all(earlier <= later <= 2 * earlier for earlier, later in pairwise(pauses))
    assert 2 * pauses[0] < pauses[-2] == pauses[-1] < 300


def test_breakers_are_separate_by_address_and_a_new_stream_starts_closed():
    breakers = CircuitBreakers()
    breakers.refused("a", 0.0)
    assert (breakers.takes("a", 0.0), breakers.takes("b", 0.0)) == (False, True)
    assert breakers.are_unavailable(0.0) == {"a": True, "b": False}
    now = float(seconds_until_given_up(breakers, "b"))
    assert not breakers.takes("b", now)
    breakers.forget("b")
    assert breakers.takes("b", now)
