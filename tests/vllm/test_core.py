"""vLLM behind the verification scheduler gives the same texts as Slipstream's own engine, for any blocks.

The model is random, in float32, with two layers and 256 tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from actors.vllm_engine.self_test import check_engine
from cluster.errors import EngineError
from cluster.verification.step import Outcome, Row, StepPlan
from tests.vllm.cases import SAMPLINGS, asked, assert_scored_alike, config, on_own_engine, on_vllm, open_all, prompts
from tests.vllm.scripted import LONGEST, STEP_TOKENS, VOCABULARY, Life, Script, Scripts, request


@pytest.fixture(scope="module")
def core(tiny_llama: Path) -> Iterator[object]:
    """Starts a core with few pages, so sessions are preempted: eight long sessions would need three times as many."""
    from actors.vllm_engine.core import start_core

    started = start_core(config(tiny_llama, num_gpu_blocks_override=14), str(tiny_llama), VOCABULARY)
    yield started
    started.close()


@pytest.mark.parametrize("kind", ["none", "right", "wrong", "random", "variable", "mixed"])
def test_texts_equal_the_own_engines_for_any_blocks(
    core: object, whole: dict[str, list[int]], own_lives: dict[str, Life], kind: str
) -> None:
    target = on_vllm(core)
    open_all(target)
    script: Script = getattr(Scripts(whole, seed=5), kind)
    target.run(script)
    assert {session: life.prefix.tokens for session, life in target.lives.items()} == whole
    accepted = sum(life.accepted for life in target.lives.values())
    assert_scored_alike(target.lives, own_lives)
    assert (accepted > 0) == (kind in ("right", "variable", "mixed")) or kind == "random"
    if kind == "right":
        verdicts = sum(life.verdicts for life in target.lives.values())
        assert verdicts < sum(len(life.text) for life in target.lives.values()) / 3
    assert target.scheduler.is_idle
    assert core.is_idle


@pytest.mark.parametrize("name", ["greedy", "grammar"])
def test_a_block_after_the_last_prompt_token_is_verified_whole_or_waits(
    core: object, tiny_llama: Path, name: str
) -> None:
    """The first step feeds all but one token of the prompt, and a right block for the next position already exists."""
    first = len(name)  # a separate prompt without cached pages
    opened = asked(name, list(range(first, first + STEP_TOKENS + 1)))
    own = on_own_engine(tiny_llama)
    own.open(opened)
    own.run(Scripts({}).none)
    text = {name: own.lives[name].prefix.tokens}
    rejected: list[Row] = []

    def step(plan: StepPlan) -> list[Outcome]:
        outcomes = core.step(plan)
        accepted = {outcome.session: outcome.accepted for outcome in outcomes}
        fed = [core.memory.fed(row) for row in plan.rows]
        rejected.extend([row for row in fed if accepted.get(row.session, 0) < row.drafted])
        return outcomes

    target = replace(on_vllm(core), step=step)
    target.open(opened)
    target.run(Scripts(text).right)
    assert target.lives[name].prefix.tokens == text[name]
    assert target.lives[name].accepted > 0
    assert not rejected, "a right draft was rejected, so it is not what was fed"
    assert core.is_idle


@pytest.mark.parametrize("seed", range(4))
def test_aborts_preemption_and_bad_timing_change_no_text(core: object, whole: dict[str, list[int]], seed: int) -> None:
    """Sessions open in random order; some are closed early and reopened from their committed tokens."""
    chooser = random.Random(seed)
    target = on_vllm(core)
    waiting = list(prompts().items())
    chooser.shuffle(waiting)
    preempted = 0

    def each_step(step: int) -> None:
        nonlocal preempted
        preempted += core.preempted
        if waiting and step % 2:
            session, prompt = waiting.pop()
            target.open(asked(session, prompt))
        living = [session for session, life in target.lives.items() if not life.is_over and life.text]
        if living and chooser.random() < 0.1:
            session = chooser.choice(living)
            life = target.lives[session]
            target.close(session)
            target.open(replace(life.open, attempt=life.open.attempt + 1, tokens=tuple(life.prefix.tokens)))

    for session, prompt in [waiting.pop() for _ in range(6)]:
        target.open(asked(session, prompt))
    target.run(Scripts(whole, seed).mixed, each_step)
    while waiting:
        each_step(1)
        target.run(Scripts(whole, seed).mixed, each_step)
    assert {session: life.prefix.tokens for session, life in target.lives.items()} == whole
    assert preempted, "no session lost its pages, so nothing was shown"
    assert target.scheduler.is_idle
    assert core.is_idle


def test_an_audits_margin_is_the_own_engines(core: object, tiny_llama: Path) -> None:
    margins = []
    for target in (on_vllm(core), on_own_engine(tiny_llama)):
        for name, sampling in (("greedy", SAMPLINGS["greedy"]), ("drawn", SAMPLINGS["restricted"])):
            target.open(request(name, sampling, [7, 8, 9, 10], 1, audit=True, rival=41))
        target.run(Scripts({}).none)
        margins.append([life.margin for life in target.lives.values()])
    assert None not in margins[0]
    assert margins[0] == pytest.approx(margins[1], abs=1e-3)
    assert core.is_idle


def test_the_self_test_passes_and_sees_an_engine_that_takes_no_drafts(core: object) -> None:
    check_engine(core.step, core.memory.fed, VOCABULARY, LONGEST)

    def deaf(plan: StepPlan) -> list[Outcome]:
        """Steps the core, but accepts no draft token."""
        return [
            Outcome(outcome.session, (), plan.rows[0].draft.tokens[0]) if plan.rows[0].drafted else outcome
            for outcome in core.step(plan)
        ]

    with pytest.raises(EngineError, match="after a right block"):
        check_engine(deaf, core.memory.fed, VOCABULARY, LONGEST)
