"""Tests the live page's content with handwritten samples."""

from dataclasses import replace

from cluster.speculation.estimators import AcceptanceCounts
from cluster.telemetry import Actor, Event, Recording, pack
from serve_app.page.routes import DraftSample, TargetSample, page_state


def recording(role: str, name: str, *events: tuple[float, str, str], offset_s: float = 0.0) -> bytes:
    """Returns a recording of events at wall-clock times; sessions have one-letter names."""
    made = (Event(order, at - offset_s, what, tuple(sessions)) for order, (at, what, sessions) in enumerate(events))
    return pack(Actor(role, name, Recording(offset_s, tuple(made))))


TARGET = TargetSample(
    name="t",
    at_s=100.0,
    sessions=3,
    queued=1,
    step_s=10.0,
    committed_tokens=1000,
    accepted_tokens=600,
    wasted_tokens=400,
    acceptance=AcceptanceCounts((100, 50), (50, 40)),
    is_drafted_for=True,
    gain=1.5,
    cache=0.25,
    recording=recording("target", "t"),
)
DRAFTER = DraftSample(
    name="d",
    at_s=50.0,
    method="lookup",
    sessions=3,
    draft_tokens=500,
    passes=30,
    passes_ahead=10,
    recording=recording("drafter", "d"),
)
LATER = replace(TARGET, at_s=102.0, step_s=11.0, committed_tokens=1080, accepted_tokens=630, wasted_tokens=410)


def test_rates_cover_the_time_between_two_samples() -> None:
    state = page_state("m", [TARGET, DRAFTER], [LATER, replace(DRAFTER, at_s=52.0, draft_tokens=600)])
    assert (state.tokens_per_s, state.busy, state.accepted) == (40.0, 0.5, 0.75)
    assert (state.targets[0].tokens_per_s, state.targets[0].busy) == (40.0, 0.5)
    assert (state.drafters[0].draft_tokens_per_s, state.drafters[0].ahead) == (50.0, 0.25)


def test_tokens_are_summed_and_utilization_is_averaged_over_targets() -> None:
    before = [TARGET, replace(TARGET, name="u")]
    now = [LATER, replace(LATER, name="u", step_s=12.0)]
    state = page_state("m", before, now)
    assert (state.tokens_per_s, state.busy) == (80.0, 0.75)
    assert state.acceptance == (0.5, 0.8), "of all blocks of both"


def test_no_rates_for_a_first_sample_or_a_restarted_replica() -> None:
    assert page_state("m", [], [TARGET]).tokens_per_s is None
    assert page_state("m", [LATER], [replace(TARGET, at_s=103.0)]).tokens_per_s is None
    assert page_state("m", [DRAFTER], [TARGET]).busy is None


def test_utilization_is_at_most_one() -> None:
    assert page_state("m", [TARGET], [replace(LATER, step_s=15.0)]).busy == 1.0


def test_bars_lie_in_the_window_despite_clock_differences() -> None:
    ends = 1000.0
    window_s = page_state("m", [], []).window_ms / 1e3
    target = recording(
        "target",
        "t",
        *[(ends - window_s - 1, "verify", "a"), (ends - window_s + 1, "decided", "a")],
        *[(ends - 1, "verify", "ab"), (ends - 0.5, "decided", "ab")],
        offset_s=900.0,
    )
    drafter = recording("drafter", "d", (ends - 2, "draft ahead", "a"), (ends - 1.75, "drafted", "a"), offset_s=948.0)
    samples = [replace(DRAFTER, recording=drafter), replace(TARGET, recording=target)]
    d, t = page_state("m", [], samples).tracks
    assert (d.actor, d.role, d.bars) == ("d", "drafter", (("draft ahead", 1000.0, 250.0, 1),))
    assert (t.actor, t.role, t.bars) == ("t", "target", (("verify", 0.0, 1000.0, 1), ("verify", 2000.0, 500.0, 2)))


def test_unfinished_work_is_drawn_until_now() -> None:
    target = recording("target", "t", (98.0, "verify", "a"), (98.5, "decided", "a"), (99.0, "verify", "ab"))
    drafter = recording("drafter", "d", (98.0, "draft", "a"), (99.75, "drafted", "a"), (99.75, "draft ahead", "a"))
    samples = [replace(DRAFTER, at_s=100.0, recording=drafter), replace(TARGET, recording=target)]
    d, t = page_state("m", [], samples).tracks
    assert d.bars == (("draft", 1000.0, 1750.0, 1), ("draft ahead", 2750.0, 250.0, 1))
    assert t.bars == (("verify", 1000.0, 500.0, 1), ("verify", 2000.0, 1000.0, 2))


def test_a_large_fleet_is_cut() -> None:
    events = [(100 - 2 + at / 1000, what, "a") for at in range(1000) for what in ("verify", "decided")]
    busy = replace(TARGET, recording=recording("target", "t", *events))
    names = [f"t{number}" for number in range(999)]
    others = [replace(TARGET, name=name, recording=recording("target", name)) for name in names]
    state = page_state("m", [], [busy, *others])
    assert 0 < len(state.tracks) <= len(state.targets) < 100
    assert len(state.targets) + state.unlisted == 1000
    assert 0 < len(state.tracks[0].bars) < 1000
    assert state.tracks[0].bars[-1][1] == 1999.0, "the latest are kept"
    assert len(state.model_dump_json()) < 50_000


def test_state_contains_no_session_names() -> None:
    secret = recording("target", "t", (99.0, "verify", "X"), (99.5, "decided", "X"))
    state = page_state("m", [], [replace(TARGET, recording=secret)])
    assert state.tracks[0].bars == (("verify", 2000.0, 500.0, 1),)
    assert "X" not in state.model_dump_json()
