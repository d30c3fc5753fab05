"""Selects the fastest correct attention backend, and reports why others were rejected."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, count
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import flex_attention

from actors.attention import AttentionBackend, ScoreOptions
from actors.attention.batch import exact_batch
from actors.attention.flashinfer import FlashInfer
from actors.attention.flex import Flex, compiled
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
from actors.compute.kv_cache import InputRow, PagedCache
from tests.unit.actors.attention.attention_kernels import FLASHINFER, varlen

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

    class TreeIgnoringFlex(Flex):
        name = "blind"

        def plan(self, rows: Sequence[InputRow], cache: PagedCache) -> SdpaGatherPlan:
            return SdpaGatherPlan([replace(row, parents=()) for row in rows], cache)

    _, report = fastest({"blind": lambda: TreeIgnoringFlex(flex_attention)}, Trial(SHAPE, CPU), 1e-4, getting_faster())
    assert (report.chosen, report.takes_trees) == ("blind", False)
    assert "off by" in report.tried[1].no_trees


@pytest.mark.parametrize("name", ["flashinfer", "varlen"])
def test_the_trial_accepts_correct_kernels_and_detects_tree_support(name):
    """Other memory contains NaN during the trial."""
    backend = {"flashinfer": lambda: FlashInfer(FLASHINFER, CPU), "varlen": lambda: Varlen(varlen)}[name]
    _, report = fastest({name: backend}, Trial(SHAPE, CPU), 1e-4, getting_faster())
    assert [tried.refused for tried in report.tried] == ["", ""]
    assert (report.chosen, report.takes_trees) == (name, name == "flashinfer")


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


def test_flex_on_a_cpu_is_refused_for_it_reads_the_whole_pool():
    """Uncompiled flex attention multiplies the whole pool, including other sessions' values."""
    _, report = fastest({"flex": lambda: Flex(flex_attention)}, Trial(SHAPE, CPU), 1e-4, Clock())
    assert "off by nan" in report.tried[1].refused


def steps_of_a_server() -> list[list[InputRow]]:
    """Returns prompts and blocks in an order that differs from the trial's."""
    pages = tuple(range(40))
    tree = (-1, 0, 0, 1, 1, 3)
    blocks = [InputRow((1,) * (1 + at % 4), 13 * at + 2, 0, pages) for at in range(12)]
    trees = [InputRow((1,) * (1 + at % 6), 7 * at + 3, 0, pages, tree[: at % 6]) for at in range(1, 9)]
    prompts = [InputRow((1,) * length, 0, 0, pages) for length in (1, 2, 17, 129, 400)]
    alone = [[row] for row in (*prompts, *blocks[:4], *trees)]
    return [*alone, blocks, trees, blocks + trees, [*blocks, prompts[3]], [*trees, prompts[4]], [*prompts, *blocks]]


def test_flex_kernels_are_compiled_before_serving(monkeypatch):
    """A kernel takes seconds to build, which would delay all sessions of a replica."""
    torch.compiler.reset()
    monkeypatch.setattr("torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", False)
    built = CompileCounter()
    backend = Flex(compiled(built))
    with torch.inference_mode():
        Trial(SHAPE, CPU).build(backend, trees=True)
        before = built.frame_count
        assert before <= 32, "few, for each costs time at a start"
        cache = PagedCache(64, SHAPE.page_size, SHAPE.dtype, CPU)
        for rows in steps_of_a_server():
            total = sum(len(row.tokens) for row in rows)
            fused = torch.zeros(total, SHAPE.heads + 2 * SHAPE.kv_heads, SHAPE.head_dim)
            query, new = fused.split([SHAPE.heads, 2 * SHAPE.kv_heads], dim=1)
            for window in (None, 20):
                exact_batch(rows, cache, backend).attend(0, query, new, ScoreOptions(0.3, window))
    assert built.frame_count == before


def test_gathering_on_a_gpu_is_a_fallback_that_names_the_missing_library():
    own = TriedBackend("gathered", 3.0)
    missing = TriedBackend("flashinfer", None, "ImportError: no such library")
    slower = TriedBackend("flex", 4.0)
    report = AttentionReport("gathered", (own, missing, slower))
    assert report.is_fallback
    assert fallback_warning(report).endswith(
        "Install what is missing: flashinfer: ImportError: no such library; flex: slower, 4.00 ms"
    )


def test_a_backend_is_no_fallback_without_a_rejected_alternative():
    assert not AttentionReport("gathered").is_fallback, "on a CPU"
    assert not AttentionReport("flex", (TriedBackend("gathered", 3.0), TriedBackend("flex", 1.0))).is_fallback


def test_a_fallback_is_an_error_in_the_log(monkeypatch, caplog):
    report = AttentionReport(
        "gathered", (TriedBackend("gathered", 3.0), TriedBackend("flex", None, "RuntimeError: no compiler"))
    )
    monkeypatch.setattr("actors.attention.select_backend.fastest", lambda *_: (SdpaGather(), report))
    monkeypatch.setattr("actors.attention.select_backend.Trial", lambda *_: Mock())
    choose_attention(SHAPE, torch.device("cuda"))
    assert [(record.levelname, "RuntimeError: no compiler" in record.message) for record in caplog.records] == [
        ("ERROR", True)
    ]
