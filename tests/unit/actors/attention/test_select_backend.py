"""Selects the fastest correct attention backend, and reports why others were rejected."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, count
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from actors.attention import AttentionBackend, PaddedBackend, ScoreOptions, StepShape
from actors.attention.flashinfer import FlashInfer
from actors.attention.flat_rows import FlatRows
from actors.attention.padded import PaddedSdpa, PaddedSdpaPlan
from actors.attention.sdpa_gather import SdpaGather, SdpaGatherPlan
from actors.attention.select_backend import (
    AttentionReport,
    AttentionShape,
    Trial,
    TriedBackend,
    choose_attention,
    create_backend,
    fallback_warning,
    fastest,
)
from actors.attention.varlen import Varlen
from actors.compute.capture import CallCapture
from actors.compute.kv_cache import InputRow, PagedCache
from tests.unit.actors.attention.attention_kernels import FLASHINFER, varlen
from tests.unit.actors.attention.triton_interpreter import interpreted_paged

CPU = torch.device("cpu")
SHAPE = AttentionShape(layers=2, heads=4, kv_heads=2, head_dim=8, page_size=16, dtype=torch.float32)


class Clock:
    """Clock that only simulated backends advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class TimedBackend:
    """Gathering backend with a simulated duration per layer and a changed result."""

    takes_trees = True

    def __init__(
        self, name: str, clock: Clock, seconds: float, change: Callable[[Tensor], Tensor] = Tensor.clone
    ) -> None:
        self.name = name
        self.clock = clock
        self.seconds = seconds
        self.change = change

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> SdpaGatherPlan:
        paced = self

        class Plan(SdpaGatherPlan):
            def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
                paced.clock.now += paced.seconds
                return paced.change(super().__call__(query, pool, options))

        return Plan(rows, cache)


def getting_faster() -> Callable[[], float]:
    """Returns a clock on which every step is faster than the previous one."""
    looks = accumulate(1 / look**2 for look in count(1))
    return lambda: next(looks)


def failing() -> AttentionBackend:
    raise ImportError("no such library")


def test_a_model_with_special_scores_gets_the_backend_that_can():
    """No backend is measured, so this works on any device."""
    _, report = choose_attention(replace(SHAPE, plain=False), torch.device("cuda"))
    assert (report.chosen, report.is_fallback) == ("gathered", False)


def test_the_fastest_right_backend_is_chosen_and_others_have_a_reason(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("actors.attention.select_backend.SdpaGather", lambda: TimedBackend("gathered", clock, 3.0))
    makes = {
        "slow": lambda: TimedBackend("slow", clock, 2.0),
        "wrong": lambda: TimedBackend("wrong", clock, 0.5, lambda found: found * 1.01),
        "nan": lambda: TimedBackend("nan", clock, 0.5, lambda found: torch.full_like(found, torch.nan)),
        "quick": lambda: TimedBackend("quick", clock, 1.0),
        "absent": failing,
    }
    backend, report = fastest(makes, Trial(SHAPE, CPU), 1e-4, clock)
    assert backend.name == report.chosen == "quick"
    times = {tried.name: tried.step_ms for tried in report.tried}
    assert times == {"gathered": 6000, "slow": 4000, "wrong": None, "nan": None, "quick": 2000, "absent": None}
    refused = {tried.name: tried.refused for tried in report.tried if tried.refused}
    assert list(refused) == ["wrong", "nan", "absent"]
    assert refused["absent"] == "ImportError: no such library"


def test_the_reference_stays_where_nothing_is_faster():
    clock = Clock()
    backend, report = fastest({"absent": failing}, Trial(SHAPE, CPU), 1e-4, clock)
    assert type(backend) is SdpaGather
    assert report.chosen == "gathered"


def test_an_error_that_is_no_refusal_is_not_swallowed():
    def broken() -> AttentionBackend:
        raise KeyError("a mistake of ours")

    with pytest.raises(KeyError):
        fastest({"broken": broken}, Trial(SHAPE, CPU), 1e-4)


def test_a_backend_that_is_wrong_about_trees_serves_without_them():
    """Wrong logits must not decide trees, but such a kernel is still useful for chains."""

    class TreeIgnoringGather(SdpaGather):
        name = "blind"

        def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> SdpaGatherPlan:
            return SdpaGatherPlan([replace(row, parents=()) for row in rows], cache)

    _, report = fastest({"blind": TreeIgnoringGather}, Trial(SHAPE, CPU), 1e-4, getting_faster())
    assert (report.chosen, report.takes_trees) == ("blind", False)
    assert "off by" in report.tried[1].no_trees


@pytest.mark.parametrize("name", ["flashinfer", "varlen"])
def test_the_trial_accepts_correct_kernels_and_detects_tree_support(name):
    """Other memory contains NaN during the trial."""
    backend = {"flashinfer": lambda: FlashInfer(FLASHINFER, CPU), "varlen": lambda: Varlen(varlen)}[name]
    _, report = fastest({name: backend}, Trial(SHAPE, CPU), 1e-4, getting_faster())
    assert [tried.refused for tried in report.tried] == ["", ""]
    assert (report.chosen, report.takes_trees) == (name, name == "flashinfer")


def test_the_trial_detects_a_kernel_that_is_wrong_about_long_prompts():
    def short(found: Tensor) -> Tensor:
        return found * (torch.arange(len(found)) < 64).view(-1, 1, 1)

    _, report = fastest({"short": lambda: TimedBackend("short", Clock(), 1.0, short)}, Trial(SHAPE, CPU), 1e-4, Clock())
    assert "off by" in report.tried[1].refused


def test_the_trial_detects_a_window_that_is_one_too_long():
    def wide(*arguments, window_size, **more):
        left, right = window_size
        return varlen(*arguments, window_size=(left + 1 if left >= 0 else left, right), **more)

    _, report = fastest({"wide": lambda: Varlen(wide)}, Trial(SHAPE, CPU), 1e-4, Clock())
    assert "with window 100" in report.tried[1].refused


def test_a_model_without_windows_is_tried_without_them():
    """Each window setting requires building a separate kernel, which takes time."""

    def windowless(*arguments, window_size, **more):
        assert window_size[0] < 0, "a window"
        return varlen(*arguments, window_size=window_size, **more)

    trial = Trial(replace(SHAPE, slides=False), CPU)
    _, report = fastest({"windowless": lambda: Varlen(windowless)}, trial, 1e-4, Clock())
    assert report.tried[1].refused == ""


@pytest.mark.parametrize("trees", [True, False])
def test_kernels_for_trees_are_built_only_where_trees_are_taken(trees):
    planned: list[InputRow] = []

    class RecordingGather(SdpaGather):
        def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> SdpaGatherPlan:
            planned.extend(rows)
            return super().plan(rows, cache)

    Trial(SHAPE, CPU).build(RecordingGather(), trees)
    assert any(row.parents for row in planned) == trees


def test_a_cpu_has_a_single_backend():
    backend, report = choose_attention(SHAPE, CPU)
    assert type(backend) is SdpaGather
    assert report == AttentionReport("gathered")


def test_followers_create_the_backend_of_the_leader_without_measuring(monkeypatch):
    """Each rank's own timing could select different backends, whose results differ in rounding."""
    clock = Clock()
    makes = {"absent": failing, "quick": lambda: TimedBackend("quick", clock, 1.0)}
    monkeypatch.setattr("actors.attention.select_backend.gpu_factories", lambda *_: makes)
    backend = create_backend(AttentionReport("quick", takes_trees=False), SHAPE, CPU)
    assert isinstance(backend, TimedBackend)
    assert clock.now > 0, "its kernels are built before serving"
    assert type(create_backend(AttentionReport("gathered"), SHAPE, CPU)) is SdpaGather
    with pytest.raises(ImportError, match="no such library"):
        create_backend(AttentionReport("absent"), SHAPE, CPU)
    makes["other"] = lambda: TimedBackend("other", clock, 1.0)
    combined = create_backend(AttentionReport("quick, other for trees", combined=("quick", "other")), SHAPE, CPU)
    assert combined.name == "quick, other for trees"


def test_trees_are_served_by_the_fastest_backend_that_takes_them():
    """The fastest kernel for chains may not support masks."""
    clock = Clock()

    class ChainsOnly(TimedBackend):
        takes_trees = False

    makes = {
        "slow": lambda: TimedBackend("slow", clock, 3.0),
        "paged": lambda: TimedBackend("paged", clock, 2.0),
        "varlen": lambda: ChainsOnly("varlen", clock, 1.0),
    }
    trial = Trial(SHAPE, CPU)
    backend, report = fastest(makes, trial, 1e-4, clock)
    assert (report.chosen, report.takes_trees) == ("varlen, paged for trees", True)
    assert backend.takes_trees
    for trees, seconds in ((False, 1.0), (True, 2.0)):
        before = clock.now
        trial.attend(backend, None, trees)
        assert clock.now - before == seconds


class TimedPadded(PaddedSdpa):
    """Padded backend with simulated durations, and a changed result of padded plans."""

    def __init__(
        self,
        name: str,
        clock: Clock,
        seconds: float,
        padded_seconds: float,
        change: Callable[[Tensor], Tensor] = Tensor.clone,
    ) -> None:
        super().__init__()
        self.name = name
        self.clock = clock
        self.seconds = seconds
        self.padded_seconds = padded_seconds
        self.change = change

    def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> SdpaGatherPlan:
        return TimedBackend(self.name, self.clock, self.seconds).plan(rows, cache)

    def padded_plan(self, flat: FlatRows, cache: PagedCache, shape: StepShape) -> PaddedSdpaPlan:
        paced = self

        class Plan(PaddedSdpaPlan):
            def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
                paced.clock.now += paced.padded_seconds
                return paced.change(super().__call__(query, pool, options))

        return Plan(flat, cache.page_size, shape)


def test_captured_backends_are_preferred_and_measured_as_they_are_captured():
    clock = Clock()
    factories = {
        "quick": lambda: TimedBackend("quick", clock, 1.0),
        "eager": lambda: TimedPadded("eager", clock, 2.0, padded_seconds=5.0),
        "padded": lambda: TimedPadded("padded", clock, 4.0, padded_seconds=3.0),
        "late": lambda: TimedBackend("late", clock, 6.0),
    }
    for capture, chosen, seconds in ((None, "quick", [1, 2, 4, 6]), (CallCapture(), "padded", [1, 5, 3])):
        _, report = fastest(factories, Trial(SHAPE, CPU), 1e-4, clock, capture)
        assert report.chosen == chosen
        assert [one.step_ms for one in report.tried[1:] if not one.refused] == [
            1000 * SHAPE.layers * each for each in seconds
        ]
    assert [one.name for one in report.tried if one.refused] == ["late"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [(lambda found: found + 0.01, "padding does not get zeros"), (lambda found: found * 1.01, "off by")],
)
def test_a_backend_with_wrong_padded_plans_is_rejected_if_steps_are_captured(change, reason):
    factories = {"wrong": lambda: TimedPadded("wrong", Clock(), 1.0, 1.0, change)}
    _, report = fastest(factories, Trial(SHAPE, CPU), 1e-4, Clock())
    assert report.chosen == "wrong"
    _, report = fastest(factories, Trial(SHAPE, CPU), 1e-4, Clock(), CallCapture())
    assert report.chosen == "gathered"
    assert reason in report.tried[1].refused


def test_kernels_for_chains_and_for_trees_are_captured_together():
    clock = Clock()
    factories = {
        "varlen": lambda: Varlen(varlen),
        "slow": lambda: TimedPadded("slow", clock, 9.0, padded_seconds=9.0),
        "flashinfer": lambda: FlashInfer(FLASHINFER, CPU),
    }
    backend, report = fastest(factories, Trial(SHAPE, CPU), 1e-4, clock, CallCapture())
    assert report.combined == ("varlen", "slow")
    assert isinstance(backend, PaddedBackend)
    backend, report = fastest(factories, Trial(SHAPE, CPU), 1e-4, clock)
    assert not isinstance(backend, PaddedBackend), "flashinfer plans on the host"


def test_a_slow_correct_backend_is_preferred_to_gathering():
    """Gathering copies memory in proportion to the context, which the trial's contexts hardly show."""
    clock = Clock()
    _, report = fastest({"slow": lambda: TimedBackend("slow", clock, 9.0)}, Trial(SHAPE, CPU), 1e-4, clock)
    assert (report.chosen, report.is_fallback) == ("slow", False)


def test_a_capped_model_is_tried_with_soft_caps():
    class Uncapped(SdpaGather):
        name = "uncapped"

        def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> SdpaGatherPlan:
            class Plan(SdpaGatherPlan):
                def __call__(self, query: Tensor, pool: Tensor, options: ScoreOptions) -> Tensor:
                    return super().__call__(query, pool, replace(options, softcap=None))

            return Plan(rows, cache)

    trial = Trial(replace(SHAPE, plain=False, capped=True), CPU)
    _, report = fastest({"uncapped": Uncapped, "own": SdpaGather}, trial, 1e-4, Clock())
    assert "off by" in report.tried[1].refused
    assert report.tried[2].refused == ""


@pytest.mark.parametrize("trees", [False, True])
def test_the_triton_kernel_agrees_with_the_reference_in_the_trial(trees):
    """Attends only once, since the interpreter is slow."""
    trial = Trial(replace(SHAPE, plain=False, capped=True), CPU)
    found = trial.attend(interpreted_paged(), 100, trees)
    torch.testing.assert_close(found, trial.attend(SdpaGather(), 100, trees), atol=1e-4, rtol=1e-4)


def test_gathering_on_a_gpu_is_a_fallback_that_names_the_missing_library():
    own = TriedBackend("gathered", 3.0)
    missing = TriedBackend("flashinfer", None, "ImportError: no such library")
    wrong = TriedBackend("paged", None, "ValueError: off")
    report = AttentionReport("gathered", (own, missing, wrong))
    assert report.is_fallback
    assert fallback_warning(report).endswith("flashinfer: ImportError: no such library; paged: ValueError: off")


def test_a_backend_is_no_fallback_without_a_rejected_alternative():
    assert not AttentionReport("gathered").is_fallback, "on a CPU"
    assert not AttentionReport("paged", (TriedBackend("gathered", 3.0), TriedBackend("paged", 1.0))).is_fallback


def test_a_fallback_is_an_error_in_the_log(monkeypatch, caplog):
    report = AttentionReport(
        "gathered", (TriedBackend("gathered", 3.0), TriedBackend("paged", None, "RuntimeError: no compiler"))
    )
    monkeypatch.setattr("actors.attention.select_backend.fastest", lambda *_, **__: (SdpaGather(), report))
    monkeypatch.setattr("actors.attention.select_backend.Trial", lambda *_: Mock())
    choose_attention(SHAPE, torch.device("cuda"))
    assert [(record.levelname, "RuntimeError: no compiler" in record.message) for record in caplog.records] == [
        ("ERROR", True)
    ]
