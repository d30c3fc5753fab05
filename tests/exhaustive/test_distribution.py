"""Chi-square tests of `tests/lossless` with four times as many sessions, which reveal biases half as large.

Not part of the default suite: `make test-exhaustive`. Each test has a false-alarm rate of 1e-5.
"""

import random
from dataclasses import replace
from typing import Any

import pytest

from protos.draft_tree import DraftTree
from protos.messages import Acceptance, Block, Sampling, TokenRules
from tests.lossless import test_pools
from tests.lossless.parts import EOS
from tests.lossless.test_distribution import (
    FALSE_ALARM,
    drafted_ahead,
    drafting_ahead,
    in_all_ways,
    p_value,
    p_value_of,
)
from tests.lossless.test_parameters import drawn
from tests.lossless.test_suffix_lookup import p_value_over_answers_of_others
from tests.lossless.world import calm, lossy_delays

WORLDS = 240
WORLDS_OF_EACH = 120  # worlds per parameter
FEW_PARAMETERS: dict[str, dict[str, Any]] = {
    "temperature": {"sampling": {"temperature": 0.6}},
    "top_k": {"sampling": {"top_k": 2}},
    "top_p": {"sampling": {"top_p": 0.8}},
    "min_p": {"sampling": {"min_p": 0.2}},
    "frequency_penalty": {"sampling": {"frequency_penalty": 0.8}},
    "presence_penalty": {"sampling": {"presence_penalty": 0.9}},
    "repetition_penalty": {"sampling": {"repetition_penalty": 1.4}},
    "logit_bias": {"rules": {"logit_bias": ((1, 0.9), (2, -0.7))}},
    "allowed": {"rules": {"allowed": (EOS, 1, 3)}},
    "bad_words": {"rules": {"bad_words": ((3, 3), (2, 1))}},
    "min_tokens": {"rules": {"min_len": 5}},
    "all restrictions": {"sampling": {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1}},
}


@in_all_ways
def test_drafting_ahead_for_several_outcomes_keeps_the_distribution(schedule, pages, several):
    setting = drafting_ahead(Acceptance.REJECTION, schedule, pages, several)
    assert p_value(setting, drafted_ahead(setting, range(WORLDS))) > FALSE_ALARM


@pytest.mark.parametrize("schedule", [calm, lossy_delays], ids=lambda s: s.__name__)
def test_losses_lookups_and_dear_verification_keep_the_distribution(schedule):
    exact = test_pools.exact_distribution(test_pools.FEW_PROMPT)
    assert p_value_of(exact, test_pools.texts_with_losses(schedule, WORLDS)) > FALSE_ALARM


@pytest.mark.parametrize("schedule", [calm, lossy_delays], ids=lambda s: s.__name__)
def test_suffix_lookup_keeps_the_distribution(schedule):
    assert p_value_over_answers_of_others(schedule, WORLDS) > FALSE_ALARM


def with_a_sibling(block: Block, rng: random.Random) -> Block:
    """Replaces the second token of a two-token block by a sibling of its first token."""
    if len(block.tree) < 2:
        return block
    first = block.tree.tokens[0]
    other = rng.choice([token for token in range(test_pools.FEW) if token != first])
    return replace(block, tree=DraftTree((first, other), (-1, -1)))


@pytest.mark.parametrize("name", FEW_PARAMETERS)
@pytest.mark.parametrize(
    ("shape", "rule", "schedule", "altered"),
    [("chain", Acceptance.REJECTION, lossy_delays, None), ("tree", Acceptance.COUPLED, calm, with_a_sibling)],
    ids=["chain", "tree"],
)
def test_each_parameter_has_its_own_distribution_without_a_seed(shape, rule, schedule, altered, name):
    """The result must differ from the distribution without the parameter, which shows that the test detects it."""
    asked = FEW_PARAMETERS[name]
    sampling = Sampling(**asked.get("sampling", {}))
    found = drawn(rule, schedule, sampling, TokenRules(**asked.get("rules", {})), WORLDS_OF_EACH, altered)
    assert (found.branches_accepted > 0) == (shape == "tree")
    assert found.p_value > FALSE_ALARM
    plain = dict.fromkeys(found.samples, 0.0) | test_pools.exact_distribution(test_pools.FEW_PROMPT)
    assert p_value_of(plain, found.samples) < FALSE_ALARM
