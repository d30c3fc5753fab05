"""Pictures as SVG text: rectangles, lines, text, a Gantt chart, and curves over a few points.

No plotting library is needed.
"""

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

COLOURS = ("#4878a8", "#e49444", "#6a9f58", "#d1615d", "#85b6b2", "#967662", "#a87c9f")
GREY = "#b0b0b0"
GOLDEN_ANGLE = 0.381966  # fraction of the hue circle: any number of hues at this step stay apart
FONT = 'font-family="sans-serif" fill="#333"'
LETTER_WIDTH = 7
LINE_HEIGHT = 20


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """Assigns colours in order; no two names share one."""
    return {name: COLOURS[index] if index < len(COLOURS) else _further(index) for index, name in enumerate(names)}


def _further(index: int) -> str:
    channels = colorsys.hls_to_rgb(index * GOLDEN_ANGLE % 1, 0.38, 0.6)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


class Drawing:
    """Collects shapes; `str` returns the picture."""

    def __init__(self, width: float, height: float = 0.0) -> None:
        self._width = width
        self._height = height
        self._shapes: list[str] = []

    def end_at(self, height: float) -> None:
        """Sets the height, if it is known only after drawing."""
        self._height = height

    def rect(self, x: float, y: float, width: float, height: float, colour: str, title: str = "") -> None:
        tip = f"<title>{escape(title)}</title>" if title else ""
        size = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
        self._shapes.append(f'<rect {size} fill="{colour}">{tip}</rect>')

    def line(self, points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> None:
        path = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self._shapes.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{dash}/>')

    def text(self, x: float, y: float, words: str, *, anchor: str = "start") -> None:
        place = f'x="{x:.2f}" y="{y:.2f}" font-size="12" text-anchor={quoteattr(anchor)}'
        self._shapes.append(f"<text {place} {FONT}>{escape(words)}</text>")

    def legend(self, x: float, y: float, colours: Mapping[str, str]) -> float:
        """Draws names beside their colours, in as many rows as needed; returns the last row's baseline."""
        left = x
        for name, colour in colours.items():
            wide = 32 + LETTER_WIDTH * len(name)
            if x > left and x + wide > self._width:
                x = left
                y += LINE_HEIGHT
            self.rect(x, y - 10, 12, 12, colour)
            self.text(x + 16, y, name)
            x += wide
        return y

    def __str__(self) -> str:
        size = f'width="{self._width:.0f}" height="{self._height:.0f}"'
        body = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        )


# ---------------------------------------------------------------- a Gantt picture

LEFT = 190.0  # left edge of the window, unless a track's name is longer
RIGHT = 20.0  # margin on the right of the window
TOP = 40.0
LEAST_LANE = 4.0  # height of a bar
LEAST_LISTED = 2.0  # least width of a bar whose colour is recognizable
TICKS = 5


@dataclass(frozen=True, slots=True)
class Bar:
    """An interval on a track."""

    track: str
    kind: str  # bars of a kind share a colour
    began: float
    ended: float
    title: str = ""


@dataclass(frozen=True, slots=True)
class _Window:
    """The time interval that is shown, and its place in the picture."""

    begins: float
    ends: float
    left: float
    width: float

    def x(self, moment: float) -> float:
        return self.left + (min(max(moment, self.begins), self.ends) - self.begins) / self.length * self.width

    @property
    def length(self) -> float:
        return self.ends - self.begins

    def width_of(self, bar: Bar) -> float:
        return self.x(bar.ended) - self.x(bar.began)


def gantt(bars: Sequence[Bar], begins: float, ends: float, unit: str, *, grey: str = "", width: float = 1200) -> str:
    """Draws a line for each track, in order of appearance; bars are cut at the window's ends.

    Overlapping bars of one track are drawn below each other. The legend names each visible kind, the kind `grey` last
    and in that colour.
    """
    tracks = _tracks([bar for bar in bars if bar.ended >= begins and bar.began <= ends])
    left = max(LEFT, 20 + LETTER_WIDTH * max(map(len, tracks), default=0))
    window = _Window(begins, ends, left, width - left - RIGHT)
    shown = sorted((bar for lanes in tracks.values() for lane in lanes for bar in lane), key=lambda bar: bar.began)
    kinds = list(dict.fromkeys(bar.kind for bar in shown if bar.kind != grey))
    colours = {**colours_of(kinds), grey: GREY}
    listed = {bar.kind for bar in shown if window.width_of(bar) >= LEAST_LISTED}
    drawing = Drawing(width)
    y = drawing.legend(left, 20, {kind: colour for kind, colour in colours.items() if kind in listed}) + TOP - 20
    for track, lanes in tracks.items():
        drawing.text(left - 8, y + 14, track, anchor="end")
        y = _draw_track(drawing, lanes, y, window, colours)
    _draw_axis(drawing, y + 18, window, unit)
    drawing.end_at(y + 30)
    return str(drawing)


def _tracks(bars: Sequence[Bar]) -> dict[str, list[list[Bar]]]:
    """Groups bars by track, in lanes without overlaps."""
    tracks: dict[str, list[list[Bar]]] = {bar.track: [] for bar in bars}
    for bar in sorted(bars, key=lambda bar: bar.began):
        lanes = tracks[bar.track]
        free = next((lane for lane in lanes if lane[-1].ended <= bar.began), None)
        if free is None:
            lanes.append([bar])
        else:
            free.append(bar)
    return tracks


def _draw_track(
    drawing: Drawing, lanes: Sequence[Sequence[Bar]], y: float, window: _Window, colours: Mapping[str, str]
) -> float:
    """Draws a track from `y` on; returns where the next one begins."""
    height = max(LEAST_LANE, (LINE_HEIGHT - 4) / len(lanes))
    for index, lane in enumerate(lanes):
        for bar in lane:
            wide = max(1.0, window.width_of(bar))
            drawing.rect(window.x(bar.began), y + 2 + index * height, wide, height, colours[bar.kind], bar.title)
    return y + 4 + height * len(lanes)


def _draw_axis(drawing: Drawing, y: float, window: _Window, unit: str) -> None:
    for tick in range(TICKS + 1):
        value = window.length * tick / TICKS
        anchor = "end" if tick == TICKS else "middle"  # the last label would be clipped
        drawing.text(window.x(window.begins + value), y, f"{value:.4g} {unit}", anchor=anchor)


# ---------------------------------------------------------------- curves


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    levels: Mapping[str, float],
    x_title: str,
    y_title: str,
    size: tuple[float, float] = (720, 420),
) -> str:
    """Draws lines through points, and dashed levels for comparison; the vertical axis begins at 0."""
    (width, height) = size
    left = 70.0
    top = 60.0
    bottom = 50.0
    points = [point for line in lines.values() for point in line]
    xs = [x for x, _ in points]
    ys = [*(y for _, y in points), *levels.values()]
    low = min(xs)
    high = max(xs)
    most = 1.05 * max(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / (high - low) if high > low else 0.5
        return left + across * (width - left - 30), height - bottom - y / most * (height - top - bottom)

    drawing = Drawing(width, height)
    colours = colours_of([*lines, *levels])
    drawing.legend(left, 20, colours)
    drawing.text(left, 42, y_title)
    drawing.text(width / 2, height - 12, x_title, anchor="middle")
    drawing.line([place(low, most), place(low, 0), place(high, 0)], "#333")
    for x in sorted(set(xs)):
        drawing.text(place(x, 0)[0], height - bottom + 18, f"{x:g}", anchor="middle")
    for part in range(5):
        y = most * part / 5
        drawing.text(left - 8, place(low, y)[1] + 4, f"{y:.4g}", anchor="end")
    for name, line in lines.items():
        drawing.line([place(x, y) for x, y in line], colours[name])
    for name, level in levels.items():
        drawing.line([place(low, level), place(high, level)], colours[name], dashed=True)
    return str(drawing)
