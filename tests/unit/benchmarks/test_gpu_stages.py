"""Runs the stages of the GPU benchmark, without network, on a CPU with tiny models."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.benchmarks.scripts import module, script

CPU = torch.device("cpu")
stages = SimpleNamespace(
    **{name: module(f"gpu_stages.{name}") for name in ("correctness", "draft", "facts", "host", "results", "target")}
)
gpu_all = module("gpu_all")
CHECKS = ("BucketCheck", "PaddedCheck", "DecisionCheck", "InvariantResult")


def results_of(run: Callable[..., None], **setting: Any) -> dict[str, list[Any]]:
    """Runs a stage; returns its results by type."""
    found: list[Any] = []
    run(stages.results.Setting(CPU, is_tiny=True, **setting), found.append)
    return {kind.__name__: some for kind, some in stages.results.grouped(found).items()}


def test_facts_name_versions_and_bandwidth():
    found = results_of(stages.facts.run)
    assert found["Machine"][0].copy_bytes_per_s > 0
    assert {one.package: one.version for one in found["Version"]}["torch"] == torch.__version__
    assert "GpuFact" not in found, "a CPU has no clocks of a GPU"


def test_captured_steps_equal_eager_ones_in_every_bucket():
    found = results_of(stages.correctness.run)
    checks = found["BucketCheck"]
    assert [(check.model, check.tokens, check.samples) for check in checks] == [
        (model, tokens, samples)
        for model in ("llama", "gemma3")
        for tokens in (1, 2, 4, 8, 16, 24, 32, 40)
        for samples in (False, True)
    ]
    assert all(check.steps for check in checks), "every bucket has steps"
    assert all(check.passed for kind in CHECKS for check in found[kind])
    assert [check.trees for check in found["PaddedCheck"]] == [False, True]
    assert found["DecisionCheck"][0].blocks == 84


def test_a_wrong_captured_step_fails_the_stage(monkeypatch):
    correctness = stages.correctness
    monkeypatch.setattr(correctness, "capture_on", lambda device: break_capture)
    with pytest.raises(RuntimeError, match="only 4 of 36 checks passed"):
        results_of(correctness.run)


def test_an_error_in_a_check_leaves_the_others(monkeypatch):
    def broken(*_: Any) -> None:
        raise ValueError("no such kernel")

    monkeypatch.setattr(stages.correctness, "check_attention", broken)
    with pytest.raises(RuntimeError, match="only 34 of 35 checks passed"):
        results_of(stages.correctness.run)


def break_capture(step: Callable[[], Any]) -> Callable[[], Any]:
    """Captures a step with wrong logits."""
    return lambda: (output := step())._replace(logits=output.logits + 1)


def test_target_steps_of_all_shapes_are_measured():
    found = results_of(stages.target.run)
    steps = found["TargetStep"]
    shapes = {(step.mode, step.rows, step.tokens, step.context) for step in steps if step.sampling == "greedy"}
    assert shapes == {
        (mode, rows, tokens, context)
        for mode in ("eager", "captured")
        for rows in (1, 3)
        for tokens in ("1", "3", "tree 9")
        for context in (20, 40)
    }
    assert {step.sampling for step in steps} == {"greedy", "T = 1", "distinct"}
    assert all(step.step_ms > 0 and step.floor_ms > 0 for step in steps)
    counted = found["StepLaunches"]
    assert {(one.mode, one.rows, one.tokens) for one in counted} == {case[:3] for case in shapes}
    assert all(one.calls for one in counted)
    assert found["Captures"][0].shapes > 0


def test_parameters_of_rows_are_distinct():
    rows = [stages.target.parameters("distinct", row) for row in range(64)]
    assert len(set(rows)) == 64
    assert any(row.top_k for row in rows)
    assert any(row.top_p < 1 for row in rows)


def test_drafts_are_measured_and_missing_products_named():
    found = results_of(stages.draft.run)
    passes = [one for one in found["DraftPass"] if one.quantization == "none"]
    assert {(one.mode, one.sessions, one.draft_tokens) for one in passes} == {
        (mode, sessions, tokens)
        for mode in ("eager", "captured", "one graph")
        for sessions in (1, 3)
        for tokens in (1, 3)
    }
    assert {one.what for one in found["Unmeasured"]} >= {"fp8", "int4"}
    assert {one.mode for one in found["PassLaunches"]} == {"eager", "captured", "one graph"}


def test_bookkeeping_of_the_host_is_measured():
    found = results_of(stages.host.bookkeeping)
    figures = {(one.sessions, one.part) for one in found["HostPart"]}
    assert figures >= {(sessions, part) for sessions in (1, 4) for part in ("plan", "outcome to plan", "all")}


@pytest.mark.parametrize("stage", ["correctness", "draft", "target"])
def test_a_stage_without_time_says_what_it_leaves_out(stage):
    found = results_of(getattr(stages, stage).run, ends_s=0.0)
    assert {one.why for one in found["Unmeasured"]} >= {stages.results.OUT_OF_TIME}


def test_stages_keep_the_time_of_later_ones():
    assert gpu_all.allotted_s(500, (60, 100, 40)) == 360
    assert gpu_all.allotted_s(150, (60, 100, 40)) == 60, "a stage that fits takes its least time"
    assert gpu_all.allotted_s(59, (60, 100)) == 0


def test_reports_are_json_by_stage(tmp_path: Path):
    results = stages.results
    report = results.StageReport(
        "A",
        "facts",
        results.DONE,
        1.0,
        "fine",
        results=(results.Unmeasured("x", "y"), stages.host.HostPart(1, "all", float("nan"))),
    )
    path = tmp_path / "found.json"
    results.write(path, {"device": "cpu"}, [report])
    data = json.loads(path.read_text())
    assert data["device"] == "cpu"
    assert data["stages"]["A"]["state"] == "done"
    assert data["stages"]["A"]["results"] == {
        "Unmeasured": [asdict(report.results[0])],
        "HostPart": [{"sessions": 1, "part": "all", "ms": None}],
    }
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_a_random_pair_has_the_requested_agreement():
    pair = script("random_pair")
    target = pair.random_model(pair.config_of("tiny", 500, 4), CPU)
    found = pair.add_noise(target, 0.7)
    assert abs(found - 0.7) < 0.05
    draft = pair.random_model(pair.config_of("tiny", 500, 1), CPU)
    pair.silence(draft)
    assert pair.agreement(draft) == 1.0, "the draft walks on undisturbed"
