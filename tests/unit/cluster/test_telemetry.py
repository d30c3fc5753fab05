"""Tests the timeline's ring buffer, and spans between the events of all actors."""

import itertools
import random
from typing import Any

import pytest
from pydantic import TypeAdapter

from cluster.telemetry import (
    Actor,
    Event,
    Recording,
    Span,
    Timeline,
    pack,
    packed,
    spans,
    unpack,
    unpacked,
)


def test_the_latest_events_stay_in_logical_order():
    now = iter([3.0, 3.0, 2.0])  # a clock may stop or jump back, but events keep their order
    timeline = Timeline(lambda: next(now), capacity=2)
    for name in ("a", "b", "c"):
        timeline.record(name, "s")
    assert timeline.events() == [Event(1, 3.0, "b", ("s",)), Event(2, 2.0, "c", ("s",))]


def test_a_recording_carries_the_offset_of_its_clock():
    timeline = Timeline(lambda: 5.0)
    timeline.record("a", "s")
    assert timeline.recording(lambda: 1005.0) == Recording(1000.0, (Event(0, 5.0, "a", ("s",)),))


def test_the_latest_seconds_hold_the_named_events_in_order():
    now = [0.0]
    timeline = Timeline(lambda: now[0])
    for at, name in enumerate(["a", "b", "a", "c", "b"]):
        now[0] = float(at)
        timeline.record(name, "s")
    latest = timeline.latest(2.0, {"a", "b"}, lambda: 104.0)
    assert latest == Recording(100.0, (Event(2, 2.0, "a", ("s",)), Event(4, 4.0, "b", ("s",))))


def actor(role: str, *events: tuple[float, str, str], offset: float = 0.0) -> Actor:
    """Returns an actor whose clock is `offset` behind wall time; sessions have one-letter names."""
    made = tuple(Event(n, at - offset, name, tuple(sessions)) for n, (at, name, sessions) in enumerate(events))
    return Actor(role, f"{role} 1", Recording(offset, made))


def test_a_round_has_all_its_stages_in_wall_time():
    drafter = actor(
        "drafter",
        *[(1.0, "draft", "ab"), (2.0, "drafted", "ab"), (2.0, "sent", "a"), (6.5, "verdict", "a"), (7.0, "draft", "a")],
        offset=0.5,
    )
    target = actor("target", (2.5, "block", "a"), (3.0, "verify", "a"), (6.0, "decided", "a"), offset=-8.0)
    router = actor("router", (6.25, "commit", "a"))
    assert spans([router, target, drafter]) == [
        Span("drafter 1", "drafter", "draft", 1.0, 2.0, ("a", "b")),
        Span("drafter 1", "drafter", "send", 2.0, 2.5, ("a",)),
        Span("target 1", "target", "wait", 2.5, 3.0, ("a",)),
        Span("target 1", "target", "verify", 3.0, 6.0, ("a",)),
        Span("router 1", "router", "commit", 6.0, 6.25, ("a",)),
        Span("target 1", "target", "return", 6.0, 6.5, ("a",)),
        Span("drafter 1", "drafter", "queue", 6.5, 7.0, ("a",)),
    ]


def test_a_span_starts_at_the_latest_start_before_its_end():
    target = actor("target", (1.0, "verify", "a"), (2.0, "verify", "a"), (3.0, "decided", "a"), (4.0, "decided", "a"))
    assert [(span.began_s, span.ended_s) for span in spans([target])] == [(2.0, 3.0)]


def test_an_end_whose_start_was_overwritten_gives_no_span():
    assert spans([actor("target", (3.0, "decided", "a"), (4.0, "verify", "a"))]) == []


def test_drafting_ahead_has_its_own_spans():
    drafter = actor(
        "drafter", (1.0, "draft", "a"), (2.0, "drafted", "a"), (2.0, "draft ahead", "a"), (3.0, "drafted", "a")
    )
    assert [(span.name, span.began_s) for span in spans([drafter])] == [("draft", 1.0), ("draft ahead", 2.0)]


def test_a_block_sent_during_a_pass_does_not_belong_to_the_pass_before():
    """A lookahead pass ended at 2.0 without blocks; the next pass sends a block after its first forward pass."""
    drafter = actor(
        "drafter", (1.0, "draft ahead", "a"), (2.0, "drafted", "a"), (4.0, "draft ahead", "a"), (5.0, "sent", "a")
    )
    target = actor("target", (5.25, "block", "a"))
    assert [(span.began_s, span.ended_s) for span in spans([drafter, target]) if span.name == "send"] == [(5.0, 5.25)]


def a_long_recording(events: int, sessions: int) -> Actor:
    draw = random.Random(0)
    names = [f"{draw.getrandbits(128):032x}" for _ in range(sessions)]
    times = itertools.accumulate(draw.randrange(1, 30_000) for _ in range(events))
    found = (
        Event(
            100 + index, at / 1e6, draw.choice(["verify", "decided", "block"]), tuple(draw.sample(names, sessions // 2))
        )
        for index, at in enumerate(times)
    )
    return Actor("target", "target 1", Recording(12.5, tuple(found)))


def test_a_recording_round_trips():
    for actor in (a_long_recording(500, 4), Actor("router", "router 1", Recording(0.0, ()))):
        assert unpack(pack(actor)) == actor


def test_a_recording_too_long_for_a_message_is_cut_to_its_latest_events():
    actor = a_long_recording(4096, 64)
    arrived = unpack(packed := pack(actor)).recording.events
    assert len(packed) < 100 * 1024, "Ray carries larger answers through its object store"
    assert 0 < len(arrived) < 4096
    assert arrived == actor.recording.events[-len(arrived) :]


@pytest.mark.parametrize(
    "wrong",
    [
        {"passed": [1, 2]},
        {"named": [2, 0, 0]},
        {"named": [0, -1, 0]},
        {"grouped": [0, 1, 7]},
        {"groups": [[0], [5]]},
        {"groups": [[0], [-1]]},
        {"sessions": []},
        {"first": None},
    ],
    ids=str,
)
def test_a_recording_that_contradicts_itself_is_refused(wrong):
    sent = actor("target", (1.0, "verify", "a"), (2.0, "decided", "b"), (3.0, "verify", "a"))
    fields = unpacked(pack(sent), TypeAdapter(dict[str, Any]))
    assert unpack(packed(fields)) == sent
    with pytest.raises(ValueError, match=r"malformed recording|_Columns|argument 2 is longer"):
        unpack(packed({**fields, **wrong}))
