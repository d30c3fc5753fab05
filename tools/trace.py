"""`slipstream trace`: shows a deployment's recent activity as a Chrome trace, a Gantt chart and a table.

The trace opens in Perfetto (https://ui.perfetto.dev) and in chrome://tracing.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.table import Table

from cluster.errors import SlipstreamError
from cluster.telemetry import STAGES, Span
from serve_app.tables import shown, table
from tools.charts import Bar, require_matplotlib, svg, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MICRO = 1e6
SEVERAL = "several"  # kind of spans that serve several requests


class TraceError(SlipstreamError):
    """Raised if no spans were recorded."""


# ---------------------------------------------------------------- Chrome trace


def chrome_trace(found: Sequence[Span]) -> dict[str, Any]:
    """Converts spans: one process per actor, one track per kind of span; times start at the first span."""
    begins = min((span.began_s for span in found), default=0.0)
    processes = {name: index for index, name in enumerate(sorted({span.actor for span in found}), start=1)}
    tracks = {name: index for index, name in enumerate(dict.fromkeys(span.name for span in found), start=1)}
    events = [*_names(found, processes, tracks)]
    for span in found:
        events.append(
            {
                "ph": "X",
                "name": span.name,
                "cat": span.role,
                "pid": processes[span.actor],
                "tid": tracks[span.name],
                "ts": (span.began_s - begins) * MICRO,
                "dur": (span.ended_s - span.began_s) * MICRO,
                "args": {"sessions": list(span.sessions)},
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(found: Sequence[Span], processes: Mapping[str, int], tracks: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    for name, pid in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
    for actor, track in dict.fromkeys((span.actor, span.name) for span in found):
        where = {"pid": processes[actor], "tid": tracks[track]}
        yield {"ph": "M", "name": "thread_name", **where, "args": {"name": track}}


# ---------------------------------------------------------------- Gantt chart


def window(found: Sequence[Span], seconds: float, ends_before_s: float = 0.0) -> tuple[float, float]:
    """Returns the begin and end of a window of `seconds` that ends `ends_before_s` before the latest span."""
    if not found:
        raise TraceError("no span was recorded; send a request first")
    ends = max(span.ended_s for span in found) - ends_before_s
    return ends - seconds, ends


def trace_chart(found: Sequence[Span], begins: float, ends: float) -> "Figure":
    """Draws the activity in a window: one line per actor and kind of span, one colour per request.

    Requests are numbered by their first unshared span; spans of several requests are grey.
    """
    inside = [span for span in found if span.ended_s > begins and span.began_s < ends]
    if not inside:
        raise TraceError("no span lies in the window; choose another window")
    alone = [span.sessions[0] for span in sorted(inside, key=lambda span: span.began_s) if len(span.sessions) == 1]
    number = {session: index for index, session in enumerate(dict.fromkeys(alone), start=1)}
    inside.sort(key=lambda span: (span.actor, span.name, span.began_s))
    bars = [
        Bar(
            f"{span.actor} {span.name}",
            f"request {number[span.sessions[0]]}" if len(span.sessions) == 1 else SEVERAL,
            span.began_s * 1e3,
            span.ended_s * 1e3,
        )
        for span in inside
    ]
    return timeline(bars, begins * 1e3, ends * 1e3, "ms", grey=SEVERAL)


def write_trace(
    found: Sequence[Span], json_path: Path, picture_path: Path | None, seconds: float, ends_before_s: float
) -> None:
    """Writes the trace, and the chart if a path is given."""
    if picture_path is not None:
        require_matplotlib()
    begins, ends = window(found, seconds, ends_before_s)
    json_path.write_text(json.dumps(chrome_trace(found)) + "\n", encoding="utf-8")
    if picture_path is not None:
        picture_path.write_text(svg(trace_chart(found, begins, ends)), encoding="utf-8")


# ---------------------------------------------------------------- duration of stages


def stages_table(found: Sequence[Span]) -> Table:
    """Tabulates the duration of each stage of a round, in milliseconds."""
    made = table("Stages of a round", "stage", "spans", "median, ms", "90 % below, ms", "longest, ms")
    for stage in STAGES:
        seconds = sorted(span.ended_s - span.began_s for span in found if span.name == stage.name)
        if seconds:
            shares = median(seconds), seconds[len(seconds) * 9 // 10], seconds[-1]
            made.add_row(stage.name, str(len(seconds)), *(shown(1e3 * value) for value in shares))
    return made
