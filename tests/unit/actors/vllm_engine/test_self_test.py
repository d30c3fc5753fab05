"""The start-up self-test passes a correct engine, and fails every faulty one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from actors.engine.executor import StepExecutor
from actors.vllm_engine.engine import StepProfile
from actors.vllm_engine.self_test import check_engine
from cluster.errors import EngineError
from cluster.verification.step import Outcome, Row, StepPlan
from protos.draft_tree import NO_TREE
from tests.toys import ToyRunner

VOCABULARY = 40


def right_engine() -> StepExecutor:
    return StepExecutor(ToyRunner(torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))), 40)


def as_planned(row: Row) -> Row:
    return row


def takes_everything(engine: StepExecutor, plan: StepPlan) -> list[Outcome]:
    found = engine.step(plan)
    return [Outcome(o.session, tuple(range(r.drafted)), o.next_token) for o, r in zip(found, plan.rows, strict=False)]


def takes_nothing(engine: StepExecutor, plan: StepPlan) -> list[Outcome]:
    found = engine.step(plan)
    return [
        Outcome(o.session, (), r.draft.tokens[0] if o.path else o.next_token)
        for o, r in zip(found, plan.rows, strict=False)
    ]


def test_it_passes_and_leaves_nothing() -> None:
    engine = right_engine()
    check_engine(engine.step, as_planned, VOCABULARY, longest=6)
    assert engine.is_idle


def test_without_drafts_there_is_nothing_to_show() -> None:
    check_engine(right_engine().step, as_planned, VOCABULARY, longest=0)


@pytest.mark.parametrize(("wrong", "block"), [(takes_everything, "wrong"), (takes_nothing, "right")])
def test_an_engine_that_decides_otherwise_is_refused(
    wrong: Callable[[StepExecutor, StepPlan], list[Outcome]], block: str
) -> None:
    engine = right_engine()
    with pytest.raises(EngineError, match=f"after a {block} block"):
        check_engine(lambda plan: wrong(engine, plan), as_planned, VOCABULARY, longest=6)


def test_independent_noise_is_detected() -> None:
    """Greedy texts are right, but sampled texts depend on the division into steps."""
    engine = right_engine()
    steps = 0

    def step(plan: StepPlan) -> list[Outcome]:
        nonlocal steps
        steps += 1
        opens = tuple([replace(request, seed=steps) for request in plan.opens])
        return engine.step(StepPlan(plan.closes, opens, plan.rows))

    with pytest.raises(EngineError, match="at temperature 1"):
        check_engine(step, as_planned, VOCABULARY, longest=6)


def test_an_engine_that_drops_drafts_is_refused() -> None:
    def undrafted(row: Row) -> Row:
        return Row(row.session, row.tokens, row.start, row.decide, (), NO_TREE)

    with pytest.raises(EngineError, match="it fed"):
        check_engine(right_engine().step, undrafted, VOCABULARY, longest=6)


def test_the_profile_is_of_several_sizes_and_leaves_nothing() -> None:
    engine = right_engine()
    cost = StepProfile(engine.step, longest=5, sessions=4, context=400).measure()
    assert [tokens for tokens, _ in cost.by_tokens] == [1, 2, 4]
    assert engine.is_idle


def test_a_near_tie_on_one_prompt_is_no_fault() -> None:
    """The first text diverges once from its speculative counterpart, as 16-bit rounding allows."""
    engine = right_engine()
    steps = 0

    def step(plan: StepPlan) -> list[Outcome]:
        nonlocal steps
        steps += 1
        found = engine.step(plan)
        return [
            replace(outcome, next_token=(outcome.next_token + 1) % VOCABULARY) if steps == 3 else outcome
            for outcome in found
        ]

    check_engine(step, as_planned, VOCABULARY, longest=6)
    assert engine.is_idle
