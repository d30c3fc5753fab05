"""The trace: spans as Perfetto reads them, and as a picture."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from cluster.telemetry import Actor, Event, Recording, Span, spans
from tools.svg import Bar, gantt
from tools.trace import TraceError, chrome_trace, gantt_picture, stages_table, window, write_trace

SVG = "{http://www.w3.org/2000/svg}"
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


def test_no_span_is_no_picture():
    with pytest.raises(TraceError, match="send a request first"):
        window([], 1.0)
    with pytest.raises(TraceError, match="ask for another one"):
        gantt_picture(SPANS, 0.0, 1.0)


def test_the_picture_shows_overlap():
    picture = ElementTree.fromstring(gantt_picture(SPANS, 100.0, 101.0))
    bars = {bar[0].text: bar.attrib for bar in picture.iter(f"{SVG}rect") if len(bar)}
    draft = bars["draft: a b"]
    verify = bars["verify: c"]
    assert float(verify["x"]) < float(draft["x"]) + float(draft["width"]), "drafting one overlaps verifying another"
    assert float(verify["y"]) > float(draft["y"]), "on lines of their own"
    assert draft["fill"] != verify["fill"]


def test_bars_are_cut_at_the_window():
    picture = ElementTree.fromstring(gantt([Bar("t", "k", -5.0, 50.0, "long")], 0.0, 10.0, "ms", width=1000))
    (bar,) = [bar.attrib for bar in picture.iter(f"{SVG}rect") if len(bar)]
    assert float(bar["x"]) == 190.0
    assert float(bar["x"]) + float(bar["width"]) == 980.0


def bars_of(picture: str) -> dict[str, dict[str, str]]:
    """By title: where each bar lies and its colour."""
    return {str(bar[0].text): bar.attrib for bar in ElementTree.fromstring(picture).iter(f"{SVG}rect") if len(bar)}


def legend_of(picture: str) -> dict[str, str]:
    """By name: its colour. A name follows the square of its colour."""
    shapes = list(ElementTree.fromstring(picture))
    squares = [(a, b) for a, b in pairwise(shapes) if a.get("width") == a.get("height") == "12.00"]
    return {str(name.text): str(square.get("fill")) for square, name in squares}


def test_what_several_go_through_has_a_colour_that_no_request_has():
    alone = [Span("drafter", "drafter", "send", index, index + 1.0, (f"session {index}",)) for index in range(20)]
    together = Span("target", "target", "verify", 0.0, 20.0, ("session 0", "session 1"))
    picture = gantt_picture([*alone, together], 0.0, 20.0)
    legend = legend_of(picture)
    assert len(legend) == 21
    assert len(set(legend.values())) == 21
    assert list(legend)[-1] == "several"
    assert bars_of(picture)["verify: session 0 session 1"]["fill"] == legend["several"]


def test_the_legend_names_requests_in_the_order_in_which_they_are_seen():
    late = Span("drafter", "drafter", "draft", 6.0, 9.0, ("a",))
    early = Span("target", "target", "verify", 1.0, 4.0, ("z",))
    picture = gantt_picture([late, early], 0.0, 10.0)
    legend = legend_of(picture)
    assert list(legend) == ["request 1", "request 2"]
    assert bars_of(picture)["verify: z"]["fill"] == legend["request 1"]


def test_the_legend_leaves_out_what_cannot_be_seen():
    seen = Span("target", "target", "verify", 0.0, 50.0, ("a",))
    too_short = Span("drafter", "drafter", "send", 10.0, 10.001, ("b",))
    batched = Span("drafter", "drafter", "draft", 20.0, 30.0, ("c", "d"))
    assert list(legend_of(gantt_picture([seen, too_short, batched], 0.0, 100.0))) == ["request 1", "several"]


def test_bars_of_one_track_that_overlap_do_not_cover_each_other():
    bars = [Bar("t", f"k{index}", 0.0, 10.0 + index, f"b{index}") for index in range(6)]
    drawn = bars_of(gantt([*bars, Bar("u", "k", 0.0, 1.0, "next")], 0.0, 20.0, "ms"))
    lanes = sorted((float(bar["y"]), float(bar["height"])) for bar in drawn.values())
    assert all(upper + height <= lower for (upper, height), (lower, _) in pairwise(lanes))
    assert max(drawn, key=lambda title: float(drawn[title]["y"])) == "next"


def test_every_word_lies_within_the_picture():
    many = [Bar("a track with a name far longer than usual", f"request {n}", n, n + 5.0) for n in range(30)]
    picture = ElementTree.fromstring(gantt(many, 0.0, 123.45678, "ms"))
    width = float(picture.attrib["width"])
    height = float(picture.attrib["height"])
    for word in picture.iter(f"{SVG}text"):
        long = 7 * len(str(word.text))
        x = float(word.attrib["x"])
        begins = x - {"start": 0.0, "middle": long / 2, "end": long}[word.attrib["text-anchor"]]
        assert 0 <= begins <= begins + long <= width, word.text
        assert 0 < float(word.attrib["y"]) <= height, word.text


def test_names_are_escaped():
    picture = ElementTree.fromstring(gantt([Bar("<t>", "k&k", 0.0, 1.0, "<&>")], 0.0, 1.0, "ms"))
    assert {"<t>", "k&k", "<&>"} <= {text.strip() for text in picture.itertext()}


def test_both_files_are_written(tmp_path: Path):
    write_trace(spans(actors()), tmp_path / "trace.json", tmp_path / "trace.svg", seconds=2.0, ends_before_s=0.0)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2
    ElementTree.fromstring((tmp_path / "trace.svg").read_text())


def test_each_stage_has_its_times_in_the_order_of_a_round():
    slower = [Span("target 8", "target", "verify", 0.0, 0.001 * ms, ("c",)) for ms in (4, 1, 2, 3)]
    columns = {column.header: list(column.cells) for column in stages_table([*SPANS, *slower]).columns}
    assert columns == {
        "stage": ["draft", "send", "verify"],
        "spans": ["1", "1", "5"],
        "median, ms": ["500.00", "100.00", "3.00"],
        "90 % below, ms": ["500.00", "100.00", "750.00"],
        "longest, ms": ["500.00", "100.00", "750.00"],
    }
