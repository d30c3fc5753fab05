"""Tests the replicas in `slipstream status`."""

from contextlib import nullcontext
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
from rich.console import Group

from cluster.audit import OUTCOMES
from serve_app import status
from serve_app.status import audits_table, ray_status, replicas_table, targets_table


def a_target(**changes: Any) -> dict[str, Any]:
    nothing = {"accepted_tokens": 0, "wasted_tokens": 0, "step_s": 0.0, "idle_s": 0.0, "rebased": 0, "desyncs": 0}
    return {**nothing, "dropped": {}} | changes


def shown_rows(targets: list[dict[str, Any]], drafters: list[dict[str, Any]]) -> dict[str, str]:
    table = replicas_table(targets, drafters)
    names, values = (list(column.cells) for column in table.columns)
    return {str(name): str(value) for name, value in zip(names, values, strict=True)}


def test_replicas_are_summed() -> None:
    targets = [
        a_target(accepted_tokens=30, wasted_tokens=10, step_s=6.0, dropped={"late": 2, "stale": 1}, desyncs=1),
        a_target(accepted_tokens=30, wasted_tokens=30, idle_s=2.0, dropped={"late": 3}, rebased=4),
    ]
    drafters = [
        {"counts": {"guess_hit": 6, "guess_miss": 1, "passes": 5}},
        {"counts": {"guess_miss": 1, "passes_ahead": 15}},
    ]
    assert shown_rows(targets, drafters) == {
        "drafting passes ahead of a verdict": "0.75 (15 of 20)",
        "guess hit rate": "0.75 (6 of 8)",
        "wasted draft tokens": "0.40 (40 of 100)",
        "late blocks used": "4",
        "dropped blocks": "6",
        "of them late": "5",
        "of them stale": "1",
        "desyncs": "1",
        "target idle": "0.25",
    }


def test_bytes_per_token_are_shown_for_targets_with_hidden_states() -> None:
    states = {"verdict": 10, "apart": 30, "verdict_bytes": 1000, "apart_bytes": 3000}
    rows = shown_rows([a_target(states=states), a_target(states=states), a_target()], [])
    assert rows["hidden states sent, bytes per token"] == "100.00 (80 tokens)"
    assert rows["of them with verdicts"] == "0.25 (20 of 80)"


def test_no_rates_without_activity() -> None:
    rows = shown_rows([a_target()], [{"counts": {}}])
    assert rows["guess hit rate"] == "- (0 of 0)"
    assert rows["target idle"] == "-"
    assert rows["dropped blocks"] == "0"


def cells(targets: list[dict[str, Any]]) -> dict[str, list[str]]:
    return {str(column.header): [str(cell) for cell in column.cells] for column in targets_table(targets).columns}


def test_a_target_shows_whether_it_requests_drafts() -> None:
    a_row = {"attention": [{"chosen": "gathered", "tried": ()}], "numerics": ["invariant"]}
    off = {"non_speculative_rate": 31.7, "gain": 0.93, "on": 0.0}
    on = {"non_speculative_rate": 31.7, "gain": 1.32, "on": 1.0}
    assert cells([a_row | {"pid": pid, "speculation": one} for pid, one in ((7, off), (8, on))]) == {
        "pid": ["7", "8"],
        "attention": ["gathered", "gathered"],
        "numerics": ["invariant", "invariant"],
        "non-speculative tokens/s": ["31.7", "31.7"],
        "gain from speculation": ["0.93", "1.32"],
        "speculation": ["off", "on"],
    }


def test_a_target_shows_why_other_attention_backends_were_rejected() -> None:
    tried = (
        {"name": "gathered", "step_ms": 2.5, "refused": ""},
        {"name": "flashinfer", "step_ms": None, "refused": "ImportError: No module named 'flashinfer'"},
    )
    report = {"chosen": "gathered", "tried": tried}
    speculation = {"non_speculative_rate": 0, "gain": 1, "on": 1}
    target = {"pid": 7, "attention": [report, report], "numerics": ["fast"], "speculation": speculation}
    (shown,) = cells([target])["attention"]
    assert shown.splitlines()[0] == "gathered (SLOW: no faster backend works on this GPU)"
    assert shown.partition("\n")[2] == "  gathered: 2.50 ms\n  flashinfer: ImportError: No module named 'flashinfer'"


def test_audit_outcomes_are_summed_including_zeros() -> None:
    routers = [
        {"audits": dict.fromkeys(OUTCOMES, 0) | counted, "audits_waiting": 2, "widest_near_tie": tie}
        for counted, tie in (({"equal": 3}, 0.25), ({"equal": 2, "near_tie": 1}, 0.125))
    ]
    names, values = (list(column.cells) for column in audits_table(routers).columns)
    rows = dict(zip(names, values, strict=True))
    assert (rows["equal"], rows["near_tie"], rows["differs"], rows["waiting"]) == ("5", "1", "0", "4")
    assert rows["widest near-tie, in logits"] == "0.25"


@pytest.mark.parametrize("left", [{}, {"ours": {"deployments": {}}}], ids=["none of it", "no deployments"])
def test_an_application_that_ends_while_queried_reports_nothing(left: dict[str, Any]) -> None:
    running = MagicMock(status=MagicMock(return_value=MagicMock(applications={"ours": MagicMock(deployments={})})))
    with patch.multiple(
        status,
        connected=nullcontext,
        serve=running,
        deployed=MagicMock(),
        broadcast=MagicMock(return_value=[]),
        serve_details=MagicMock(return_value={"applications": left}),
    ):
        shown = ray_status("auto", "ours")
    assert isinstance(shown, Group)
    said = str(shown.renderables[-1])
    assert said.startswith("The replicas of ours do not report their counters: Serve no longer lists its Target")
