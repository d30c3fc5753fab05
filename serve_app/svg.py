"""Pictures as SVG text: rectangles, lines and words, and two ways to arrange them.

Enough for a Gantt picture and for curves over a few points, without a plotting library. Knows nothing of what is
shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape, quoteattr

COLOURS = ("#4878a8", "#e49444", "#6a9f58", "#d1615d", "#85b6b2", "#967662", "#a87c9f", "#7d7d7d")
FONT = 'font-family="sans-serif" fill="#333"'
LINE_HEIGHT = 20


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """One each, in order; they repeat when there are too many names."""
    return {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(names)}


class Drawing:
    """Collects shapes; `str` gives the picture."""

    def __init__(self, width: float, height: float) -> None:
        self._width = width
        self._height = height
        self._shapes: list[str] = []

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

    def legend(self, x: float, y: float, colours: Mapping[str, str]) -> None:
        """Names beside their colours, in a row."""
        for name, colour in colours.items():
            self.rect(x, y - 10, 12, 12, colour)
            self.text(x + 16, y, name)
            x += 32 + 7 * len(name)

    def __str__(self) -> str:
        size = f'width="{self._width:.0f}" height="{self._height:.0f}"'
        body = "\n".join(self._shapes)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n'
            f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
        )


# ---------------------------------------------------------------- a Gantt picture


@dataclass(frozen=True, slots=True)
class Bar:
    """Something that lasted."""

    track: str
    kind: str  # bars of a kind share a colour
    began: float
    ended: float
    title: str = ""


def gantt(bars: Sequence[Bar], begins: float, ends: float, unit: str, width: float = 1200) -> str:
    """A line for each track, in order of appearance; bars are cut at the window's ends."""
    tracks = list(dict.fromkeys(bar.track for bar in bars))
    left = 190.0
    top = 40.0
    colours = colours_of(sorted({bar.kind for bar in bars}))
    scale = (width - left - 20) / (ends - begins)
    bottom = top + LINE_HEIGHT * len(tracks)
    drawing = Drawing(width, bottom + 30)
    drawing.legend(left, 20, colours)
    for index, track in enumerate(tracks):
        drawing.text(left - 8, top + LINE_HEIGHT * index + 14, track, anchor="end")
    for bar in bars:
        x0 = max(bar.began, begins)
        x1 = min(bar.ended, ends)
        if x1 >= x0:
            y = top + LINE_HEIGHT * tracks.index(bar.track) + 2
            drawing.rect(
                left + (x0 - begins) * scale,
                y,
                max(1.0, (x1 - x0) * scale),
                LINE_HEIGHT - 4,
                colours[bar.kind],
                bar.title,
            )
    for tick in range(6):
        value = (ends - begins) * tick / 5
        drawing.text(left + value * scale, bottom + 18, f"{value:.4g} {unit}", anchor="middle")
    return str(drawing)


# ---------------------------------------------------------------- curves


def curves(
    lines: Mapping[str, Sequence[tuple[float, float]]],
    levels: Mapping[str, float],
    x_title: str,
    y_title: str,
    size: tuple[float, float] = (720, 420),
) -> str:
    """Lines through points, and dashed levels to compare them with; the vertical axis begins at 0."""
    (width, height) = size
    (left, top, bottom) = (70.0, 60.0, 50.0)
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
