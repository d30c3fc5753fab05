"""Speculation gives the text of a simple non-speculative reference, for each sampling parameter and each pair.

The reference processes one row of logits at a time in Python loops.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from actors.sampling.acceptance import DrawAddress
from actors.sampling.truncation import filtered
from cluster.routing.ledger import Generation
from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Block, Sampling, TokenRules
from tests.lossless.history import NextLogits
from tests.lossless.parts import EOS, Schedule, Setting
from tests.lossless.pools import Pools, PoolWorld
from tests.lossless.test_distribution import FALSE_ALARM, p_value_of
from tests.lossless.test_pools import DRAFT, FEW, FEW_AT_ONCE, FEW_DRAFT, FEW_NEW, FEW_TARGET, FEW_WORLDS, TARGET
from tests.lossless.test_pools import VOCABULARY as MANY
from tests.lossless.world import calm, lossy_delays
from tests.sampling_reference import accept

PROMPT = (1, 2, 3)
NEW_TOKENS = 16
AT_ONCE = 4
Change = dict[str, dict[str, Any]]
PARAMETERS: dict[str, Change] = {
    "temperature": {"sampling": {"temperature": 0.6}},
    "top_k": {"sampling": {"top_k": 5}},
    "top_p": {"sampling": {"top_p": 0.8}},
    "min_p": {"sampling": {"min_p": 0.1}},
    "frequency_penalty": {"sampling": {"frequency_penalty": 0.8}},
    "presence_penalty": {"sampling": {"presence_penalty": 0.9}},
    "repetition_penalty": {"sampling": {"repetition_penalty": 1.4}},
    "logit_bias": {"rules": {"logit_bias": ((4, 1.5), (7, -100.0))}},
    "allowed": {"rules": {"allowed": (EOS, 2, 3, 4, 5, 8, 9, 10)}},
    "bad_words": {"rules": {"bad_words": ((5,), (2, 3), (4, 4))}},
    "min_tokens": {"rules": {"min_len": len(PROMPT) + 9}},
}
PAIRS = [*[(name,) for name in PARAMETERS], *itertools.combinations(PARAMETERS, 2)]


def changed_logits(logits: list[float], generation: Generation, generated: tuple[int, ...]) -> list[float]:
    """Applies masks, then bias, then penalties, in vLLM's order."""
    rules = generation.rules
    sampling = generation.sampling
    bias = dict(rules.logit_bias)
    text = (*generation.prompt, *generated)
    changed = []
    for token, value in enumerate(logits):
        ends_word = any(
            generated[len(generated) - len(word) + 1 :] == word[:-1]
            for word in rules.bad_words
            if word[-1] == token and len(generated) >= len(word) - 1
        )
        is_early = token in generation.stop_ids and len(text) < rules.min_len
        if (rules.allowed and token not in rules.allowed) or ends_word or is_early:
            changed.append(-math.inf)
            continue
        value += bias.get(token, 0.0)
        if token in text:
            penalty = sampling.repetition_penalty
            value = value / penalty if value > 0 else value * penalty
        value -= sampling.frequency_penalty * generated.count(token)
        value -= sampling.presence_penalty * (token in generated)
        changed.append(value)
    return changed


def plainly(generation: Generation, target: NextLogits) -> tuple[int, ...]:
    """Decodes one token after another with the reference."""
    generated: tuple[int, ...] = ()
    while len(generation.prompt) + len(generated) < generation.max_len and EOS not in generated:
        logits = target((*generation.prompt, *generated)).tolist()
        row = torch.tensor([changed_logits(logits, generation, generated)])
        at = DrawAddress(generation.seed, generation.choice, len(generation.prompt) + len(generated))
        row = filtered(row, generation.sampling)
        decided = accept(Acceptance.COUPLED, generation.sampling.greedy, row, DraftTree.chain(()), at)
        generated = (*generated, decided.next_token)
    return generated


def setting_of(names: tuple[str, ...], base: Sampling) -> Setting:
    sampling: dict[str, Any] = {}
    rules: dict[str, Any] = {}
    for name in names:
        sampling |= PARAMETERS[name].get("sampling", {})
        rules |= PARAMETERS[name].get("rules", {})
    unused = torch.zeros(MANY, MANY)  # these models are not tables
    return Setting(
        unused,
        unused,
        Acceptance.COUPLED,
        lossy_delays,
        draft_tokens=4,
        new_tokens=NEW_TOKENS,
        prompt=PROMPT,
        ahead=4,
        sampling=replace(base, **sampling),
        rules=TokenRules(**rules),
    )


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_each_pair_of_parameters_gives_the_text_of_the_reference(names):
    world = PoolWorld(setting_of(names, Sampling()), Pools(TARGET, DRAFT), AT_ONCE, seed=1)
    assert world.run() == [plainly(session.generation, TARGET) for session in world.sessions.values()]


@pytest.mark.parametrize("names", [(name,) for name in PARAMETERS if name != "temperature"], ids="-".join)
def test_each_parameter_gives_the_greedy_text_of_the_reference(names):
    world = PoolWorld(setting_of(names, Sampling(temperature=0.0)), Pools(TARGET, DRAFT), AT_ONCE, seed=1)
    assert world.run() == [plainly(session.generation, TARGET) for session in world.sessions.values()]


@pytest.mark.parametrize("name", [name for name in PARAMETERS if name not in ("top_k", "top_p", "min_p")])
def test_each_parameter_changes_texts_and_the_drafter_applies_it_too(name):
    """A drafter that ignored the parameter would have a lower acceptance rate."""
    texts: dict[bool, list[tuple[int, ...]]] = {}
    counts: Counter[str] = Counter()
    for is_set in (True, False):
        world = PoolWorld(setting_of((name,) if is_set else (), Sampling()), Pools(TARGET, TARGET), 8, seed=2)
        texts[is_set] = world.run()
        if is_set:
            counts["accepted"] = world.accepted
            counts["blocks"] = sum(session.counts.blocks for session in world.sessions.values())
    assert texts[True] != texts[False]
    assert counts["accepted"] > counts["blocks"], "a draft that is the target is accepted, rules or not"


FEW_RULES = TokenRules(logit_bias=((1, 0.7), (2, -0.6)), bad_words=((3, 3), (2, 1)), min_len=5)
FEW_SAMPLING = Sampling(repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3)


def restricted(logits: list[float], sampling: Sampling) -> list[float]:
    """Returns probabilities after temperature, then top-k, top-p and min-p, each applied to the previous result."""
    scaled = [value / sampling.temperature for value in logits]
    ranked = sorted(range(len(scaled)), key=lambda token: -scaled[token])
    kept = ranked[: sampling.top_k] if sampling.top_k else ranked
    weights = {token: math.exp(scaled[token] - scaled[ranked[0]]) for token in kept}
    total = sum(weights.values())
    likelier = list(itertools.accumulate((weights[token] / total for token in kept), initial=0.0))[:-1]
    kept = [token for token, before in zip(kept, likelier, strict=True) if before < sampling.top_p]
    kept = [token for token in kept if weights[token] >= sampling.min_p * weights[ranked[0]]]
    total = sum(weights[token] for token in kept)
    return [weights[token] / total if token in kept else 0.0 for token in range(len(logits))]


def exact_distribution(generation: Generation) -> dict[tuple[int, ...], float]:
    """Returns the reference's probability of each non-speculative text."""
    exact: dict[tuple[int, ...], float] = {}
    ahead: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while ahead:
        text, chance = ahead.pop()
        logits = changed_logits(FEW_TARGET((*generation.prompt, *text)).tolist(), generation, text)
        for token, p in enumerate(restricted(logits, generation.sampling)):
            if p == 0.0:
                continue
            if token == EOS or len(text) + 1 == FEW_NEW:
                exact[*text, token] = chance * p
            else:
                ahead.append(((*text, token), chance * p))
    return exact


@dataclass(frozen=True)
class Drawn:
    """Texts of three tokens, drawn without a seed."""

    exact: dict[tuple[int, ...], float]
    samples: list[tuple[int, ...]]
    branches_accepted: int

    @property
    def p_value(self) -> float:
        return p_value_of(self.exact, self.samples)


def drawn(
    rule: Acceptance,
    schedule: Schedule,
    sampling: Sampling,
    rules: TokenRules,
    worlds: int,
    altered: Callable[[Block, random.Random], Block] | None = None,
) -> Drawn:
    """Returns texts drawn with speculation in many worlds; `altered` changes a drafter's blocks before verification."""
    few = torch.zeros(FEW, FEW)
    setting = Setting(
        few,
        few,
        rule,
        schedule,
        new_tokens=FEW_NEW,
        prompt=(1, 2, 1),
        ahead=2,
        sampling=sampling,
        altered=altered,
        rules=rules,
    )
    samples: list[tuple[int, ...]] = []
    accepted = 0
    branches_accepted = 0
    for seed in range(worlds):
        world = PoolWorld(setting, Pools(FEW_TARGET, FEW_DRAFT), FEW_AT_ONCE, seed)
        samples += world.run()
        accepted += world.accepted
        branches_accepted += world.branches_accepted
    (generation, *_) = [session.generation for session in world.sessions.values()]
    assert accepted > len(samples) / 10, "hardly anything was speculated, so this showed little"
    return Drawn(exact_distribution(generation), samples, branches_accepted)


@pytest.mark.parametrize("schedule", [calm, lossy_delays], ids=lambda s: s.__name__)
@pytest.mark.parametrize("rule", Acceptance, ids=lambda rule: rule.name.lower())
def test_unseeded_texts_follow_the_processed_distribution(rule, schedule):
    """Chi-square tests over all three-token texts, each with a false-alarm rate of 1e-5."""
    assert drawn(rule, schedule, FEW_SAMPLING, FEW_RULES, FEW_WORLDS).p_value > FALSE_ALARM
