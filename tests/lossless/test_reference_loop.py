"""Compares the overlapped loop with the reference loop, its executable specification: draft, verify, commit.

The same sessions run under both loops. Greedy and coupled texts must be equal. Under rejection sampling, the text may
depend on the blocks, so the tests compare distributions.
"""

import functools
import random
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from protos.messages import Acceptance, Sampling
from tests.lossless.parts import EOS, Setting, generations, rounds_in_lock_step, texts_in_lock_step
from tests.lossless.test_distribution import DRAFTERS, FALSE_ALARM, SESSIONS, p_value
from tests.lossless.test_distribution import TARGET as FEW_TOKENS
from tests.lossless.world import World, accepted, calm, lossy_delays, near_patience, run_worlds, texts

VOCABULARY = 40
BLOCK_LEN = 4
NEW_TOKENS = 24
AT_ONCE = 8
WORLDS = 2
SCHEDULES = [calm, lossy_delays, near_patience]


def logits(seed: int, scale: float) -> torch.Tensor:
    drawn = scale * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    drawn[:, EOS] -= 2.0  # otherwise most texts end before the first draft
    return drawn


TARGET = logits(21, 2.5)
DRAFT = TARGET + logits(22, 0.6)


def worlds(setting: Setting) -> list[World]:
    return run_worlds(setting, AT_ONCE, [(1 + seed,) for seed in range(WORLDS)])


@functools.cache
def without_drafts(sampling: Sampling) -> list[tuple[int, ...]]:
    setting = Setting(TARGET, DRAFT, Acceptance.COUPLED, calm, 0, NEW_TOKENS, sampling)
    return texts(worlds(setting))


@functools.cache
def specified(acceptance: Acceptance, sampling: Sampling) -> list[tuple[int, ...]]:
    """Returns the texts of `cluster.reference_loop` for the same sessions, without a schedule."""
    setting = Setting(TARGET, DRAFT, acceptance, calm, BLOCK_LEN, NEW_TOKENS, sampling)
    return [
        text
        for seed in range(WORLDS)
        for text in texts_in_lock_step(replace(setting, prompt=(1 + seed,)), AT_ONCE, seed)
    ]


def counts(found: list[World]) -> Counter[str]:
    return sum((world.drafting.counts for world in found), Counter[str]())


def rows_without_block(world: World) -> int:
    """Counts rows that lack a possible block, except in the first step, which precedes all drafters."""
    longest = 1 + NEW_TOKENS
    rows = (row for step in world.steps[1:] for row in step)
    return sum(not row.drafted and row.base_len + 1 < longest for row in rows)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.__name__)
@pytest.mark.parametrize(
    ("acceptance", "sampling"),
    [
        pytest.param(Acceptance.COUPLED, Sampling(temperature=0.0), id="greedy"),
        pytest.param(Acceptance.REJECTION, Sampling(temperature=0.0), id="greedy by rejection sampling"),
        pytest.param(Acceptance.COUPLED, Sampling(temperature=0.7), id="coupled"),
        pytest.param(Acceptance.COUPLED, Sampling(temperature=1.0, top_p=0.9, frequency_penalty=0.5), id="penalties"),
    ],
)
def test_both_loops_give_the_text_of_non_speculative_decoding(acceptance, sampling, schedule):
    setting = Setting(TARGET, DRAFT, acceptance, schedule, BLOCK_LEN, NEW_TOKENS, sampling, ahead=4)
    assert specified(acceptance, sampling) == without_drafts(sampling)
    slow = worlds(replace(setting, lock_step=True))
    fast = worlds(setting)
    assert texts(slow) == without_drafts(sampling)
    assert texts(fast) == without_drafts(sampling)
    for found in (slow, fast):
        assert accepted(found) > len(without_drafts(sampling))
    assert counts(slow)["guesses"] == 0, "the reference loop drafts nothing ahead"
    assert counts(fast)["guess_hit"] > 0, "nothing drafted ahead was used, so both loops were the same"


@pytest.mark.parametrize("schedule", [calm, near_patience], ids=lambda s: s.__name__)
def test_the_reference_loop_drafts_for_all_sessions_and_verifies_all(schedule):
    setting = Setting(TARGET, DRAFT, Acceptance.COUPLED, schedule, BLOCK_LEN, NEW_TOKENS, Sampling(temperature=0.7))
    for world in worlds(replace(setting, lock_step=True)):
        assert rows_without_block(world) == 0, "a session did not wait for its block"
        # The first step begins as soon as one session is open.
        cohorts = [{row.session for row in step} for step in world.steps[1:]]
        assert all(later <= earlier for earlier, later in pairwise(cohorts)), "a session stayed out of a step"
    assert all(rows_without_block(world) > 0 for world in worlds(setting)), (
        "the overlapped loop waits for all of them too"
    )


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s.__name__)
def test_rejection_sampling_in_the_reference_schedule_has_the_targets_distribution(schedule):
    setting = Setting(FEW_TOKENS, DRAFTERS["good"], Acceptance.REJECTION, schedule, lock_step=True)
    world = World(setting, SESSIONS, seed=11)
    assert p_value(setting, world.run()) > FALSE_ALARM
    assert world.drafting.counts["guesses"] == 0
    assert world.drafted > SESSIONS / 5, "the drafter was hardly used"


def test_the_specification_has_the_targets_distribution_under_rejection_sampling():
    setting = Setting(FEW_TOKENS, DRAFTERS["good"], Acceptance.REJECTION, calm)
    assert p_value(setting, texts_in_lock_step(setting, SESSIONS, seed=17)) > FALSE_ALARM


def test_the_specification_drafts_verifies_and_commits_in_every_round():
    setting = Setting(TARGET, TARGET, Acceptance.COUPLED, calm, BLOCK_LEN, NEW_TOKENS, Sampling(temperature=0.7))
    (generation,) = generations(setting, 1, random.Random(5))
    emits = list(rounds_in_lock_step(setting, generation))
    assert all(emit.accepted for emit in emits[:-1]), "the draft is the target"
    assert max(emit.accepted for emit in emits) == BLOCK_LEN
