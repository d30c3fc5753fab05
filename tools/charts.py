"""Draws line charts and timelines with matplotlib, as SVG.

The extra `plot` installs matplotlib, which is imported only for drawing. Commands without charts start quickly and work
without it.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from cluster.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = {"svg.fonttype": "none", "text.parse_math": False, "font.size": 9}  # keeps text and "$" verbatim
GREY = "#b0b0b0"
GOLDEN_ANGLE = 0.381966  # step on the hue circle, which separates any number of hues
VISIBLE_SHARE = 0.002  # minimum visible bar width, as a share of the window
LEGEND_COLUMNS = 8


@dataclass(frozen=True, slots=True)
class Bar:
    """Interval on one track of a timeline. Bars of one kind share a colour."""

    track: str
    kind: str
    began: float
    ended: float


def require_matplotlib() -> None:
    """Raises ConfigError if matplotlib is not installed; call it before computing a chart's data."""
    if find_spec("matplotlib") is None:
        raise ConfigError("charts need matplotlib; install it with: pip install 'slipstream-serving[plot]'")


def svg(figure: "Figure") -> str:
    """Renders a chart as an SVG element, deterministically."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": "slipstream"}):
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = buffer.getvalue()
    return text[text.index("<svg") :]  # drop the XML prolog, which HTML does not allow


def line_chart(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    levels: Mapping[str, float],
    x_label: str,
    y_label: str,
    size: tuple[float, float] = (7.2, 4.2),
) -> "Figure":
    """Plots lines through points, and dashed horizontal lines at `levels`. `size` is in inches."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
        colours = _colours([*lines, *levels])
        for name, points in lines.items():
            xs, ys = zip(*points, strict=True)
            axes.plot(xs, ys, color=colours[name], marker=".", label=name)
        for name, level in levels.items():
            axes.axhline(level, color=colours[name], linestyle="--", label=name)
        axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return figure


def timeline(bars: Sequence[Bar], begins: float, ends: float, unit: str, grey: str = "") -> "Figure":
    """Draws the bars of a window, one row per track in order of appearance; time starts at 0.

    Stacks overlapping bars of a track. The legend lists only visible kinds; the kind `grey` is grey and comes last.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    visible = sorted((bar for bar in bars if bar.ended >= begins and bar.began <= ends), key=lambda bar: bar.began)
    colours = {**_colours(list(dict.fromkeys(bar.kind for bar in visible if bar.kind != grey))), grey: GREY}
    shortest = VISIBLE_SHARE * (ends - begins)
    listed = {bar.kind for bar in visible if min(bar.ended, ends) - max(bar.began, begins) >= shortest}
    tracks = [track for track in dict.fromkeys(bar.track for bar in bars) if any(bar.track == track for bar in visible)]
    with rc_context(STYLE):
        legend = [Patch(color=colour, label=kind) for kind, colour in colours.items() if kind in listed]
        legend_rows = -(-len(legend) // LEGEND_COLUMNS)
        figure = Figure(figsize=(12, 0.8 + 0.3 * len(tracks) + 0.2 * legend_rows), layout="constrained")
        axes = figure.add_subplot(xlabel=unit, xlim=(0, ends - begins), ylim=(len(tracks), 0))
        axes.set_yticks([row + 0.5 for row in range(len(tracks))], tracks)
        for row, track in enumerate(tracks):
            lanes = _lanes([bar for bar in visible if bar.track == track])
            height = 0.8 / len(lanes)
            for index, lane in enumerate(lanes):
                spans = [(bar.began - begins, bar.ended - bar.began) for bar in lane]
                facecolors = [colours[bar.kind] for bar in lane]
                axes.broken_barh(spans, (row + 0.1 + index * height, height), facecolors=facecolors)
        if legend:
            figure.legend(handles=legend, loc="outside upper left", ncols=LEGEND_COLUMNS, frameon=False)
    return figure


def _colours(names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """Assigns a distinct colour to each name."""
    from matplotlib.colors import hsv_to_rgb

    return {name: tuple(hsv_to_rgb(((0.58 + index * GOLDEN_ANGLE) % 1, 0.6, 0.75))) for index, name in enumerate(names)}


def _lanes(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Distributes bars, sorted by start, over lanes without overlap."""
    lanes: list[list[Bar]] = []
    for bar in bars:
        free = next((lane for lane in lanes if lane[-1].ended <= bar.began), None)
        if free is None:
            lanes.append([bar])
        else:
            free.append(bar)
    return lanes
