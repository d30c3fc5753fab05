"""vLLM behind the verification scheduler says what the project's own engine says, whatever blocks come.

The model is random, in float32: two layers, 256 tokens.
"""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from actors.engine.executor import StepExecutor
from actors.engine.runner import ModelRunner
from actors.grammars.grammar_compiler import GrammarCompiler
from actors.grammars.grammar_vocabulary import load_grammar_vocabulary
from actors.vllm_engine.self_test import check_engine
from cluster.config import SlipstreamConfig, validated
from cluster.errors import EngineError
from cluster.verification.bounds import VerificationLimits
from cluster.verification.step import Outcome, StepPlan
from protos.messages import Open, Sampling, TokenRules
from protos.scores import Scoring
from tests.vllm.scripted import CONTEXT, LONGEST, VOCABULARY, Life, Script, ScriptedTarget, Scripts, request

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(temperature=1.0),
    "restricted": Sampling(temperature=0.7, top_k=40, top_p=0.9),
    "penalised": Sampling(temperature=1.0, frequency_penalty=0.8, presence_penalty=0.4),
    "min_p": Sampling(temperature=1.3, min_p=0.05),
    "greedy_penalised": Sampling(temperature=0.0, frequency_penalty=0.8),
    "repetitive": Sampling(temperature=0.0, repetition_penalty=1.3),
    "biased": Sampling(temperature=1.0),
    "allowed": Sampling(temperature=0.9),
    "bad_words": Sampling(temperature=0.0),
    "no_early_end": Sampling(temperature=1.0),
    "grammar": Sampling(temperature=1.0),
    "greedy_grammar": Sampling(temperature=0.0, presence_penalty=0.3),
    "scored": Sampling(temperature=1.0),
}
GRAMMAR = LLMatcher.grammar_from_regex("[a-z]{3,9}( [a-z]{2,7}){4,9}")
END = 256
MORE: dict[str, dict[str, Any]] = {
    "biased": {"rules": TokenRules(logit_bias=((5, 3.0), (9, -4.0), (77, 2.5)))},
    "allowed": {"rules": TokenRules(allowed=tuple(range(40, 70)))},
    "bad_words": {"rules": TokenRules(bad_words=tuple((token,) for token in range(0, 256, 3)))},
    "no_early_end": {"rules": TokenRules(min_len=60), "stop_ids": tuple(range(0, 250, 5))},
    "grammar": {"grammar": GRAMMAR, "stop_ids": (END,)},
    "greedy_grammar": {"grammar": GRAMMAR, "stop_ids": (END,)},
    "scored": {"scoring": Scoring(top=2)},
}
"""What else requests of these names ask for."""


def asked(session: str, prompt: list[int]) -> Open:
    name = session.partition("-")[0]
    return request(session, SAMPLINGS[name], prompt, **MORE.get(name, {}))


def config(folder: Path, **vllm: object) -> SlipstreamConfig:
    arguments = {"enforce_eager": True, "block_size": 32, **vllm}
    return validated(
        {
            "model": {"target": str(folder), "dtype": "float32", "max_context": CONTEXT},
            "target": {
                "engine": "vllm",
                "max_sessions": 8,
                "max_step_tokens": 64,
                "cache_per_rank": {"gib": 0.1},
                "vllm": arguments,
            },
            "draft": {"method": "prompt_lookup"},
            "speculation": {"max_draft_tokens": LONGEST},
        }
    )


@pytest.fixture(scope="module")
def core(tiny_llama: Path) -> Iterator[object]:
    """Few pages, so that sessions lose theirs: eight sessions at their longest would need three times as many."""
    from actors.vllm_engine.vllm_core import start_core

    started = start_core(config(tiny_llama, num_gpu_blocks_override=14), str(tiny_llama), VOCABULARY)
    yield started
    started.close()


def limits(pages: int, page_size: int) -> VerificationLimits:
    return VerificationLimits(
        vocabulary=VOCABULARY,
        max_context=CONTEXT,
        max_sessions=8,
        max_step_tokens=64,
        pages=pages,
        page_size=page_size,
        trees=False,
        own_draws_only=True,
    )


def on_vllm(core: object) -> ScriptedTarget:
    return ScriptedTarget(core.step, limits(core.memory.pages, core.memory.page_size), core.memory)


def on_own_engine(folder: Path) -> ScriptedTarget:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    grammars = GrammarCompiler(load_grammar_vocabulary(folder))
    executor = StepExecutor(ModelRunner(model, pages=256, page_size=16), VOCABULARY, grammars=grammars)
    return ScriptedTarget(executor.step, limits(256, 16))


def prompts() -> dict[str, list[int]]:
    chooser = random.Random(1)
    return {
        f"{name}-{index}": [chooser.randrange(3, VOCABULARY) for _ in range(chooser.randrange(4, 70))]
        for name in SAMPLINGS
        for index in range(2)
    }


def open_all(target: ScriptedTarget) -> None:
    for session, prompt in prompts().items():
        target.open(asked(session, prompt))


@pytest.fixture(scope="module")
def own_lives(tiny_llama: Path) -> dict[str, Life]:
    own = on_own_engine(tiny_llama)
    open_all(own)
    own.run(Scripts({}).none)
    return own.lives


@pytest.fixture(scope="module")
def whole(own_lives: dict[str, Life]) -> dict[str, list[int]]:
    """Prompts and texts, by the project's own engine without any draft."""
    return {session: life.prefix.tokens for session, life in own_lives.items()}


def assert_scored_alike(lives: dict[str, Life], own: dict[str, Life]) -> None:
    for session, life in lives.items():
        expected = own[session].scores
        assert len(life.scores) == len(expected) == (len(life.text) if session.startswith("scored") else 0)
        for found, known in zip(life.scores, expected, strict=True):
            assert (found.rank, found.top_ids) == (known.rank, known.top_ids)
            assert found.logprob == pytest.approx(known.logprob, abs=1e-4)
            assert found.top_logprobs == pytest.approx(known.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("kind", ["none", "right", "wrong", "random", "variable", "mixed"])
def test_texts_are_the_own_engines_whatever_blocks_come(
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


@pytest.mark.parametrize("seed", range(4))
def test_aborts_preemption_and_bad_timing_change_no_text(core: object, whole: dict[str, list[int]], seed: int) -> None:
    """Sessions come in a random order, some are closed in mid-stream, and come back from what was committed."""
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


def test_the_self_test_passes_and_sees_an_engine_that_takes_no_drafts(core: object) -> None:
    check_engine(core.step, core.memory.fed, VOCABULARY, LONGEST)

    def deaf(plan: StepPlan) -> list[Outcome]:
        """Verifies nothing: whatever was drafted, it is wrong."""
        return [
            Outcome(outcome.session, (), plan.rows[0].draft.tokens[0]) if plan.rows[0].drafted else outcome
            for outcome in core.step(plan)
        ]

    with pytest.raises(EngineError, match="after a right block"):
        check_engine(deaf, core.memory.fed, VOCABULARY, LONGEST)
