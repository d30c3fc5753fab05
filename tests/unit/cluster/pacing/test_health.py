"""When a drafter is counted on no more, tried again, and trusted again; and when it must be out of step."""

import itertools
import random
from collections.abc import Sequence
from statistics import median

import pytest

from cluster.pacing.health import (
    ALARM,
    FIRST_BLOCK_S,
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MISSES,
    PROBE_AFTER,
    PROOF,
    SILENT_S,
    SILENT_STEPS,
    AcceptanceDrift,
    Breaker,
    Breakers,
    SilentDrafters,
)
from protos.messages import DraftAnswer

PROBED_AFTER = SILENT_STEPS - 1 + PROBE_AFTER  # steps without a block


def misses(breaker: Breaker, begin: float, seconds: float, silence_s: float = SILENT_S, count: int = 20) -> bool:
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
    silent.heard("d")
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
    assert not any(breaker.missed(at * SILENT_S, SILENT_S) for at in range(MISSES - 1))


def test_who_has_yet_to_read_a_prompt_gets_more_time():
    breaker = Breaker()
    assert not misses(breaker, 0.0, 0.9 * FIRST_BLOCK_S, silence_s=FIRST_BLOCK_S)
    assert breaker.missed(FIRST_BLOCK_S, FIRST_BLOCK_S)


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
    missed = [breakers.note("b", "s", DraftAnswer.MISSED, True, at * SILENT_S) for at in range(MISSES)]
    assert missed == [False] * (MISSES - 1) + [True]
    end = MISSES * SILENT_S - SILENT_S
    assert not breakers.takes("b", end)
    breakers.forget("b")
    assert breakers.takes("b", end)


# ---------------------------------------------------------------- blocks that have become bad


def test_good_blocks_that_turn_bad_raise_the_alarm_and_merely_bad_ones_do_not():
    good = AcceptanceDrift()
    for _ in range(PROOF):
        good = good.after(accepted=1)
    rejected = 0
    while not good.is_collapsed:
        good = good.after(accepted=0)
        rejected = rejected + 1
        assert rejected < 50
    assert rejected > 3, "a few rejections in a row are nothing"
    bad = AcceptanceDrift()
    for _ in range(500):
        bad = bad.after(accepted=0)
    assert not bad.is_collapsed, "it never was better"


def alarms(seed: int, *spells: tuple[float, int]) -> list[int]:
    """After which blocks of a session there was one; a spell is an acceptance, and for how many blocks it lasts.

    After an alarm the drafter begins anew, and drafts no better for it.
    """
    rng = random.Random(seed)
    drift = AcceptanceDrift()
    found = []
    chances = [acceptance for acceptance, length in spells for _ in range(length)]
    for count, chance in enumerate(chances, 1):
        drift = drift.after(rng.random() < chance)
        if drift.is_collapsed:
            drift = AcceptanceDrift()
            found.append(count)
    return found


def alarms_per_block(sessions: int, *spells: tuple[float, int]) -> float:
    """Over so many sessions."""
    count = sum(len(alarms(seed, *spells)) for seed in range(sessions))
    return count / (sessions * sum(length for _, length in spells))


@pytest.mark.parametrize(("collapsed", "usually", "at_most"), [(0.0, 10, 15), (0.1, 13, 60), (0.2, 19, 120)])
def test_a_collapse_is_found_within_few_blocks(collapsed: float, usually: int, at_most: int):
    """It need not be complete: text that is easy to guess is guessed by a drafter out of step too."""
    good = 100
    delays = [alarms(seed, (0.8, good), (collapsed, at_most))[0] - good for seed in range(400)]
    assert min(delays) > 3, "a few rejections in a row are nothing"
    assert median(delays) <= usually


def test_a_short_history_is_enough_for_a_collapse():
    """Then more blocks are needed."""
    found = [bool(alarms(seed, (0.8, 2 * PROOF), (0.1, 60))) for seed in range(400)]
    assert sum(found) > 0.95 * len(found)


@pytest.mark.parametrize(("acceptance", "rate"), [(0.95, 1e-5), (0.8, 1e-5), (0.5, 2e-5), (0.2, ALARM), (0.05, 1e-5)])
def test_blocks_that_fare_as_ever_raise_no_more_alarms_than_is_said(acceptance: float, rate: float):
    assert alarms_per_block(400, (acceptance, 1000)) <= rate


def test_false_alarms_are_as_rare_in_short_sessions():
    """Where least is known of what is usual; at the acceptance at which they come closest to what is allowed."""
    assert 0 < alarms_per_block(5000, (0.2, 100)) <= ALARM


@pytest.mark.parametrize("spells", [((0.8, 150), (0.7, 350)), ((0.5, 150), (0.43, 350)), ((0.95, 150), (0.81, 350))])
def test_texts_that_become_harder_raise_no_more_alarms_than_is_said(spells: Sequence[tuple[float, int]]):
    assert alarms_per_block(400, *spells) <= ALARM


def test_what_was_always_poor_cannot_collapse():
    assert alarms_per_block(400, (0.05, 300), (0.0, 300)) <= 1e-5


def test_after_an_alarm_the_history_begins_anew():
    """Beginning anew that did not help is not tried again; and what recovered can collapse once more."""
    for_good = ((0.8, 100), (0.1, 400))
    again = ((0.8, 100), (0.1, 50), (0.8, 100), (0.1, 150))
    assert sum(len(alarms(seed, *for_good)) for seed in range(200)) <= 200 * (1 + 400 * ALARM)
    assert [len(alarms(seed, *again)) for seed in range(200)] == [2] * 200
