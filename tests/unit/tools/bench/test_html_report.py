"""The report is a single file with all numbers and without external resources."""

import re
from html.parser import HTMLParser

from serve_app.endpoint_client import TimedAnswer
from tools.bench.latencies import Latencies, LoadPoint
from tools.bench.reports import html_report


def point(arm: str, load: float, first_s: float) -> LoadPoint:
    answers = [TimedAnswer("", 11, 0, 0, first_s, first_s + 1.0, (0.123, 0.123))]
    return LoadPoint(arm, load, 44.0 * load, 1, 0, Latencies.of(answers))


class Reading(HTMLParser):
    """Parser that asserts properly nested elements, and collects table cells."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"td", "th"}:
            self.cells.append(data)


def test_the_report_is_complete_and_loads_nothing_external() -> None:
    points = [point("speculative", 1, 0.25), point("speculative", 2, 0.5), point("plain", 1, 0.75)]
    text = html_report("bench: a<b", "12 requests", "requests/s", points)
    reading = Reading()
    reading.feed(text)
    assert reading.open == []
    assert "a&lt;b" in text
    row = reading.cells.index("plain")
    assert reading.cells[row : row + 6] == ["plain", "1", "44.0", "1", "0", "750"]
    assert text.count("<svg") == 4, "throughput, TTFT, TPOT, ITL"
    assert not re.search(r"""(src|href)=(?!"#)|@import|url\((?!#)""", text)


def test_unmeasured_values_have_no_chart() -> None:
    answers = [TimedAnswer("", 1, 0, 0, 0.5, 0.5)]
    points = [LoadPoint("plain", load, 1.0, 1, 0, Latencies.of(answers)) for load in (1, 2)]
    assert html_report("t", "c", "requests/s", points).count("<svg") == 2
