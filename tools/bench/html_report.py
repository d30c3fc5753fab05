"""Report of a benchmark as one self-contained HTML file with tables and curves."""

from collections.abc import Iterator, Sequence
from html import escape

from serve_app.tables import shown
from tools.bench.latencies import MEASURES, QUANTILES, LoadPoint
from tools.bench.tables import milliseconds
from tools.svg import curves

NAMES = {
    "ttft": "Time to the first token",
    "tpot": "Time per output token after the first",
    "itl": "Time between two events of a stream",
}
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .8rem; border-bottom: 1px solid #ccc; }
th:first-child { text-align: left; }
svg { max-width: 100%; height: auto; }
"""


def html_report(title: str, conditions: str, load: str, points: Sequence[LoadPoint]) -> str:
    """Renders the report; `load` is the unit of the points' load, such as "requests/s"."""
    body = "\n".join([_table(load, points), *_pictures(load, points)])
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n'
        f"<body><h1>{escape(title)}</h1><p>{escape(conditions)}</p>\n{body}\n</body></html>\n"
    )


def _table(load: str, points: Sequence[LoadPoint]) -> str:
    names = [f"{measure.upper()} {quantile}, ms" for measure in MEASURES for quantile in QUANTILES]
    heads = ["arm", load, "tokens/s", "answers", "failed", *names]
    rows = ["".join(f'<th scope="col">{escape(head)}</th>' for head in heads)]
    for point in points:
        values = [f"{point.load:g}", shown(point.tokens_per_s, ".1f"), str(point.answers), str(point.failed)]
        values += [milliseconds(point, measure, quantile) for measure in MEASURES for quantile in QUANTILES]
        rows.append(f'<th scope="row">{escape(point.arm)}</th>' + "".join(f"<td>{value}</td>" for value in values))
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in rows) + "</table>"


def _pictures(load: str, points: Sequence[LoadPoint]) -> Iterator[str]:
    arms = list(dict.fromkeys(point.arm for point in points))
    speeds = {arm: [(point.load, point.tokens_per_s) for point in points if point.arm == arm] for arm in arms}
    yield f"<h2>Throughput</h2>{curves(speeds, {}, load, 'tokens/s')}"
    for measure in MEASURES:
        lines = {
            f"{arm}, {quantile}": [
                (point.load, 1e3 * seconds)
                for point in points
                if point.arm == arm and (seconds := point.quantile_s(measure, quantile)) is not None
            ]
            for arm in arms
            for quantile in QUANTILES
        }
        if any(lines.values()):
            told = {name: line for name, line in lines.items() if line}
            yield f"<h2>{NAMES[measure]}</h2>{curves(told, {}, load, 'ms')}"
