"""Requests of every kind that a vLLM target supports, for the tiny model, with Slipstream's own engine as reference."""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from llguidance import LLMatcher

from actors.engine.executor import StepExecutor
from actors.engine.runner import ModelRunner
from actors.grammars import GrammarCompiler, load_grammar_vocabulary
from cluster.config import SlipstreamConfig, validated
from cluster.verification.scheduler import VerificationLimits
from protos.messages import Open, Sampling, Scoring, StatesFormat, TokenRules
from tests.vllm.scripted import CONTEXT, LONGEST, STEP_TOKENS, VOCABULARY, Life, ScriptedTarget, request

SAMPLINGS = {
    "greedy": Sampling(temperature=0.0),
    "plain": Sampling(temperature=1.0),
    "restricted": Sampling(temperature=0.7, top_k=40, top_p=0.9),
    "penalized": Sampling(temperature=1.0, frequency_penalty=0.8, presence_penalty=0.4),
    "min_p": Sampling(temperature=1.3, min_p=0.05),
    "greedy_penalized": Sampling(temperature=0.0, frequency_penalty=0.8),
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
"""Additional fields of the requests with these names."""


def asked(session: str, prompt: list[int], new_tokens: int = 40) -> Open:
    name = session.partition("-")[0]
    return request(session, SAMPLINGS[name], prompt, new_tokens, **MORE.get(name, {}))


LOOKUP: Mapping[str, Any] = MappingProxyType({"method": "ngram"})


def config(
    folder: Path,
    ranks: int = 1,
    draft: Mapping[str, Any] = LOOKUP,
    dtype: str = "float32",
    adapters: Mapping[str, str] = MappingProxyType({}),
    **vllm: object,
) -> SlipstreamConfig:
    arguments = {"enforce_eager": True, "block_size": 32, **vllm}
    return validated(
        {
            "model": {"target": str(folder), "dtype": dtype, "max_context": CONTEXT},
            "target": {
                "engine": "vllm",
                "tensor_parallel": ranks,
                "max_sessions": 8,
                "max_step_tokens": STEP_TOKENS,
                "cache_per_rank": {"gib": 0.1},
                "vllm": arguments,
                "adapters": dict(adapters),
            },
            "draft": dict(draft),
            "speculation": {"draft_tokens": LONGEST},
        }
    )


def limits(
    pages: int, page_size: int, states: StatesFormat | None = None, adapters: Iterable[str] = ()
) -> VerificationLimits:
    return VerificationLimits(
        vocabulary=VOCABULARY,
        max_context=CONTEXT,
        max_sessions=8,
        max_step_tokens=STEP_TOKENS,
        pages=pages,
        page_size=page_size,
        trees=False,
        own_draws_only=True,
        states=states,
        adapters=frozenset(adapters),
    )


def on_vllm(core: object, adapters: Iterable[str] = ()) -> ScriptedTarget:
    bounds = limits(core.memory.pages, core.memory.page_size, adapters=adapters)
    return ScriptedTarget(core.step, bounds, core.memory)


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


def assert_scored_alike(lives: dict[str, Life], own: dict[str, Life]) -> None:
    for session, life in lives.items():
        expected = own[session].scores
        assert len(life.scores) == len(expected) == (len(life.text) if session.startswith("scored") else 0)
        for found, known in zip(life.scores, expected, strict=True):
            assert (found.rank, found.top_ids) == (known.rank, known.top_ids)
            assert found.logprob == pytest.approx(known.logprob, abs=1e-4)
            assert found.top_logprobs == pytest.approx(known.top_logprobs, abs=1e-4)
