"""The timeline's ring."""

from cluster.timeline import Event, Timeline


def test_the_latest_events_stay_in_logical_order():
    now = iter([3.0, 3.0, 2.0])  # clocks may stand still or jump; the order may not
    timeline = Timeline(lambda: next(now), capacity=2)
    for name in ("a", "b", "c"):
        timeline.record(name, "s")
    assert timeline.events() == [Event(1, 3.0, "b", ("s",)), Event(2, 2.0, "c", ("s",))]
