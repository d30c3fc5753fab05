"""Tests traces: spans in Perfetto's format, and as a picture."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from cluster.telemetry import Actor, Event, Recording, Span, spans
from tools.trace import TraceError, chrome_trace, stages_table, trace_chart, window, write_trace

SPANS = [
    Span("drafter 7", "drafter", "draft", 100.0, 100.5, ("a", "b")),
    Span("target 8", "target", "verify", 100.25, 101.0, ("c",)),
    Span("drafter 7", "drafter", "send", 100.5, 100.6, ("a",)),
]


def actors() -> list[Actor]:
    drafter = Recording(90.0, (Event(0, 10.0, "draft", ("a",)), Event(1, 10.5, "drafted", ("a",))))
    target = Recording(0.0, (Event(0, 100.25, "verify", ("b",)), Event(1, 101.0, "decided", ("b",))))
    return [Actor("drafter", "drafter 7", drafter), Actor("target", "target 8", target)]


def test_a_process_for_each_actor_and_a_track_for_each_kind():
    events = chrome_trace(SPANS)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["drafter 7", "target 8"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(names[e["pid"]], tracks[e["pid"], e["tid"]], e["name"]) for e in spans] == [
        ("drafter 7", "draft", "draft"),
        ("target 8", "verify", "verify"),
        ("drafter 7", "send", "send"),
    ]


def test_times_are_microseconds_from_the_first_span():
    spans = [event for event in chrome_trace(SPANS)["traceEvents"] if event["ph"] == "X"]
    assert [event["ts"] for event in spans] == pytest.approx([0, 250_000, 500_000])
    assert [event["dur"] for event in spans] == pytest.approx([500_000, 750_000, 100_000])
    assert spans[0]["args"] == {"sessions": ["a", "b"]}


def test_the_window_ends_with_the_trace_or_earlier():
    assert window(SPANS, 0.5) == (100.5, 101.0)
    assert window(SPANS, 0.5, 0.25) == (100.25, 100.75)


def test_a_chart_needs_a_span():
    with pytest.raises(TraceError, match="send a request first"):
        window([], 1.0)
    with pytest.raises(TraceError, match="choose another window"):
        trace_chart(SPANS, 0.0, 1.0)


def legend_of(figure: Figure) -> dict[str, tuple[float, ...]]:
    """Returns colours by name."""
    return {str(patch.get_label()): tuple(patch.get_facecolor()) for patch in figure.legends[0].legend_handles}


def colours_of(figure: Figure, track: str) -> set[tuple[float, ...]]:
    """Returns the colours of a track's bars."""
    axes = figure.axes[0]
    row = [label.get_text() for label in axes.get_yticklabels()].index(track)
    lanes = [lane for lane in axes.collections if row <= lane.get_paths()[0].vertices[:, 1].min() < row + 1]
    return {tuple(colour) for lane in lanes for colour in lane.get_facecolor()}


def test_chart_shows_overlap():
    figure = trace_chart(SPANS, 100.0, 101.0)
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "drafter 7 draft",
        "drafter 7 send",
        "target 8 verify",
    ]
    draft, _, verify = (lane.get_paths()[0].vertices for lane in axes.collections)
    assert verify[:, 0].min() < draft[:, 0].max(), "drafting one overlaps verifying another"
    assert verify[:, 1].min() > draft[:, 1].max(), "in rows of their own"
    assert colours_of(figure, "drafter 7 draft") != colours_of(figure, "target 8 verify")


def test_spans_shared_by_requests_have_a_separate_color():
    alone = [Span("drafter", "drafter", "send", index, index + 1.0, (f"session {index}",)) for index in range(20)]
    together = Span("target", "target", "verify", 0.0, 20.0, ("session 0", "session 1"))
    figure = trace_chart([*alone, together], 0.0, 20.0)
    legend = legend_of(figure)
    assert len(legend) == 21
    assert len(set(legend.values())) == 21
    assert list(legend)[-1] == "several"
    assert colours_of(figure, "target verify") == {legend["several"]}


def test_legend_lists_requests_in_order_of_appearance():
    late = Span("drafter", "drafter", "draft", 6.0, 9.0, ("a",))
    early = Span("target", "target", "verify", 1.0, 4.0, ("z",))
    figure = trace_chart([late, early], 0.0, 10.0)
    legend = legend_of(figure)
    assert list(legend) == ["request 1", "request 2"]
    assert colours_of(figure, "target verify") == {legend["request 1"]}


def test_legend_omits_invisible_bars():
    seen = Span("target", "target", "verify", 0.0, 50.0, ("a",))
    too_short = Span("drafter", "drafter", "send", 10.0, 10.001, ("b",))
    batched = Span("drafter", "drafter", "draft", 20.0, 30.0, ("c", "d"))
    assert list(legend_of(trace_chart([seen, too_short, batched], 0.0, 100.0))) == ["request 1", "several"]


def test_both_files_are_written(tmp_path: Path):
    write_trace(spans(actors()), tmp_path / "trace.json", tmp_path / "trace.svg", seconds=2.0, ends_before_s=0.0)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2
    ElementTree.fromstring((tmp_path / "trace.svg").read_text())


def test_stage_times_are_listed_in_round_order():
    slower = [Span("target 8", "target", "verify", 0.0, 0.001 * ms, ("c",)) for ms in (4, 1, 2, 3)]
    columns = {column.header: list(column.cells) for column in stages_table([*SPANS, *slower]).columns}
    assert columns == {
        "stage": ["draft", "send", "verify"],
        "spans": ["1", "1", "5"],
        "median, ms": ["500.00", "100.00", "3.00"],
        "90 % below, ms": ["500.00", "100.00", "750.00"],
        "longest, ms": ["500.00", "100.00", "750.00"],
    }
