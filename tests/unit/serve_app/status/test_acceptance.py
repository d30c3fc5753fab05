"""Tests acceptance rates in `slipstream status`."""

from typing import Any

from rich.table import Table

from cluster.draft_quality import AcceptanceStats, LoadCheck, kind_of
from serve_app.status import acceptance_table, drafters_table, handovers_table, recoveries_table


def rows(table: Table) -> list[tuple[str, ...]]:
    columns = [[str(cell) for cell in column.cells] for column in table.columns]
    return list(zip(*columns, strict=True))


def a_drafter(name: str, check: LoadCheck) -> dict[str, Any]:
    return {"name": name, "address": "1.2.3.4:5", "method": "draft_model", "load_check": check.summary()}


def test_a_drafter_far_below_its_confidence_is_named():
    bad = LoadCheck(0.8, 1000, 50, 600.0)
    good = LoadCheck(0.8, 1000, 780, 600.0)
    shown = rows(drafters_table([a_drafter("a", bad), a_drafter("b", good), a_drafter("c", LoadCheck())]))
    assert [row[3:5] for row in shown] == [("0.80", "0.05"), ("0.80", "0.78"), ("-", "-")]
    assert shown[0][5].startswith("far below: the target accepts 5 % of the draft's first tokens")
    assert [row[5] for row in shown[1:]] == ["as expected", "0 tokens so far"]


def test_a_draft_that_learns_is_shown_with_its_version():
    shown = rows(drafters_table([a_drafter("a", LoadCheck()) | {"draft_version": {"version": 3}}]))
    assert shown[0][2] == "draft_model, version 3"


def test_remedies_are_summed_over_routers():
    routers = [
        {"remedies": {("d", "resynced"): 2}},
        {"remedies": {("d", "resynced"): 1, ("e", "given up"): 1}},
    ]
    assert rows(recoveries_table(routers)) == [("d", "3", "0"), ("e", "0", "1")]


def test_acceptance_is_listed_by_kind_and_summed_over_targets():
    tallies = [AcceptanceStats(), AcceptanceStats()]
    for tally in tallies:
        tally.block_verified("a", kind_of(600, True), requested=2, accepted=1)
        tally.block_verified("a", kind_of(600, False), requested=1, accepted=0)
    tallies[0].block_verified("a", kind_of(600, True), requested=2, accepted=2)
    shown = rows(acceptance_table([{"tally": tally.rows()} for tally in tallies], [a_drafter("a", LoadCheck())]))
    assert [row[:7] for row in shown] == [
        ("a", "draft_model", "512-1023", "computed", "2", "0.00", "-"),
        ("a", "draft_model", "512-1023", "cached", "3", "1.00", "0.33"),
    ]


def test_handovers_are_listed_by_cause_and_summed_over_routers():
    routers = [
        {"handovers": {("target", "planned"): 2, ("drafter", "lost"): 1}},
        {"handovers": {("target", "planned"): 1, ("target", "lost"): 4}},
    ]
    assert rows(handovers_table(routers)) == [("target", "3", "4"), ("drafter", "0", "1")]
