"""Tests the content of charts through matplotlib's objects and the SVG text."""

import xml.etree.ElementTree as ElementTree
from itertools import pairwise

import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from tools.charts import Bar, line_chart, svg, timeline


def rows_of(figure: Figure) -> list[tuple[float, float]]:
    """Returns the vertical extent of each lane of bars, from the top."""
    paths = [path for lane in figure.axes[0].collections for path in lane.get_paths()]
    return [(min(y), max(y)) for path in paths for y in [path.vertices[:, 1]]]


def test_line_chart_plots_points_and_levels():
    figure = line_chart({"a": [(1, 10.0), (2, 30.0)], "b": [(2, 5.0)]}, {"level": 20.0}, "sessions", "tokens/s")
    axes = figure.axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("sessions", "tokens/s")
    lines = {str(line.get_label()): line for line in axes.lines}
    assert list(lines) == ["a", "b", "level"]
    assert lines["a"].get_xydata().tolist() == [[1, 10], [2, 30]]
    assert set(lines["level"].get_ydata()) == {20.0}
    assert lines["level"].is_dashed()
    assert len({line.get_color() for line in axes.lines}) == 3
    assert axes.get_ylim()[0] == 0
    assert [text.get_text() for text in figure.legends[0].texts] == ["a", "b", "level"]


def test_bars_are_cut_at_the_window():
    figure = timeline([Bar("t", "k", -5.0, 50.0)], 0.0, 10.0, "ms")
    assert figure.axes[0].get_xlim() == (0.0, 10.0)


def test_overlapping_bars_of_one_track_do_not_cover_each_other():
    bars = [Bar("t", f"k{index}", 0.0, 10.0 + index) for index in range(6)]
    rows = rows_of(timeline([*bars, Bar("u", "k", 0.0, 1.0)], 0.0, 20.0, "ms"))
    assert len(rows) == 7
    assert all(upper[1] <= lower[0] + 1e-9 for upper, lower in pairwise(rows))


def test_timeline_labels_its_rows_and_axis():
    figure = timeline([Bar("drafter", "a", 0.0, 1.0), Bar("target", "b", 0.5, 2.0)], 0.0, 2.0, "ms")
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["drafter", "target"]
    assert axes.get_xlabel() == "ms"
    drafter, target = axes.collections
    assert isinstance(drafter, PolyCollection)
    assert drafter.get_facecolor().tolist() != target.get_facecolor().tolist()


def test_all_text_lies_within_the_image():
    many = [Bar("a track with a name far longer than usual", f"request {n}", n, n + 5.0) for n in range(30)]
    figure = timeline(many, 0.0, 123.45678, "ms")
    figure.draw_without_rendering()
    drawn = {text.strip() for text in ElementTree.fromstring(svg(figure)).itertext() if text.strip()}
    texts = [text for text in figure.findobj(Text) if text.get_text() in drawn]
    assert len(texts) > 31
    for text in texts:
        box = text.get_window_extent()
        assert -1 <= box.x0 <= box.x1 <= figure.bbox.x1 + 1, text
        assert -1 <= box.y0 <= box.y1 <= figure.bbox.y1 + 1, text


@pytest.mark.parametrize("name", ["<t>", "k&k", "$a$ and $b"])
def test_names_appear_verbatim(name: str):
    for figure in (timeline([Bar(name, "k", 0.0, 1.0)], 0.0, 1.0, "ms"), line_chart({name: [(0, 1)]}, {}, "x", "y")):
        assert name in {text.strip() for text in ElementTree.fromstring(svg(figure)).itertext()}


def test_equal_charts_give_equal_text():
    first, second = (svg(line_chart({"a": [(0, 1), (1, 2)]}, {"b": 1.0}, "x", "y")) for _ in range(2))
    assert first == second
